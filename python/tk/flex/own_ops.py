"""A pair's own op, ``torch.ops.tk.flex_<fingerprint>``, which a pack brings: which one serves a call, and with what."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _python_dispatch

from tk import _packs, capi, errors, missing
from tk.flex import kernel_options, matching, registry, source
from tk.flex.tracing import trace
from tk.flex.tracing.trace import Traced
from tk.generated import register
from tk.heuristics.problem import describe, is_describing
from tk.ops.flex import OPTIONAL, Request
from tk.ops.product import allows_tf32

# --- Which op ---


class Source(NamedTuple):
    """The source of a tensor that an own op captures: the call's, as another dtype, repeated for `dims` further
    dimensions; or what is worked out of numbers."""

    place: int
    dtype: torch.dtype
    dims: int = 0
    computed: matching.Computed | None = None


class OwnOp(NamedTuple):
    """A pair's op of a loaded pack, and what it captures. sources: of its tensors; None: the call's, as they are.
    values: of the call's numbers, at their places among its captures."""

    op: Callable[..., Any]
    floats: Sequence[float]
    ints: Sequence[int]
    sources: tuple[Source, ...] | None = None
    general: Traced | None = None
    values: Sequence[Any] = ()

    def captured(self, tensors: Sequence[Tensor], query: Tensor) -> Sequence[Tensor]:
        if self.sources is None:
            return tensors
        return [self._captured(source, tensors, query) for source in self.sources]

    def _captured(self, source: Source, tensors: Sequence[Tensor], query: Tensor) -> Tensor:
        if source.computed is not None:
            return _worked_out(source.computed, self.values, query.shape[1], query.device)
        x = _converted(tensors[source.place], source.dtype)
        return matching.repeated(x, source.dims) if source.dims else x

    def gradients(self, traced: Traced, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the call's tensors that can have one, made of those of the pair that serves."""
        if self.sources is None or self.general is None:
            return list(grads)
        found: dict[int, Tensor] = {}
        for place, grad in zip(self.general.differentiable_tensors, grads, strict=True):
            source = self.sources[place]
            if source.computed is None:
                i = source.place
                found[i] = found[i] + grad if i in found else grad
        return [found[i].to(tensors[i].dtype) for i in traced.differentiable_tensors]


_worked: dict[Any, Tensor] = {}  # see _worked_out
_MAX_WORKED = 64


def _worked_out(computed: matching.Computed, values: Sequence[Any], n_heads: int, device: torch.device) -> Tensor:
    """Once for the same numbers: a mod is called in every layer and step. What is made while a CUDA graph is recorded
    is the graph's, and what is made under a mode, such as fake tensors', is the mode's: these are not kept."""
    is_cuda = device.type == "cuda"
    if _python_dispatch._len_torch_dispatch_stack() or (is_cuda and torch.cuda.is_current_stream_capturing()):
        return computed.of(values, n_heads, device)
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0  # another one would not wait for it
    key = (computed, *values, n_heads, device, stream)
    made = _worked.get(key)
    if made is None:
        if len(_worked) >= _MAX_WORKED:
            _worked.clear()
        made = _worked[key] = computed.of(values, n_heads, device)
    return made


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an expanded tensor repeats is not copied. Kernels read integers of 32 bits where they read those of 64."""
    if x.dtype == dtype or (x.dtype == torch.int32 and dtype == torch.int64):
        return x
    held = x[tuple(slice(0, 1) if s == 0 and n else slice(None) for n, s in zip(x.shape, x.stride(), strict=True))]
    return held.to(dtype).expand(x.shape)


_matched: dict[Any, tuple[int, _Served | None]] = {}  # see _sought; with how many ops were loaded
_MAX_MATCHED = 256


def find(
    traced: Traced, tensors: Sequence[Tensor], floats: Sequence[float], ints: Sequence[int], suffix: str = "",
    without: Collection[str] = (),
) -> OwnOp:  # fmt: skip
    """The pair's own, or of one that serves it (matching.py). suffix: "" or "_backward". without: fingerprints of pairs
    that are left out (:func:`set_aside`). Raises tk.VariantNotFoundError."""
    op = _found.get((traced.fingerprint, suffix)) if not without else None
    if op is not None:
        return OwnOp(op, floats, ints)
    first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}  # which tensors are the same one decides too
    places = tuple([first[id(x)] for x in tensors])
    numbers = [*floats, *ints]
    # Whatever the numbers are, where that is possible: an offset is another one in every step.
    served = _sought(traced, places, suffix, None, without) or _sought(traced, places, suffix, numbers, without)
    if served is None:
        raise errors.VariantNotFoundError(_not_found(traced, suffix))
    return served.call(traced.values_of([None] * len(places), floats, ints))


class _Served(NamedTuple):
    """A pair that serves others, and what it captures of a call."""

    op: Callable[..., Any]
    general: Traced
    sources: tuple[Source, ...] | None
    floats: Sequence[Any]
    ints: Sequence[Any]

    def call(self, values: Sequence[Any]) -> OwnOp:
        floats, ints = ([_number(x, values) for x in some] for some in (self.floats, self.ints))
        if self.sources is None:
            return OwnOp(self.op, floats, ints)
        return OwnOp(self.op, floats, ints, self.sources, self.general, values)


def _number(x: Any, values: Sequence[Any]) -> Any:
    return x.of(values) if isinstance(x, matching.Symbol) else x


def _sought(
    traced: Traced, places: Sequence[int], suffix: str, numbers: Sequence[Any] | None, without: Collection[str]
) -> _Served | None:
    """places: of the tensors, the first that is the same one. numbers: None, whatever they are."""
    exactly = ("any",) if numbers is None else map(_exactly, numbers)
    key = (traced.fingerprint, suffix, places, tuple(without), *exactly)
    n_loaded, found = _matched.get(key, (-1, None))
    if n_loaded != register.count():
        n_loaded = register.count()
        found = _serving(traced, places, suffix, numbers, without)
        if len(_matched) >= _MAX_MATCHED:
            _matched.clear()
        _matched[key] = n_loaded, found
    return found


def _exactly(x: float) -> Any:
    """Equal only for what is the same in every respect: 1 and 1.0, 0.0 and -0.0 are not, and nan is nan."""
    return (type(x), x.hex() if isinstance(x, float) else x)


def _serving(
    traced: Traced, places: Sequence[int], suffix: str, numbers: Sequence[Any] | None, without: Collection[str]
) -> _Served | None:
    floats, ints = _as_given(traced, numbers)
    if traced.fingerprint not in without and (op := _packed(traced, suffix)) is not None:
        return _Served(op, traced, None, floats, ints)
    slots = {i: _Slot(i) for i in places}
    values = traced.values_of([slots[i] for i in places], floats, ints)
    known = (general for general in _known() if general.fingerprint not in without)
    for general in sorted(known, key=_bits):  # the narrowest that serves
        found = matching.numbers(general, traced, values)
        if found is not None and (op := _packed(general, suffix)) is not None:
            tensors, floats, ints = general.by_kind(found)
            dtypes = [c.dtype for c in general.captures if c.kind == "tensor"]
            sources = tuple(_source(x, dtype) for x, dtype in zip(tensors, dtypes, strict=True))
            return _Served(op, general, sources, floats, ints)
    return None


def _as_given(traced: Traced, numbers: Sequence[Any] | None) -> tuple[list[Any], list[Any]]:
    """Floats and integers: these, or what stands for them whatever they are."""
    kinds = [(c.kind, i) for i, c in enumerate(traced.captures)]
    floats, ints = ([matching.Symbol(i, kind) for kind, i in kinds if kind == wanted] for wanted in ("float", "int"))
    if numbers is None:
        return floats, ints
    return list(numbers[: len(floats)]), list(numbers[len(floats) :])


@dataclass(frozen=True, eq=False)
class _Slot:
    """Stands for a tensor of the call."""

    place: int


def _source(x: Any, dtype: torch.dtype) -> Source:
    if isinstance(x, matching.Computed):
        return Source(-1, dtype, computed=x)
    if isinstance(x, matching.Repeated):
        return Source(x.value.place, dtype, x.dims)
    return Source(x.place, dtype)


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
    """What ``call`` of these returns: once more with another pair, where the narrowest that serves has no kernels for
    such operands, and once more where a kernel was missing and has been built."""
    if is_describing():  # nothing is launched, so that nothing would be seen to lack
        _set_aside(traced, request, suffix)
    while True:
        try:
            return call(traced, request, *more)
        except (RuntimeError, ValueError) as error:
            if not (missing.is_lack(error) and _set_aside(traced, request, suffix)):
                build_missing(error, traced, request, suffix)
                break
    return call(traced, request, *more)


_aside: dict[Any, tuple[int, tuple[str, ...]]] = {}  # see set_aside; with how many ops were loaded
_MAX_ASIDE = 256


def set_aside(traced: Traced, request: Request, suffix: str = "") -> Sequence[str]:
    """Fingerprints of the pairs that serve these mods and have no kernels for operands of such a dtype and such heads,
    where another has. Nothing is known of a call before one has failed, so that the others need not ask."""
    if not _aside:
        return ()
    n_loaded, found = _aside.get(_operands(traced, request, suffix), (-1, ()))
    return found if n_loaded == register.count() else ()


def _operands(traced: Traced, request: Request, suffix: str) -> Any:
    return traced.fingerprint, suffix, request.query.dtype, *_head(request)


def _head(request: Request) -> tuple[int, int]:
    return request.query.shape[3], request.value.shape[3]


def _set_aside(traced: Traced, request: Request, suffix: str) -> bool:
    """Whether a pair that a call has asked for kernels in vain, and others without, are left out from now on."""
    wanted = _Kernels(request.query.dtype, _head(request), True)
    without: list[str] = []
    for pair in _pairs_that_serve(traced, request, suffix):
        if any(kernels.cover(wanted) for kernels in _held(op_name(pair, suffix))):
            break
        without.append(pair.fingerprint)
    else:
        return False
    if tuple(without) == tuple(set_aside(traced, request, suffix)):
        return False
    if len(_aside) >= _MAX_ASIDE:
        _aside.clear()
    _aside[_operands(traced, request, suffix)] = register.count(), tuple(without)
    return True


def _pairs_that_serve(traced: Traced, request: Request, suffix: str) -> Iterator[Traced]:
    """The narrowest first."""
    without: list[str] = []
    while True:
        try:
            own = find(traced, request.tensors, request.floats, request.ints, suffix, without)
        except (errors.VariantNotFoundError, errors.UnsupportedError):
            return
        pair = own.general or traced
        yield pair
        without = [*without, pair.fingerprint]


def build_missing(error: Exception, traced: Traced, request: Request, suffix: str = "") -> None:
    """Kernels for the head sizes and the dtype of a call that no pack has them for, where they may be built. Else the
    error is raised again, or one that says for which there are some."""
    if not missing.is_lack(error):
        raise error
    query, head = request.query, _head(request)
    if not missing.is_wanted():
        if isinstance(error, errors.VariantNotFoundError):  # no pack has these mods
            raise error
        serving = list(_pairs_that_serve(traced, request, suffix))
        if not serving:
            raise errors.VariantNotFoundError(_not_found(traced, suffix))
        _raise_lack(serving[0], head, query.dtype, suffix, serving[1:])
        raise error
    text = source.source_of(traced, f"head_dims=({head},)", f"dtypes=({query.dtype},)")
    missing.load(op_name(traced), text, query.device.index)


class _Kernels(NamedTuple):
    """Kernels, by the operands that they are for: of query and key, and of value."""

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


def _raise_lack(
    traced: Traced, head: tuple[int, int], dtype: torch.dtype, suffix: str, others: Sequence[Traced] = ()
) -> None:
    """Says what the packs have, where none has kernels for such operands. others: more pairs that serve the mods."""
    wanted = _Kernels(dtype, head, True)
    held = list(dict.fromkeys(kernels for pair in (traced, *others) for kernels in _held(op_name(pair, suffix))))
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
    band = _bands.get(traced.fingerprint)
    if band is None:
        bounds = bounds_of(traced)
        is_known = all(b.place is None for b in (*bounds.left, *bounds.right))
        band = _bands[traced.fingerprint] = bounds.band(()) if is_known else bounds.band
    return band(ints) if callable(band) else band


class _Bound(NamedTuple):
    """A number, or the place among the captured integers of one."""

    value: int
    place: int | None = None


class _Bounds(NamedTuple):
    """How far a query sees, of each side the least; and whether that is all that the mask says."""

    left: list[_Bound]
    right: list[_Bound]
    is_all: bool

    def band(self, ints: Sequence[int]) -> tuple[int, int, int]:
        """What kernels walk contains the query's own position: a band that does not is asked inside of it too."""
        left, right = (
            min([_EVERYWHERE, *(b.value if b.place is None else ints[b.place] for b in side)])
            for side in (self.left, self.right)
        )
        return max(left, 0), max(right, 0), int(self.is_all and left >= 0 and right >= 0)


_bands: dict[str, tuple[int, int, int] | Callable[[Sequence[int]], tuple[int, int, int]]] = {}


def bounds_of(traced: Traced) -> _Bounds:
    """What a mask's conditions say of the difference of positions (normal.py spells it in one way)."""
    places = [i for i, c in enumerate(traced.captures) if c.kind == "int"]
    found = _Bounds([], [], True)
    for condition in matching.conjuncts(traced.mask):
        difference = matching.difference_of(condition)
        if difference is None:
            found = found._replace(is_all=False)
            continue
        first, number = difference
        is_captured = isinstance(number, fx.Node)
        bound = _Bound(0, places.index(number.meta["capture"])) if is_captured else _Bound(number)
        (found.right if first == "kv_idx" else found.left).append(bound)
    return found


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
