"""The cost model of docs/parallel.md: the page has what it prints, and it does not contradict itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def costs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parallel_costs", ROOT / "tools/parallel_costs.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["parallel_costs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_it_prints(costs: ModuleType) -> None:
    page = " ".join((ROOT / "docs/parallel.md").read_text().split())
    missing = [name for name, text in costs.texts().items() if " ".join(text.split()) not in page]
    assert not missing, "python tools/parallel_costs.py prints these for docs/parallel.md"


def test_what_follows_from_whatever_the_numbers_are(costs: ModuleType) -> None:
    """No fused call is faster than its product alone, and no collective than its bytes."""
    for model in costs.MODELS:
        for ranks in costs.RANKS:
            for rows in costs.ROWS:
                n_bytes = 2 * rows * model.hidden
                for call in costs.calls(model, ranks, rows)[:-1]:
                    assert call.fused > call.plain - call.collective
                    assert call.collective > costs.moved(n_bytes * (ranks - 1) / ranks)
                last = costs.calls(model, ranks, rows)[-1]
                assert costs.moved(n_bytes) <= last.fused < last.plain


def test_what_the_page_compares_with_published_figures(costs: ModuleType) -> None:
    product = costs.Product(2048, 3584, 8192)
    plain = product.time() + costs.gathered(2 * product.m * product.k, 8)
    fused = costs.all_gather_linear(product, 8)
    page = " ".join((ROOT / "docs/parallel.md").read_text().split())
    assert f"the model says {plain:.0f} and {fused:.0f} µs" in page
    assert f"its gain of {plain / fused:.2f} was" in page


def test_runs_of_sizes(costs: ModuleType) -> None:
    assert costs._ranges([2, 4, 16], [2, 4, 8, 16]) == "2 to 4, 16"
    assert costs._ranges([], [2, 4]) == "never"
