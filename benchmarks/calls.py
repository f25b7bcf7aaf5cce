"""Calls of tk's generated ops as they are drawn: one table of the functions, of their arguments and of what torch has
for each.

A function of tk that runs a generated op is in the table, or in EXCLUDED with the reason; a test holds the two
complete. The functions of examples/my_ops.py are there where a loaded pack has them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks import layouts
from benchmarks.layouts import Strided
from benchmarks.runner import ROOT

Arguments = tuple[list[Any], dict[str, Any]]
Function = Callable[..., Any]

FLOATS = {"bfloat16": 5, "float16": 1, "float32": 4}
WIDE = FLOATS | {"float64": 0.5}
NUMBERS = WIDE | {"int64": 0.5, "int32": 0.5, "uint8": 0.3}


@dataclass(frozen=True)
class Limits:
    """How many elements the largest tensor of a call has, about."""

    least: int = 1 << 12
    most: int = 1 << 26


LIMITS = Limits()


class Room:
    """What a function's arguments are drawn in: the dtype, and the layout of its first tensor, are one draw's.
    is_written: the function writes to its arguments."""

    def __init__(self, rng: Random, dtype: str, limits: Limits, requires_grad: bool, is_written: bool = False):
        self.rng, self.dtype, self.requires_grad, self.is_written = rng, dtype, requires_grad, is_written
        self.elements = layouts.log_uniform(rng, limits.least, limits.most)
        self.layout = ""

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def shape(self, low: int = 1, high: int = 5) -> tuple[int, ...]:
        return layouts.sizes(self.rng, self.rng.randint(low, high), self.elements)

    def tensor(self, shape: Sequence[int], dtype: str = "", values: str = "normal") -> Strided:
        """The first one has the draw's layout. Others have it too, or are contiguous, or have one of their own."""
        drawn = layouts.drawn_layout(self.rng, len(shape), self.is_written)
        layout = self.rng.choice((self.layout, self.layout, "contiguous", drawn)) if self.layout else drawn
        self.layout = self.layout or layout
        strides, offset = layouts.placed(self.rng, shape, layout)
        return self._strided(shape, strides, offset, dtype, values)

    def plain(self, shape: Sequence[int], dtype: str = "", values: str = "normal") -> Strided:
        """A contiguous one: a weight, a table."""
        return self._strided(shape, layouts.dense(shape), 0, dtype, values)

    def _strided(self, shape: Sequence[int], strides: tuple[int, ...], offset: int, dtype: str, values: str) -> Strided:
        dtype = dtype or self.dtype
        wants = self.requires_grad and getattr(torch, dtype).is_floating_point
        return Strided(tuple(shape), strides, offset, dtype, values, wants)

    def dim(self, shape: Sequence[int]) -> int:
        """The last one half of the time."""
        return -1 if self.chance(0.5) else self.rng.randrange(len(shape))

    def dims(self, shape: Sequence[int]) -> Any:
        """What a reduction goes over: all, the last, the first, or any set of dimensions."""
        n = len(shape)
        kind = self.rng.choice(("all", "last", "first", "any"))
        if kind == "any":
            return sorted(self.rng.sample(range(n), self.rng.randint(1, n)))
        return {"all": None, "last": -1, "first": 0}[kind]


@dataclass(frozen=True)
class Op:
    """A function of tk's.

    torchs: what a user of torch calls. exact: what results are compared with where torch leaves a choice open.
    has_grad: its backward is drawn as well. is_random: results are compared by their moments. writes: arguments that it
    writes to, by place. makes_new: of no other tensor, on CUDA where there is one. is_users: of examples/my_ops.py."""

    function: str
    arguments: Callable[[Room], Arguments]
    torchs: Function
    exact: Function | None = None
    dtypes: Mapping[str, float] = field(default_factory=lambda: FLOATS)
    has_grad: bool = False
    is_random: bool = False
    writes: tuple[int, ...] = ()
    makes_new: bool = False
    is_users: bool = False

    def ours(self) -> Function:
        import tk

        found: Function = getattr(torch.ops.tk if self.is_users else tk, self.function)
        return _on_cuda(found) if self.makes_new else found


