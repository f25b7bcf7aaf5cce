"""Writes the generated parts of README and docs: the first tables and their picture, the ops, and all figures.

    python tools/readme.py [--check]

A part stands between <!-- begin NAME --> and <!-- end NAME -->. The ops come from the kernels' records, everything else
from benchmarks/results. With --check it writes nothing and fails when a part is out of date. It needs Triton, as
building packs does, and neither the native library nor a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = (80, 90)  # of the wheel that ships

sys.path.insert(0, str(ROOT))

from benchmarks import gains, peers, picture  # noqa: E402
from benchmarks.gains import Measured, Products, Result  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail instead of writing when something is out of date")
    args = parser.parse_args(argv)
    stale = {path: text for path, text in generated(ROOT).items() if not path.exists() or path.read_text() != text}
    if args.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: what is generated is out of date; run `make readme`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text)
    return 0


def generated(root: Path) -> dict[Path, str]:
    """Every file with generated parts, as it should be."""
    results = gains.read(root / "benchmarks" / "results")
    readme, benchmarks = root / "README.md", root / "docs" / "benchmarks.md"
    return {
        readme: fill(readme, {"gains": gains_part(results), "strengths": strengths_part(results)}),
        benchmarks: fill(benchmarks, {"ops": ops_table(), "figures": figures(results)}),
        root / "benchmarks" / "results" / "gains.svg": picture.draw(results),
    }


def fill(path: Path, parts: Mapping[str, str]) -> str:
    """The file with each part between its two markers. Raises ValueError when a marker is missing."""
    text = path.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        text, count = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, b=begin, p=part, e=end: f"{b}{p}\n{e}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{path.name} has the part {name} {count} times")
    return text


def table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    header = list(header)
    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


# --- What a user gains ---


def gains_part(results: Sequence[Result]) -> str:
    """The table of times, the table of speeds and the picture."""
    calls = [*call_rows(results, first=True), *call_rows(results, first=False)]
    speeds = [product_row(p) for p in judged(gains.products(results))]
    parts = [
        table(("what is timed", "alternative", "its time", "the op's time", "the wrapper's time"), calls),
        table(("rows", "shapes", "tk's speed", "shapes where cuBLAS is faster", "cuBLAS is faster by at most"), speeds),
        "![Products against cuBLAS by number of rows, and first calls](benchmarks/results/gains.svg)",
        measured_on(results),
    ]
    return "\n\n".join(parts)


def call_rows(results: Sequence[Result], first: bool) -> Iterable[tuple[str, ...]]:
    """A row for each alternative, unless neither its time nor tk's is known: its time, that of tk's op, and that of the
    op's Python wrapper."""

    def measured(way: peers.Way) -> Measured:
        return gains.figure(results, way.first_figure if first else way.host_figure)

    for fused in (False, True):
        op, wrapper = (measured(w) for w in peers.WAYS if w.is_tk and w.fused == fused)
        title = ("first call" if first else "host time of a call") + (", bias and gelu" if fused else "")
        for way in (w for w in peers.WAYS if not w.is_tk and w.fused == fused):
            peer = measured(way)
            if peer.tried or op.tried or wrapper.tried:
                yield title, code(way.title.removesuffix(", bias and gelu")), str(peer), str(op), str(wrapper)


def code(title: str) -> str:
    """The title with names of the program set as code."""
    return re.sub(r"@?\w+\.\w[\w.]*", lambda name: f"`{name[0]}`", title)


def judged(products: Iterable[Products]) -> list[Products]:
    """The random shapes of each band, and the listed ones where there are no random ones."""
    return list({p.band: p for p in sorted(products, key=lambda p: p.random)}.values())


def product_row(p: Products) -> tuple[str, ...]:
    count = len(p.ratios)
    shapes = f"{count} {'random' if p.random else 'listed'}"
    lead = f"{1 / p.worst:.2f} ×" if p.slower else ""
    return p.band.title, shapes, f"{p.geomean:.2f} ×", f"{p.slower} of {count}", lead


def measured_on(results: Iterable[Result]) -> str:
    dates: dict[str, set[str]] = {}
    for environment in (r["environment"] for r in results):
        dates.setdefault("{gpu} with torch {torch}".format(**environment), set()).add(environment["date"])
    machines = [f"{machine} on {' and '.join(sorted(found))}" for machine, found in sorted(dates.items())]
    return f"Measured on {', '.join(machines)}." if machines else "Nothing was measured yet."


# --- Where tk is fast, and where not ---

