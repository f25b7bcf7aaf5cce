"""What ``torch.ops.tk.flex_attention`` and its gradient do (tk/ops/flex.py defines them). One op is for all pairs of
mods, so that a model that calls it stays one graph under torch.compile and torch.export. The pair is an argument, as
text (Traced.text), and what it captures are others.

On the CPU the op is reference.py; on CUDA it calls the pair's own op, ``torch.ops.tk.flex_<fingerprint>``, which a pack
brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tk import errors, missing
from tk.flex import kernel_options, matching, mods, reference, registry, trace
from tk.flex.trace import Traced
from tk.generated import register
from tk.ops import _register, flex
from tk.ops.product import allows_tf32

forward_op, backward_op = flex.forward, flex.backward

# Where they stand. The last are options: of the forward max_scores and tile, which may be absent; of the gradient
# of_captures.
_PAIR, _TENSORS, _FLOATS, _INTS, _FIRST_LIST, _LENGTHS, _SINKS, _SCALE, _OPTION, _TILE = (
    3,
    4,
    5,
    6,
    7,
    15,
    17,
    18,
    21,
    22,
)


def values_of(traced: Traced, tensors: Sequence[Any], floats: Sequence[Any], ints: Sequence[Any]) -> list[Any]:
    """The captures in their order, of the arguments by kind."""
    by_kind = {"tensor": iter(tensors), "float": iter(floats), "int": iter(ints)}
    return [next(by_kind[c.kind]) for c in traced.captures]


def by_kind(traced: Traced, values: Sequence[Any]) -> tuple[list[Tensor], list[float], list[int]]:
    """:func:`values_of` undone."""
    tensors: list[Tensor] = []
    floats: list[float] = []
    ints: list[int] = []
    for capture, value in zip(traced.captures, values, strict=True):
        kind = capture.kind
        (tensors if kind == "tensor" else ints if kind == "int" else floats).append(value)
    return tensors, floats, ints


def _differentiable_tensors(traced: Traced) -> list[int]:
    """Which of the tensors have a gradient."""
    numbers = [i for i, c in enumerate(traced.captures) if c.kind == "tensor"]
    wanted = set(reference.differentiable(traced))
    return [place for place, i in enumerate(numbers) if i in wanted]


# --- CPU ---

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)  # sums are in float32 whatever it says


def _problem(args: Sequence[Any]) -> reference.Problem:
    traced = trace.parse(args[_PAIR])
    values = values_of(traced, args[_TENSORS], args[_FLOATS], args[_INTS])
    lists = None if args[_FIRST_LIST] is None else args[_FIRST_LIST : _FIRST_LIST + 4]
    query, key, value = args[:3]
    kv_lengths, page_table, sinks, scale, *block = args[_LENGTHS:_OPTION]
    return reference.Problem(
        traced, values, query, key, value, lists, (block[0], block[1]), kv_lengths, page_table, sinks, scale
    )


def cpu(*args: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        out, lse, largest = reference.forward(_problem(args))
        return out, torch.cat([lse, largest], -1) if _has_max_scores(args) else lse


def cpu_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    with _autograd_at_work(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        found = reference.backward(_problem(args), out, lse, grad_out, grad_lse, args[-1])
    sinks = [] if found.sinks is None else [found.sinks]
    return [found.query, found.key, found.value, *sinks, *found.captures.values()]


class _autograd_at_work:
    """Below autograd, with autograd: a tile's derivative is taken with it."""

    _keys = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)

    def __enter__(self) -> None:
        self.excluded = [k for k in self._keys if torch._C._dispatch_tls_is_dispatch_key_excluded(k)]
        for key in self.excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key in self.excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


# --- Fake ---