@dataclass(frozen=True)
class Draw:
    """One call. gradients: of a backward, those of the results that have one."""

    seed: int
    index: int
    op: str
    is_backward: bool
    dtype: str
    layout: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: tuple[Strided, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.op} backward" if self.is_backward else self.op

    @property
    def tensors(self) -> list[Strided]:
        return [x for x in tree_leaves([self.args, self.kwargs, self.gradients]) if isinstance(x, Strided)]

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.tensors)

    def given(self) -> list[str]:
        named = [f"{k}={v}" for k, v in self.kwargs.items()]
        return [*(_text(x) for x in self.args), *named, *(f"gradient {g}" for g in self.gradients)]

    def __str__(self) -> str:
        return f"#{self.index} {self.name} {self.layout}: {'; '.join(self.given())}"

    def make(self, device: str) -> tuple[list[Any], dict[str, Any], list[Tensor]]:
        """The same contents every time."""
        torch.manual_seed(self.seed + self.index)
        return tree_map_only(  # type: ignore[no-any-return]
            Strided, lambda x: x.make(device), (list(self.args), self.kwargs, list(self.gradients))
        )


def _text(x: Any) -> str:
    return f"[{', '.join(map(str, x))}]" if isinstance(x, list) else str(x)


# --- Arguments ---


def _one(room: Room) -> Arguments:
    return [room.tensor(room.shape())], {}


def _biased(room: Room) -> Arguments:
    x = room.tensor(room.shape())
    return ([x, room.plain(x.shape[-1:])] if room.chance(0.3) else [x]), {}


def _gelu(room: Room) -> Arguments:
    args, _ = _biased(room)
    return args, {"approximate": "tanh"} if room.chance(0.4) else {}


def _gated(room: Room) -> Arguments:
    """Two tensors, or one that holds both halves of every row."""
    shape = room.shape()
    if room.chance(0.4):
        return [room.tensor((*shape[:-1], 2 * shape[-1]))], {}
    return [room.tensor(shape), room.tensor(shape)], {}


def _geglu(room: Room) -> Arguments:
    args, _ = _gated(room)
    return args, {"approximate": "tanh"} if room.chance(0.4) else {}


def _reduced(room: Room) -> Arguments:
    shape = room.shape()
    return [room.tensor(shape), room.dims(shape), room.chance(0.3)], {}


def _extremes(room: Room) -> Arguments:
    (x, dims, keepdim), _ = _reduced(room)
    return [x, () if dims is None else dims, keepdim], {}


def _over_one(values: str = "normal") -> Callable[[Room], Arguments]:
    """One dimension or all."""

    def draw(room: Room) -> Arguments:
        shape = room.shape()
        x = room.tensor(shape, values=values)
        return ([x] if room.chance(0.25) else [x, room.dim(shape), room.chance(0.3)]), {}

    return draw


def _logsumexp(room: Room) -> Arguments:
    (x, dims, keepdim), _ = _reduced(room)
    return [x, list(range(len(x.shape))) if dims is None else dims, keepdim], {}


def _norm(room: Room) -> Arguments:
    (x, dims, keepdim), _ = _reduced(room)
    return [x, room.rng.choice((2.0, 2.0, 1.0, math.inf, 3.0)), dims, keepdim], {}


def _moments(room: Room) -> Arguments:
    (x, dims, keepdim), _ = _reduced(room)
    return [x, dims], {"correction": room.rng.choice((0, 1)), "keepdim": keepdim}


def _along(values: str = "normal") -> Callable[[Room], Arguments]:
    def draw(room: Room) -> Arguments:
        shape = room.shape()
        return [room.tensor(shape, values=values), room.dim(shape)], {}

    return draw


def _sorted(room: Room) -> Arguments:
    args, _ = _along()(room)
    return [*args, room.chance(0.4)], {}


def _topk(room: Room) -> Arguments:
    (x, dim), _ = _along()(room)
    k = layouts.log_uniform(room.rng, 1, min(x.shape[dim], 256))
    return [x, k, dim, room.chance(0.8)], {}


def _normalized(room: Room, has_bias: bool) -> Arguments:
    shape = room.shape(1, 5)
    last = shape[-2:] if len(shape) > 2 and room.chance(0.15) else shape[-1:]
    x = room.tensor(shape)
    affine = [room.plain(last) for _ in range(1 + has_bias)] if room.chance(0.8) else [None] * (1 + has_bias)
    return [x, list(last), *affine, room.rng.choice((1e-5, 1e-6))], {}


