"""What attention's errors say: they are worded for ``tk.flex_attention``, and one op serves other functions too.

The function that was called is a field of the request (tk.ops.flex), so that its errors name it whenever they are
raised: in the backward pass and in a compiled graph as well.
"""

from __future__ import annotations

from tk import errors
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced
from tk.ops.flex import Request

NAMED = (errors.Error, ValueError, TypeError, NotImplementedError)
_OWN, _FILE = "tk.flex_attention", "As they were traced"


def named(error: Exception, request: Request) -> Exception | None:
    """The error in the words of the function that was called; None where it has them."""
    if request.caller == "flex_attention" or _OWN not in (text := str(error)):
        return None
    mask = "packed sequences" if request.caller == "varlen_attn" else _mask_of(trace.parse(request.pair))
    said, *registering = text.split(_FILE, 1)  # what follows is a file, whose words stay
    for theirs, own in (
        (_OWN, f"tk.{request.caller}"),
        ("has kernels for these mods", f"has kernels for {mask}"),
        ("have these mods", f"have {mask}"),
    ):
        said = said.replace(theirs, own)
    return type(error)(_FILE.join([said, *registering]))


def _mask_of(traced: Traced) -> str:
    """The arguments of :func:`tk.sdpa` that a pair was made of."""
    for c in traced.captures:
        if c.kind == "tensor":
            return f"an attn_mask of {c.dtype}"
    return "no attn_mask" if traced.mask is None else "is_causal=True"
