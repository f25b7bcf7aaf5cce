"""Fills README's generated parts: the ops, from the kernels' records, and the figures, from benchmarks/results.

    python tools/readme.py [--check]

A part stands between <!-- begin NAME --> and <!-- end NAME -->. --check writes nothing and fails when a part is out of
date. Needs what builds packs (Triton), and neither the native library nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
ARCHITECTURES = (80, 90)  # of the wheel that ships

os.environ["TK_NO_LIBRARY"] = "1"
sys.path.insert(0, str(ROOT / "python"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail instead of writing when a part is out of date")
    args = parser.parse_args(argv)
    old = README.read_text()
    new = fill(old, {"ops": ops_table(), "figures": figures()})
    if new == old:
        return 0
    if args.check:
        print("README.md: the generated parts are out of date; run `make readme`", file=sys.stderr)
        return 1
    README.write_text(new)
    return 0


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Replaces what stands between each part's two markers. Raises ValueError when a marker is missing."""
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        text, count = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, b=begin, p=part, e=end: f"{b}{p}\n{e}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"README.md has the part {name} {count} times")
    return text


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    header = list(header)
    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


# --- Ops ---


def ops_table() -> str:
    """A row for each kernel: what it varies over, and how many variants the wheel has for each architecture."""
    from tk.aot.grid import enumerate_grid
    from tk.aot.sources import package_families

    rows = []
    for family in package_families():
        grids = [enumerate_grid(family, arch) for arch in ARCHITECTURES]
        for kernel in family.kernels:
            counts = (sum(v.kernel.name == kernel.name for v in grid.variants) for grid in grids)
            axes = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in kernel.axes.items())
            rows.append((f"`{family.op.name}`", f"`{kernel.name}`", axes, *(count or "" for count in counts)))
    return table(("op", "kernel", "compiled for each of", *(f"sm_{arch}" for arch in ARCHITECTURES)), rows)


# --- Figures ---


def figures() -> str:
    """The summary of every results file; that nothing was measured, when there is none."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    results = [r for r in results if r.get("groups") or r.get("figures")]
    if not results:
        return "Not measured yet."
    return "\n\n".join(summary(r) for r in results)


def summary(result: Mapping[str, Any]) -> str:
    e = result["environment"]
    caption = (
        f"`{result['family']}` on {e['gpu']}, driver {e['driver']}, torch {e['torch']}, kernels by {e['compiler']}, "
        f"commit {e['commit']}, {e['date']}:"
    )
    parts = [caption]
    if result.get("groups"):
        rows = ((g["title"], g["peer"], len(g["rows"]), *ratios(g), g["worst_label"]) for g in result["groups"])
        parts.append(table(("products", "against", "shapes", "geomean", "worst", "worst shape"), rows))
    if result.get("figures"):
        rows = ((f["title"], f"{f['value']:.4g} {f['unit']}", limit(f)) for f in result["figures"])
        parts.append(table(("figure", "measured", "goal"), rows))
    if result.get("failures"):
        parts.append(f"{len(result['failures'])} rows failed: " + "; ".join(f["label"] for f in result["failures"]))
    return "\n\n".join(parts)


def ratios(group: Mapping[str, Any]) -> tuple[str, str]:
    """Geometric mean and worst, each with its goal."""
    goal = group.get("goal") or {}

    def cell(name: str) -> str:
        return f"{group[name]:.2f}" + (f" (goal {goal[name]:.2f})" if name in goal else "")

    return cell("geomean"), cell("worst")


def limit(figure: Mapping[str, Any]) -> str:
    if figure["limit"] is None:
        return ""
    return f"{'≤' if figure['at_most'] else '≥'} {figure['limit']:g} {figure['unit']}"


if __name__ == "__main__":
    sys.exit(main())
