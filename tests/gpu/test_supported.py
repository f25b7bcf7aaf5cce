"""docs/supported.md, cell by cell, with calls on CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tk

from .device import DEVICE

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import supported

pytestmark = pytest.mark.filterwarnings("ignore")


def cells() -> dict[str, dict[str, str]]:
    text = supported.DOCUMENT.read_text()
    table = text[text.index("| function | bf16") :].split("\n\n")[0].splitlines()
    rows = {line.split(" | ")[0].strip("|` "): [c.strip("| ") for c in line.split(" | ")[1:]] for line in table[2:]}
    return {name: dict(zip(supported.COLUMNS, row, strict=True)) for name, row in rows.items()}


CELLS = cells()
ERRORS = {mark: name.removeprefix("tk.") for name, mark in supported.MARKS.items()}


def there(call: Any) -> tuple[Any, Any]:
    args, kwargs = tree_map_only(Tensor, lambda x: x.to(DEVICE), (call.args, call.kwargs))
    return args, kwargs | ({"device": DEVICE} if "device" in kwargs else {})


def outcome(call: Any) -> str:
    args, kwargs = there(call)
    try:
        with torch.no_grad():
            call.function(*args, **kwargs)
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        raise
    except supported.REFUSALS as error:
        return type(tk.errors.typed(error)).__name__
    return ""


@pytest.mark.parametrize("name", CELLS)
def test_dtypes(name: str) -> None:
    for column, cell in CELLS[name].items():
        if column == "complex64" or (column.startswith("fp8") and not name.startswith("scaled_")):
            continue  # of most of these it is torch that refuses
        call = supported.in_dtype(supported.calls()[name], supported.COLUMNS[column])
        found = outcome(call)
        if cell == "**tk**" or cell.startswith("ATen"):
            assert not found, (column, cell, found)
            if cell.startswith("ATen") and name in tk.functional.FUNCTIONS:
                with tk.config.strict():
                    assert outcome(call) == "UnsupportedError", (column, cell)
                args, kwargs = there(call)
                assert "ATen computes it" in tk.explain(name, *args, **kwargs).reason, (column, cell)
        else:
            assert found == ERRORS[cell[0]], (column, cell, found)
