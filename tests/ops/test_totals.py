"""Reductions of all of a tensor that round nothing, in any layout: those that no copy is made of are read by rows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from drawn_layouts import SEED, placed
from torch import Tensor

import tk

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

    assert tk.functional.reductions._of_all(of_rows, x) == x.max()
    assert read[0].untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
