"""docs/functions.md says what the functions take."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import functions_table


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_that_of_today() -> None:
    written = functions_table.FILE.read_text()
    assert written == functions_table.text(), "make it anew: python tools/functions_table.py --write"
