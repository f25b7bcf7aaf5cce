"""What a user gains, read from the results files: for README's first table and its picture. Pure; measures nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import BANDS, Band

Result = Mapping[str, Any]  # a results file, as benchmarks/report.py says

LISTED_GROUPS = ("few", "large")  # of products under graph replay against torch.mm
NOT_MEASURED = "not measured"
RANDOM_GROUPS = tuple(f"random_{band.name}" for band in BANDS)


def read(folder: Path) -> list[Result]:
    """The results in `folder` that hold anything, by file name."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [r for r in results if r.get("groups") or r.get("figures") or r.get("failures")]


# --- Figures ---


@dataclass(frozen=True)
class Measured:
    """A figure. value None: there is none, for the reason that `missing` gives."""

    value: float | None
    unit: str = ""
    missing: str = ""

    @property
    def tried(self) -> bool:
        return self.missing != NOT_MEASURED

    def __str__(self) -> str:
        return self.missing if self.value is None else quantity(self.value, self.unit)


def figure(results: Iterable[Result], name: str) -> Measured:
    """The figure called `name`: "failed" where measuring it failed, "not measured" where nobody tried."""
    failed = False
    for result in results:
        for f in result.get("figures", ()):
            if f["name"] == name and f["value"] is not None:
                return Measured(f["value"], f["unit"])
        failed = failed or any(f["label"] == name for f in result.get("failures", ()))
    return Measured(None, missing="failed" if failed else NOT_MEASURED)


def quantity(value: float, unit: str) -> str:
    """Two digits, or all before the point; milliseconds from a thousand on as seconds."""
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f} {unit}" if value > 0 else f"{value:g} {unit}"


# --- Products ---


@dataclass(frozen=True)
class Products:
    """Those of a band of rows, under graph replay. ratios: torch.mm's time over tk's. random: drawn, not listed."""

    band: Band
    random: bool
    ratios: tuple[float, ...]

    @property
    def geomean(self) -> float:
        return math.exp(sum(map(math.log, self.ratios)) / len(self.ratios))

    @property
    def slower(self) -> int:
        """How many shapes cuBLAS is faster in."""
        return sum(ratio < 1 for ratio in self.ratios)

    @property
    def worst(self) -> float:
        return min(self.ratios)


def products(results: Iterable[Result]) -> list[Products]:
    """By band, the listed shapes first; what was not measured is left out."""
    found: dict[tuple[Band, bool], list[float]] = {(band, r): [] for band in BANDS for r in (False, True)}
    for group in (g for result in results for g in result.get("groups", ())):
        if group["name"] in LISTED_GROUPS + RANDOM_GROUPS:
            for row in group["rows"]:
                band = next(b for b in BANDS if row["m"] in b)
                found[band, group["name"] in RANDOM_GROUPS].append(row["ratio"])
    return [Products(band, random, tuple(ratios)) for (band, random), ratios in found.items() if ratios]
