"""The plans of int4_mm, as expressions: what they say of a problem, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from test_other_products import described, number, tensor
from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Grid, Variant, bucket_expr, buckets, enumerate_grid
from tk.aot.spec import DTYPES
from tk.kernels.int4.family import FAMILIES

PRODUCT, DEQUANTIZE = FAMILIES


def fitting(grid: Grid, problem: Problem) -> list[tuple[Variant, int]]:
    """The variants of the problem's bucket that fit it, with their predicted times, of which split-K's read the
    plan's locals."""
    found = []
    for i in buckets(grid.op, grid.variants)[bucket_expr(grid.op).evaluate(problem)]:
        v = grid.variants[i]
        if all(c.holds.evaluate(problem) for c in v.plan.constraints):
            whole = replace(problem, locals=evaluate_locals(v.plan.locals, problem))
            found.append((v, v.plan.cost.evaluate(whole)))
    return found


def chosen(grid: Grid, problem: Problem) -> str:
    times = {v.name: cost for v, cost in fitting(grid, problem)}
    return min(times, key=times.__getitem__)


@pytest.fixture(scope="module")
def grid() -> Grid:
    return enumerate_grid(PRODUCT, 90)


def problem(m: int, n: int, k: int, group: int | None = 128, mode: int = 0, out: str = "bf16", dtype: str = "bf16",
            strided: bool = False):  # type: ignore[no-untyped-def]  # fmt: skip
    b = tensor(k // 2, n, dtype="u8")
    if strided:
        b = TensorValue(b.sizes, (1, k // 2), DTYPES["u8"])
    scales = None if group is None else tensor(k // group, n, dtype=dtype)
    tensors = (tensor(m, k, dtype=dtype), b, scales, scales, None, tensor(m, n, dtype=out))
    return described(PRODUCT, tensors, mode)


def test_the_kernel_goes_by_the_rows(grid: Grid) -> None:
    for m in (1, 2, 8, 16, 64):
        assert chosen(grid, problem(m, 4096, 4096)).startswith("int4_few_rows"), m
    assert chosen(grid, problem(500, 4096, 4096)).startswith("int4_tile")


def test_blocks_lie_in_one_group(grid: Grid) -> None:
    for group, block in ((32, 32), (64, 64), (128, 128), (4096, 128), (None, 128)):
        for v, _ in fitting(grid, problem(64, 4096, 4096, group)):
            if v.kernel.name in ("int4_tile", "int4_split_k"):
                assert v.point.config.block_k <= block
    assert all(v.kernel.name == "int4_general" for v, _ in fitting(grid, problem(64, 4096, 48, 48)))


def test_few_rows_take_groups_that_a_shift_divides_by_and_single_ones(grid: Grid) -> None:
    """And the shift is what divides."""
    for group, shift in ((32, 5), (64, 6), (128, 7), (4096, 31), (None, 31)):
        p = problem(3, 4096, 4096, group)
        plans = [v.plan for v, _ in fitting(grid, p) if v.kernel.name == "int4_few_rows"]
        assert plans and {number(plan.launches[0].args["group_shift"].value, p) for plan in plans} == {shift}
    assert not any(v.kernel.name == "int4_few_rows" for v, _ in fitting(grid, problem(3, 4096, 4096, 256)))


def test_few_rows_have_as_many_as_their_place_in_the_tile(grid: Grid) -> None:
    for m, rows in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (128, 32)):
        found = [v for v, _ in fitting(grid, problem(m, 4096, 4096)) if v.kernel.name == "int4_few_rows"]
        assert found and {v.point.rows for v in found} == {rows}
    assert not any(v.kernel.name == "int4_few_rows" for v, _ in fitting(grid, problem(129, 4096, 4096)))


def test_what_has_no_words_is_the_general_kernel_s(grid: Grid) -> None:
    for odd in (problem(16, 4096, 4096, strided=True), problem(16, 4104, 4096)):
        assert chosen(grid, odd).startswith("int4_general")


def test_float32_results_come_of_split_k(grid: Grid) -> None:
    for m in (1, 16, 100):
        assert chosen(grid, problem(m, 4096, 4096, out="fp32")).startswith("int4_split_k")


def test_batch_invariance_leaves_the_same_kernel_for_all(grid: Grid) -> None:
    names = {chosen(grid, problem(m, 4096, 4096, mode=MODE_BITS["batch_invariant"])) for m in (1, 4, 16, 300, 2000)}
    assert len(names) == 1 and names.pop().startswith("int4_tile")


def test_splits_are_whole_blocks_and_cover_k(grid: Grid) -> None:
    for m, n, k in ((16, 1024, 4096), (5, 4096, 14336), (64, 512, 128)):
        p = problem(m, n, k)
        for v, _ in fitting(grid, p):
            if v.kernel.name == "int4_split_k":
                whole = replace(p, locals=evaluate_locals(v.plan.locals, p))
                per_split = number(v.plan.launches[0].args["k_per_split"].value, whole)
                splits = number(v.plan.launches[0].grid[1], whole)
                assert per_split % v.point.config.block_k == 0
                assert (splits - 1) * per_split < k <= splits * per_split
