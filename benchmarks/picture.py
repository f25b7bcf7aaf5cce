"""The picture on README's first screen, as SVG: products against cuBLAS, and first calls.

Written out by hand, so that its bytes depend on the results alone and drawing it needs no library. It has a background
of its own in either colour scheme, so it can be read wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from benchmarks import peers
from benchmarks.gains import Measured, Products, Result, figure, products
from benchmarks.shapes import BANDS

WIDTH, HEIGHT = 900, 440
TOP, BOTTOM = 76, 352  # of both panels' axes
LEFT_PANEL = (104, 580)
RIGHT_PANEL = (632, 840)
RADIUS = 2.5
SPACING = 1.7 * RADIUS  # of two points: they may touch, and none hides another
RATIO_TICKS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # a ratio beyond stands at the edge, with its number
MS_TICKS = (1, 10, 100, 1_000, 10_000, 100_000)
MS_LABELS = {1: "1 ms", 100: "100 ms", 10_000: "10 s"}
FIRST_CALLS = tuple(way for way in peers.WAYS if not way.name.startswith("op"))  # tk.mm's has the op's in it

STYLE = """
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-size: 14px; font-weight: 600; }
  .muted { fill: #59636e; }
  .small { font-size: 10px; }
  .strong { font-weight: 600; }
  .ground { fill: #ffffff; stroke: #d1d9e0; }
  .grid { stroke: #d1d9e0; }
  .even { stroke: #59636e; stroke-width: 1.5; }
  .mean { stroke: #1f2328; stroke-width: 2; stroke-linecap: round; }
  circle { fill-opacity: 0.8; }
  .ours { fill: #0b62c4; stroke: #0b62c4; }
  .theirs { fill: #c4500b; stroke: #c4500b; }
  .peer { fill: #59636e; stroke: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .muted { fill: #9198a1; }
    .ground { fill: #0d1117; stroke: #3d444d; }
    .grid { stroke: #3d444d; }
    .even { stroke: #9198a1; }
    .mean { stroke: #f0f6fc; }
    .ours { fill: #58a6ff; stroke: #58a6ff; }
    .theirs { fill: #ff9a4d; stroke: #ff9a4d; }
    .peer { fill: #9198a1; stroke: #9198a1; }
  }
"""


def draw(results: Sequence[Result]) -> str:
    """The SVG, ending in a line break. The same results give the same bytes."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img">',
        f"<title>{escape(description(results))}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>',
        *_products(products(results)),
        *_first_calls([(way, figure(results, way.first_figure)) for way in FIRST_CALLS]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def description(results: Sequence[Result]) -> str:
    """For who cannot see the picture."""
    said = [
        f"{p.band.title}, {_kind(p)} shapes: {p.geomean:.2f}, cuBLAS faster in {p.slower} of {len(p.ratios)}"
        for p in products(results)
    ]
    calls = [f"{way.title} {figure(results, way.first_figure)}" for way in FIRST_CALLS]
    return f"Speed of products, × cuBLAS's: {'; '.join(said) or 'not measured'}. First call: {'; '.join(calls)}."


def _kind(p: Products) -> str:
    return "random" if p.random else "listed"


# --- Products against cuBLAS ---

Scale = Callable[[float], float]  # a value's place


def _products(found: Sequence[Products]) -> Iterable[str]:
    """A column for each band, one half for the listed shapes, the other for the random ones."""
    left, right = LEFT_PANEL
    ticks = ticks_around([ratio for p in found for ratio in p.ratios])

    def y(ratio: float) -> float:
        inside = min(max(ratio, ticks[0]), ticks[-1])
        return _between(math.log(inside), math.log(ticks[0]), math.log(ticks[-1]), BOTTOM, TOP)

    yield _text(24, 26, "Products: tk's speed, × cuBLAS's, a point for each shape", "title")
    yield from _legend(24, 48)
    for tick in ticks:
        yield _line(left, y(tick), right, y(tick), "even" if tick == 1 else "grid")
        yield _text(left - 8, y(tick) + 4, f"{tick:g}", "muted", "end")
    for line, label in enumerate(("shapes", "geomean", "cuBLAS faster")):
        yield _text(left - 8, BOTTOM + 40 + 16 * line, label, "muted", "end")
    column = (right - left) / len(BANDS)
    for i, band in enumerate(BANDS):
        middle = left + column * (i + 0.5)
        if i:
            yield _line(left + column * i, TOP - 8, left + column * i, BOTTOM + 76, "grid")
        yield _text(middle, BOTTOM + 22, band.title, "strong", "middle")
        for random in (False, True):
            center = middle + (column / 4 if random else -column / 4)
            of_half = [p for p in found if p.band == band and p.random == random]
            yield _text(center, BOTTOM + 40, "random" if random else "listed", "muted", "middle")
            yield from _half(of_half[0], center, column / 4 - 4, ticks, y) if of_half else _unmeasured(center)


def _half(p: Products, center: float, room: float, ticks: Sequence[float], y: Scale) -> Iterable[str]:
    yield from _swarm(p.ratios, center, room, y)
    for beyond, edge in (
        ([r for r in p.ratios if r > ticks[-1]], TOP - 10),
        ([r for r in p.ratios if r < ticks[0]], BOTTOM - 8),
    ):
        if beyond:
            yield _text(center, edge, ", ".join(f"{r:.2g}" for r in sorted(beyond)), "small", "middle")
    yield _line(center - room, y(p.geomean), center + room, y(p.geomean), "mean")
    yield _text(center, BOTTOM + 56, f"{p.geomean:.2f}", "", "middle")
    yield _text(center, BOTTOM + 72, f"{p.slower} of {len(p.ratios)}", "", "middle")


def _unmeasured(center: float) -> Iterable[str]:
    yield _text(center, BOTTOM + 56, "not", "muted small", "middle")
    yield _text(center, BOTTOM + 72, "measured", "muted small", "middle")


def _legend(x: float, y: float) -> Iterable[str]:
    yield _dot(x + 4, y - 4, "ours")
    yield _text(x + 13, y, "tk faster", "muted")
    yield _dot(x + 88, y - 4, "theirs")
    yield _text(x + 97, y, "cuBLAS faster", "muted")
    yield _line(x + 200, y - 4, x + 220, y - 4, "mean")
    yield _text(x + 227, y, "geometric mean", "muted")


def ticks_around(values: Sequence[float], ticks: Sequence[float] = RATIO_TICKS) -> list[float]:
    """Those of `ticks` from the last one below all values to the first one above them, and one either side of 1."""
    low, high = min((*values, 0.9)), max((*values, 1.1))
    first = max((i for i, t in enumerate(ticks) if t <= low), default=0)
    last = min((i for i, t in enumerate(ticks) if t >= high), default=len(ticks) - 1)
    return list(ticks[first : last + 1])


def _swarm(ratios: Iterable[float], center: float, room: float, y: Scale) -> Iterable[str]:
    """Each as near to the middle as it can be without hiding another; where there is no room left they do."""
    placed: list[tuple[float, float]] = []
    for ratio in sorted(ratios):
        height = y(ratio)
        x = next((x for x in _sideways(center, room) if _is_free(x, height, placed)), center)
        placed.append((x, height))
        yield _dot(x, height, "theirs" if ratio < 1 else "ours")


def _sideways(center: float, room: float) -> Iterable[float]:
    yield center
    for step in range(1, int(room) + 1):
        yield center + step
        yield center - step


def _is_free(x: float, y: float, placed: Sequence[tuple[float, float]]) -> bool:
    return all(math.hypot(x - px, y - py) >= SPACING for px, py in placed)


# --- First calls ---


def _first_calls(found: Sequence[tuple[peers.Way, Measured]]) -> Iterable[str]:
    left, right = RIGHT_PANEL

    def x(ms: float) -> float:
        inside = min(max(ms, MS_TICKS[0]), MS_TICKS[-1])
        return _between(math.log(inside), math.log(MS_TICKS[0]), math.log(MS_TICKS[-1]), left, right)

    yield _text(left, 26, "First call in a process", "title")
    yield _text(left, 48, "the GPU's context up, caches empty", "muted")
    for tick in MS_TICKS:
        yield _line(x(tick), TOP - 8, x(tick), BOTTOM, "grid")
        if tick in MS_LABELS:
            yield _text(x(tick), BOTTOM + 22, MS_LABELS[tick], "muted", "middle")
    step = (BOTTOM - TOP + 8) / len(found)
    for i, (way, measured) in enumerate(found):
        y = TOP + step * i + 8
        yield _text(left + 4, y, way.title, "")
        yield from _first_call(way, measured, x, y + 13)


def _first_call(way: peers.Way, measured: Measured, x: Scale, y: float) -> Iterable[str]:
    if measured.value is None:
        yield _text(RIGHT_PANEL[0] + 4, y + 3, str(measured), "muted")
        return
    kind, end = "ours" if way.is_tk else "peer", x(measured.value)
    yield f'<line class="{kind}" x1="{RIGHT_PANEL[0]}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke-width="3"/>'
    yield f'<circle class="{kind}" cx="{end:.1f}" cy="{y:.1f}" r="4"/>'
    yield _text(end + 9, y + 4, str(measured), "strong")


# --- SVG ---


def _between(value: float, low: float, high: float, first: float, last: float) -> float:
    return first + (last - first) * (value - low) / (high - low)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>'
