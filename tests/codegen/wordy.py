"""Functions that users write first, beside what they are held against: the function itself, eagerly, with gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import backwards
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tk.codegen.family import Generated, generate
from tk.codegen.lowering.lower import lower
from tk.codegen.lowering.rules import RULED
from tk.codegen.tracing.trace import Trace, trace_all, trace_backward
from tk.generated import interpret, op
from tk.generated.signature import DTYPES, NumberSpec

SIZES = dict(M=5, N=12, B=2, C=3, H=8, W=10, K=4, E=3)
NUMBERS = {"float": 0.7, "int": 2, "bool": True}
TAPS = torch.tensor([0.25, 0.5, 0.25])
CODES = torch.linspace(-1, 1, 8)
SECOND = torch.tensor([1])


@dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    texts: Mapping[str, Any]
    grad: bool = True
    eager: Callable[..., Any] | None = None  # where eager torch refuses the function itself


X, XY = {"x": "fp32[M, N]"}, {"x": "fp32[M, N]", "y": "fp32[M, N]"}
IMAGE = {"x": "fp32[B, C, H, W]"}
BOTH = ("fp16", "fp32")

CASES: dict[str, Case] = {
    "a cast to the same dtype": Case(lambda x: x.float(), {"x": "T[M, N]", "T": BOTH}),
    "a cast there and back": Case(lambda x: F.softmax(x.float(), -1).to(x.dtype), {"x": "T[M, N]", "T": BOTH}),
    "type_as": Case(lambda x, y: x.type_as(y) * 2, {"x": "T[M, N]", "y": "fp32[M, N]", "T": BOTH}),
    "sums in fp32": Case(lambda x: (x.sum(-1, dtype=torch.float32), x.mean(0)), {"x": "T[M, N]", "T": BOTH}),
    "power": Case(lambda x, p: x.abs() ** p + p**x, {**X, "p": "float"}),
    "integer power": Case(lambda x, p: x**p, {**X, "p": "int"}),
    "huber": Case(lambda x, y, d: F.huber_loss(x, y, delta=d), {**XY, "d": "float"}),
    "smooth l1": Case(lambda x, y, b: F.smooth_l1_loss(x, y, beta=b), {**XY, "b": "float"}),
    "label smoothing": Case(
        lambda x, t, s: F.cross_entropy(x, t, label_smoothing=s, ignore_index=1),
        {"x": "fp32[M, N]", "t": "i64[M]", "s": "float"},
    ),
    "norm": Case(lambda x, p: x.norm(p, -1) + torch.linalg.vector_norm(x, p), {**X, "p": "float"}),
    "norms of 16 bits": Case(
        lambda x: (x.norm(3, -1), F.normalize(x, p=3.0), torch.linalg.vector_norm(x, 1, -2)),
        {"x": "T[M, N]", "T": BOTH},
    ),
    "norms of a single row": Case(
        lambda x: (torch.linalg.vector_norm(x, 1, -2), x.norm(dim=-2), x.norm(3, -1)), {"x": "fp32[1, N]"}
    ),
    "xlogy of a number": Case(
        lambda x: torch.xlogy(x, 1.5) + torch.special.xlog1py(x, 2) + torch.xlogy(2, x.abs() + 1), X
    ),
    "normalize": Case(lambda x, p, e: F.normalize(x, p, eps=e), {**X, "p": "float", "e": "float"}),
    "cosine": Case(lambda x, y, e: F.cosine_similarity(x, y, -1, e), {**XY, "e": "float"}),
    "variance": Case(lambda x, c: torch.var(x, -1, correction=c), {**X, "c": "float"}),
    "activations": Case(
        lambda x, a: F.celu(x, a) + F.softshrink(x, a) + F.hardshrink(x, a) + F.hardtanh(x, -a, a) + F.leaky_relu(x, a)
        + F.elu(x, a) + F.softplus(x, a, a) + x.clamp(-a, a) + torch.logit(x, a * 0.1),
        {**X, "a": "float"},
    ),
    "alpha": Case(lambda x, y, a: torch.add(x, y, alpha=a) - torch.sub(x, y, alpha=a) * torch.lerp(x, y, a),
                  {**XY, "a": "float"}),
    "margins": Case(lambda x, y, m: F.margin_ranking_loss(x, y, y.sign().detach(), m)
                    + F.triplet_margin_loss(x, y, x + y, m), {**XY, "m": "float"}),
    "take_along_dim": Case(lambda x, i: torch.take_along_dim(x, i, 1), {"x": "fp32[M, N]", "i": "i64[M, K]"}),
    "repeats": Case(lambda x: (x.repeat(2, 3), x.tile(2), x.unfold(1, 4, 2), x.roll(1, -1)), X),
    "slices beyond the ends": Case(
        lambda x: (x[-5:], x[1:9], x[-7:2], x[7:], x[-9:9:2], x[:, -4:], x.mean(0, keepdim=True)[-3:] * 2,
                   x.unsqueeze(1)[:, -2:, -2:] + 1, x[:-1, :-2], x[-2:-1]),
        {"x": "fp32[3, N]"},
    ),
    "slices written beyond the ends": Case(
        lambda x, y: (torch.slice_scatter(x, y, 0, -5, None), torch.slice_scatter(x, y[:2], 0, 1, 9),
                      torch.slice_scatter(x, y[:0], 0, 7, 9), torch.slice_scatter(x, y[:, :4], 1, -4, None),
                      torch.slice_scatter(x, y[::2], 0, -8, 8, 2), torch.select_scatter(x, y[0], 0, -3)),
        {"x": "fp32[3, N]", "y": "fp32[3, N]"},
    ),
    "turned and cut beyond the ends": Case(
        lambda x: (x.roll(7, 0), x.roll(-8, 0), F.pad(x, (-1, 2, -2, 1)), x.diagonal(2), x.diagonal(-2),
                   x.T.diagonal(1), *x.chunk(5, 0), *x.tensor_split(4, 0), x.narrow(0, -2, 2),
                   x.select(0, -3), x.unfold(0, 2, 5)),
        {"x": "fp32[3, N]"},
    ),
    "padding": Case(lambda x: tuple(F.pad(x, (1, 2), mode=m) for m in ("reflect", "replicate", "circular")), X),
    "flips of what is flat": Case(lambda x: (x.flatten().flip(0), x.mT.flatten().flip(0).cumsum(0)), X),
    "turned beside what broadcasts": Case(  # their decompositions lay the result out as ATen would
        lambda x, y: (torch.lerp(x.mT, y, 0.25), torch.lerp(y, x.mT, x.mT), torch.index_fill(x.mT, 1, SECOND, 0.5)),
        {"x": "fp32[M, N]", "y": "fp32[M]"},
    ),
    "max pooling": Case(lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE),
    "average pooling": Case(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE),
    "pooling to a size": Case(lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, (4, 5))),
                              {"x": "fp32[B, C, 8, 10]"}),
    "interpolation": Case(lambda x: tuple(F.interpolate(x, scale_factor=2, mode=m) for m in ("nearest", "bilinear")),
                          IMAGE),
    "batch_norm": Case(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
                       {**IMAGE, "w": "fp32[C]", "b": "fp32[C]"}),
    "batch_norm of given statistics": Case(
        lambda x, m, v: F.batch_norm(x, m, v * v), {**IMAGE, "m": "fp32[C]", "v": "fp32[C]"},
        eager=lambda x, m, v: (x - m[:, None, None]) * torch.rsqrt((v * v)[:, None, None] + 1e-5),
    ),
    "instance_norm": Case(lambda x: F.instance_norm(x), IMAGE),
    "digamma": Case(lambda x: torch.digamma(x) + torch.lgamma(x), X),
    "gcd": Case(lambda x, y: (torch.gcd(x, y), torch.lcm(x, y)), {"x": "i32[M, N]", "y": "i32[M, N]"}, grad=False),
    "products before": Case(lambda x: torch.where(x.abs() < 0.3, 0.0, x).cumprod(-1), X),
    "diagonals": Case(lambda x: (x.diagonal(), x.trace(), x.tril(), torch.diag_embed(x)), {"x": "fp32[M, M]"}),
    "twice as long": Case(lambda x: (lambda a, b: a * torch.sigmoid(b))(*x.chunk(2, -1)), {"x": "fp32[M, 2*N]"}),
    "one more": Case(lambda x, y: x.diff() * y, {"x": "fp32[N + 1]", "y": "fp32[N]"}),
    "half": Case(lambda x, y: x.sum() * y, {"x": "fp32[N]", "y": "fp32[N//2]"}),
    "captured": Case(lambda x: (x * TAPS).sum(-1) * torch.tensor(2.0), {"x": "fp32[M, 3]"}),
    "code book": Case(lambda i: CODES[i], {"i": "i64[M]"}, grad=False),
    "six dimensions": Case(lambda x: x.softmax(2).sum((1, 4)), {"x": "fp32[K, B, C, K, E, B]"}),
    "searches": Case(lambda x, b: torch.bucketize(x.t(), b[::2]), {"x": "fp32[M, N]", "b": "fp32[K]"}, grad=False),
}  # fmt: skip

# In Triton's interpreter, which is slow: one of each rule.
INTERPRETED = ("a cast to the same dtype", "type_as", "integer power", "norm", "flips of what is flat",
               "max pooling", "padding", "repeats", "diagonals", "products before", "gcd", "digamma", "one more",
               "captured", "code book", "six dimensions", "slices beyond the ends", "slices written beyond the ends",
               "turned and cut beyond the ends", "turned beside what broadcasts")  # fmt: skip


def made(name: str) -> Generated:
    case = CASES[name]
    declared = op(grad=case.grad, **case.texts)(case.fn)
    return generate(case.fn, declared.signature, "f", case.grad)


def traced(name: str) -> list[tuple[Trace, Trace | None]]:
    """Every graph and its gradient's, of which the first are lowered."""
    case = CASES[name]
    signature = op(grad=case.grad, **case.texts)(case.fn).signature
    found = [(t, trace_backward(case.fn, signature, t.dtypes, t.flags, RULED) if case.grad else None)
             for t in trace_all(case.fn, signature, RULED)]  # fmt: skip
    for one in found[0]:
        assert one is None or lower(one, "f")
    return found


