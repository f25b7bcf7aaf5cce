"""Pictures of a terminal are drawn by rich, which is there where the site is made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import terminal


def test_what_a_command_printed_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = tmp_path / "printed.txt"
    printed.write_text("generated op  speedup\n------------  -------\nsoftmax          3.05\n")
    monkeypatch.setattr(terminal, "FOLDER", tmp_path)
    assert terminal.main(["demo", "--printed", str(printed)]) == 0
    drawn = terminal.lines((tmp_path / "demo.svg").read_text())
    assert drawn == [["$", "tk", "demo"], *(line.split() for line in printed.read_text().splitlines())]
