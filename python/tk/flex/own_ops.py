"""A pair's own op, ``torch.ops.tk.flex_<fingerprint>``, which a pack brings: which one serves a call, and with what."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tk import _packs, capi, errors, missing
from tk.flex import kernel_options, matching, mods, registry, source
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced
from tk.generated import register
from tk.heuristics.problem import describe
from tk.ops.flex import OPTIONAL, Request
from tk.ops.product import allows_tf32

# --- Which op ---


class OwnOp(NamedTuple):
    """A pair's op of a loaded pack, and what it captures. tensors: which of the call's, and as which dtype; None: they,
    as they are."""

    op: Callable[..., Any]
    floats: Sequence[float]
    ints: Sequence[int]
    tensors: tuple[tuple[int, torch.dtype], ...] | None = None
    general: Traced | None = None

    def captured(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.tensors is None:
            return tensors
        return [_converted(tensors[i], dtype) for i, dtype in self.tensors]

    def gradients(self, traced: Traced, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Of the call's tensors that can have one, of those of the pair that serves."""
        if self.tensors is None or self.general is None:
            return list(grads)
        found: dict[int, Tensor] = {}
        for place, grad in zip(self.general.differentiable_tensors, grads, strict=True):
            i = self.tensors[place][0]
            found[i] = found[i] + grad if i in found else grad
        return [found[i].to(tensors[i].dtype) for i in traced.differentiable_tensors]


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an expanded tensor repeats is not copied. Kernels read integers of 32 bits where they read those of 64."""
    if x.dtype == dtype or (x.dtype == torch.int32 and dtype == torch.int64):
        return x
    held = x[tuple(slice(0, 1) if s == 0 and n else slice(None) for n, s in zip(x.shape, x.stride(), strict=True))]
    return held.to(dtype).expand(x.shape)


_matched: dict[Any, tuple[int, OwnOp]] = {}  # see find; with how many ops were loaded
_MAX_MATCHED = 256


def find(
    traced: Traced, tensors: Sequence[Tensor], floats: Sequence[float], ints: Sequence[int], suffix: str = ""
) -> OwnOp:
    """The pair's own, or of one that takes as arguments numbers that are spelled out in the pair, or that captures
    wider tensors. suffix: "" or "_backward". Raises tk.VariantNotFoundError."""
    op = _found.get((traced.fingerprint, suffix))
    if op is not None:
        return OwnOp(op, floats, ints)
    first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}  # which tensors are the same one decides too
    places = [first[id(x)] for x in tensors]
    key = (traced.fingerprint, suffix, *floats, *ints, *places)
    n_loaded, found = _matched.get(key, (-1, None))
    if found is None or n_loaded != register.count():
        n_loaded = register.count()
        found = _sought(traced, places, floats, ints, suffix)
        if len(_matched) >= _MAX_MATCHED:
            _matched.clear()
        _matched[key] = n_loaded, found
    return found


def _sought(traced: Traced, places: Sequence[int], floats: Sequence[float], ints: Sequence[int], suffix: str) -> OwnOp:
    """places: of the tensors, the first that is the same one."""
    op = _packed(traced, suffix)
    if op is not None:
        return OwnOp(op, floats, ints)
    slots = {i: _Slot(i) for i in places}
    values = traced.values_of([slots[i] for i in places], floats, ints)
    for general in sorted(_known(), key=_bits):  # the narrowest that serves
        found = matching.numbers(general, traced, values)
        if found is not None and (op := _packed(general, suffix)) is not None:
            tensors, floats, ints = general.by_kind(found)
            dtypes = [c.dtype for c in general.captures if c.kind == "tensor"]
            order = tuple((slot.place, d) for slot, d in zip(tensors, dtypes, strict=True))  # type: ignore[attr-defined]
            return OwnOp(op, floats, ints, order, general)
    raise errors.VariantNotFoundError(_not_found(traced, suffix))


@dataclass(frozen=True, eq=False)
class _Slot:
    """Stands for a tensor of the call."""

    place: int


def _bits(traced: Traced) -> int:
    return sum(c.dtype.itemsize for c in traced.captures)


def op_name(traced: Traced, suffix: str = "") -> str:
    return f"flex_{traced.fingerprint[:16]}{suffix}"


_found: dict[tuple[str, str], Callable[..., Any]] = {}  # a loaded pack stays
_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _packed(traced: Traced, suffix: str) -> Callable[..., Any] | None:
    """The kernel of an op: nothing else is registered for it."""
    key = (traced.fingerprint, suffix)
    if key not in _found:
        packet = getattr(torch.ops.tk, op_name(traced, suffix), None)
        if packet is None:
            return None
        _found[key] = partial(packet.default.redispatch, _KERNEL)
    return _found[key]


def _known() -> list[Traced]:
    """The pairs of loaded packs; each op's record has its pair's text. Those of another spelling serve nothing."""
    found = map(register.find, register.attention_names())
    texts = (op.meta.get("flex") for op in found if op is not None)
    return [trace.parse(text) for text in texts if isinstance(text, str) and trace.is_text(text)]


# --- Where there is none ---


def _not_found(traced: Traced, suffix: str) -> str:
    """The message, with a file to start from. Raises tk.UnsupportedError for mods that no kernel can have."""
    for graph in (traced.score, traced.mask):
        if graph is not None:
            registry.check_ops(graph, suffix == "_backward", "tk.flex_attention: ")
    op = op_name(traced, suffix)
    what = f"no loaded pack has kernels for these mods ({op})"
    if suffix and _packed(traced, ""):
        what = f"the loaded packs have these mods without their gradient ({op}): they were built with backward=False"
    return _to_be_built(what, source.source_of(traced))


def _to_be_built(what: str, text: str) -> str:
    return (
        f"tk.flex_attention: {what}. Build them, once, on any machine with the build extra:\n"
        "    tk build mods.py -o mods.tkpack\nand load them with tk.load_pack('mods.tkpack'), or by TK_PACK_PATH; or "
        f"let tk do so, with tk.config.build_missing(). As they were traced, for mods.py:\n\n{text}"
    )


def or_built(call: Callable[..., Any], traced: Traced, request: Request, *more: Any, suffix: str = "") -> Any:
    """What ``call`` of these returns, once more where a kernel was missing and has been built."""
    try:
        return call(traced, request, *more)
    except (RuntimeError, ValueError) as error:
        build_missing(error, traced, request, suffix)
    return call(traced, request, *more)


def build_missing(error: Exception, traced: Traced, request: Request, suffix: str = "") -> None:
    """Kernels for the head sizes and the dtype of a call that no pack has them for, where they may be built. Else the
    error is raised again, or one that says for which there are some."""
    if not missing.is_lack(error):
        raise error
    query, value = request.query, request.value
    head = (query.shape[3], value.shape[3])
    if not missing.is_wanted():
        if isinstance(error, errors.VariantNotFoundError):  # no pack has these mods
            raise error
        own = find(traced, request.tensors, request.floats, request.ints, suffix)
        _raise_lack(own.general or traced, head, query.dtype, suffix)
        raise error
    text = source.source_of(traced, f"head_dims=({head},)", f"dtypes=({query.dtype},)")
    missing.load(op_name(traced), text, query.device.index)


class _Kernels(NamedTuple):
    """For which operands some are, of query and key, and of value."""

    dtype: torch.dtype
    sizes: tuple[int, int]
    is_exact: bool

    def cover(self, other: _Kernels) -> bool:
        if self.dtype != other.dtype or self.is_exact:
            return self == other
        return self.sizes[0] >= other.sizes[0] and self.sizes[1] >= other.sizes[1]

    def __str__(self) -> str:
        return f"{_bare(self.dtype)} with head size{'' if self.is_exact else 's up to'} {_sizes(self.sizes)}"


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# As tk.kernels.attention.problem words them.
_OF_DTYPE, _OF_HEAD = re.compile(r"operands of (\w+)"), re.compile(r"head sizes (up to )?(\d+) and (\d+)")


def _raise_lack(traced: Traced, head: tuple[int, int], dtype: torch.dtype, suffix: str) -> None:
    """Says what the packs have, where none has kernels for such operands."""
    wanted = _Kernels(dtype, head, True)
    held = _held(op_name(traced, suffix))
    if any(kernels.cover(wanted) for kernels in held):
        return
    if max(head) > registry.MAX_HEAD:
        raise errors.UnsupportedError(
            f"tk.flex_attention: head sizes go up to {registry.MAX_HEAD} on CUDA, and are {_sizes(head)}"
        )
    most = [x for x in held if not any(y.cover(x) for y in held if y != x)]
    what = f"no loaded pack has kernels for these mods ({op_name(traced, suffix)})"
    if most:
        what = (
            f"the loaded packs have these mods ({op_name(traced, suffix)}) for {'; '.join(map(str, most))}, and the "
            f"call is of {_bare(dtype)} with head size {_sizes(head)}"
        )
    size = head[0] if head[0] == head[1] else head
    text = source.source_of(traced, f"head_dims=({size},)", f"dtypes=({dtype},)")
    raise errors.VariantNotFoundError(_to_be_built(what, text))


def _held(op: str) -> list[_Kernels]:
    """What the packs have kernels for."""
    found: dict[_Kernels, None] = {}
    for needs in map("; ".join, _packs.needs(op)):
        dtype, head = _OF_DTYPE.search(needs), _OF_HEAD.search(needs)
        if dtype is not None and head is not None:
            found[_Kernels(_DTYPES[dtype[1]], (int(head[2]), int(head[3])), head[1] is None)] = None
    return list(found)


def _sizes(head: tuple[int, int]) -> str:
    return f"{head[0]}" if head[0] == head[1] else f"{head[0]} of query and {head[1]} of value"


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Its arguments ---


def arguments(own: OwnOp, traced: Traced, request: Request, max_scores: bool = False,
              of_captures: bool = True) -> tuple[list[Tensor], list[Any]]:  # fmt: skip
    """What a pair's own op and its gradient's take in common: tensors, with an empty one for what is absent, and
    numbers. tk.kernels.attention.problem has their order. Captured tensors stand between them, after `out` and `lse`
    of a gradient."""
    query, key, value = request.operands
    given = zip(request.optional, _nothing(query.device))  # noqa: B905  # to be strict takes a tenth of all this time
    optional = [nothing if x is None else x for x, nothing in given]
    is_tf32 = query.dtype is torch.float32 and allows_tf32()
    band = _band(traced, request.ints) if request.kv_num_blocks is None else _NO_BAND
    scale = request.scale
    numbers = [scale, *own.floats, request.q_block, request.kv_block, *band, int(is_tf32), *own.ints,
               int(of_captures), int(not scale > 0), int(max_scores)]  # fmt: skip
    return [query, key, value, *optional], numbers


_RANKS = [{"kv_lengths": 1, "page_table": 2, "sinks": 1}.get(n, 3 if "num" in n else 4) for n in OPTIONAL]


@cache
def _nothing(device: torch.device) -> tuple[Tensor, ...]:
    """Stand for arguments that are absent; the same in all calls, since to make them takes longer than the rest."""
    return tuple([torch.empty((0,) * rank, dtype=torch.int32, device=device) for rank in _RANKS])


_EVERYWHERE = 1 << 29
_NO_BAND = (_EVERYWHERE, _EVERYWHERE, 0)


def _band(traced: Traced, ints: Sequence[int]) -> tuple[int, int, int]:
    """How far to the left and right a query sees without a block mask, and whether this is all that the mask says."""
    kind = _shapes.get(traced.fingerprint)
    if kind is None:
        kind = _shapes[traced.fingerprint] = _shape(traced)
    if kind == "window":
        return max(0, ints[-1]), 0, 1
    return _BANDS[kind]


_BANDS = {"all": (_EVERYWHERE, _EVERYWHERE, 1), "causal": (_EVERYWHERE, 0, 1), "other": _NO_BAND}
_shapes: dict[str, str] = {}


def _shape(traced: Traced) -> str:
    """What :func:`_band` tells apart."""
    if traced.mask is None:
        return "all"
    text = traced.mask.renumbered(0).text
    known = {_mask_text(mods.causal): "causal", _mask_text(mods.sliding_window(1)): "window"}
    return known.get(text, "other")


def _mask_text(mask_mod: Any) -> str:
    graph = trace.pair(None, mask_mod).mask
    assert graph is not None
    return graph.text


def config_with(tile: str, op: Callable[..., Any], given: Sequence[Any]) -> int:
    """The number of the fastest config that takes a call and has such a tile. Raises tk.UnsupportedError."""
    described = describe(op, *given)
    if described is None:  # there is nothing to compute
        return -1
    fitting = [row for row in capi.candidates(described.problem) if row.fits]
    found = [row for row in fitting if kernel_options.has(row.config_name, tile)]
    if not found:
        there = ", ".join(dict.fromkeys(row.config_name for row in sorted(fitting, key=lambda row: row.cost)))
        raise errors.UnsupportedError(
            f"tk.flex_attention: kernel_options: no compiled config that takes this call has {tile}; there are, by "
            f"BLOCK_M x BLOCK_N, stages and warps, {there or 'none'}"
        )
    return min(found, key=lambda row: row.cost).config
