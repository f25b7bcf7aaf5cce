"""Reductions of all of a tensor that round nothing, in any layout: those that no copy is made of are read by rows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from drawn_layouts import SEED, placed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tk
from tk.functional import reductions

TOTALS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "amax": (tk.amax, torch.amax),
    "amin": (tk.amin, torch.amin),
    "max": (tk.max, torch.max),
    "any": (lambda x: tk.any(x > 2), lambda x: torch.any(x > 2)),
    "all": (lambda x: tk.all(x > -2), lambda x: torch.all(x > -2)),
    "any of numbers": (tk.any, torch.any),
    "amax of integers": (lambda x: tk.amax(x.long()), lambda x: torch.amax(x.long())),
    "sum of integers": (lambda x: tk.sum(x.mul(9).int()), lambda x: torch.sum(x.mul(9).int())),
    "prod of integers": (lambda x: tk.prod(x.long() | 1), lambda x: torch.prod(x.long() | 1)),
    "sum of fp64": (lambda x: tk.sum(x.double()), lambda x: torch.sum(x.double())),
    "largest magnitude": (lambda x: tk.vector_norm(x, float("inf")), lambda x: torch.linalg.vector_norm(x, torch.inf)),
}


def drawn(random: Random) -> Tensor:
    """Of up to four dimensions; some with one that repeats."""
    x = placed(random, tuple(random.choice([1, 2, 3, 5, 16, 33]) for _ in range(random.randint(1, 4))), torch.float32)
    d = random.randrange(x.dim())
    return x.narrow(d, 0, 1).expand(x.shape) if random.random() < 0.2 else x


@pytest.mark.parametrize("name", TOTALS)
def test_total(name: str) -> None:
    print(f"TK_LAYOUTS_SEED={SEED}")
    random = Random(f"{SEED} {name}")
    torch.manual_seed(SEED)
    mine, torchs = TOTALS[name]
    for _ in range(40):
        x = drawn(random)
        found, expected = mine(x), torchs(x)
        assert found.dtype == expected.dtype and found.shape == ()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=f"{list(x.shape)} {x.stride()}")


@pytest.mark.parametrize("n", [4096 * 17, 1024 * 67, 256 * 257, 65537, 70001])
def test_long_rows_are_cut(n: int) -> None:
    x = torch.randn(2, n + 3)[:, 1 : n + 1]
    for found, expected in (
        (tk.amax(x), x.amax()),
        (tk.amin(x[0]), x[0].amin()),
        (tk.sum(x.double()), x.double().sum()),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["permuted", "pitched", "middle", "every other row", "every third"])
def test_a_total_makes_no_copy(layout: str) -> None:
    base = torch.randn(6, 8, 10)
    x = {
        "permuted": base.permute(2, 0, 1),
        "pitched": base[:, :, :7],
        "middle": base[:, 2:5],
        "every other row": base[:, ::2],
        "every third": base.flatten()[::3],
    }[layout]
    read: list[Tensor] = []

    def of_rows(rows: Tensor) -> Tensor:
        read.append(rows)
        return rows.amax(-1)

    assert tk.functional.reductions._of_all(of_rows, x, once=False) == x.max()
    assert read[0].untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("n", [1 << 16, (1 << 16) + 1, 70_001, 181_323])
def test_what_parts_leave_has_no_launch_of_its_own(n: int) -> None:
    """Where an element may count twice."""
    x, read = torch.arange(n, dtype=torch.float32), list[Tensor]()

    def of_rows(rows: Tensor) -> Tensor:
        read.append(rows)
        return rows.amax(-1)

    assert tk.functional.reductions._of_all(of_rows, x, once=False) == x.max()
    assert len(read) == 2


# --- Gradients of float64, of which all of a tensor is reduced by parts ---

OF_FLOAT64: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "sum": (tk.sum, torch.sum),
    "mean": (tk.mean, torch.mean),
    "norm": (tk.norm, torch.norm),
    "norm of order 1": (lambda x: tk.vector_norm(x, 1), lambda x: torch.linalg.vector_norm(x, 1)),
    "var": (tk.var, torch.var),
    "var of all": (lambda x: tk.var(x, correction=0), lambda x: torch.var(x, correction=0)),
    "std": (tk.std, torch.std),
    "var_mean": (tk.var_mean, torch.var_mean),
    "std_mean": (tk.std_mean, torch.std_mean),
    "the mean of var_mean": (lambda x: tk.var_mean(x)[1], torch.mean),
}


def _weighted(found: Any) -> Tensor:
    return found[0] * 3 + found[1] * 5 if isinstance(found, tuple) else found * 3


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "PART", 8)
    monkeypatch.setattr(reductions, "MANY", 16)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("name", OF_FLOAT64)
def test_gradients_of_totals_by_parts(name: str) -> None:
    mine, torchs = OF_FLOAT64[name]
    base = torch.randn(4, 6, 5, dtype=torch.float64)
    for x in (base, base.mT, base[:, 1:, ::2], base[:1].expand(4, 6, 5), base.flatten()[:17], torch.zeros(40).double()):
        if not x.any() and name == "norm of order 1":
            continue
        first, second = (_derivatives(f, x) for f in (mine, torchs))
        for found, expected in zip(first, second, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def _derivatives(function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """The value, its gradient, and that of the gradient's square where there is one."""
    x = x.detach().clone().requires_grad_()
    value = _weighted(function(x))
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    found = [value.detach(), grad.detach()]
    if x.any() and grad.requires_grad and grad.grad_fn is not None:
        (twice,) = torch.autograd.grad(grad.square().sum(), x, allow_unused=True)
        found.append(torch.zeros_like(x) if twice is None else twice)
    return found if len(found) == 3 else [*found, torch.zeros_like(x)]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("name", OF_FLOAT64)
def test_totals_by_parts_under_transforms(name: str) -> None:
    mine, torchs = OF_FLOAT64[name]
    x, tangent = (torch.randn(5, 9, dtype=torch.float64) for _ in "xt")

    def ours(x: Tensor) -> Tensor:
        return _weighted(mine(x))

    def theirs(x: Tensor) -> Tensor:
        return _weighted(torchs(x))

    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(theirs)(x))
    many = x.expand(2, 5, 9) * torch.tensor([1.0, 2.0]).double()[:, None, None]
    gradients = torch.func.vmap(torch.func.grad(ours))(many)
    torch.testing.assert_close(gradients, torch.stack([torch.func.grad(theirs)(y) for y in many]))
    leaf = x.clone().requires_grad_()
    for found, expected in zip(*(torch.func.jvp(f, (leaf,), (tangent,)) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(leaf), leaf)
    (expected,) = torch.autograd.grad(theirs(leaf), leaf)
    torch.testing.assert_close(found, expected)


class _Passes(TorchDispatchMode):
    """How many ops make a tensor of this many elements."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.count = n, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [x.data_ptr() for x in args if isinstance(x, Tensor)]
        if isinstance(found, Tensor) and found.numel() == self.n and found.data_ptr() not in given:
            self.count += 1
        return found


@pytest.mark.parametrize(("name", "passes"), [("sum", 0), ("mean", 0), ("norm", 2), ("var", 2), ("std_mean", 2)])
def test_gradients_of_totals_pass_over_the_elements_twice_at_most(name: str, passes: int) -> None:
    mine, _ = OF_FLOAT64[name]
    x = torch.randn(3, 30_001, dtype=torch.float64, requires_grad=True)
    total = _weighted(mine(x))
    with _Passes(x.numel()) as seen:
        torch.autograd.grad(total, x)
    assert seen.count == passes
