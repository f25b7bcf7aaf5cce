"""tk beneath ATen's flash attention: ``torch.nn.attention.activate_flash_attention_impl("tk")``.

``scaled_dot_product_attention`` (its flash backend), ``torch.nn.attention.varlen.varlen_attn`` and the ring of context
parallel call the ops of ``_OPS``. What tk has no kernels for goes to the kernel that was there before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from tk import errors, missing
from tk.dropin.beneath import use_up_warning
from tk.flex import ops, packed
from tk.flex.packed import Sequences, Window
from tk.generated import register
from tk.ops.flex import Request

__all__ = ["Activated"]

_log = logging.getLogger("tk.flash")
_DTYPES = (torch.bfloat16, torch.float16)
_CALLER = "flash_attention"
_MAX_HEAD = 256


class Activated:
    """What torch's registry keeps while tk is active. calls: of each op, how many tk served and how many it left."""

    def __init__(self, key: str = "CUDA"):
        self.calls: dict[str, list[int]] = {}
        self._library = Library("aten", "IMPL")
        use_up_warning()
        for name, serve in _OPS.items():
            op = getattr(getattr(torch.ops.aten, name, None), "default", None)
            if op is None:  # of a newer torch
                continue
            before = _kernel(op, key)
            self.calls[name] = [0, 0]
            self._library.impl(name, _Override(op, serve, before, self.calls[name]), key, with_keyset=True)

    def remove(self) -> None:
        """The kernels that were there before are there again."""
        self._library._destroy()


def _kernel(op: Any, key: str) -> Any:
    try:
        return torch.library.get_kernel(op, key)
    except RuntimeError:  # there is none: torch was built without it
        return None


class _Left(Exception):
    """A call that tk leaves to the kernel before; its text says why."""


class _Override:
    """An op's kernel. Arguments are found by their names, since later versions of torch have more of them: one that is
    not known here must have its default."""

    def __init__(self, op: Any, serve: Callable[[_Given], Any], before: Any, calls: list[int]):
        self.serve, self.before, self.calls = serve, before, calls
        self.name: str = op._schema.name
        schema = op._schema.arguments
        self.arguments = [(a.name, a.default_value if a.has_default_value() else None) for a in schema]
        self.unknown = [(name, default) for name, default in self.arguments if name not in _KNOWN]
        self.positional = [a.name for a in schema if not a.kwarg_only]
        self.keywords = [a.name for a in schema if a.kwarg_only]

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = _Given(self.arguments)
        given.update(zip(self.positional, args, strict=False))
        given.update(kwargs)
        try:
            for name, default in self.unknown:
                if given[name] is not None and given[name] != default:
                    raise _Left(f"{name} is given")
            found = self.serve(given)
        except _Left as reason:
            self.calls[1] += 1
            _log.debug("%s goes to the kernel before tk's: %s", self.name, reason)
            if self.before is None:
                raise errors.UnsupportedError(
                    f"{self.name}: tk does not serve this call ({reason}), and this torch has no other kernel for it"
                ) from None
            keywords = {name: given[name] for name in self.keywords}
            return self.before.call_boxed(keyset, *(given[name] for name in self.positional), **keywords)
        self.calls[0] += 1
        return found


