"""Which settings an op's launches have on a described H100, and how many programs: without a GPU or the library."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from choosing import backward, chosen, dense, generated, turned

from tk.aot.expr import TensorValue
from tk.aot.grid import enumerate_grid
from tk.aot.spec import DTYPES
from tk.generated import Declared
from tk.kernels.generated import activations, norms, reductions, scans, softmax

ELEMENTS = 1 << 24

# --- Launches beside a reduction ---


@pytest.mark.parametrize("columns", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("declared", [activations.bias_silu, activations.bias_gelu], ids=lambda d: d.name)
def test_a_pointwise_launch_beside_column_sums_has_blocks_of_many_short_rows(declared: Declared, columns: int) -> None:
    """Programs had blocks of at least 256 columns each, and there was one for each row or two."""
    rows = 1 << 20
    x, bias = dense([1, 1, rows, columns], "bf16"), dense([columns], "bf16")
    ints = (0,) if "tanh" in declared.signature.params else ()
    found = chosen(backward(declared), [x, x, bias, x, bias], ints)
    assert found.programs < rows * columns // 256 + 8192


@pytest.mark.parametrize("sizes", [(8192, 32, 32, 1), (8192, 4, 8, 1), (1000, 32, 2, 1)])
def test_the_gradient_of_a_group_norm_without_positions_has_blocks_of_many_rows(sizes: tuple[int, ...]) -> None:
    """Of one position for each channel a program reduced four rows, and added up batches with one program a channel."""
    x, weight = dense(sizes, "bf16"), dense(sizes[1:3], "bf16")
    found = chosen(backward(norms.group_norm), [x, x, weight, x, weight, weight])
    assert found.programs < math.prod(sizes) // 64 + 512


@pytest.mark.parametrize("sizes", [(32, 32, 8, 4096), (64, 32, 8, 49)])
def test_long_parts_of_rows_keep_their_settings(sizes: tuple[int, ...]) -> None:
    x, weight = dense(sizes, "bf16"), dense(sizes[1:3], "bf16")
    found = chosen(backward(norms.group_norm), [x, x, weight, x, weight, weight])
    parts = math.prod(sizes[:3]) // (4 if sizes[3] <= 2048 else 1)
    assert 2 * parts <= found.programs < 3 * parts


# --- Ops and dtypes that have few settings ---


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "declared", [reductions.row_norm, reductions.row_prod, reductions.row_var_mean], ids=lambda d: d.name
)
@pytest.mark.parametrize("reduced", [1, 4, 8])
def test_few_elements_are_reduced_in_a_block_of_few(declared: Declared, dtype: str, reduced: int) -> None:
    """Over a dimension of size 1, and over few rows in dimension 0. fp64 and seldom called ops had 64x32 alone: that
    8x256 is everywhere was said of another layout's."""
    n = 1 << 20
    out = [dense([1, 1, n], dtype)] * (2 if declared is reductions.row_var_mean else 1)
    for x in (dense([1, 1, n, reduced], dtype), turned([1, 1, n, reduced], dtype)):
        found = chosen(generated(declared), [x, *out])
        assert found.config in ("across_8x256_w4", "512x4_w4", "1024x1_w4"), (found.layout, found.config)


@pytest.mark.parametrize(("n", "config"), [(1, "1024x1_w4"), (3, "512x4_w4"), (12, "128x16_w4")])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rows_of_few_elements_are_one_threads(dtype: str, n: int, config: str) -> None:
    """But for those that are written without gaps: lanes beside each other have neighbours of theirs."""
    x = TensorValue([1, 1, 1 << 20, n], [0, 0, 2 * n, 2], DTYPES[dtype])
    out = dense([1, 1, 1 << 20, n], dtype)
    found = chosen(generated(softmax.softmax), [x, out])
    assert (found.layout, found.config) == ("gathered", config)
    found = chosen(generated(softmax.softmax), [out, out])
    assert (found.layout, found.config) == ("gathered" if n == 1 else "rows", config)
    rows = dense([1, 1, 1 << 20], dtype)
    found = chosen(generated(reductions.row_var_mean), [out, rows, rows])
    assert (found.layout, found.config) == ("gathered" if n <= 4 else "rows", config)


