"""Settings: how large a block is, with how many warps. One table, by kind of tile and by layout.

A setting is a config of the op. What is tried before it comes into the table is tools/time_settings.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from tk.aot.spec import Config


@dataclass(frozen=True)
class Setting:
    """Block sizes along the tile's dimensions, warps, and whether the reduced dimension is run through in blocks.

    stages: of a loop's loads, how many are under way. hints: whether loads say what is read once and what again."""

    p: int
    q: int
    warps: int
    looped: bool = False
    stages: int = 1
    hints: bool = True

    @property
    def name(self) -> str:
        stages = f"_s{self.stages}" if self.stages > 1 else ""
        hints = "" if self.hints else "_plain"
        return f"{'loop_' if self.looped else ''}{self.p}x{self.q}_w{self.warps}{stages}{hints}"

    @property
    def config(self) -> Config:
        return Config(self.name, {"p": self.p, "q": self.q, "num_warps": self.warps, "looped": self.looped})


Table = Mapping[str, Mapping[str, tuple[Setting, ...]]]

# By kind of launch. Of a kind's settings those that a layout gets; the strided one serves what nothing else takes.
SETTINGS: Table = {
    "flat": {
        "aligned": (Setting(1, 1024, 4), Setting(1, 2048, 4)),
        "rows": (Setting(1, 1024, 4),),
        "strided": (Setting(1, 1024, 4),),
    },
    "rows": {
        "aligned": (Setting(1, 1024, 4), Setting(4, 256, 4), Setting(16, 64, 4), Setting(2, 2048, 8)),
        "rows": (Setting(1, 1024, 4), Setting(16, 64, 4), Setting(128, 8, 4)),
        "strided": (Setting(1, 1024, 4), Setting(32, 32, 4), Setting(256, 4, 4)),
    },
    "inner": {
        "aligned": (
            Setting(32, 64, 4), Setting(8, 256, 4), Setting(2, 1024, 4), Setting(1, 1024, 4), Setting(1, 2048, 4),
            Setting(1, 4096, 8), Setting(1, 8192, 8), Setting(1, 16384, 16), Setting(1, 2048, 8, True),
            Setting(1, 4096, 16, True),
        ),
        "rows": (Setting(32, 64, 4), Setting(4, 512, 4), Setting(1, 2048, 4), Setting(1, 2048, 8, True)),
        "strided": (Setting(16, 64, 4, True), Setting(1, 1024, 4, True)),
    },
    "walk": {
        "aligned": (
            Setting(8, 256, 4), Setting(4, 1024, 8), Setting(1, 2048, 4), Setting(1, 4096, 8), Setting(1, 8192, 8),
        ),
        "rows": (Setting(1, 2048, 4), Setting(1, 4096, 8)),
        "strided": (),
    },
    "full": {
        "aligned": (Setting(1, 1024, 4), Setting(1, 4096, 8, True)),
        "rows": (Setting(1, 4096, 8, True),),
        "strided": (Setting(1, 1024, 4, True),),
    },
    "outer": {
        "aligned": (Setting(64, 32, 8, True), Setting(32, 64, 4, True), Setting(16, 256, 8, True)),
        "rows": (Setting(64, 32, 8, True),),
        "strided": (Setting(32, 64, 4, True), Setting(128, 8, 4, True)),
    },
}  # fmt: skip

_table: Table = SETTINGS


def settings_of(kind: str, layout: str) -> tuple[Setting, ...]:
    """Those of a kind of tile in a layout, the first of them the one that every graph has."""
    return _table[kind][layout]


@contextmanager
def replaced(table: Table) -> Iterator[None]:
    """With other settings: to time what is not in the table."""
    global _table
    before, _table = _table, table
    try:
        yield
    finally:
        _table = before
