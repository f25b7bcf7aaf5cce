"""The plans of scaled_mm and scaled_grouped_mm, as expressions: what they say of a problem, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tk.aot.expr import MODE_BITS, Problem, TensorValue, as_expr, evaluate_locals
from tk.aot.grid import Grid, Variant, bucket_expr, buckets, enumerate_grid
from tk.aot.spec import DTYPES, Family
from tk.kernels.scaled_grouped_mm.family import FAMILY as GROUPED
from tk.kernels.scaled_mm.family import FAMILY

H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 60 << 20}
FAST = {"slow": 0, "fast": 1}


def value(sizes: Sequence[int], strides: Sequence[int], dtype: str = "fp8e4nv") -> TensorValue:
    return TensorValue(sizes, strides, DTYPES[dtype])


def described(family: Family, tensors: Sequence[TensorValue | None], fast: int, mode: int) -> Problem:
    bare = Problem(tensors, (0, fast), mode, H200)
    return replace(bare, locals=evaluate_locals(family.op.locals.values(), bare))


def product(m: int, n: int, k: int, accumulation: str = "slow", mode: int = 0, pitch: int = 0) -> Problem:
    """Of a and b along K, with scales of rows. pitch: of both, where it is not K."""
    pitch = pitch or k
    a, b, out = value((m, k), (pitch, 1)), value((k, n), (1, pitch)), value((m, n), (n, 1), "bf16")
    scales = value((m, 1), (1, 1), "fp32"), value((1, n), (n, 1), "fp32")
    return described(FAMILY, (a, b, *scales, None, out), FAST[accumulation], mode)


def groups(count: int, total: int, n: int, k: int) -> Problem:
    a, b, out = value((total, k), (k, 1)), value((count, k, n), (n * k, 1, k)), value((total, n), (n, 1), "bf16")
    scales = value((total, 1), (1, 1), "fp32"), value((count, 1, n), (n, n, 1), "fp32")
    return described(GROUPED, (a, b, *scales, value((1, count), (count, 1), "i32"), None, out), 0, 0)


def fitting(grid: Grid, problem: Problem) -> list[tuple[Variant, int]]:
    """The variants of the problem's bucket that fit it, with their predicted times."""
    candidates = buckets(grid.op, grid.variants)[bucket_expr(grid.op).evaluate(problem)]  # type: ignore[union-attr]
    found = []
    for v in (grid.variants[i] for i in candidates):
        if all(c.holds.evaluate(problem) for c in v.plan.constraints):
            inner = replace(problem, locals=evaluate_locals(v.plan.locals, problem))
            found.append((v, v.plan.cost.evaluate(inner)))
    return found


def chosen(grid: Grid, problem: Problem) -> Variant:
    special = [x for x in fitting(grid, problem) if not x[0].plan.general]
    return min(special or fitting(grid, problem), key=lambda x: x[1])[0]


@pytest.fixture(scope="module")
def grid() -> Grid:
    return enumerate_grid(FAMILY, 90)


@pytest.fixture(scope="module")
def grouped() -> Grid:
    return enumerate_grid(GROUPED, 90)


@pytest.mark.parametrize("accumulation", FAST)
def test_few_rows_are_cut_along_k_and_many_are_tiles(grid: Grid, accumulation: str) -> None:
    assert chosen(grid, product(16, 4096, 4096, accumulation)).kernel.name.endswith(("split_k", "stream_k"))
    assert chosen(grid, product(128, 4096, 4096, accumulation)).kernel.name == "scaled_mm_tma_stream_k"
    assert chosen(grid, product(4096, 4096, 4096, accumulation)).kernel.name == "scaled_mm_tma"


def test_consumers_that_take_turns_are_not_chosen_to_add_up_every_stage(grid: Grid) -> None:
    assert "pingpong" not in chosen(grid, product(4096, 4096, 4096, "slow")).point.config.name
    assert chosen(grid, product(256, 4096, 14336, "fast")).point.config.name == "64x128x128_s8_pingpong"