# What is computed, the family of the results, and the group: of random shapes where there is one.
STRENGTHS = (
    ("softmax and log_softmax, rows of 4,096 columns and more", "generated", "softmax_long_random"),
    ("gelu", "generated", "gelu_random"),
    ("argmax along rows", "generated", "argmax_random"),
    ("norms, pointwise, softmax, reductions, 64 MB and more", "generated", "memory_random"),
    ("scans", "generated", "scan_random"),
    ("sorts of rows up to 2,048", "generated", "sort_short_random"),
    ("sorts of longer rows", "generated", "sort_long_random"),
    ("topk", "generated", "topk"),
    ("convolutions, channels-last", "conv", "channels_last_random"),
    ("convolutions, contiguous", "conv", "contiguous_random"),
    ("depthwise and grouped convolutions, channels-last", "conv", "grouped_channels_last_random"),
    ("attention with mods, forward", "attention", "forward1_random"),
    ("attention with mods, backward", "attention", "backward1_random"),
    ("plain and causal attention, forward", "attention", "forward_random"),
    ("plain and causal attention, backward", "attention", "backward_random"),
    ("decoding", "attention", "decode_random"),
    ("two products in a row, as one kernel", "b2b", "b2b_gemm_random"),
    ("float8 products of groups", "other_products", "scaled_grouped_mm_random"),
    ("float8 products, up to 64 rows", "other_products", "scaled_mm_few_rows_random"),
    ("float8 products, more rows", "other_products", "scaled_mm_random"),
    ("batched products", "other_products", "bmm_random"),
    ("four-bit weights, up to 16 rows", "int4", "int4_mm_few_rows_random"),
    ("four-bit weights, 17 to 1,000 rows", "int4", "int4_mm_random"),
    ("products, up to 16 rows", "mm", "random_16"),
    ("products, 17 to 256 rows", "mm", "random_256"),
    ("products, 257 to 1,024 rows", "mm", "random_1024"),
    ("products, more rows", "mm", "random_above"),
    ("products with bias and activation", "mm", "fused_random"),
    ("four Llama-3 8B layers, 4,096 tokens of prefill", "models", "llama_prefill"),
    ("four Llama-3 8B layers, decoding in a CUDA graph", "models", "llama_decode"),
    ("four Llama-3 8B layers, a training step", "models", "llama_training"),
    ("ResNet-50, inference", "models", "resnet_inference"),
    ("ResNet-50, inference", "models", "resnet_inference_compiled"),
)


def strengths_part(results: Sequence[Result]) -> str:
    """Groups of shapes, those where tk leads by most first."""
    found = []
    for title, family, name in STRENGTHS:
        for group in (g for r in results if r["family"] == family for g in r.get("groups", ()) if g["name"] == name):
            ratios = [row["ratio"] for row in group["rows"]]
            slower = sum(ratio < 1 for ratio in ratios)
            speed = f"{group['geomean']:.2f} ×"
            found.append((group["geomean"], (title, group["peer"], speed, f"{slower} of {len(ratios)}")))
    rows = [row for _, row in sorted(found, key=lambda one: -one[0])]
    header = ("what is computed", "alternative", "tk's speed", "shapes where the alternative is faster")
    return "\n\n".join((table(header, rows), measured_on(r for r in results if r.get("groups"))))


# --- Ops ---


def ops_table() -> str:
    """A row for each kernel: its axes, and how many variants of it the wheel has for each architecture."""
    from tk.aot.grid import enumerate_grid
    from tk.build.sources import package_families

    rows = []
    for family in package_families():
        grids = [enumerate_grid(family, arch) for arch in ARCHITECTURES]
        for kernel in family.kernels:
            counts = (sum(v.kernel.name == kernel.name for v in grid.variants) for grid in grids)
            axes = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in kernel.axes.items())
            rows.append((f"`{family.op.name}`", f"`{kernel.name}`", axes, *(count or "" for count in counts)))
    return table(("op", "kernel", "compiled for each of", *(f"sm_{arch}" for arch in ARCHITECTURES)), rows)


# --- Figures ---


def figures(results: Sequence[Result]) -> str:
    """The summary of every results file, or a line that says that nothing was measured."""
    return "\n\n".join(summary(r) for r in results) or "Not measured yet."


def summary(result: Result) -> str:
    e = result["environment"]
    caption = (
        f"`{result['family']}` on {e['gpu']}, driver {e['driver']}, torch {e['torch']}, kernels by {e['compiler']}, "
        f"commit {e['commit']}, {e['date']}:"
    )
    parts = [caption]
    if result.get("groups"):
        rows = ((g["title"], g["peer"], len(g["rows"]), *ratios(g), g["worst_label"]) for g in result["groups"])
        parts.append(table(("group", "against", "shapes", "geomean", "worst", "worst shape"), rows))
    if result.get("figures"):
        rows = ((f["title"], f"{f['value']:.4g} {unit(f)}", limit(f)) for f in result["figures"])
        parts.append(table(("figure", "measured", "goal"), rows))
    if result.get("failures"):
        failed = "; ".join(f"{f['label']} ({f['error']})" for f in result["failures"])
        parts.append(f"{len(result['failures'])} failed: {failed}")
    return "\n\n".join(parts)


def ratios(group: Mapping[str, object]) -> tuple[str, str]:
    """The geometric mean and the worst ratio, each with its goal."""
    goal = group.get("goal") or {}

    def cell(name: str) -> str:
        return f"{group[name]:.2f}" + (f" (goal {goal[name]:.2f})" if name in goal else "")

    return cell("geomean"), cell("worst")


def limit(figure: Mapping[str, object]) -> str:
    if figure["limit"] is None:
        return ""
    return f"{'≤' if figure['at_most'] else '≥'} {figure['limit']:g} {unit(figure)}"


def unit(figure: Mapping[str, object]) -> str:
    return {"us": "µs"}.get(figure["unit"], figure["unit"])


if __name__ == "__main__":
    os.environ["TK_NO_LIBRARY"] = "1"
    sys.path.insert(0, str(ROOT / "python"))
    sys.exit(main())
