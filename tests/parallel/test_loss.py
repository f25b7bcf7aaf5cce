"""tk.cross_entropy of logits whose classes are sharded: against float64 of the whole logits, and torch's own."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F
from harness import Ranks, World
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import tk

SEED = seeds.seed("TK_PARALLEL_LOSS_SEED")
DTYPES = (torch.float32, torch.bfloat16)


class Problem:
    """Whole, as each rank can make it again from its seed."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, rng: Random, **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        dim = min(len(shape) - 1, 1)
        classes, of_rows = shape[dim], (*shape[:dim], *shape[dim + 1 :])
        x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + rng.choice((0, 0, 300, -300))
        self.x = x.to(dtype)
        self.target = torch.randint(classes, of_rows, generator=generator)
        self.kwargs = {
            "reduction": rng.choice(("none", "mean", "sum")),
            "label_smoothing": rng.choice((0.0, 0.1, 1.0)),
            "ignore_index": rng.choice((-100, 0, classes - 1)),
        } | kwargs
        if self.kwargs["ignore_index"] == -100 and of_rows:
            self.target.view(-1)[:: rng.randint(2, 5)] = -100
        shape_of_loss = of_rows if self.kwargs["reduction"] == "none" else ()
        self.grad = (torch.rand(shape_of_loss, generator=generator) + 0.5).to(dtype)

    def of_one(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = self.x.detach().to(dtype, copy=True).requires_grad_()
        loss = F.cross_entropy(x, self.target, **self.kwargs)
        return loss.detach(), torch.autograd.grad(loss, x, self.grad.to(dtype))[0]

    def check(self, results: list[tuple[Tensor, Tensor]]) -> None:
        for found in results:
            for ours, theirs, exact in zip(found, self.of_one(self.x.dtype), self.of_one(torch.float64), strict=True):
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
                assert torch.equal(ours.isnan(), exact.isnan())
                if ours.numel() == 0 or exact.isnan().all():
                    continue
                largest = float(exact.abs().nan_to_num().max())
                errors = [float((y.double() - exact).abs().nan_to_num().max()) for y in (ours, theirs)]
                slack = 4 * torch.finfo(ours.dtype).eps * largest + 1e-6
                assert errors[0] <= 2 * errors[1] + slack, (self.kwargs, self.x.shape, errors, largest)


def run(rank: int, world: World, problem: Problem, shape: Any, placements: Any, is_plain: bool) -> Any:
    """(loss, gradient), gathered, and their placements. A plain target is this rank's part."""
    mesh, x, of_rows = world.mesh(*shape), problem.x, of_target(problem.x, placements)
    x = distribute_tensor(x.to(world.device), mesh, placements).requires_grad_()
    target: Any = distribute_tensor(problem.target.to(world.device), mesh, of_rows)
    loss = tk.cross_entropy(x, target.to_local() if is_plain else target, **problem.kwargs)
    whole = loss.full_tensor()
    (grad,) = torch.autograd.grad(whole, x, problem.grad.to(world.device))
    assert grad.placements == x.placements and grad.to_local().shape == x.to_local().shape
    return (whole, grad.full_tensor()), loss.placements


def of_target(x: Tensor, placements: Any) -> list[Any]:
    dim = min(x.dim() - 1, 1)
    return [Shard(p.dim - (p.dim > dim)) if p.is_shard() and not p.is_shard(dim) else Replicate() for p in placements]


def found(ranks: Ranks, problem: Problem, shape: tuple[int, ...], placements: Any, is_plain: bool = False) -> Any:
    world = torch.Size(shape).numel()
    results = ranks(world, run, problem, shape, placements, is_plain)
    problem.check([values for values, _ in results])
    return results[0][1]


# --- Values ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("number", range(6))
def test_drawn_problems_against_float64(ranks: Ranks, number: int, world: int, dtype: torch.dtype) -> None:
    seed = SEED + 8 * number + world
    print(f"TK_PARALLEL_LOSS_SEED={seed}")
    rng = Random(seed)
    problem = Problem((rng.randint(1, 40), rng.choice((1, 3, 7, 128, 129, 300))), dtype, rng)
    assert found(ranks, problem, (world,), [Shard(1)], rng.random() < 0.5) == (Replicate(),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_rows_and_classes_are_sharded(ranks: Ranks, reduction: str, dtype: torch.dtype) -> None:
    """Over a mesh of 2 × 2, in either order. The third row of four is ignored, or not: ranks count differently."""
    seed = SEED + 1
    print(f"TK_PARALLEL_LOSS_SEED={SEED}")
    rng = Random(seed)
    of_rows = Shard(0) if reduction == "none" else Partial()
    for rows in (1, 5, 32):
        problem = Problem((rows, 71), dtype, rng, reduction=reduction, ignore_index=-100)
        assert found(ranks, problem, (2, 2), [Shard(0), Shard(1)], rows == 5) == (of_rows, Replicate())
        assert found(ranks, problem, (2, 2), [Shard(1), Shard(0)]) == (Replicate(), of_rows)
        assert found(ranks, problem, (2, 2), [Replicate(), Shard(1)]) == (Replicate(), Replicate())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_other_shapes(ranks: Ranks, reduction: str) -> None:
    rng = Random(SEED + 2)
    print(f"TK_PARALLEL_LOSS_SEED={SEED}")
    of_rows = Shard(1) if reduction == "none" else Partial()
    problem = Problem((3, 10, 5), torch.float32, rng, reduction=reduction)
    assert found(ranks, problem, (2, 2), [Shard(2), Shard(1)]) == (of_rows, Replicate())
    assert found(ranks, problem, (2,), [Shard(1)]) == (Replicate(),)
    one_row = Problem((13,), torch.float32, rng, reduction=reduction, ignore_index=-100)
    assert found(ranks, one_row, (4,), [Shard(0)]) == (Replicate(),)
    found(ranks, Problem((0, 6), torch.float32, rng, reduction=reduction), (2,), [Shard(1)])


def test_float16_and_float64(ranks: Ranks) -> None:
    for dtype in (torch.float16, torch.float64):
        found(ranks, Problem((9, 50), dtype, Random(SEED), label_smoothing=0.1), (2,), [Shard(1)])


def test_all_rows_are_ignored(ranks: Ranks) -> None:
    for reduction in ("none", "sum", "mean"):
        problem = Problem((4, 6), torch.float32, Random(0), reduction=reduction, ignore_index=-100)
        problem.target.fill_(-100)
        found(ranks, problem, (2,), [Shard(1)])


def test_classes_without_probability(ranks: Ranks) -> None:
    """A padded vocabulary: a whole shard of -inf. And a row that has nothing else, which is NaN, as ATen's."""
    problem = Problem((6, 8), torch.float32, Random(0), label_smoothing=0.0, reduction="none", ignore_index=-100)
    problem.x[:, 4:] = -torch.inf
    problem.target.fill_(2)
    found(ranks, problem, (2,), [Shard(1)])
    problem.x[3] = -torch.inf
    problem.x[4, 6] = torch.nan
    found(ranks, problem, (2,), [Shard(1)])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_groups_of_one(ranks: Ranks, reduction: str) -> None:
    """The classes are sharded over one rank alone, or rows are."""
    rng = Random(SEED + 3)
    print(f"TK_PARALLEL_LOSS_SEED={SEED}")
    for shape in ((2, 1), (1, 2)):
        problem = Problem((5, 9), torch.float32, rng, reduction=reduction)
        found(ranks, problem, shape, [Shard(0), Shard(1)])


def under_autocast(rank: int, world: World, problem: Problem) -> Any:
    with torch.autocast(world.device.type, torch.bfloat16):
        (loss, grad), _ = run(rank, world, problem, (2,), [Shard(1)], False)
    return loss, grad


def test_autocast_works_out_in_float32(ranks: Ranks) -> None:
    problem = Problem((5, 9), torch.bfloat16, Random(SEED), reduction="none", ignore_index=-100)
    problem.grad = problem.grad.float()
    expected, _ = problem.of_one(torch.float64)
    for loss, grad in ranks(2, under_autocast, problem):
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        torch.testing.assert_close(loss, expected.float())


def in_blocks(rank: int, world: World, problem: Problem) -> Any:
    from tk.parallel import loss

    whole, loss.BLOCK_BYTES = loss.BLOCK_BYTES, 1
    try:
        return run(rank, world, problem, (2,), [Shard(1)], False)
    finally:
        loss.BLOCK_BYTES = whole


def test_blocks_of_rows(ranks: Ranks) -> None:
    for dtype in DTYPES:
        problem = Problem((7, 30), dtype, Random(SEED), label_smoothing=0.1)
        problem.check([values for values, _ in ranks(2, in_blocks, problem)])


# --- Beside torch's own, and within a model ---


def under_loss_parallel(rank: int, world: World, problem: Problem) -> Any:
    x = distribute_tensor(problem.x.to(world.device), world.mesh(), [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(x, problem.target.to(world.device), **problem.kwargs)
        (grad,) = torch.autograd.grad(loss, x)
    return loss.full_tensor(), grad.full_tensor()


def test_torchs_loss_parallel_agrees(ranks: Ranks) -> None:
    for reduction in ("sum", "mean"):
        problem = Problem((12, 20), torch.float32, Random(SEED), reduction=reduction, label_smoothing=0.0)
        problem.grad.fill_(1)
        for ours, theirs in zip(
            ranks(2, run, problem, (2,), [Shard(1)], False), ranks(2, under_loss_parallel, problem), strict=True
        ):
            torch.testing.assert_close(ours[0], theirs)


def of_a_layer(rank: int, world: World, x: Tensor, weight: Tensor, target: Tensor) -> Any:
    """The gradients of a layer that is sharded by its outputs, and of its input, by loss.backward()."""
    mesh = world.mesh(2, 2)
    x = distribute_tensor(x.to(world.device), mesh, [Shard(0), Replicate()]).requires_grad_()
    weight = distribute_tensor(weight.to(world.device), mesh, [Replicate(), Shard(0)]).requires_grad_()
    target = distribute_tensor(target.to(world.device), mesh, [Replicate(), Replicate()])
    tk.cross_entropy(x @ weight.t(), target).backward()
    return x.grad.full_tensor(), weight.grad.full_tensor()  # type: ignore[union-attr]


def test_a_layers_gradients(ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(SEED)
    x, weight = torch.randn(6, 5, generator=generator), torch.randn(11, 5, generator=generator)
    target = torch.tensor([0, 10, -100, 3, 7, -100])
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].t(), target), leaves)
    for grads in ranks(4, of_a_layer, x, weight, target):
        torch.testing.assert_close(grads, expected)


def what_travels(rank: int, world: World) -> list[int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name.startswith("_c10d_functional::") and not name.endswith(("::wait_tensor", "_wrap_tensor_autograd")):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    x = distribute_tensor(torch.randn(8, 1000, device=world.device), world.mesh(), [Shard(1)]).requires_grad_()
    target = torch.arange(8, device=world.device)
    with Seen():
        tk.cross_entropy(x, target).backward()
    return sizes


def test_two_numbers_of_each_row_travel(ranks: Ranks) -> None:
    """And its largest logit, and what the ranks agree on first."""
    for sizes in ranks(2, what_travels):
        assert sizes == [8, 8, 2 * 8]


# --- What is refused ---


def refused(rank: int, world: World, case: str) -> tuple[str, str]:
    mesh, device = world.mesh(), world.device
    x: Any = distribute_tensor(torch.zeros(4, 6, device=device), mesh, [Shard(1)])
    target: Any = torch.arange(4, device=device)
    kwargs: dict[str, Any] = {}
    if case == "weight":
        kwargs["weight"] = torch.ones(6, device=device)
    elif case == "probabilities":
        target = torch.rand(4, 6, device=device)
    elif case == "rows":
        target = torch.arange(5, device=device)
    elif case == "rows of a DTensor":
        target = distribute_tensor(torch.arange(5, device=device), mesh, [Replicate()])
    elif case == "dtype":
        target = target.int()
    elif case == "integers":
        x = distribute_tensor(torch.zeros(4, 6, dtype=torch.int64, device=device), mesh, [Shard(1)])
    elif case == "no class":
        target[2] = 6
    elif case == "no class on one rank":
        target[2] = 6 if rank == 1 else 0
    elif case == "none":
        x = distribute_tensor(torch.zeros(4, 0, device=device), mesh, [Shard(1)])
    elif case == "twice":
        x = distribute_tensor(torch.zeros(4, 6, device=device), world.mesh(2, 1), [Shard(1), Shard(1)])
    elif case == "partial":
        x = DTensor.from_local(torch.zeros(4, 3, device=device), world.mesh(1, 2), [Partial(), Shard(1)])
    elif case == "meshes":
        target = distribute_tensor(target, world.mesh(2, 1), [Replicate(), Replicate()])
    with pytest.raises((ValueError, IndexError, tk.errors.UnsupportedError)) as error:
        tk.cross_entropy(x, target, **kwargs)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        ("weight", "UnsupportedError", "weight is not taken where classes are sharded"),
        ("probabilities", "UnsupportedError", "target holds probabilities"),
        ("rows", "ValueError", "target must be [4], this rank's part of input without its classes, is [5]"),
        ("rows of a DTensor", "ValueError", "target must be [4], input without its classes, is [5]"),
        ("dtype", "ValueError", "target is torch.int32, must be int64 or uint8"),
        ("integers", "UnsupportedError", "input is torch.int64"),
        ("no class", "IndexError", "target is 6, must be 0 to 5"),
        ("none", "UnsupportedError", "input has no classes"),
        ("twice", "UnsupportedError", "input is [Shard(dim=1), Shard(dim=1)], must be Shard(1)"),
        ("partial", "UnsupportedError", "input is [Partial(sum), Shard(dim=1)], must be Shard(1)"),
        ("meshes", "ValueError", "target on DeviceMesh"),
    ],
)
def test_bad_input_is_an_error_on_each_rank(ranks: Ranks, case: str, kind: str, says: str) -> None:
    for found_kind, said in ranks(2, refused, case):
        assert found_kind == kind and says in said and said.startswith("tk.cross_entropy: "), said


def of_two_tensors(rank: int, world: World, what: str) -> str:
    shape = {"rows": (4 + rank, 3), "classes": (4, 3 + rank), "dtype": (4, 3)}[what]
    dtype = (torch.float32, torch.float64)[rank if what == "dtype" else 0]
    x = DTensor.from_local(torch.zeros(shape, dtype=dtype, device=world.device), world.mesh(), [Shard(1)])
    with pytest.raises(ValueError) as error:
        tk.cross_entropy(x, torch.zeros(shape[0], dtype=torch.int64, device=world.device))
    return str(error.value)


@pytest.mark.parametrize("what", ["rows", "classes", "dtype"])
def test_ranks_that_disagree(ranks: Ranks, what: str) -> None:
    for rank, said in enumerate(ranks(2, of_two_tensors, what)):
        assert "the ranks' shards are not of one tensor" in said, said
        has = {"rows": f"{4 + rank} rows", "classes": f"and {3 + rank} of", "dtype": ("float32", "float64")[rank]}
        assert has[what] in said


def test_a_wrong_target_of_one_rank_is_an_error_on_each(ranks: Ranks) -> None:
    (_, of_other), (_, of_it) = ranks(2, refused, "no class on one rank")
    assert "target of another rank is no class" in of_other and "target is 6, must be 0 to 5" in of_it


def twice(rank: int, world: World) -> str:
    x = distribute_tensor(torch.randn(4, 6, device=world.device), world.mesh(), [Shard(1)]).requires_grad_()
    loss = tk.cross_entropy(x, torch.arange(4, device=world.device))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError) as error:
        grad.sum().backward()
    return str(error.value)


def test_no_gradient_of_the_gradient(ranks: Ranks) -> None:
    assert all("no gradient of its gradient" in said for said in ranks(2, twice))


def test_plain_tensors_import_nothing() -> None:
    code = """
import sys, torch, tk
tk.cross_entropy(torch.randn(3, 4), torch.arange(3))
assert not {"torch.distributed.tensor", "tk.parallel.loss"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