def test_what_tma_does_not_take_is_the_general_kernels(grid: Grid) -> None:
    for problem in (product(64, 64, 100, pitch=100), product(300, 9, 64), product(64, 64, 64, pitch=65)):
        assert {v.kernel.name for v, _ in fitting(grid, problem)} == {"scaled_mm_pointer"}
    # A K that is no multiple of anything is TMA's as long as rows begin on 16 bytes.
    assert chosen(grid, product(64, 64, 100, pitch=112)).kernel.name != "scaled_mm_pointer"


@pytest.mark.parametrize("accumulation", FAST)
def test_in_batch_invariant_mode_the_choice_does_not_depend_on_the_rows(grid: Grid, accumulation: str) -> None:
    mode = MODE_BITS["batch_invariant"]
    found = [fitting(grid, product(m, 4096, 4096, accumulation, mode)) for m in (2, 100, 513, 9000)]
    assert len({tuple((v.name, cost) for v, cost in f) for f in found}) == 1
    assert not any(v.kernel.name.endswith(("stream_k", "split_k")) for v, _ in found[0])


def test_predicted_times_grow_with_the_work(grid: Grid, grouped: Grid) -> None:
    pairs = (
        (grid, product(200, 1024, 1024), product(200, 8192, 8192)),
        (grid, product(200, 1024, 1024, "fast"), product(200, 8192, 8192, "fast")),
        (grouped, groups(8, 1024, 1024, 1024), groups(8, 8192, 4096, 4096)),
    )
    for of, little, much in pairs:
        few, many = ({v.name: cost for v, cost in fitting(of, p)} for p in (little, much))
        both = few.keys() & many.keys()
        assert len(both) > 2 and all(0 < few[v] < many[v] for v in both)


def test_a_group_s_rows_of_tiles_read_its_own_matrix_alone(grouped: Grid) -> None:
    """8 groups of 512 rows: four rows of tiles of 128 each."""
    problem = groups(8, 4096, 14336, 4096)
    plan = next(v.plan for v, _ in fitting(grouped, problem) if v.point.config.name == "128x128x128_s6_coop")
    a, b = 4096 * 4096, 8 * 14336 * 4096
    assert plan.terms["l2_kb"].evaluate(problem) == (14336 // 128 * a + 4 * b) // 1024


def test_maps_of_the_device_are_asked_for_by_name_alone(grid: Grid) -> None:
    """They take a program time that maps from the host do not: none is chosen until one was measured to be faster."""
    for m in (64, 4096, 65536):
        kernels = {v.kernel.name for v, _ in fitting(grid, product(m, 4096, 4096, "fast"))}
        assert "scaled_mm_tma_device_maps" in kernels
        assert chosen(grid, product(m, 4096, 4096, "fast")).kernel.name != "scaled_mm_tma_device_maps"


def test_two_e5m2_matrices_have_no_hopper_kernel(grid: Grid, grouped: Grid) -> None:
    for v in (*grid.variants, *grouped.variants):
        axes = v.point.axes
        assert not (axes["dtype"] == "fp8e5" and axes.get("b_dtype") == "fp8e5")


def test_the_grid_is_small(grid: Grid, grouped: Grid) -> None:
    assert len(grid.variants) <= 90 and len(grouped.variants) <= 24


def test_there_are_programs_for_every_tile_whatever_the_ends(grouped: Grid) -> None:
    problem = groups(3, 1000, 80, 32)
    for v, _ in fitting(grouped, problem):
        block_m, block_n = v.point.config.block_m, v.point.config.block_n
        if v.kernel.name == "scaled_grouped_mm_pointer":
            tiles = sum(-(-rows // block_m) for rows in (1, 998, 1)) * -(-80 // block_n)
            assert as_expr(v.plan.launches[0].grid[0]).evaluate(problem) >= tiles
