"""Writes stubs of the C and C++ runtime to link against, so that a library runs on systems older than this one.

    python tools/link_stubs.py FOLDER [--glibc 2.28]

A stub has the symbols of this system's library up to a version, each in the newest version that the old system has.
What is linked against stubs can ask for nothing newer: the linker knows nothing newer, and fails where something newer
is needed. This is what a sysroot of an old distribution does, and needs none.

- Of libstdc++ what is newer than the stub comes from the compiler's own static archive, hidden in the library. So do
  the compilers that Red Hat and the manylinux images have for newer C++ on an old system (libstdc++_nonshared.a).
- Of glibc what is newer is defined in csrc/compat/glibc.c, or fails to link.
- Functions that glibc 2.34 moved from libpthread and libdl into libc are where they were before.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

# Of each glibc: the newest versions of the other runtime libraries that a manylinux tag of it promises.
PROMISED: dict[str, dict[str, Version]] = {
    "2.28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    "2.31": {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    "2.34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    "2.35": {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    "2.39": {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
_MERGED = (2, 34)  # the glibc whose libc has what was libpthread's and libdl's
_OLD_HOMES = {
    r"dl(open|close|sym|vsym|error|addr1?|info|mopen)": "libdl.so.2",
    r"(__)?(pthread|sem)_\w+": "libpthread.so.0",
}


@dataclass(frozen=True)
class Symbol:
    name: str
    node: str  # GLIBC_2.2.5
    kind: str  # of an assembler's .type

    @property
    def library(self) -> str:
        return self.node.rpartition("_")[0]

    @property
    def version(self) -> Version:
        return tuple(map(int, self.node.rpartition("_")[2].split(".")))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--glibc", choices=list(PROMISED), default="2.28", help="the oldest to run on")
    parser.add_argument("--compiler", default="c++")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    write(args.folder.resolve(), PROMISED[args.glibc], args.compiler)


def write(folder: Path, newest: dict[str, Version], compiler: str) -> None:
    """The stubs, and the scripts that -lc, -lm and -lstdc++ find before the compiler's own libraries."""

    def path_of(name: str) -> str:
        found = subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout
        return str(Path(found.strip()).resolve(strict=True))

    moved: dict[str, list[Symbol]] = {home: [] for home in _OLD_HOMES.values()}
    for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        kept = []
        for symbol, default in newest_of(symbols(Path(path_of(name))), newest):
            home = old_home(symbol, default) if newest["GLIBC"] < _MERGED else None
            (moved[home] if home else kept).append(symbol)
        link(folder / name, kept, compiler)
    for name, found in moved.items():
        link(folder / name, found, compiler)
    needed = " ".join(str(folder / name) for name in moved)
    loader, nonshared = path_of("ld-linux-x86-64.so.2"), path_of("libc_nonshared.a")
    (folder / "libc.so").write_text(f"GROUP({folder}/libc.so.6 {nonshared} AS_NEEDED({needed} {loader}))\n")
    (folder / "libm.so").write_text(f"INPUT({folder}/libm.so.6)\n")
    (folder / "libstdc++.so").write_text(f"INPUT({folder}/libstdc++.so.6 {path_of('libstdc++.a')})\n")


def symbols(library: Path) -> list[tuple[Symbol, bool]]:
    """What a library defines, and whether each is its name's default version."""
    command = ["readelf", "--wide", "--dyn-syms", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kinds = {"FUNC": "function", "IFUNC": "function", "OBJECT": "object", "TLS": "tls_object"}
    row = re.compile(
        r"^ *\d+: \S+ +\S+ (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +(?:\d+) ([^\s@]+)(@@?)(\w+_[\d.]+)$", re.M
    )
    return [
        (Symbol(name, node, kinds[kind]), at == "@@") for kind, name, at, node in row.findall(text) if kind in kinds
    ]


def newest_of(found: Iterable[tuple[Symbol, bool]], newest: dict[str, Version]) -> list[tuple[Symbol, Symbol]]:
    """For each name, the newest version that is old enough, with the version that a program of today gets."""
    allowed: dict[str, Symbol] = {}
    today: dict[str, Symbol] = {}
    for symbol, is_default in found:
        if is_default:
            today[symbol.name] = symbol
        if symbol.version > newest.get(symbol.library, ()):
            continue
        if symbol.name not in allowed or allowed[symbol.name].version < symbol.version:
            allowed[symbol.name] = symbol
    return [(symbol, today.get(name, symbol)) for name, symbol in sorted(allowed.items())]


def old_home(symbol: Symbol, today: Symbol) -> str | None:
    """The library that had the symbol before it moved into libc."""
    if symbol == today or not (2, 28) < today.version <= _MERGED:
        return None
    return next((home for pattern, home in _OLD_HOMES.items() if re.fullmatch(pattern, symbol.name)), None)


def link(path: Path, found: Sequence[Symbol], compiler: str) -> None:
    """A shared library with these symbols, which nobody can call: it serves the linker alone."""
    nodes: dict[str, list[str]] = {}
    lines = ["        .text"]
    for symbol in found:
        nodes.setdefault(symbol.node, []).append(symbol.name)
    for kind, section in (
        ("function", ".text"),
        ("object", ".data"),
        ("tls_object", '.section .tdata,"awT",@progbits'),
    ):
        lines.append(section)
        for symbol in (s for s in found if s.kind == kind):
            lines += [f".globl {symbol.name}", f".type {symbol.name}, @{kind}", f"{symbol.name}: .quad 0"]
    source, versions = path.with_suffix(".s"), path.with_suffix(".map")
    source.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    text = [f"{node} {{ global: {' '.join(f'{name};' for name in names)} }};\n" for node, names in nodes.items()]
    versions.write_text("".join(text) or "NONE { local: *; };\n")
    script = f"-Wl,--version-script={versions}"
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname={path.name}", script, "-o", path, source]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
