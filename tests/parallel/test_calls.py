"""tk's functions on DTensors: every argument sharded over a dimension that is drawn, or whole on each rank; values and
gradients are those of the whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import seeds
import torch
from harness import Ranks, World
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

import tk

SEED = seeds.seed("TK_PLACEMENTS_SEED")
DRAWS = 6  # placements of each call


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _of_float32(*shape: int) -> Tensor:
    """Of ops that are there in float32 at most."""
    return torch.randn(shape)


def _index(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape)


def _products() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    r = _randn
    return {
        "mm": (tk.mm, (r(4, 6), r(6, 8), r(8))),
        "mm of an activation": (lambda a, b: tk.mm(a, b, activation="gelu"), (r(4, 6), r(6, 8))),
        "addmm": (lambda c, a, b: tk.addmm(c, a, b, beta=0.5, alpha=2.0), (r(4, 1), r(4, 6), r(6, 8))),
        "linear": (tk.linear, (r(2, 4, 6), r(8, 6), r(8))),
        "linear of a vector": (tk.linear, (r(2, 4, 6), r(6))),
        "bmm": (tk.bmm, (r(2, 4, 6), r(2, 6, 8))),
        "baddbmm": (tk.baddbmm, (r(2, 4, 8), r(2, 4, 6), r(2, 6, 8))),
        "mm_plus_mm": (tk.mm_plus_mm, (r(4, 6), r(6, 8), r(4, 2), r(2, 8))),
        "b2b_gemm": (lambda a, b, c: tk.b2b_gemm(a.detach(), b.detach(), c.detach()), (r(4, 6), r(6, 8), r(8, 2))),
        "conv1d": (lambda x, w, b: tk.conv1d(x, w, b, padding=1), (r(2, 4, 8), r(6, 4, 3), r(6))),
        "conv2d": (lambda x, w, b: tk.conv2d(x, w, b, stride=2), (r(2, 4, 6, 6), r(6, 4, 3, 3), r(6))),
        "conv2d of groups": (lambda x, w: tk.conv2d(x, w, groups=2), (r(2, 4, 6, 6), r(6, 2, 3, 3))),
        "grouped_mm": (lambda a, b: tk.grouped_mm(a, b), (r(2, 4, 6), r(2, 6, 8))),
    }  # fmt: skip


def _rows() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x = _of_float32
    return {
        "gelu": (tk.gelu, (x(4, 6),)),
        "gelu of tanh": (lambda a: tk.gelu(a, approximate="tanh"), (x(4, 6, 2),)),
        "silu": (tk.silu, (x(4, 6),)),
        "swiglu": (tk.swiglu, (x(4, 6), x(4, 6))),
        "swiglu of halves": (tk.swiglu, (x(4, 6, 8),)),
        "geglu": (tk.geglu, (x(4, 6), x(4, 6))),
        "softmax": (lambda a: tk.softmax(a, -1), (x(4, 6, 8),)),
        "softmax over the first": (lambda a: tk.softmax(a, 0), (x(4, 6),)),
        "log_softmax": (lambda a: tk.log_softmax(a, 1), (x(4, 6, 2),)),
        "rms_norm": (lambda a, w: tk.rms_norm(a, (8,), w), (x(4, 6, 8), x(8))),
        "rms_norm of two dimensions": (lambda a, w: tk.rms_norm(a, (6, 8), w), (x(4, 6, 8), x(6, 8))),
        "layer_norm": (lambda a, w, b: tk.layer_norm(a, (8,), w, b), (x(4, 6, 8), x(8), x(8))),
        "layer_norm without weights": (lambda a: tk.layer_norm(a, (8,)), (x(4, 6, 8),)),
        "add_rms_norm": (lambda a, b, w: tk.add_rms_norm(a, b, w, 1e-5), (x(4, 6, 8), x(4, 6, 8), x(8))),
        "add_layer_norm": (lambda a, b, w, c: tk.add_layer_norm(a, b, w, c), (x(4, 8), x(4, 8), x(8), x(8))),
        "group_norm": (lambda a, w, b: tk.group_norm(a, 2, w, b), (x(2, 4, 6, 2), x(4), x(4))),
        "sum": (lambda a: tk.sum(a), (x(4, 6, 2),)),
        "sum of dimensions": (lambda a: tk.sum(a, (0, 2)), (x(4, 6, 2),)),
        "mean": (lambda a: tk.mean(a), (x(4, 6, 2),)),
        "mean of a dimension": (lambda a: tk.mean(a, 1, keepdim=True), (x(4, 6, 2),)),
        "amax": (lambda a: tk.amax(a, 1), (x(4, 6),)),
        "var_mean": (lambda a: tk.var_mean(a, 1), (x(4, 6),)),
        "logsumexp": (lambda a: tk.logsumexp(a, 1), (x(4, 6),)),
        "cumsum": (lambda a: tk.cumsum(a, 1), (x(4, 6),)),
        "cumsum of one element": (lambda a: tk.cumsum(a, 1), (x(4, 1, 6),)),
        "cummax of one element": (lambda a: tk.cummax(a, 1), (x(4, 1),)),
        "sum of one element": (lambda a: tk.sum(a, 1), (x(4, 1, 6),)),
        "max of one element": (lambda a: tk.max(a, 1), (x(4, 1),)),
        "cumprod": (lambda a: tk.cumprod(a.detach(), 0), (x(4, 6),)),  # ATen has no gradient of it for DTensors
        "cummax": (lambda a: tk.cummax(a, 1), (x(4, 6),)),
        "logcumsumexp": (lambda a: tk.logcumsumexp(a, 1), (x(4, 6),)),
        "sort": (lambda a: tk.sort(a, 1), (x(4, 6),)),
        "topk": (lambda a: tk.topk(a, 2, 0), (x(4, 6),)),
        "norm": (lambda a: tk.norm(a), (x(4, 6),)),
        "norm of rows": (lambda a: tk.vector_norm(a, 1, 1), (x(4, 6),)),
        "std": (lambda a: tk.std(a), (x(4, 6),)),
        "any": (lambda a: tk.any(a > 1.5, 1), (x(4, 6),)),
        "prod": (lambda a: tk.prod(a.detach(), 1), (x(4, 6),)),
        "argmax of all": (lambda a: tk.argmax(a), (x(4, 6),)),
        "index_put": (lambda a, i, b: tk.index_put(a, (i,), b), (x(4, 6), torch.randperm(4)[:2], x(2, 6))),
        "sum of integers": (lambda a: tk.sum(a, 0), (_index(9, 4, 6),)),
        "sdpa of a mask": (lambda q, k, v, m: tk.sdpa(q, k, v, m > 0.0), (*(x(2, 4, 6, 8) for _ in "qkv"), x(4, 6, 6))),
        "sdpa of a bias": (
            lambda q, k, v, m: tk.sdpa(q, k, v, m, enable_gqa=True),
            (x(2, 4, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), x(1, 6, 6)),
        ),
        "argmax": (lambda a: tk.argmax(a, 1), (x(4, 6),)),
        "argsort": (lambda a: tk.argsort(a, 0), (x(4, 6),)),
        "gather": (lambda a, i: tk.gather(a, 1, i), (x(4, 6), _index(6, 4, 2))),
        "scatter_add": (lambda a, i, b: tk.scatter_add(a, 1, i, b), (x(4, 6), _index(6, 4, 2), x(4, 2))),
        "index_add": (lambda a, i, b: tk.index_add(a, 0, i, b), (x(4, 6), _index(4, 2), x(2, 6))),
        "embedding": (lambda i, w: tk.embedding(i, w), (_index(4, 2, 6), x(4, 6))),
        "rope": (lambda a, c, s: tk.rope(a, c.detach(), s.detach()), (x(2, 4, 6, 8), x(6, 8), x(6, 8))),
        "rope of neighbours": (
            lambda a, c, s: tk.rope(a, c.detach(), s.detach(), True),
            (x(2, 4, 6, 8), x(6, 8), x(6, 8)),
        ),
        "cross_entropy of smoothed rows": (
            lambda a, t: tk.cross_entropy(a, t, label_smoothing=0.25, ignore_index=2),
            (x(4, 6), _index(6, 4)),
        ),
        "searchsorted": (tk.searchsorted, (torch.randn(4, 6).sort().values, x(4, 2))),
        "bucketize": (tk.bucketize, (x(4, 6), torch.randn(4).sort().values)),
        "cross_entropy": (tk.cross_entropy, (x(4, 6), _index(6, 4))),
        "cross_entropy of rows": (lambda a, t: tk.cross_entropy(a, t, reduction="none"), (x(4, 6), _index(6, 4))),
        "linear_cross_entropy": (tk.linear_cross_entropy, (x(4, 6), x(8, 6), _index(8, 4))),
        "sdpa": (lambda q, k, v: tk.sdpa(q, k, v, is_causal=True), (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8))),
        "quantize_fp8": (lambda a: tk.quantize_fp8(a, "row")[1], (x(4, 6),)),
    }


CALLS = {**_products(), **_rows()}


def _leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _with_gradients(fn: Callable[..., Any], args: list[Any], grads: list[Tensor] | None) -> tuple[list[Any], list[Any]]:
    """(results, gradients of the arguments). grads: of the results that have one."""
    results = [x for x in tree_leaves(fn(*args)) if isinstance(x, Tensor)]
    sources = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    tracked = [x for x in results if x.requires_grad]
    if not tracked:
        return results, []
    given = [torch.ones_like(x) for x in tracked] if grads is None else grads
    return results, list(torch.autograd.grad(tracked, sources, given, allow_unused=True))


def checked(rank: int, world: World, name: str) -> None:
    random = Random(f"{SEED} {name}")
    torch.manual_seed(random.randrange(1 << 30))
    fn, args = {**_products(), **_rows()}[name]
    expected, expected_grads = _with_gradients(fn, [_leaf(a) for a in args], None)
    for _ in range(DRAWS):
        placements = [_placement(a, random) for a in args]
        given = [_leaf(distribute_tensor(a, world.mesh(), [p])) if p is not None else a
                 for a, p in zip(args, placements, strict=True)]  # fmt: skip
        said = f"{name} of {placements}, TK_PLACEMENTS_SEED={SEED}"
        try:
            found, grads = _with_gradients(fn, given, None)
        except Exception as error:
            raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
        for mine, theirs in zip((*found, *grads), (*expected, *expected_grads), strict=True):
            if theirs is None:
                continue
            torch.testing.assert_close(_whole(mine), theirs, atol=1e-5, rtol=1e-4, msg=f"{said}: {mine}, {theirs}")


def _placement(x: Any, random: Random) -> Any:
    if not isinstance(x, Tensor):
        return None
    return random.choice([Replicate(), *(Shard(d) for d in range(x.dim()))])


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(ranks: Ranks, name: str) -> None:
    ranks(2, checked, name)


# --- Steps of an optimizer, and what is refused ---


def stepped(rank: int, world: World) -> None:
    torch.manual_seed(SEED)
    given = [[torch.randn(4, 6), torch.randn(5)] for _ in "pgm"] + [[torch.rand(4, 6), torch.rand(5)]]
    steps = [torch.zeros(()), torch.zeros(())]
    placed = [[distribute_tensor(x, world.mesh(), [Shard(0)]) for x in column] for column in given]
    tk.adamw_(*placed, [x.clone() for x in steps], lr=0.1)
    tk.adamw_(*given, steps, lr=0.1)
    for mine, theirs in zip(tree_leaves(placed), tree_leaves(given), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)
    mixed = [placed[0], [x.redistribute(placements=[Replicate()]) for x in placed[1]], *placed[2:]]
    with pytest.raises(ValueError, match="must be DTensors of the same placements"):
        tk.adamw_(*mixed, steps, lr=0.1)


def test_adamw_of_each_ranks_part(ranks: Ranks) -> None:
    ranks(2, stepped)


def refused(rank: int, world: World) -> None:
    q = distribute_tensor(torch.randn(2, 4, 16, 8), world.mesh(), [Shard(1)])
    with pytest.raises(tk.UnsupportedError, match="query is a DTensor; call it on each rank's part"):
        tk.flex_attention(q, q, q)
    with pytest.raises(tk.UnsupportedError, match=r"query is a DTensor on .*, and key is not on it"):
        tk.sdpa(q, q.to_local(), q)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        tk.linear(q, torch.randn(6, 8))
    with pytest.raises(RuntimeError, match=r"tk\.dropout: it draws random numbers"):
        tk.dropout(q, 0.5)


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(2, refused)
