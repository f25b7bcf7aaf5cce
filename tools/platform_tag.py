"""The platform of a wheel, from what its libraries ask of the machine.

    python tools/platform_tag.py LIBRARY...

A manylinux tag promises that the wheel runs wherever glibc is that new, or newer. So the tag follows from the newest
versions of the C and C++ runtime that the libraries need, and from their needing no library that such a system lacks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from link_stubs import PROMISED, Version

# What every manylinux system has, of what tk could need; and what is there before tk is: torch's, which tk requires.
RUNTIME = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
LOADER = "ld-linux-x86-64.so.2"
TORCH = {"libtorch_cpu.so"}


@dataclass(frozen=True)
class Needs:
    """The newest version of each runtime library, and every library."""

    versions: Mapping[str, Version]
    libraries: frozenset[str]

    def platform(self) -> str:
        """The lowest tag that holds; "linux_x86_64" where none does. None is lower than torch's own."""
        if not self.libraries - RUNTIME - TORCH - {LOADER}:
            for glibc, promised in PROMISED.items():
                if all(newest <= promised.get(name, ()) for name, newest in self.versions.items()):
                    return f"manylinux_{glibc.replace('.', '_')}_x86_64"
        return "linux_x86_64"


def needs(libraries: Iterable[Path]) -> Needs:
    """What libraries that come together need of the machine, without what one has of another."""
    paths = list(libraries)
    versions: dict[str, Version] = {}
    needed: set[str] = set()
    for path in paths:
        text = _readelf("--version-info", path)
        for name, number in re.findall(r"Name: ([A-Z]+)_([\d.]+) ", text.partition("Version needs section")[2]):
            versions[name] = max(versions.get(name, ()), tuple(map(int, number.split("."))))
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", path)))
    return Needs(versions, frozenset(needed - {path.name for path in paths}))


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, path], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    found = needs(map(Path, sys.argv[1:]))
    print(found.platform())
    for name, newest in sorted(found.versions.items()):
        print(f"  {name} {'.'.join(map(str, newest))}")
    print(f"  {' '.join(sorted(found.libraries))}")