def fake(query: Tensor, key: Tensor, value: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    B, H, M, _ = query.shape
    if query.device.type == "cuda" and H > 1 and query.stride(1) < query.stride(2):
        out = query.new_empty(B, M, H, value.shape[3]).transpose(1, 2)  # as the query lies (Problem._outputs)
    else:
        out = query.new_empty(B, H, M, value.shape[3])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    width = 2 * M if _has_max_scores((query, key, value, *args)) else M
    return out, query.new_empty(B, H, width, dtype=dtype)


def fake_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    sinks = [] if args[_SINKS] is None else [args[_SINKS]]
    captured = [args[_TENSORS][i] for i in _differentiable_tensors(trace.parse(args[_PAIR]))] if args[-1] else []
    return [x.new_empty(x.shape) for x in (*args[:3], *sinks, *captured)]


# --- CUDA ---


@dataclass(frozen=True)
class _Own:
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
        for place, grad in zip(_differentiable_tensors(self.general), grads, strict=True):
            i = self.tensors[place][0]
            found[i] = found[i] + grad if i in found else grad
        return [found[i].to(tensors[i].dtype) for i in _differentiable_tensors(traced)]


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an expanded tensor repeats is not copied."""
    if x.dtype == dtype:
        return x
    held = x[tuple(slice(0, 1) if s == 0 and n else slice(None) for n, s in zip(x.shape, x.stride(), strict=True))]
    return held.to(dtype).expand(x.shape)


_matched: dict[Any, tuple[int, _Own]] = {}  # see _own; with how many ops were loaded
_MAX_MATCHED = 256


def _own(
    traced: Traced, tensors: Sequence[Tensor], floats: Sequence[float], ints: Sequence[int], suffix: str = ""
) -> _Own:
    """The pair's own, or of one that takes as arguments numbers that are spelled out in the pair, or that captures
    wider tensors. Raises tk.VariantNotFoundError."""
    op = _found.get((traced.fingerprint, suffix))
    if op is not None:
        return _Own(op, floats, ints)
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


def _sought(traced: Traced, places: Sequence[int], floats: Sequence[float], ints: Sequence[int], suffix: str) -> _Own:
    """places: of the tensors, the first that is the same one."""
    op = _packed(traced, suffix)
    if op is not None:
        return _Own(op, floats, ints)
    slots = {i: _Slot(i) for i in places}
    values = values_of(traced, [slots[i] for i in places], floats, ints)
    for general in sorted(_known(), key=_bits):  # the narrowest that serves
        found = matching.numbers(general, traced, values)
        if found is not None and (op := _packed(general, suffix)) is not None:
            tensors, floats, ints = by_kind(general, found)
            dtypes = [c.dtype for c in general.captures if c.kind == "tensor"]
            order = tuple((slot.place, d) for slot, d in zip(tensors, dtypes, strict=True))  # type: ignore[attr-defined]
            return _Own(op, floats, ints, order, general)
    raise errors.VariantNotFoundError(registry.missing(traced, _name(traced, suffix)))


@dataclass(frozen=True, eq=False)
class _Slot:
    """Stands for a tensor of the call."""

    place: int


def _bits(traced: Traced) -> int:
    return sum(c.dtype.itemsize for c in traced.captures)


def _name(traced: Traced, suffix: str) -> str:
    return f"flex_{traced.fingerprint[:16]}{suffix}"


_found: dict[tuple[str, str], Callable[..., Any]] = {}  # a loaded pack stays
_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def _packed(traced: Traced, suffix: str) -> Callable[..., Any] | None:
    """The kernel of an op: nothing else is registered for it."""
    key = (traced.fingerprint, suffix)
    if key not in _found:
        packet = getattr(torch.ops.tk, _name(traced, suffix), None)
        if packet is None:
            return None
        _found[key] = partial(packet.default.redispatch, _KERNEL)
    return _found[key]


def _known() -> list[Traced]:
    """The pairs of loaded packs; each op's record has its pair's text. Those of another spelling serve nothing."""
    found = map(register.find, register.attention_names())
    texts = (op.meta.get("flex") for op in found if op is not None)
    return [trace.parse(text) for text in texts if isinstance(text, str) and trace.is_text(text)]


def _own_call(traced: Traced, args: Sequence[Any], suffix: str = "") -> tuple[_Own, list[Tensor], list[Any]]:
    """The pair's own op, and its arguments: tensors, with an empty one for what is absent, and numbers."""
    own = _own(traced, args[_TENSORS], args[_FLOATS], args[_INTS], suffix)
    query, scale = args[0], args[_SCALE]
    given = zip(args[_FIRST_LIST:_SCALE], _nothing(query.device))  # noqa: B905  # both eleven
    optional = [nothing if x is None else x for x, nothing in given]
    is_tf32 = query.dtype is torch.float32 and allows_tf32()
    band = _band(traced, args[_INTS]) if args[_FIRST_LIST] is None else _NO_BAND
    of_captures = args[_OPTION] if suffix else True
    max_scores = not suffix and _has_max_scores(args)
    numbers = [scale, *own.floats, args[_SCALE + 1], args[_SCALE + 2], *band, int(is_tf32), *own.ints,
               int(of_captures), int(scale < 0), int(max_scores)]  # fmt: skip
    return own, [query, args[1], args[2], *optional], numbers


def _has_max_scores(args: Sequence[Any]) -> bool:
    return len(args) > _OPTION and bool(args[_OPTION])


_RANKS = (*(3 if "num" in name else 4 for name in flex.LISTS), 1, 2, 1)


@cache
def _nothing(device: torch.device) -> tuple[Tensor, ...]:
    """Stand for arguments that are absent; the same in all calls, since to make eleven takes longer than the rest."""
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


def cuda(*args: Any) -> tuple[Tensor, Tensor]:
    return _on_cuda(trace.parse(args[_PAIR]), args)


def _on_cuda(traced: Traced, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    def run() -> Any:
        own, tensors, numbers = _own_call(traced, args)
        given = (*tensors, *own.captured(args[_TENSORS]), *numbers)
        if len(args) > _TILE and args[_TILE]:
            given = (*given, _config_with(args[_TILE], own.op, given))
        return own.op(*given)

    return _or_built(run, traced, args)


def _config_with(tile: str, op: Callable[..., Any], given: Sequence[Any]) -> int:
    """The number of the fastest config that takes a call and has such a tile. Raises tk.UnsupportedError."""
    from tk import capi
    from tk.heuristics.problem import describe

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


def _or_built(run: Callable[[], Any], traced: Traced, args: Sequence[Any]) -> Any:
    """What ``run`` returns, once more where a kernel was missing and has been built."""
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        build_missing(error, traced, args)
    return run()


def build_missing(error: Exception, traced: Traced, args: Sequence[Any]) -> None:
    """Kernels for the head sizes and the dtype of a call that no pack has them for, where they may be built; else the
    error is raised again."""
    if not missing.is_for(error):
        raise error
    query, value = args[0], args[2]
    head = (query.shape[3], value.shape[3])
    source = registry.source_of(traced, f"head_dims=({head},)", f"dtypes=({query.dtype},)")
    missing.load(_name(traced, ""), source, query.device.index)


def cuda_backward(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    traced = trace.parse(args[_PAIR])

    def run() -> Any:
        own, tensors, numbers = _own_call(traced, args, "_backward")
        found = own.op(grad_out, grad_lse, *tensors, out, lse, *own.captured(args[_TENSORS]), *numbers)
        return own, found

    own, found = _or_built(run, traced, args)
    query, key, value, sinks, *captured = found
    captured = own.gradients(traced, args[_TENSORS], captured) if args[-1] else []
    return [query, key, value, *([] if args[_SINKS] is None else [sinks]), *captured]


# --- Python's way in ---


def attend(traced: Traced, *args: Any) -> tuple[Tensor, Tensor]:
    """:data:`forward_op` with a traced pair in the place of its text. Where nothing would come between the op and its
    CUDA kernel, that is called at once: the dispatcher takes twice as long as the kernel to pass on 28 arguments."""
    if not _is_direct(args):
        return forward_op(*args[:_PAIR], traced.text, *args[_PAIR + 1 :])
    kernel = partial(_on_cuda, traced)
    return _tracked(kernel, (*args[:_PAIR], traced.text, *args[_PAIR + 1 :])) if _is_at_stake(args) else kernel(args)


def _has_kernels(query: Tensor) -> bool:
    return query.is_cuda


def _is_at_stake(args: Sequence[Any]) -> bool:
    """Whether a gradient is."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args[:3], *args[_TENSORS], args[_SINKS])


def _is_direct(args: Sequence[Any]) -> bool:
    """Whether a call's CUDA kernel may be called at once: no dispatch mode, tensor subclass, transform, tracer or
    profiler is to see the call."""
    return (
        _has_kernels(args[0])
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and _PLAIN.issuperset(map(type, (*args[:_PAIR], *args[_TENSORS], *args[_FIRST_LIST : _SINKS + 1])))
    )


_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


# --- Gradients ---


class _Attention(_SingleLevelFunction):
    """The formula. below: the op without it, of args; after these stand once more what autograd is to see, which does
    not look into tuples: query, key, value, sinks and the captured tensors."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], args: Sequence[Any], *_: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = below(args)
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.numbers, ctx.more = args[_PAIR], args[_FLOATS:_FIRST_LIST], args[_SCALE:_OPTION]
        ctx.save_for_backward(out, lse, *args[:_PAIR], *args[_FIRST_LIST:_SCALE], *args[_TENSORS])
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        out, lse, *inputs = ctx.saved_tensors
        if lse.shape[2] != out.shape[2]:  # the largest scores, which have no gradient, are behind
            lse = lse[:, :, : out.shape[2]]
            grad_lse = None if grad_lse is None else grad_lse[:, :, : out.shape[2]]
        first = _PAIR + _SCALE - _FIRST_LIST
        args = (*inputs[:_PAIR], ctx.pair, inputs[first:], *ctx.numbers, *inputs[_PAIR:first], *ctx.more)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        needed = ctx.needs_input_grad[2:]
        places = _differentiable_tensors(trace.parse(ctx.pair))
        of_captures = any(needed[4 + place] for place in places)
        found = _gradients(grad_out, grad_lse, out, lse, *args, of_captures)
        with_sinks = [] if args[_SINKS] is None else [3]
        order = [0, 1, 2, *with_sinks, *([4 + place for place in places] if of_captures else ())]
        grads: list[Any] = [None] * len(needed)
        for i, grad in zip(order, found, strict=True):
            grads[i] = grad if needed[i] else None
        return None, None, *grads


def _gradients(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, *args: Any) -> list[Tensor]:
    """:data:`backward_op`; as in :func:`attend`, its kernel where nothing would come between."""
    is_plain = _PLAIN.issuperset(map(type, (grad_out, grad_lse, out, lse)))
    if is_plain and not torch.is_grad_enabled() and _is_direct(args):
        return cuda_backward(grad_out, grad_lse, out, lse, *args)
    return backward_op(grad_out, grad_lse, out, lse, *args)


def autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0 and _register.has_tangent(tuple(_leaves(args))):
        _refuse_forward_mode()
    below = partial(_below, keyset)
    if _is_at_stake(args):
        _refuse_forward_mode()
        with _register.single_level():
            return _tracked(below, args)
    return below(args)


def _refuse_forward_mode() -> None:
    """Of a transform outside of another one, too: within a formula its tangents are not seen, and would be lost."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError("tk.flex_attention has no formula for forward-mode automatic differentiation")


def _tracked(below: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    return _Attention.apply(below, args, *args[:_PAIR], args[_SINKS], *args[_TENSORS])  # type: ignore[attr-defined]


def _below(keyset: Any, args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The op without its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        if _is_direct(args):
            return cuda(*args)
        return forward_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _leaves(args: Iterable[Any]) -> Iterable[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list):
            yield from (y for y in x if isinstance(y, Tensor))


class _Gradients(_SingleLevelFunction):
    """The gradients, which have none of their own: they say so when one is asked for, since torch.func.grad asks for a
    graph of them in any case."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., list[Tensor]], args: Sequence[Any], *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(below(args))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError("tk.flex_attention has no gradient of its gradient (create_graph=True)")


def autograd_backward(keyset: Any, *args: Any) -> list[Tensor]:
    below = partial(_backward_below, keyset)
    if torch.is_grad_enabled() and any(x.requires_grad for x in _leaves(args)):
        _refuse_forward_mode()
        with _register.single_level():
            return list(_Gradients.apply(below, args, *_leaves(args)))  # type: ignore[attr-defined]
    return below(args)


def _backward_below(keyset: Any, args: Sequence[Any]) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


# --- vmap ---


def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    """More batch entries where that changes nothing that the mods see, else one call after the other."""
    if not _is_of_batch(in_dims, args):
        return _one_by_one(forward_op, info, in_dims, args)
    n = info.batch_size
    sizes = [x.shape[0] if d is None else x.movedim(d, 0).shape[1] for x, d in zip(args[:_PAIR], in_dims, strict=False)]
    size = max(sizes, default=1) if 0 not in sizes else 0
    joined = [_joined(x, d, n, size) for x, d in zip(args[:_PAIR], in_dims, strict=False)]
    out, lse = forward_op(*joined, *args[_PAIR:])
    return tuple(x.unflatten(0, (n, size)) for x in (out, lse)), (0, 0)


def vmap_backward(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
    return _one_by_one(backward_op, info, in_dims, args)


def _is_of_batch(in_dims: Sequence[Any], args: Sequence[Any]) -> bool:
    """Whether only query, key and value have the dimension, nothing else differs by batch entry, and no mod asks for
    it."""
    traced = trace.parse(args[_PAIR])
    graphs = [g for g in (traced.score, traced.mask) if g is not None]
    asked = any(n.name == "b" and n.users for g in graphs for n in g.arguments)
    others = [x for x in args[_FIRST_LIST:_SINKS] if x is not None]
    return not asked and not others and not any(_flat_dims(in_dims[_PAIR:]))


def _flat_dims(dims: Sequence[Any]) -> list[bool]:
    return [y for x in dims for y in (_flat_dims(x) if isinstance(x, list | tuple) else [x is not None])]


def _joined(x: Tensor, d: int | None, n: int, size: int) -> Tensor:
    """``[n * size, ...]``"""
    x = x.expand(n, *x.shape) if d is None else x.movedim(d, 0)
    return x.expand(n, size, *x.shape[2:]).flatten(0, 1)


def _one_by_one(op: Callable[..., Any], info: Any, in_dims: Sequence[Any], args: Sequence[Any]) -> Any:
    if not info.batch_size:
        raise NotImplementedError("tk.flex_attention has no vmap over a dimension of size 0")
    calls = [op(*[_selected(x, d, i) for x, d in zip(args, in_dims, strict=True)]) for i in range(info.batch_size)]
    found = [torch.stack(parts) for parts in zip(*calls, strict=True)]
    return type(calls[0])(found), type(calls[0])([0] * len(found))


def _selected(x: Any, d: Any, i: int) -> Any:
    if isinstance(x, list | tuple):
        return [_selected(y, e, i) for y, e in zip(x, d, strict=True)] if d is not None else x
    return x if d is None else x.select(d, i)