def _layer_norm(room: Room) -> Arguments:
    return _normalized(room, True)


def _rms_norm(room: Room) -> Arguments:
    return _normalized(room, False)


def _add_norm(has_bias: bool) -> Callable[[Room], Arguments]:
    def draw(room: Room) -> Arguments:
        x = room.tensor(room.shape())
        affine = (
            [room.plain(x.shape[-1:]) for _ in range(1 + has_bias)] if room.chance(0.8) else [None] * (1 + has_bias)
        )
        return [x, room.tensor(x.shape), *affine, 1e-5], {}

    return draw


def _group_norm(room: Room) -> Arguments:
    groups = room.rng.choice((1, 2, 8, 16, 32))
    spatial = room.rng.randint(0, 3)
    images = layouts.sizes(room.rng, 1 + spatial, max(1, room.elements // (groups * 8)))
    shape = (images[0], groups * room.rng.choice((2, 4, 8, 10, 16)), *images[1:])
    affine = [room.plain(shape[1:2]) for _ in range(2)] if room.chance(0.8) else [None, None]
    return [room.tensor(shape), groups, *affine, 1e-5], {}


def _cross_entropy(room: Room) -> Arguments:
    classes = room.rng.choice((10, 1000, 32000, 50257, 128256, layouts.log_uniform(room.rng, 2, 1 << 17)))
    classes = min(classes, room.elements)
    rows = max(1, room.elements // classes)
    places = (layouts.log_uniform(room.rng, 1, rows),) if room.chance(0.15) else ()
    rows = max(1, rows // math.prod(places))
    x = room.tensor((rows, classes, *places))
    kwargs: dict[str, Any] = {"reduction": room.rng.choice(("mean", "mean", "sum", "none"))}
    if room.chance(0.3):
        kwargs["label_smoothing"] = 0.1
    if room.chance(0.1):
        return [x, replace(room.plain(x.shape), requires_grad=False)], kwargs
    if room.chance(0.1) and "label_smoothing" not in kwargs:  # torch's own cannot be captured with both
        kwargs["weight"] = replace(room.plain((classes,), values="positive"), requires_grad=False)
    return [x, room.plain((rows, *places), "int64", f"below {classes}")], kwargs


def _linear_cross_entropy(room: Room) -> Arguments:
    features = layouts.log_uniform(room.rng, 8, 1024)
    classes = layouts.log_uniform(room.rng, 2, max(2, min(1 << 17, room.elements // features)))
    rows = max(1, room.elements // max(classes, features))
    given = [room.tensor((rows, features)), room.tensor((classes, features))]
    kwargs: dict[str, Any] = {"reduction": room.rng.choice(("mean", "mean", "sum", "none"))}
    if room.chance(0.3):
        kwargs["linear_bias"] = room.plain((classes,))
    if room.chance(0.3):
        kwargs["label_smoothing"] = 0.1
    return [*given, room.plain((rows,), "int64", f"below {classes}")], kwargs


def _torch_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """As torch's own, which is there from 2.13 on."""
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **kwargs)


def _dropout(room: Room) -> Arguments:
    return [*_one(room)[0], room.rng.choice((0.1, 0.5))], {}


def _dropout_add(room: Room) -> Arguments:
    x = room.tensor(room.shape())
    return [x, room.tensor(x.shape), room.rng.choice((0.1, 0.5))], {}


def _embedding(room: Room) -> Arguments:
    width = room.rng.choice((64, 128, 768, 1024, 4096, layouts.log_uniform(room.rng, 1, 5000)))
    width = min(width, room.elements)
    tokens = layouts.sizes(room.rng, room.rng.randint(1, 2), max(1, room.elements // width))
    table = layouts.log_uniform(room.rng, 2, max(2, min(128256, (1 << 26) // width)))
    dtype = room.rng.choice(("int64", "int32"))
    index = room.plain(tokens, dtype, f"below {table}")
    return [index, room.tensor((table, width))], {}


def _gathered(room: Room) -> Arguments:
    """Along any dimension, as many as input has there, fewer or more."""
    shape = room.shape()
    dim = room.dim(shape)
    places = min(layouts.log_uniform(room.rng, 1, 2 * shape[dim]), room.elements)
    sizes = (*shape[:dim], places, *shape[dim % len(shape) + 1 :])
    dtype = room.rng.choice(("int64", "int64", "int32"))
    return [room.tensor(shape), dim, room.plain(sizes, dtype, f"below {shape[dim]}")], {}


def _scatter_added(room: Room) -> Arguments:
    (x, dim, index), _ = _gathered(room)
    return [x, dim, replace(index, dtype="int64"), room.tensor(index.shape)], {}


def _index_added(room: Room) -> Arguments:
    (x, dim, index), _ = _gathered(room)
    n = index.shape[dim]
    return [x, dim, room.plain((n,), "int64", f"below {x.shape[dim]}"), room.tensor(index.shape)], {}


def _index_put(room: Room) -> Arguments:
    """At rows, or at places of the first two dimensions, with values for each or one row for all."""
    shape = room.shape(1, 4)
    n_indices = room.rng.randint(1, min(2, len(shape)))
    n = layouts.log_uniform(room.rng, 1, max(1, room.elements // max(1, math.prod(shape[n_indices:]))))
    indices = [room.plain((n,), "int64", f"below {size}") for size in shape[:n_indices]]
    values = (n, *shape[n_indices:]) if room.chance(0.8) else shape[n_indices:]
    return [room.tensor(shape), indices, room.tensor(values), room.chance(0.5)], {}


def _rope(room: Room) -> Arguments:
    half = room.rng.choice((32, 64, 64, 128, 48, layouts.log_uniform(room.rng, 1, 160)))
    half = min(half, max(1, room.elements // 4))
    *lead, length = layouts.sizes(room.rng, room.rng.randint(1, 4), max(1, room.elements // (2 * half)))
    tables = [replace(room.plain((length, half)), requires_grad=False) for _ in range(2)]
    return [room.tensor((*lead, length, 2 * half)), *tables, room.chance(0.3)], {}


def _quantize(room: Room) -> Arguments:
    return [*_one(room)[0], room.rng.choice(("tensor", "row"))], {}


def _bucketize(room: Room) -> Arguments:
    x = room.tensor(room.shape())
    row = room.plain((layouts.log_uniform(room.rng, 1, 1 << 16),), values="sorted")
    return [x, row], {"right": room.chance(0.5)}


def _searchsorted(room: Room) -> Arguments:
    *lead, last = room.shape(2, 4)
    rows = room.plain((*lead, layouts.log_uniform(room.rng, 1, max(1, min(8192, room.elements // math.prod(lead))))),
                      values="sorted")  # fmt: skip
    return [rows, room.tensor((*lead, last))], {"right": room.chance(0.5)}


def _adamw(room: Room) -> Arguments:
    """A model's parameters: a few matrices, as many vectors, laid out as its optimizer made them."""
    shapes: list[tuple[int, ...]] = []
    count = room.rng.randint(1, 12)
    for _ in range(count):
        share = max(1, room.elements // count)
        shapes.append(layouts.sizes(room.rng, room.rng.choice((1, 2, 2, 4)), layouts.log_uniform(room.rng, 1, share)))
    moments = "float32" if room.chance(0.5) else ""
    room.layout = "contiguous"
    kinds = (("", "normal"), ("", "normal"), (moments, "normal"), (moments, "positive"))
    of_all = [[room.plain(s, dtype, values) for s in shapes] for dtype, values in kinds]
    steps = [room.plain((), "float32", "steps") for _ in shapes]
    return [*of_all, steps], {"lr": 1e-3}


def _filled(room: Room) -> Arguments:
    room.layout = "contiguous"
    return [list(room.shape())], {"dtype": getattr(torch, room.dtype)}


def _integers(room: Room) -> Arguments:
    room.layout = "contiguous"
    return [0, room.rng.choice((2, 1000, 50257)), list(room.shape())], {}


# --- What torch has ---


def _torch_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def _torch_silu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.silu(x if bias is None else x + bias)


def _torch_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def _torch_geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Any:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


def _torch_add_layer_norm(x: Tensor, residual: Tensor, weight: Any, bias: Any, eps: float) -> Any:
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def _torch_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _torch_quantize(x: Tensor, per: str) -> tuple[Tensor, Tensor]:
    amax = x.abs().amax(-1, keepdim=True) if per == "row" else x.abs().amax()
    scale = (amax.float() / 448.0).clamp_min(2.0**-126)
    return (x / scale).float().to(torch.float8_e4m3fn), scale


def _torch_adamw(params: Any, grads: Any, means: Any, squares: Any, steps: Any, lr: float) -> None:
    """In float32 moments of 16-bit parameters torch's fused step has none: the parameters are then converted."""
    rates: dict[str, Any] = dict(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2)
    for step in steps:
        step += 1
    counts = [step.float() for step in steps]  # on CUDA it reads float32, whatever the tensors are
    if params[0].dtype == means[0].dtype:
        torch._fused_adamw_(params, grads, means, squares, [], counts, **rates, amsgrad=False, maximize=False)
        return
    wide = [p.to(means[0].dtype) for p in params]
    gradients = [g.to(means[0].dtype) for g in grads]
    torch._fused_adamw_(wide, gradients, means, squares, [], counts, **rates, amsgrad=False, maximize=False)
    torch._foreach_copy_(params, wide)


def _torch_dropout(x: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True)


def _torch_dropout_add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return F.dropout(x, p, True) + residual


def _stable_sort(x: Tensor, dim: int, descending: bool) -> Any:
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _stable_topk(x: Tensor, k: int, dim: int, largest: bool) -> Any:
    return tuple(t.narrow(dim, 0, k) for t in _stable_sort(x, dim, largest))


def _last_put(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool) -> Tensor:
    """Of several values for one place the last, and, as in torch, the gradient of the place for all of them."""
    found = torch.index_put(x, indices, values, accumulate)
    if accumulate:
        return found
    places = torch.arange(x.numel(), device=x.device).view(x.shape)[tuple(indices)]
    order = torch.arange(places.numel(), device=x.device)
    none = torch.full((x.numel(),), -1, device=x.device)
    last = none.scatter_reduce(0, places.flatten(), order, "amax").view(x.shape)
    chosen = values.detach().expand(places.shape).flatten()[last.clamp(min=0)]
    found.detach().copy_(torch.where(last < 0, x.detach(), chosen))
    return found


def _on_cuda(function: Function) -> Function:
    """Of a function that makes a tensor: on CUDA where there is one."""
    return lambda *args, **kwargs: function(*args, device=device(), **kwargs)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# The gradients of prod and cumprod are ATen's, which wait for the host: no graph can hold them.
OPS = (
    Op("gelu", _gelu, _torch_gelu, has_grad=True),
    Op("silu", _biased, _torch_silu, has_grad=True),
    Op("swiglu", _gated, _torch_swiglu, has_grad=True),
    Op("geglu", _geglu, _torch_geglu, has_grad=True),
    Op("sum", _reduced, torch.sum, dtypes=NUMBERS, has_grad=True),
    Op("mean", _reduced, torch.mean, dtypes=WIDE, has_grad=True),
    Op("prod", _over_one("near one"), torch.prod),
    Op("logsumexp", _logsumexp, torch.logsumexp, dtypes=WIDE, has_grad=True),
    Op("amax", _extremes, torch.amax, dtypes=NUMBERS, has_grad=True),
    Op("amin", _extremes, torch.amin, dtypes=NUMBERS, has_grad=True),
    Op("argmax", _over_one(), torch.argmax, dtypes=NUMBERS),
    Op("argmin", _over_one(), torch.argmin, dtypes=NUMBERS),
    Op("max", _over_one(), torch.max, dtypes=NUMBERS, has_grad=True),
    Op("min", _over_one(), torch.min, dtypes=NUMBERS, has_grad=True),
    Op("any", _reduced, torch.any, dtypes={"bool": 3, "float32": 1}),
    Op("all", _reduced, torch.all, dtypes={"bool": 3, "float32": 1}),
    Op("norm", _norm, torch.norm, dtypes=WIDE, has_grad=True),
    Op("vector_norm", _norm, torch.linalg.vector_norm, dtypes=WIDE, has_grad=True),
    Op("var", _moments, torch.var, dtypes=WIDE, has_grad=True),
    Op("std", _moments, torch.std, dtypes=WIDE, has_grad=True),
    Op("var_mean", _moments, torch.var_mean, dtypes=WIDE, has_grad=True),
    Op("std_mean", _moments, torch.std_mean, dtypes=WIDE, has_grad=True),
    Op("softmax", _along(), torch.softmax, dtypes=WIDE, has_grad=True),
    Op("log_softmax", _along(), torch.log_softmax, dtypes=WIDE, has_grad=True),
    Op("cumsum", _along(), torch.cumsum, dtypes=NUMBERS, has_grad=True),
    Op("cumprod", _along("near one"), torch.cumprod),
    Op("cummax", _along(), torch.cummax, dtypes=NUMBERS, has_grad=True),
    Op("cummin", _along(), torch.cummin, dtypes=NUMBERS, has_grad=True),
    Op("logcumsumexp", _along(), torch.logcumsumexp, has_grad=True),
    Op("sort", _sorted, torch.sort, _stable_sort, dtypes=NUMBERS, has_grad=True),
    Op("argsort", _sorted, torch.argsort, lambda *args: _stable_sort(*args)[1], dtypes=NUMBERS),
    Op("topk", _topk, torch.topk, _stable_topk, dtypes=NUMBERS, has_grad=True),
    Op("layer_norm", _layer_norm, F.layer_norm, has_grad=True),
    Op("rms_norm", _rms_norm, F.rms_norm, has_grad=True),
    Op("group_norm", _group_norm, F.group_norm, has_grad=True),
    Op("add_layer_norm", _add_norm(True), _torch_add_layer_norm, has_grad=True),
    Op("add_rms_norm", _add_norm(False), _torch_add_rms_norm, has_grad=True),
    Op("cross_entropy", _cross_entropy, F.cross_entropy, has_grad=True),
    Op("linear_cross_entropy", _linear_cross_entropy, _torch_linear_cross_entropy, has_grad=True),
    Op("dropout", _dropout, _torch_dropout, has_grad=True, is_random=True),
    Op("dropout_add", _dropout_add, _torch_dropout_add, has_grad=True, is_random=True),
    Op("embedding", _embedding, F.embedding, has_grad=True),
    Op("gather", _gathered, torch.gather, dtypes=NUMBERS, has_grad=True),
    Op("scatter_add", _scatter_added, torch.scatter_add, dtypes=NUMBERS, has_grad=True),
    Op("index_add", _index_added, torch.index_add, dtypes=NUMBERS, has_grad=True),
    Op("index_put", _index_put, torch.index_put, _last_put, dtypes=NUMBERS, has_grad=True),
    Op("rope", _rope, _torch_rope, has_grad=True),
    Op("quantize_fp8", _quantize, _torch_quantize),
    Op("bucketize", _bucketize, torch.bucketize, dtypes=NUMBERS),
    Op("searchsorted", _searchsorted, torch.searchsorted, dtypes=NUMBERS),
    Op("adamw_", _adamw, _torch_adamw, writes=(0, 2, 3, 4)),
    Op("rand", _filled, _on_cuda(torch.rand), is_random=True, makes_new=True),
    Op("randn", _filled, _on_cuda(torch.randn), is_random=True, makes_new=True),
    Op("randint", _integers, _on_cuda(torch.randint), is_random=True, makes_new=True),
)
EXCLUDED: Mapping[str, str] = {}  # function: why it is not drawn


# --- A user's functions ---


def _of_shape(
    *tensors: tuple[str, str] | float | int | bool, low: int = 1, high: int = 5
) -> Callable[[Room], Arguments]:
    """Tensors of (dtype, sizes): "all" is the drawn shape, else dimensions of it by place, "1" one of size 1."""

    def draw(room: Room) -> Arguments:
        shape = room.shape(low, high)

        def sized(text: str) -> tuple[int, ...]:
            if text == "all":
                return shape
            return tuple(1 if part == "one" else shape[int(part)] for part in text.split())

        args: list[Any] = []
        for t in tensors:
            args.append(room.tensor(sized(t[1]), t[0]) if isinstance(t, tuple) else t)
        return args, {}

    return draw


def _lists(*rest: Any) -> Callable[[Room], Arguments]:
    def draw(room: Room) -> Arguments:
        parts = room.rng.randint(1, 12)
        shapes = [layouts.sizes(room.rng, room.rng.randint(1, 3), max(1, room.elements // parts)) for _ in range(parts)]
        tail = [room.plain((), "float32") if x == "scalar" else x for x in rest]
        return [[room.tensor(s, "float32") for s in shapes], *tail], {}

    return draw


def _looked_up(room: Room) -> Arguments:
    (index, table), _ = _embedding(room)
    return [table, replace(index, dtype="int64")], {}


X = ("float32", "all")
_USERS: Mapping[str, tuple[Callable[[Room], Arguments], bool, tuple[int, ...]]] = {
    "scaled_tanh": (_of_shape(X, 0.5), True, ()),
    "squashed": (_of_shape(X, -1.0, 2.0), False, ()),
    "shifted_bits": (_of_shape(("int32", "all"), 3), False, ()),
    "smooth_difference": (_of_shape(X, X), False, ()),
    "masked": (_of_shape(X, ("bool", "all")), False, ()),
    "gate": (_of_shape(X, True), False, ()),
    "biased_relu": (_of_shape(("bfloat16", "all"), ("bfloat16", "-1")), False, ()),
    "outer_scaled": (_of_shape(X, ("float32", "0 one"), ("float32", "1"), low=2, high=2), False, ()),
    "channel_affine": (_of_shape(X, ("float32", "1"), ("float32", "1"), low=4, high=4), False, ()),
    "row_range": (_of_shape(X), False, ()),
    "centred": (_of_shape(X), False, ()),
    "unit_rows": (_of_shape(X, ("float32", "-1"), 1e-6), True, ()),
    "column_spread": (_of_shape(X, low=2, high=2), False, ()),
    "any_not_finite": (_of_shape(X), False, ()),
    "best": (_of_shape(X, 0.7), False, ()),
    "neighbours": (_of_shape(X), False, ()),
    "mirrored": (_of_shape(X, low=2, high=2), False, ()),
    "looked_up": (_looked_up, False, ()),
    "decayed_": (_of_shape(X, X, 0.9), False, (0,)),
    "scale_all_": (_lists(1.0009765625), False, (0,)),
    "scaled_copies": (_lists("scalar", 2.0), False, ()),
    "clip_norm_": (_lists(0.5), False, (0,)),
}


@cache
def my_ops() -> ModuleType:
    """examples/my_ops.py."""
    spec = importlib.util.spec_from_file_location("my_ops", ROOT / "examples" / "my_ops.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def users() -> tuple[Op, ...]:
    """Those of examples/my_ops.py that loaded packs have."""
    from tk.generated import register

    return tuple(
        Op(name, arguments, getattr(my_ops(), name).fn, dtypes={"float32": 1}, has_grad=has_grad, writes=writes,
           is_users=True)
        for name, (arguments, has_grad, writes) in _USERS.items()
        if register.find(name) is not None
    )  # fmt: skip


# --- Draws ---


def table() -> dict[str, Op]:
    return {op.function: op for op in (*OPS, *users())}


def drawn(seed: int, index: int, ops: Mapping[str, Op], limits: Limits = LIMITS) -> Draw:
    """Number `index` of a seed, whatever was drawn before. Every op's forward and backward come alike often."""
    ways = [
        (name, is_backward)
        for name, op in ops.items()
        for is_backward in (False, True)
        if not is_backward or op.has_grad
    ]
    round_, place = divmod(index, len(ways))
    Random(f"{seed} round {round_}").shuffle(ways)
    name, is_backward = ways[place]
    op, rng = ops[name], Random(f"{seed} draw {index}")
    dtypes = {d: w for d, w in op.dtypes.items() if not is_backward or getattr(torch, d).is_floating_point}
    dtype = rng.choices(list(dtypes), list(dtypes.values()))[0]
    room = Room(rng, dtype, limits, is_backward, bool(op.writes))
    args, kwargs = op.arguments(room)
    found = Draw(seed, index, name, is_backward, dtype, room.layout, tuple(args), kwargs)
    return replace(found, gradients=_gradients(op, found, room)) if is_backward else found


def _gradients(op: Op, draw: Draw, room: Room) -> tuple[Strided, ...]:
    """As large as torch's results; most lie as a backward pass before would have left them, contiguous."""
    args, kwargs, _ = draw.make("meta")
    room.requires_grad = False
    found = []
    for y in differentiable(op.torchs(*args, **kwargs)):
        dtype = str(y.dtype).removeprefix("torch.")
        found.append((room.plain if room.chance(0.6) else room.tensor)(tuple(y.shape), dtype))
    return tuple(found)


def differentiable(results: Any) -> list[Tensor]:
    return [y for y in tree_leaves(results) if isinstance(y, Tensor) and y.requires_grad]


def sources(args: Any, kwargs: Any) -> list[Tensor]:
    """What gradients are asked of."""
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
