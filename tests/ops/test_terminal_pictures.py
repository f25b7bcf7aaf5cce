"""The pictures of a terminal in README and docs show what the commands print."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def terminal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terminal", ROOT / "tools/terminal.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def now(terminal: ModuleType) -> list[tuple[str, str]]:
    """What the commands of docs/terminal/explain.svg print, with the kernels that are installed."""
    commands = map(terminal.whole, terminal.COMMANDS["explain"])
    return [(command, terminal.printed(command)) for command in commands]


@pytest.fixture(scope="module")
def picture() -> str:
    return (ROOT / "docs/terminal/explain.svg").read_text()


def test_the_picture_is_what_the_commands_print(terminal: ModuleType, picture: str, now: list[tuple[str, str]]) -> None:
    assert len(now) == 2
    assert not terminal.differences(picture, now)


def test_a_picture_of_other_lines_is_found(terminal: ModuleType, picture: str, now: list[tuple[str, str]]) -> None:
    (linear, table), softmax = now
    for changed in (
        table.replace("predicted", "expected"),
        table.replace("lowest", "least"),
        table.replace("\nmm", "\nnn"),
    ):
        assert changed != table
        assert terminal.differences(picture, [(linear, changed), softmax])
    rows = softmax[1].splitlines()
    time = rows[3].split()[3]
    assert terminal.differences(picture, [(softmax[0], softmax[1].replace(time, f"9{time}"))])
    assert terminal.differences(picture, [("tk explain gelu 8x8 --arch 90", softmax[1])])


def test_every_picture_is_shown(terminal: ModuleType) -> None:
    assert {p.stem for p in terminal.FOLDER.glob("*.svg")} == {*terminal.COMMANDS, *terminal.ON_A_GPU}
    for document in ("README.md", "docs/first-steps.md"):
        assert "terminal/explain.svg" in (ROOT / document).read_text(), document
    assert "terminal/demo.svg" in (ROOT / "README.md").read_text()
