"""docs/supported.md says what the functions take and refuse, and is that of today."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # what kernels written by hand take, their records say
sys.path.append(str(Path(__file__).parents[2] / "tools"))
import supported

WRITTEN = supported.DOCUMENT.read_text()
of_this_torch = pytest.mark.skipif(
    f"with torch {supported.TORCH}," not in WRITTEN, reason="the document was made with another torch"
)
ANEW = "make it anew: python tools/supported.py"


def rows(header: str) -> dict[str, list[str]]:
    """Of the table whose header begins so, by the first cell."""
    table = WRITTEN[WRITTEN.index(header) :].split("\n\n")[0].splitlines()
    return {line.split(" | ")[0].strip("|` "): [c.strip("| ") for c in line.split(" | ")[1:]] for line in table[2:]}


def test_every_function_has_its_rows() -> None:
    own = {name for name in supported.tk.inspect.functions() if not name.startswith("_")}  # type: ignore[attr-defined]
    for header in ("| function | bf16", "| function | gradient"):
        assert rows(header).keys() == supported.calls().keys() == own, ANEW


@of_this_torch
def test_cells_hold() -> None:
    """A few dozen, others at every run; tests/gpu/test_supported.py makes the calls of all on a GPU."""
    found = rows("| function | bf16")
    cells = [(name, i) for name in found for i in range(len(supported.COLUMNS))]
    for name, i in random.sample(cells, 60):
        column = list(supported.COLUMNS)[i]
        assert found[name][i] == supported.mark(supported.calls()[name], column), (name, column, ANEW)
    for name, cells_of_ways in random.sample(sorted(rows("| function | gradient").items()), 20):
        assert cells_of_ways[:4] == list(supported.ways_of(supported.calls()[name])), (name, ANEW)


@of_this_torch
@pytest.mark.parametrize("part", ["pairs_table", "refused_table", "hints_table"])
def test_the_other_tables_are_those_of_today(part: str) -> None:
    assert getattr(supported, part)() in WRITTEN, ANEW


def test_atomic_sums_are_of_the_ops_that_the_document_names() -> None:
    """Of all generated functions those that index are the only ones that scatter."""
    from tk import codegen
    from tk.aot.grid import enumerate_grid
    from tk.kernels.generated import indexing

    families = codegen.families_of(indexing)
    plans = {
        family.op.name
        for family in families
        if not all(variant.plan.deterministic for variant in enumerate_grid(family, 90).variants)
    }
    assert plans == {"embedding_backward", "scatter_add", "scatter_add_columns", "index_add"}


def test_what_is_in_one_dtype_alone_is_changed_alone() -> None:
    call = supported.calls()["embedding"]
    changed = supported.in_dtype(call, torch.float64)
    assert [x.dtype for x in changed.args] == [torch.int64, torch.float64]
