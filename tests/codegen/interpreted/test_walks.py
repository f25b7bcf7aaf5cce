"""Programs that walk through rows, positions of extremes, one-pass softmax and the approximation of erfc."""

from __future__ import annotations

from functools import cache

import host
import pytest
import torch
import triton
import triton.language as tl

from tk.codegen import device
from tk.codegen.family import Generated, generate
from tk.generated import Declared, op
from tk.kernels.generated import norms, reductions, softmax


@cache
def generated(declared: Declared, grad: bool = False) -> Generated:
    return generate(declared.fn, declared.signature, declared.name, grad)


@pytest.mark.parametrize(("rows", "columns"), [(37, 48), (300, 33), (3, 64)])
def test_several_blocks_of_rows_for_a_program(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of two multiprocessors there are eight programs: more rows than they have, and fewer."""
    monkeypatch.setitem(host.H200, "sm_count", 2)
    g = generated(norms.layer_norm, grad=True).backward
    assert g is not None
    torch.manual_seed(rows)
    grad, x, weight = torch.randn(rows, columns), torch.randn(rows, columns) + 1, torch.randn(columns)
    wide = [t.double().requires_grad_() for t in (x, weight, torch.zeros(columns))]
    torch.nn.functional.layer_norm(wide[0], (columns,), *wide[1:], 1e-5).backward(grad.double())
    args = {"grad_0": grad, "x": x, "weight": weight, "eps": 1e-5}
    walked = 0
    for variant, results in host.run_all(g, *(args[n] for n in g.signature.params), only="walk"):
        walked += 1
        for mine, exact in zip(results, wide, strict=True):
            torch.testing.assert_close(mine.double(), exact.grad, rtol=2e-4, atol=2e-4, msg=lambda m: f"{variant}: {m}")  # noqa: B023
    assert walked >= 2


INFINITY = float("inf")
ROWS = [
    [1.0] * 40,
    [-INFINITY] * 40,
    [0.0] * 20 + [5.0] + [5.0] * 19,
    [INFINITY] * 3 + [float("nan")] + [INFINITY] * 36,
    [float("nan")] * 40,
    [-INFINITY] * 39 + [-1e30],
    [0.0, -0.0] * 20,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1, 60])
def test_the_first_of_equals_and_of_nans(dtype: torch.dtype, times: int) -> None:
    """In one block, and in the loops' several, whose first element may be anywhere."""
    x = torch.tensor(ROWS, dtype=dtype).repeat(1, times)
    count = 0
    for variant, (found,) in host.run_all(generated(reductions.row_argmax), x, 1.0):
        count += 1
        assert torch.equal(found, x.argmax(-1)), variant
    assert count >= 3


def test_the_last_of_integers_in_a_loop() -> None:
    """The least number there is is found where it is, and not where a block ends."""

    @op(x="i32[M, N]")
    def positions(x):
        return x.argmax(-1), x.argmin(-1)

    x = torch.full((2, 70), -(2**31), dtype=torch.int32)
    x[1] = 2**31 - 1
    for variant, (largest, least) in host.run_all(generated(positions), x):
        assert largest.tolist() == [0, 0] and least.tolist() == [0, 0], variant


@pytest.mark.parametrize("columns", [2100, 4160])
def test_one_pass_over_blocks_of_rising_and_falling_maxima(columns: int) -> None:
    """The maximum rises from block to block, falls, is -inf for a whole block, or there is nothing else."""
    rising = torch.linspace(-90, 90, columns)
    late = torch.full((columns,), -INFINITY)
    late[-5:] = torch.arange(5.0)
    nothing = torch.full((columns,), -INFINITY)
    poisoned = rising.clone()
    poisoned[columns // 2] = INFINITY
    x = torch.stack([rising, rising.flip(0), late, nothing, poisoned])
    for declared, function in ((softmax.softmax, torch.softmax), (softmax.logsumexp, torch.logsumexp)):
        expected = function(x.double(), -1)
        if declared is softmax.logsumexp:
            expected[3:] = torch.tensor([-INFINITY, INFINITY])  # as torch has them in any precision
        for variant, (found,) in host.run_all(generated(declared), x, only="loop"):
            torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-30, equal_nan=True,
                                       msg=lambda m: f"{declared.name} {variant}: {m}")  # noqa: B023  # fmt: skip


@triton.jit
def erfc_of(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, device.erfc(tl.load(x + at)))


def test_erfc_keeps_its_digits() -> None:
    x = torch.cat([torch.linspace(-6, 9, 8192 - 5), torch.tensor([-INFINITY, INFINITY, float("nan"), 0.0, -30.0])])
    out = torch.empty_like(x)
    erfc_of[(1,)](x, out, BLOCK=8192)
    exact = torch.special.erfc(x.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-37, equal_nan=True)
    assert out[-4] == 0.0, "gelu of -inf is NaN, as in torch"
