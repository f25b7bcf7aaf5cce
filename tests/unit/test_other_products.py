"""The plans of bmm, mm_plus_mm and grouped_mm, as expressions: what they say of a problem, without a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tk.aot.expr import MODE_BITS, Problem, TensorValue, as_expr, evaluate_locals
from tk.aot.grid import Grid, Variant, bucket_expr, buckets, enumerate_grid
from tk.aot.spec import DTYPES, Family
from tk.kernels.bmm.family import FAMILY as BMM
from tk.kernels.grouped_mm.family import FAMILIES as GROUPED
from tk.kernels.mm_plus_mm.family import FAMILY as MM_PLUS_MM

H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 60 << 20}
A100 = {"sm_count": 108, "arch": 80, "shared_optin": 166912, "l2_bytes": 40 << 20}
ROWS, INNER = GROUPED


def tensor(*sizes: int, dtype: str = "bf16", shared: bool = False) -> TensorValue:
    """Row-major. shared: the first dimension's stride is 0."""
    strides = [1]
    for n in reversed(sizes[1:]):
        strides.insert(0, strides[0] * n)
    return TensorValue(sizes, (0, *strides[1:]) if shared else strides, DTYPES[dtype])


def described(family: Family, tensors: Sequence[TensorValue | None], mode: int = 0, arch: int = 90) -> Problem:
    bare = Problem(tensors, (0, 0), mode, H200 if arch == 90 else A100)
    return replace(bare, locals=evaluate_locals(family.op.locals.values(), bare))


def batch(n: int, m: int, cols: int, k: int, mode: int = 0, arch: int = 90, shared: bool = False) -> Problem:
    tensors = (tensor(n, m, k), tensor(n, k, cols, shared=shared), None, tensor(n, m, cols))
    return described(BMM, tensors, mode, arch)


def groups(count: int, total: int, n: int, k: int) -> Problem:
    tensors = (tensor(total, k), tensor(count, k, n), tensor(1, count, dtype="i32"), None, tensor(total, n))
    return described(ROWS, tensors)


def fitting(grid: Grid, problem: Problem) -> list[tuple[Variant, int]]:
    """The variants of the problem's bucket that fit it, with their predicted times."""
    candidates = buckets(grid.op, grid.variants)[bucket_expr(grid.op).evaluate(problem)]
    fit = (
        v for v in (grid.variants[i] for i in candidates) if all(c.holds.evaluate(problem) for c in v.plan.constraints)
    )
    return [(v, v.plan.cost.evaluate(problem)) for v in fit]


def chosen(grid: Grid, problem: Problem) -> str:
    times = {v.name: cost for v, cost in fitting(grid, problem)}
    return min(times, key=times.__getitem__)


def number(x: object, problem: Problem) -> int:
    return as_expr(x).evaluate(problem)


@pytest.fixture(scope="module")
def grids() -> dict[str, Grid]:
    return {f.op.name: enumerate_grid(f, 90) for f in (BMM, MM_PLUS_MM, ROWS, INNER)}


def test_small_matrices_are_programs_of_a_warp_and_large_ones_go_through_tma(grids: dict[str, Grid]) -> None:
    assert "32x32x32_s2_w1" in chosen(grids["bmm"], batch(10_000, 32, 32, 32))
    assert chosen(grids["bmm"], batch(64, 512, 512, 512)).startswith("bmm_tma")
    assert chosen(grids["grouped_mm"], groups(8, 4096, 4096, 4096)).startswith("grouped_mm_tma")


def pair(m: int, n: int, k: int, k2: int) -> Problem:
    """Row-major a, b, c and d."""
    return described(MM_PLUS_MM, (tensor(m, k), tensor(k, n), tensor(m, k2), tensor(k2, n), None, tensor(m, n)))


def config_of(grid: Grid, problem: Problem) -> str:
    return min(fitting(grid, problem), key=lambda x: x[1] if not x[0].plan.general else 10**18)[0].point.config.name


def test_tiles_are_those_that_mm_s_times_say(grids: dict[str, Grid]) -> None:
    """Where one and a half waves of 256 columns are two, and where short sums are all beginnings and ends of tiles,
    128 columns are faster, though they fetch more."""
    assert config_of(grids["mm_plus_mm"], pair(928, 5560, 4616, 5528)).startswith("128x128")
    for problem in (batch(32, 800, 528, 88), batch(16, 2048, 2048, 128), batch(8, 4096, 4096, 1024)):
        assert config_of(grids["bmm"], problem) == "128x128x64_s6_pingpong"
    assert config_of(grids["bmm"], batch(312, 136, 152, 1504)).startswith("128x256"), "a row of tiles for each matrix"