@pytest.mark.parametrize(("n", "config"), [(257, "2x512_w4"), (511, "2x512_w4"), (1501, "1x2048_w4")])
def test_rows_whose_elements_lie_apart_are_read_once(n: int, config: str) -> None:
    """By columns in a loop it was, up to 2,047 elements, or by the general kernel."""
    x = TensorValue([1, 1, ELEMENTS // n, n], [0, 0, 2 * n, 2], DTYPES["bf16"])
    found = chosen(generated(softmax.softmax), [x, dense([1, 1, ELEMENTS // n, n], "bf16")])
    assert (found.layout, found.config) == ("gathered", config)


# --- Rows that begin anywhere ---


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "n"), [(11146, 9975), (4000, 8209), (100, 12287)])
def test_rows_at_any_address_are_read_in_vectors_up_to_12288_elements(rows: int, n: int, dtype: str) -> None:
    """In a loop, whose loads have no vectors, softmax of [11146, 9975] takes 1.5 times as long and argmax of
    [3245, 10133] twice."""
    x = dense([1, 1, rows, n], dtype)
    assert chosen(generated(softmax.softmax), [x, x]).config == "1x3x4096_w16_vectors"


@pytest.mark.parametrize(("count", "alignment", "config"), [
    ((1 << 24) + 5, 256, "1x2048_w4_vectors"), ((1 << 24) + 5, 2, "1x2048_w4"), (1 << 24, 256, "1x2048_w4"),
])  # fmt: skip
def test_an_odd_number_of_elements_is_read_in_vectors(count: int, alignment: int, config: str) -> None:
    """One by one swiglu of them reaches two thirds of what it does in vectors."""
    x = dense([1, 1, count], "bf16")
    found = chosen(generated(activations.swiglu), [replace(x, alignment=alignment), x, x])
    assert found.config == config


def test_rows_of_weights_at_any_address_are_cut_in_three() -> None:
    """In vectors each weight is loaded by itself: layer_norm of [71224, 2593] takes a fifth longer."""
    x, weight = dense([1, 1, 71224, 2593], "bf16"), dense([2593], "bf16")
    assert chosen(generated(norms.layer_norm), [x, weight, weight, x]).config == "1x3x1024_w4"


@pytest.mark.parametrize(("rows", "columns"), [(3671, 12615), (107392, 1353), (16605, 4667), (14571, 3005)])
def test_a_block_of_few_columns_takes_whole_sectors(rows: int, columns: int) -> None:
    """Of 512 rows and 4 columns in bf16 a block reads 8 bytes of each 32 that move: sums over the rows took 1.4 to 1.7
    times as long as of 64 rows and 32 columns."""
    tensors = [dense([rows, columns], "bf16"), dense([columns], "bf16")]
    assert chosen(generated(reductions.column_sum), tensors).config.endswith("loop_64x32_w8")


def test_a_setting_is_everywhere_where_its_layout_has_it_so() -> None:
    """Two layouts have one of the same shape, of which that in rows alone is everywhere."""
    grid = enumerate_grid(generated(reductions.row_norm).family, 80)
    layouts = {(v.point.layout, v.point.config.name) for v in grid.variants}
    assert {("columns", "across_8x256_w4"), ("rows", "2x1024_w4")} <= layouts
    assert ("aligned", "8x256_w4") not in layouts and ("gathered", "512x4_w4") not in layouts


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("count", "alignment", "config"), [
    (23066445, 256, "realigned_spread_1x4096_w8"), (23066445, 2, "spread_1x4096_w8"),
    (1338369, 256, "realigned_spread_1x4096_w8"), (20001, 2, "spread_1x4096_w8"),
])  # fmt: skip
def test_programs_share_long_rows_of_logs(count: int, alignment: int, config: str, dtype: str, arch: int) -> None:
    """One program took 183 ms for 23,066,445 elements of bf16 that begin beside 16 bytes, and 3.3 ms for 1,338,369 of
    fp16."""
    x = dense([1, 1, 1, count], dtype)
    assert chosen(generated(scans.logcumsumexp), [replace(x, alignment=alignment), x], arch=arch).config == config


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("batches", "columns", "n"), [(2284, 60, 3), (396, 174, 5), (2048, 60, 300)])
def test_few_columns_of_logs_have_narrow_blocks(batches: int, columns: int, n: int, dtype: str, arch: int) -> None:
    """Of 60 columns each a block of 512 takes as long as of 512: 19.6 µs where torch takes 3.3."""
    x = turned([1, batches, columns, n], dtype)
    found = chosen(generated(scans.logcumsumexp), [x, dense([1, batches, columns, n], dtype)], arch=arch)
    assert (found.layout, found.config) == ("columns", "loop_4x64_w2")


# --- Columns of any width ---


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [7, 17, 33, 65, 257, 1501])
def test_columns_of_odd_width_are_reduced_in_vectors(width: int, dtype: str) -> None:
    """They were read element by element: a sum over 65 columns took twice as long as eagerly, a maximum four times."""
    rows = ELEMENTS // width
    x, of_columns, beside = dense([rows, width], dtype), dense([width], dtype), dense([1, 1, rows, width], dtype)
    turned_rows = TensorValue([1, 1, width, rows], [0, 0, 1, width], DTYPES[dtype])
    for found in (
        chosen(generated(reductions.column_sum), [x, of_columns]),
        chosen(generated(reductions.row_amax), [turned_rows, dense([1, 1, width], dtype)]),
        chosen(backward(activations.bias_silu), [beside, beside, of_columns, beside, of_columns]),
    ):
        assert found.layout == "aligned" and "interleaved_" in found.config
        assert 100 < found.programs < 2048


@pytest.mark.parametrize("width", [64, 96, 200, 1024])
def test_wide_columns_of_whole_vectors_have_parts_of_neighbours(width: int) -> None:
    x, of_columns = dense([ELEMENTS // width, width], "bf16"), dense([width], "bf16")
    found = chosen(generated(reductions.column_sum), [x, of_columns])
    assert found.layout == "aligned" and found.config == "split_loop_64x32_w8"
