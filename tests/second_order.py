"""Every public function of tk beside torch's, twice differentiated: for the CPU (ops/test_second_order.py) and for CUDA
(gpu/test_gradients.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tk

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """shapes: of the leaves that both functions take."""

    name: str  # of the function, then what is special
    ours: Function
    torchs: Function
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return self.name

    @property
    def function(self) -> str:
        return self.name.partition(" ")[0]

    def leaves(self, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
        """The same numbers for every dtype and device, none of them equal."""
        generator = torch.Generator().manual_seed(1)
        found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in self.shapes]
        return [x.to(torch.float32).to(device, dtype).requires_grad_() for x in found]


def _index(*values: int) -> Function:
    return lambda x: torch.tensor(values, device=x.device)


_CLASSES = _index(1, 0, 4, -100, 2)
_ROWS = _index(3, 0, 3, 1)
_ENDS = _index(2, 3)


def _places(x: Tensor) -> Tensor:
    return torch.stack([_index(3, 0, 3, 1, 2, 0)(x), _index(0, 0, 1, 2, 2, 3)(x)])


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    first, second = a * cos - b * sin, b * cos + a * sin
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.arange(12, device=x.device, dtype=torch.float32).reshape(4, 3)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def _kept(x: Tensor) -> Tensor:
    """What tk.dropout with seed 7 keeps, scaled."""
    return tk.dropout(torch.ones_like(x, dtype=torch.float32), 0.3, seed=7).detach().to(x.dtype)


def _rms(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _of_groups(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((a[:2] @ b[0], a[2:3] @ b[1], a.new_zeros(a.shape[0] - 3, b.shape[2])))


def _cases() -> list[Case]:
    row = ((4, 6),)
    cases = [
        Case("gelu", tk.gelu, F.gelu, row),
        Case("gelu tanh", lambda x: tk.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), row),
        Case("gelu bias", tk.gelu, lambda x, b: F.gelu(x + b), ((4, 6), (6,))),
        Case("silu", tk.silu, F.silu, row),
        Case("silu bias", tk.silu, lambda x, b: F.silu(x + b), ((2, 2, 6), (6,))),
        Case("swiglu", tk.swiglu, lambda g, u: F.silu(g) * u, ((4, 6), (4, 6))),
        Case("swiglu halves", tk.swiglu, lambda x: F.silu(x[..., :3]) * x[..., 3:], row),
        Case("geglu", tk.geglu, lambda g, u: F.gelu(g) * u, ((4, 6), (4, 6))),
        Case("softmax", lambda x: tk.softmax(x, -1), lambda x: x.softmax(-1), row),
        Case("softmax first", lambda x: tk.softmax(x, 0), lambda x: x.softmax(0), row),
        Case("log_softmax", lambda x: tk.log_softmax(x, 1), lambda x: x.log_softmax(1), ((2, 4, 3),)),
        Case("logsumexp", lambda x: tk.logsumexp(x, (0, 1)), lambda x: x.logsumexp((0, 1)), row),
        Case("layer_norm", lambda x, w, b: tk.layer_norm(x, (6,), w, b), lambda x, w, b: F.layer_norm(x, (6,), w, b),
             ((2, 3, 6), (6,), (6,))),
        Case("layer_norm two", lambda x: tk.layer_norm(x, (2, 3)), lambda x: F.layer_norm(x, (2, 3)), ((4, 2, 3),)),
        Case("rms_norm", lambda x, w: tk.rms_norm(x, (6,), w, 1e-3), lambda x, w: _rms(x, w, 1e-3), ((4, 6), (6,))),
        Case("rms_norm plain", lambda x: tk.rms_norm(x, (6,)), lambda x: _rms(x, None, None), row),
        Case("group_norm", lambda x, w, b: tk.group_norm(x, 2, w, b), lambda x, w, b: F.group_norm(x, 2, w, b),
             ((2, 4, 3), (4,), (4,))),
        Case("add_rms_norm", tk.add_rms_norm, lambda x, r, w: (_rms(x + r, w, None), x + r), ((4, 6), (4, 6), (6,))),
        Case("add_layer_norm", tk.add_layer_norm,
             lambda x, r, w, b: (F.layer_norm(x + r, (6,), w, b), x + r), ((4, 6), (4, 6), (6,), (6,))),
        Case("sum", tk.sum, torch.sum, row),
        Case("sum rows", lambda x: tk.sum(x, -1), lambda x: x.sum(-1), row),
        Case("sum columns", lambda x: tk.sum(x, 0), lambda x: x.sum(0), row),
        Case("mean", tk.mean, torch.mean, row),
        Case("mean rows", lambda x: tk.mean(x, 1), lambda x: x.mean(1), row),
        Case("prod", lambda x: tk.prod(x, -1), lambda x: x.prod(-1), row),
        Case("prod all", tk.prod, torch.prod, ((2, 3),)),
        Case("amax", lambda x: tk.amax(x, -1), lambda x: x.amax(-1), row),
        Case("amin all", tk.amin, torch.amin, row),
        Case("amin", lambda x: tk.amin(x, 0), lambda x: x.amin(0), row),
        Case("max", lambda x: tk.max(x, 1)[0], lambda x: x.max(1)[0], row),
        Case("min all", tk.min, torch.min, row),
        Case("min", lambda x: tk.min(x, 0)[0], lambda x: x.min(0)[0], row),
        Case("norm", lambda x: tk.norm(x, dim=-1), lambda x: x.norm(dim=-1), row),
        Case("norm all", tk.norm, torch.norm, row),
        Case("norm 1", lambda x: tk.norm(x, 1, -1), lambda x: x.norm(1, -1), row),
        Case("vector_norm 3", lambda x: tk.vector_norm(x, 3, -1), lambda x: torch.linalg.vector_norm(x, 3, -1), row),
        Case("vector_norm inf", lambda x: tk.vector_norm(x, torch.inf, -1), lambda x: x.abs().amax(-1), row),
        Case("var", lambda x: tk.var(x, -1), lambda x: x.var(-1), row),
        Case("var all", lambda x: tk.var(x, correction=0), lambda x: x.var(correction=0), row),
        Case("std", lambda x: tk.std(x, -1), lambda x: x.std(-1), row),
        Case("std all", tk.std, torch.std, row),
        Case("var_mean", lambda x: tk.var_mean(x, 1), lambda x: torch.var_mean(x, 1), row),
        Case("std_mean", lambda x: tk.std_mean(x, 1), lambda x: torch.std_mean(x, 1), row),
        Case("cumsum", lambda x: tk.cumsum(x, -1), lambda x: x.cumsum(-1), row),
        Case("cumprod", lambda x: tk.cumprod(x, -1), lambda x: x.cumprod(-1), row),
        Case("cummax", lambda x: tk.cummax(x, -1)[0], lambda x: x.cummax(-1)[0], row),
        Case("cummin", lambda x: tk.cummin(x, 0)[0], lambda x: x.cummin(0)[0], row),
        Case("logcumsumexp", lambda x: tk.logcumsumexp(x, -1), lambda x: x.logcumsumexp(-1), row),
        Case("sort", lambda x: tk.sort(x, -1, True)[0], lambda x: x.sort(-1, True)[0], row),
        Case("topk", lambda x: tk.topk(x, 2)[0], lambda x: x.topk(2)[0], row),
        Case("embedding", lambda w: tk.embedding(_ROWS(w), w, 1), lambda w: F.embedding(_ROWS(w), w, 1), row),
        Case("gather", lambda x: tk.gather(x, 0, _places(x)), lambda x: x.gather(0, _places(x)), row),
        Case("scatter_add", lambda x, y: tk.scatter_add(x, 0, _places(x), y[:2]),
             lambda x, y: x.scatter_add(0, _places(x), y[:2]), ((4, 6), (4, 6))),
        Case("index_add", lambda x, y: tk.index_add(x, 0, _places(x)[:, 0], y[:2]),
             lambda x, y: x.index_add(0, _places(x)[:, 0], y[:2]), ((4, 6), (4, 6))),
        Case("index_put", lambda x, y: tk.index_put(x, (_places(x)[:, 0],), y[:2]),
             lambda x, y: x.index_put((_places(x)[:, 0],), y[:2]), ((4, 6), (4, 6))),
        Case("rope", lambda x: tk.rope(x, *_angles(x)), lambda x: _rotated(x, *_angles(x)), ((2, 4, 6),)),
        Case("rope interleaved", lambda x: tk.rope(x, *_angles(x), interleaved=True),
             lambda x: _rotated(x, *_angles(x), interleaved=True), ((2, 4, 6),)),
        Case("dropout", lambda x: tk.dropout(x, 0.3, seed=7), lambda x: x * _kept(x), row),
        Case("dropout_add", lambda x, r: tk.dropout_add(x, r, 0.3, seed=7), lambda x, r: x * _kept(x) + r,
             ((4, 6), (4, 6))),
    ]  # fmt: skip
    for reduction in ("none", "sum", "mean"):
        for smoothing in (0.0, 0.2):
            named = dict(reduction=reduction, label_smoothing=smoothing)
            cases.append(
                Case(
                    f"cross_entropy {reduction} {smoothing}",
                    lambda x, named=named: tk.cross_entropy(x, _CLASSES(x), **named),
                    lambda x, named=named: F.cross_entropy(x, _CLASSES(x), **named),
                    ((5, 6),),
                )
            )
    return [*cases, *_products()]


def _products() -> list[Case]:
    cases = [
        Case("bmm", tk.bmm, torch.bmm, ((2, 3, 4), (2, 4, 5))),
        Case("baddbmm", lambda c, a, b: tk.baddbmm(c, a, b, beta=0.5, alpha=2.0),
             lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), ((5,), (2, 3, 4), (2, 4, 5))),
        Case("mm_plus_mm", tk.mm_plus_mm, lambda a, b, c, d: a @ b + c @ d, ((3, 4), (4, 5), (3, 2), (2, 5))),
        Case("grouped_mm", lambda a, b: tk.grouped_mm(a, b, offs=_ENDS(a).int()), _of_groups, ((3, 4), (2, 4, 5))),
    ]  # fmt: skip
    for activation, f in (("none", lambda z: z), ("gelu", F.gelu), ("silu", F.silu), ("relu", F.relu)):
        named = {"activation": activation}
        cases += [
            Case(f"mm {activation}", lambda a, b, n=named: tk.mm(a, b, **n), lambda a, b, f=f: f(a @ b),
                 ((3, 4), (4, 5))),
            Case(f"addmm {activation}", lambda c, a, b, n=named: tk.addmm(c, a, b, **n),
                 lambda c, a, b, f=f: f(torch.addmm(c, a, b)), ((5,), (3, 4), (4, 5))),
            Case(f"linear {activation}", lambda x, w, b, n=named: tk.linear(x, w, b, **n),
                 lambda x, w, b, f=f: f(F.linear(x, w, b)), ((2, 3, 4), (5, 4), (5,))),
        ]  # fmt: skip
        for spatial in (1, 2, 3):
            ours, torchs = getattr(tk, f"conv{spatial}d"), getattr(F, f"conv{spatial}d")
            cases.append(
                Case(
                    f"conv{spatial}d {activation}",
                    lambda x, w, b, c=ours, n=named: c(x, w, b, padding=1, **n),
                    lambda x, w, b, c=torchs, f=f: f(c(x, w, b, padding=1)),
                    ((2, 3, *(4,) * spatial), (4, 3, *(3,) * spatial), (4,)),
                )
            )
    return cases


CASES = _cases()

# Functions whose results are integers, drawn, or rounded to them: torch has no gradients of these either.
WITHOUT_GRADIENT = (
    "all", "any", "argmax", "argmin", "argsort", "bucketize", "quantize_fp8", "rand", "randint", "randn",
    "searchsorted", "adamw_",
)  # fmt: skip

# Refused where a gradient, or a gradient of a gradient, is at stake.
REFUSED = (
    "b2b_gemm", "flex_attention", "int4_mm", "linear_cross_entropy", "scaled_grouped_mm", "scaled_mm", "sdpa",
    "uint4x2_mixed_mm",
)  # fmt: skip


def hessian_product(f: Function, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss that is no sum of the results alone, and the Hessian of it times a vector; none is a
    number that a formula could leave out unseen."""
    found = f(*leaves)
    outputs = [y for y in (found if isinstance(found, tuple) else (found,)) if y.is_floating_point()]
    loss = sum((_weights(y, 1 + i) * (y + 0.3 * y.sin())).sum() for i, y in enumerate(outputs))
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    along = sum((g * _weights(g, 3 + i)).sum() for i, g in enumerate(grads))
    if not along.requires_grad:
        return [*grads, *map(torch.zeros_like, leaves)]
    return [*grads, *torch.autograd.grad(along, leaves, materialize_grads=True)]


def _weights(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device, like.dtype)
