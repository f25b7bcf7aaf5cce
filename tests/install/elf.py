"""What a shared library asks of others and offers them, as binutils read it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Library:
    path: Path

    @cached_property
    def undefined(self) -> dict[str, str]:
        """Symbols that must come from elsewhere, with their versions ("" where they have none)."""
        lines = output("nm", "-D", "--undefined-only", self.path).splitlines()
        symbols = (line.split()[1].partition("@") for line in lines if line.split()[0] == "U")
        return {name: version.lstrip("@") for name, _, version in symbols}

    @cached_property
    def defined(self) -> frozenset[str]:
        lines = output("nm", "-D", "--defined-only", self.path).splitlines()
        return frozenset(line.split()[2].partition("@")[0] for line in lines)

    @cached_property
    def _dynamic(self) -> str:
        return output("readelf", "-W", "-d", self.path)

    @property
    def needed(self) -> frozenset[str]:
        return frozenset(re.findall(r"\(NEEDED\).*\[(.*)\]", self._dynamic))

    @property
    def run_path(self) -> list[str]:
        return re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", self._dynamic)

    def section(self, name: str) -> bytes:
        sections = output("readelf", "-W", "-S", self.path)
        (found,) = re.findall(rf"\s{re.escape(name)}\s+\w+\s+\w+\s+(\w+)\s+(\w+)\s", sections)
        offset, size = (int(x, 16) for x in found)
        return self.path.read_bytes()[offset : offset + size]

    def newest(self, prefix: str) -> tuple[int, ...]:
        """The newest version of a versioned library that it needs: ``newest("GLIBC")`` -> (2, 34)."""
        versions = (re.fullmatch(rf"{prefix}_([\d.]+)", v) for v in self.undefined.values())
        return max((tuple(map(int, v[1].split("."))) for v in versions if v), default=(0,))