def test_a_batch_s_predicted_time_is_at_least_what_memory_takes(grids: dict[str, Grid]) -> None:
    moved = 2 * 4096 * (64 * 64 + 2 * 64 * 64)
    assert all(cost > 1000 * moved // 4200 for _, cost in fitting(grids["bmm"], batch(4096, 64, 64, 64)))


def test_terms_of_a_batch_are_those_of_all_its_matrices(grids: dict[str, Grid]) -> None:
    """Of 136 x 152 a tile of 128 x 256 holds more out of bounds than within."""
    one, many = batch(1, 136, 152, 1504), batch(312, 136, 152, 1504)
    plan = next(v.plan for v, _ in fitting(grids["bmm"], many) if v.point.config.name.startswith("128x256"))
    for name in ("oob_kb", "l2_kb", "dram_kb"):
        # Rounded down to a KB each.
        assert 0 <= plan.terms[name].evaluate(many) - 312 * plan.terms[name].evaluate(one) < 312, name


def test_a_pair_s_pitch_is_unaligned_where_either_s_is(grids: dict[str, Grid]) -> None:
    for k, k2, expected in ((512, 512, False), (520, 512, True), (512, 520, True)):
        problem = pair(512, 512, k, k2)
        plan = fitting(grids["mm_plus_mm"], problem)[0][0].plan
        assert (plan.terms["unaligned_kb"].evaluate(problem) > 0) == expected


def test_a_matrix_that_all_share_is_a_batch_of_one(grids: dict[str, Grid]) -> None:
    for shared, expected in ((True, (1, 0)), (False, (24, 1))):
        problem = batch(24, 256, 256, 256, shared=shared)
        launch = next(v for v, _ in fitting(grids["bmm"], problem) if v.kernel.name == "bmm_tma").plan.launches[0]
        args = launch.args
        assert (number(args["maps"].b.sizes[0], problem), number(args["b_step"].value, problem)) == expected
        strides = [number(x, problem) for x in args["maps"].b.strides]
        assert strides[0] % 8 == 0 and strides[0] > 0, "the driver takes no stride of 0"


@pytest.mark.parametrize("arch", (80, 90))
def test_in_batch_invariant_mode_the_choice_depends_on_neither_rows_nor_batch(arch: int) -> None:
    grid = enumerate_grid(BMM, arch)
    mode = MODE_BITS["batch_invariant"]
    problems = [batch(n, m, 512, 512, mode, arch) for n, m in ((2, 2), (1000, 513), (7, 9000))]
    assert len({tuple((v.name, cost) for v, cost in fitting(grid, p)) for p in problems}) == 1


def test_predicted_times_grow_with_the_work(grids: dict[str, Grid]) -> None:
    for name, little, much in (
        ("bmm", batch(16, 256, 256, 256), batch(64, 1024, 1024, 1024)),
        ("mm_plus_mm", pair(512, 512, 512, 1024), pair(512, 512, 4096, 8192)),
        ("grouped_mm", groups(8, 1024, 1024, 1024), groups(8, 8192, 4096, 4096)),
    ):
        few, many = ({v.name: cost for v, cost in fitting(grids[name], p)} for p in (little, much))
        both = few.keys() & many.keys()
        assert len(both) > 2 and all(0 < few[v] < many[v] for v in both)


def test_there_are_programs_for_every_tile_whatever_the_ends(grids: dict[str, Grid]) -> None:
    rng = random.Random(0)
    for _ in range(50):
        count, total = rng.choice((1, 3, 8, 100)), rng.randint(1, 3000)
        problem = described(ROWS, (tensor(total, 33), tensor(count, 33, 70), tensor(1, count, dtype="i32"), None,
                                   tensor(total, 70)))  # fmt: skip
        ends = sorted(rng.randint(0, total) for _ in range(count))
        for v, _ in fitting(grids["grouped_mm"], problem):
            block_m, block_n = v.point.config.block_m, v.point.config.block_n
            tiles = sum(-(-(end - begin) // block_m) for begin, end in zip([0, *ends], ends, strict=False))
            assert number(v.plan.launches[0].grid[0], problem) >= tiles * -(-70 // block_n)


@pytest.mark.parametrize("n", (2**31, 2**31 - 1))
def test_more_than_32_bits_can_count_is_refused(grids: dict[str, Grid], n: int) -> None:
    assert not fitting(grids["grouped_mm"], groups(8, 16, n, 16))
    assert not fitting(grids["bmm"], batch(2, 16, n, 16))