class _Given(dict[str, Any]):
    """A call's arguments by name, those that were left out with their defaults."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def check(self) -> None:
        if self.dropout_p != 0:
            raise _Left("dropout_p is not 0")
        if self.get("return_debug_mask"):
            raise _Left("return_debug_mask is True")
        q, k, v = self.query, self.key, self.value
        if q.dtype not in _DTYPES or k.dtype is not q.dtype or v.dtype is not q.dtype:
            raise _Left(f"query, key and value are {q.dtype}, {k.dtype} and {v.dtype}")
        if not q.numel() or not k.numel() or not v.numel():
            raise _Left("there is nothing to compute")
        if k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[-1] > _MAX_HEAD:
            raise _Left(f"head sizes and lengths of {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")


_KNOWN = frozenset({
    "query", "key", "value", "dropout_p", "is_causal", "scale", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
    "window_size_left", "window_size_right", "return_debug_mask", "out", "grad_out", "logsumexp", "rng_state", "unused",
    "philox_seed", "philox_offset",
})  # fmt: skip


# --- The ops ---


def _sdpa(given: _Given) -> Any:
    """[B, H, M, D] -> out, lse [B, H, M], and what the backward pass is given again."""
    given.check()
    out, lse = _forward(_dense(given, given.query, given.key, given.value))
    lengths = (given.query.shape[2], given.key.shape[2])
    return _laid(out, given.query), lse, None, None, *lengths, *_unused(given.query)


def _sdpa_backward(given: _Given) -> Any:
    given.check()
    if given.cum_seq_q is not None and given.cum_seq_q.numel():
        raise _Left("dense queries have lengths")
    request = _dense(given, given.query, given.key, given.value)
    return _laid_all(_backward(request, given.grad_out, given.out, given.logsumexp), given)


def _flash(given: _Given) -> Any:
    """[B, M, H, D], or packed [total, H, D] -> out, lse [B, H, M] or [H, total], and no random numbers."""
    given.check()
    out, lse = _flash_forward(given)
    out = _laid(out, given.query) if given.get("out") is None else _written(out, given.out)
    return out, lse, *_unused(given.query)


def _flash_inplace(given: _Given) -> Any:
    given.check()
    out, lse = _flash_forward(given)
    _written(out, given.out)
    return lse


def _written(found: Tensor, out: Tensor) -> Tensor:
    if out.shape != found.shape or out.dtype != found.dtype:
        raise _Left("out is of another shape or dtype")
    return out.copy_(found)


def _flash_forward(given: _Given) -> tuple[Tensor, Tensor]:
    if given.cum_seq_q is None:
        out, lse = _forward(_dense(given, *_transposed(given.query, given.key, given.value)))
        return out.transpose(1, 2), lse
    request, has_empty = _packed(given, has_gradient=False)
    out, lse = _forward(request)
    if has_empty:  # as the kernels of FlashAttention have rows that see no key
        lse = lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
    return out[0].transpose(0, 1), lse[0]


def _flash_backward(given: _Given) -> Any:
    given.check()
    grad_out, out, lse = given.grad_out, given.out, given.logsumexp
    if given.cum_seq_q is None or not given.cum_seq_q.numel():
        request = _dense(given, *_transposed(given.query, given.key, given.value))
        grad_out, out = _transposed(grad_out, out)
        return _laid_all(_transposed(*_backward(request, grad_out, out, lse)), given)
    request, _ = _packed(given, has_gradient=True)
    grad_out, out = (x.transpose(0, 1).unsqueeze(0) for x in (grad_out, out))
    found = [x[0].transpose(0, 1) for x in _backward(request, grad_out, out, lse.unsqueeze(0))]
    return _laid_all(found, given)


_OPS: dict[str, Callable[[_Given], Any]] = {
    "_flash_attention_forward": _flash,
    "_flash_attention_forward_no_dropout_inplace": _flash_inplace,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}


# --- Requests ---


def _window(given: _Given) -> Window:
    return Window.of(given.get("window_size_left"), given.get("window_size_right"), given.is_causal)


def _scale(given: _Given) -> float:
    return given.query.shape[-1] ** -0.5 if given.scale is None else float(given.scale)


def _dense(given: _Given, query: Tensor, key: Tensor, value: Tensor) -> Request:
    window = _window(given)
    if query.dim() != 4 or key.dim() != 4 or key.shape[0] != query.shape[0] or query.shape[1] % key.shape[1]:
        raise _Left("batches or heads do not go together")
    if window.is_bounded and query.shape[2] > key.shape[2]:  # whose first queries see nothing, each torch in its way
        raise _Left("a window over more queries than keys")
    return packed.dense(query, key, value, window, _scale(given), _CALLER)


def _packed(given: _Given, has_gradient: bool) -> tuple[Request, bool]:
    """The request, and whether a row may see no key."""
    query, key, starts, of_keys = given.query, given.key, given.cum_seq_q, given.cum_seq_k
    if query.dim() != 3 or key.dim() != 3 or query.shape[1] % key.shape[1]:
        raise _Left("heads do not go together")
    if of_keys is None or starts.dim() != 1 or of_keys.shape != starts.shape or starts.numel() < 2:
        raise _Left("sequences of queries and keys do not go together")
    if any(x.dtype != torch.int32 or x.device != query.device for x in (starts, of_keys)):
        raise _Left("lengths are not int32 beside query")
    sequences, window = Sequences(starts, of_keys, packed.are_same(starts, of_keys)), _window(given)
    if sequences.are_same and query.shape[0] != key.shape[0]:
        raise _Left("equal sequences of other totals")
    if window.is_bounded and not sequences.are_same:
        raise _Left("a window over lengths that may differ")
    request = packed.packed(query, key, given.value, sequences, window, _scale(given), _CALLER, has_gradient)
    return request, not sequences.are_same


def _transposed(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


# --- Kernels ---

_lacking: dict[Any, int] = {}  # what no pack has; with how many ops were loaded


def _forward(request: Request) -> tuple[Tensor, Tensor]:
    run = ops.on_cuda if request.query.is_cuda else ops.forward_on_cpu
    found: tuple[Tensor, Tensor] = _or_left("forward", request, lambda: run(request))
    return found


def _backward(request: Request, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    run = ops.on_cuda_backward if request.query.is_cuda else ops.backward_on_cpu
    grads = grad_out, torch.zeros_like(lse)
    found: list[Tensor] = _or_left("backward", request, lambda: run(*grads, out, lse, request, False))
    return found


def _or_left(which: str, request: Request, run: Callable[[], Any]) -> Any:
    query = request.query
    kind = (which, request.pair, query.dtype, query.shape[3], query.device)
    if _lacking.get(kind) == register.count():
        raise _Left("no loaded pack has kernels for it")
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        if not (isinstance(error, errors.UnsupportedError) or missing.is_lack(error)):
            raise
        _lacking[kind] = register.count()
        raise _Left(str(error).split("\n", 1)[0]) from error


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is of random numbers: without dropout nobody reads it."""
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return seed, offset, query.new_empty(0)


def _laid(x: Tensor, like: Tensor) -> Tensor:
    """Lays `x` out in memory as `like` is, which torch.compile expects of ATen's op."""
    if x.stride() == like.stride():
        return x
    wanted = torch.empty_like(like)
    return x if x.stride() == wanted.stride() else wanted.copy_(x)


def _laid_all(grads: list[Tensor], given: _Given) -> tuple[Tensor, ...]:
    return tuple(_laid(x, like) for x, like in zip(grads, (given.query, given.key, given.value), strict=True))
