"""The setting that each op has for sizes and layouts of every kind, as files: what a change of settings or of predicted
times does to calls that nobody thought of shows as their diff.

To write them anew: ``TK_REWRITE_GOLDEN=1 python -m pytest tests/codegen/test_choices.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import golden_files
import pytest
from choosing import backward, chosen, dense, generated, turned

from tk.aot.expr import TensorValue
from tk.aot.spec import DTYPES
from tk.generated import Declared
from tk.kernels.generated import activations, losses, norms, reductions, scans, softmax, sorts

FOLDER = Path(__file__).parent / "choices"
ELEMENTS = 1 << 24
FEW_ROWS = 8
COLUMNS = (1, 3, 17, 64, 257, 1024, 1501, 2593, 4096, 5001, 8192, 9975, 10112, 20001, 32768, 131072)
SOME_COLUMNS = (3, 64, 257, 2593, 9975)


@dataclass(frozen=True)
class Call:
    """tensors: a letter for each of the op's: x has all elements, n the columns, r the rows. The first one has the
    problem's layout, the others are contiguous. rank: dimensions of x, with what stands for "...": of three all do,
    and rows that run together in every tensor are one."""

    declared: Declared
    tensors: str
    ints: tuple[int, ...] = ()
    is_backward: bool = False
    rank: int = 4


CALLS = {
    "softmax": Call(softmax.softmax, "xx"),
    "softmax_backward": Call(softmax.softmax, "xxx", is_backward=True),
    "logsumexp": Call(softmax.logsumexp, "xr"),
    "layer_norm": Call(norms.layer_norm, "xnnx"),
    "layer_norm_backward": Call(norms.layer_norm, "xxnxnn", is_backward=True),
    "rms_norm": Call(norms.rms_norm, "xnx"),
    "rms_norm_backward": Call(norms.rms_norm, "xxnxn", is_backward=True),
    "gelu": Call(activations.gelu, "xx", (0,), rank=3),
    "swiglu": Call(activations.swiglu, "xxx", rank=3),
    "row_sum": Call(reductions.row_sum, "xr"),
    "row_argmax": Call(reductions.row_argmax, "xr"),
    "row_var_mean": Call(reductions.row_var_mean, "xrr"),
    "column_sum": Call(reductions.column_sum, "xn", rank=2),
    "cumsum": Call(scans.cumsum, "xx"),
    "sort": Call(sorts.sort, "xxx", (0,)),
}
LAYOUTS: dict[str, Callable[[int, int, str], TensorValue]] = {
    "contiguous": lambda m, n, dtype: dense([m, n], dtype),
    "columns of more": lambda m, n, dtype: TensorValue([m, n], [n + 3, 1], DTYPES[dtype]),
    "every other": lambda m, n, dtype: TensorValue([m, n], [2 * n, 2], DTYPES[dtype]),
    "transposed": lambda m, n, dtype: turned([m, n], dtype),
}


def problems() -> Iterator[tuple[str, str, int, int]]:
    """dtype, layout, rows, columns."""
    for n in COLUMNS:
        yield "bf16", "contiguous", ELEMENTS // n, n
        yield "bf16", "contiguous", FEW_ROWS, n
    for n in SOME_COLUMNS:
        yield "fp32", "contiguous", ELEMENTS // n, n
        for layout in list(LAYOUTS)[1:]:
            yield "bf16", layout, ELEMENTS // n, n


def printed(call: Call) -> str:
    op = backward(call.declared) if call.is_backward else generated(call.declared)
    lines = []
    for dtype, layout, m, n in problems():
        rows, columns = (1, m * n) if call.rank == 3 and layout == "contiguous" else (m, n)
        tensors = [shaped(letter, call.rank, rows, columns, dtype, "contiguous") for letter in call.tensors]
        tensors[0] = shaped("x", call.rank, rows, columns, dtype, layout)
        found = chosen(op, tensors, call.ints)
        lines.append(f"{dtype} {layout} {m} x {n}: {found.layout} {found.config}")
    return "\n".join(lines) + "\n"


def shaped(letter: str, rank: int, m: int, n: int, dtype: str, layout: str) -> TensorValue:
    if letter == "n":
        return dense([n], dtype)
    more = rank - 2  # leading dimensions, of size 1
    if letter == "r":
        return dense([1] * more + [m], dtype)
    x = LAYOUTS[layout](m, n, dtype)
    return TensorValue([1] * more + list(x.sizes), [0] * more + list(x.strides), x.dtype)


@pytest.mark.parametrize("name", list(CALLS))
def test_choices(name: str) -> None:
    golden_files.check(FOLDER / f"{name}.txt", printed(CALLS[name]))


def target(n: int) -> TensorValue:
    return dense((n,), "i64")


@pytest.mark.parametrize(
    ("op", "layout", "config"),
    [
        (losses.cross_entropy_sum, "aligned", "split_2x1024_w4"),
        (losses.cross_entropy_mean, "rows", "split_4x4x256_w4_vectors"),
    ],
)
def test_a_reduced_loss_has_blocks_of_short_rows(op: Declared, layout: str, config: str) -> None:
    found = chosen(generated(op), [dense((8192, 1024), "bf16"), target(8192), dense((), "bf16")], [-100])
    assert (found.layout, found.config) == (layout, config)


@pytest.mark.parametrize("op", [losses.cross_entropy_sum, losses.cross_entropy_mean], ids=lambda op: op.name)
def test_a_reduced_loss_of_rows_across_memory_reads_along_it(op: Declared) -> None:
    tensors = [turned((6419, 50), "bf16"), target(6419), dense((), "bf16")]
    assert chosen(generated(op), tensors, [-100]).layout == "columns"


def test_no_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.iterdir()} == set(CALLS)