def arguments(trace: Trace) -> dict[str, Any]:
    """For a graph."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for name, spec in trace.signature.params.items():
        if isinstance(spec, NumberSpec):
            found[name] = NUMBERS[spec.kind]
            continue
        dtype = DTYPES[trace.dtypes.get(spec.dtype, spec.dtype)]
        shape = spec.shape(SIZES)
        is_float = dtype.is_floating_point
        found[name] = (torch.randn(shape, generator=generator) if is_float
                       else torch.randint(0, 3, shape, generator=generator)).to(dtype)  # fmt: skip
    return found


def flat(x: Any) -> list[Tensor]:
    return [t for t in tree_flatten(x)[0] if isinstance(t, Tensor)]


def close(found: Tensor, expected: Tensor, what: str) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    tolerance = 2e-2 if found.dtype in (torch.float16, torch.bfloat16) else 2e-4
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def gradients(case: Case, args: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """(of the floating-point tensors, what they come of: those of the results, and the results)."""
    own = {n: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
           for n, x in args.items()}  # fmt: skip
    all_results = flat((case.eager or case.fn)(**own))
    results = [r for r in all_results if r.is_floating_point()]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(r.shape, generator=generator).to(r.dtype) for r in results]
    sources = [x for x in own.values() if isinstance(x, Tensor) and x.requires_grad]
    pairs = [(r, g) for r, g in zip(results, given, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]
    return filled, backwards.arguments(given, all_results)


def recorded(trace: Trace, args: Mapping[str, Any]) -> list[Tensor]:
    return interpret.evaluate(json.loads(json.dumps(trace.recorded)), args, "f")
