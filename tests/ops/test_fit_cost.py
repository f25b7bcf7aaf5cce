"""From timings to the table that ships, with timings that are made up: what a hidden law gives, and some noise."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType

import numpy
import pytest
import torch

pytest.importorskip("triton", reason="plans are declared beside kernels")

import tk.kernels
from tk import capi
from tk.aot.expr import Problem
from tk.aot.spec import Family
from tk.kernels import tuned_tables
from tk.tune import pins, products, timings
from tk.tune.measure import Measured, Result
from tk.tune.products import Drawn

ROOT = Path(__file__).resolve().parents[2]
NOISE = 0.02
# Picoseconds of each term, the same for all configs but for k blocks: what a product of one takes, and of a schedule
# that mm's weights have for the better one.
LAW = {"launch": 2_900_000, "wave": 600_000, "l2_kb": 35, "dram_kb": 60, "unaligned_kb": 20, "oob_kb": 90}
PER_PRODUCT, PINGPONG = 0.25, 1.6
PRODUCTS_OF_A_GEMV = 300_000  # the k block of a kernel that has none


@pytest.fixture(scope="module")
def fit_cost() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_cost", ROOT / "tools/fit_cost.py")
    assert spec and spec.loader
    module = sys.modules["fit_cost"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def matrix(d: Drawn, dtype: torch.dtype, rows: int, cols: int, order: str = "n") -> capi.Matrix:
    strides = (cols, 1) if order == "n" else (1, rows)
    if d.op == "bmm":
        return capi.Matrix(dtype, (d.batch, rows, cols), (rows * cols, *strides))
    return capi.Matrix(dtype, (rows, cols), strides)


def problem_of(d: Drawn) -> capi.Problem:
    """As the op describes the call to the core."""
    half, eight, single = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    out = matrix(d, half, d.m, d.n)
    if d.op == "scaled_mm":
        scales = matrix(d, single, d.m, 1), matrix(d, single, 1, d.n)
        given = (matrix(d, eight, d.m, d.k), matrix(d, eight, d.k, d.n, "t"), *scales, None, out)
        return capi.Problem("scaled_mm", given, (0, int(d.fast)))
    if d.op == "int4_mm":
        scales = matrix(d, half, d.k // d.group, d.n)
        packed = matrix(d, torch.uint8, d.k // 2, d.n)
        return capi.Problem(
            "int4_mm", (matrix(d, half, d.m, d.k), packed, scales, scales, None, out), (0, 0), (1.0, 1.0)
        )
    inner = (d.k, d.k2) if d.op == "mm_plus_mm" else (d.k,)
    factors = [x for k in inner for x in (matrix(d, half, d.m, k, d.order[0]), matrix(d, half, k, d.n, d.order[1]))]
    return capi.Problem(d.op, (*factors, None, out), (0, 0), (1.0, 1.0))


class Machine:
    """A GPU that obeys the law."""

    def __init__(self, fit_cost: ModuleType, op: str):
        self.family: Family = fit_cost.family_of(op)
        self.fit_cost, self.variants = fit_cost, fit_cost.Variants(self.family, 90)

    def times(self, d: Drawn) -> dict[str, float]:
        """Microseconds of every config that fits."""
        described = self._described(d)
        fit = self.variants.that_fit(timings.selector_values(problem_of(d)), described)
        return {config: self._us(v, described) for config, v in fit.items()}

    def _described(self, d: Drawn) -> Problem:
        """As it comes back from a file."""
        return self.fit_cost.problem_of(pins.problem_entry(problem_of(d)), self.family.op, 90)

    def _us(self, variant, problem) -> float:  # type: ignore[no-untyped-def]
        c = variant.point.config
        pace = PER_PRODUCT * (PINGPONG if c.params.get("pingpong") else 1)
        products_of = c.block_m * c.block_n * c.block_k if "block_m" in c.params else PRODUCTS_OF_A_GEMV
        law = {**LAW, "k_block": pace * products_of}
        terms = dict(zip(variant.plan.terms, self.fit_cost.terms_of(variant, problem), strict=True))
        return sum(law.get(name, 0) * term for name, term in terms.items()) * 1e-6

    def loss(self, d: Drawn, variants) -> float:  # type: ignore[no-untyped-def]
        """What these variants' choice takes, over the best."""
        problem, times = self._described(d), self.times(d)
        key = timings.selector_values(problem_of(d))
        return times[self.fit_cost.predicted(variants.that_fit(key, problem), problem)] / min(times.values())

    def result(self, d: Drawn, rng: random.Random) -> Result:
        noisy = {config: us * (1 + rng.gauss(0, NOISE)) for config, us in self.times(d).items()}
        measured = [Measured(config, 0, "kernel", us, 0.0) for config, us in noisy.items()]
        return Result(d, problem_of(d), sorted(measured, key=lambda m: m.us))


@pytest.mark.parametrize("op", products.OPS)
def test_the_choice_of_unseen_sizes_is_what_the_timings_say(
    op: str, fit_cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, rng = Machine(fit_cost, op), random.Random(0)
    folder = tmp_path / "tuned" / "sm90"
    drawn = products.draw(op, 60, seed=0)
    timings.write(folder / f"{op}_timings.json", [machine.result(d, rng) for d in drawn], {"gpu": "G"})
    monkeypatch.setattr(tk.kernels, "__path__", [str(tmp_path), *tk.kernels.__path__])
    try:
        report = fit_cost.fit(op, 90, tmp_path / "tuned")
        table = tuned_tables.read(folder / f"{op}.json")
        shipped = fit_cost.Variants(machine.family, 90)  # which read that table
    finally:
        tuned_tables.load.cache_clear()
    assert "regret of sizes left out" in report and table["gpu"] == "G"
    before, after = (
        [machine.loss(d, variants) for d in products.draw(op, 40, seed=1)] for variants in (machine.variants, shipped)
    )
    assert geometric_mean(after) < 1.02 and max(after) < 1.2, after
    assert geometric_mean(before) > 1.05, "the fit has nothing to do"


@pytest.mark.parametrize("op", products.OPS)
def test_what_is_drawn_depends_on_the_seed_and_is_not_too_large(op: str) -> None:
    drawn = products.draw(op, 50, seed=3)
    assert drawn == products.draw(op, 50, seed=3) != products.draw(op, 50, seed=4)
    assert len(set(drawn)) == 50 and len(set(map(str, drawn))) == 50
    assert all(d.flops <= products.MOST_FLOPS and d.bytes <= products.MOST_BYTES for d in drawn)


@pytest.mark.parametrize("seed", range(20))
def test_no_weight_is_negative_and_none_could_be_better(fit_cost: ModuleType, seed: int) -> None:
    """Karush, Kuhn and Tucker: the gradient is 0 where x is positive, and does not fall where it is 0."""
    rng = numpy.random.default_rng(seed)
    terms = rng.random((30, 10)) ** 4
    gram, sums = terms.T @ terms + 1e-9 * numpy.eye(10), terms.T @ rng.normal(1, 2, 30)
    x = fit_cost.non_negative(gram, sums)
    gradient = gram @ x - sums
    assert (x >= 0).all() and (x > 0).any() and (x == 0).any()
    numpy.testing.assert_allclose(gradient[x > 0], 0, atol=1e-9 * abs(sums).max())
    assert (gradient[x == 0] >= -1e-9 * abs(sums).max()).all()


def test_what_costs_the_same_is_pinned_alike(fit_cost: ModuleType) -> None:
    plain = {"dtype": 0, "order": 1, "epilogue": 0, "out": 0, "precision": 0}
    assert [(k["dtype"], k["epilogue"]) for k in fit_cost.twins(plain)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    float8 = {"dtype": 0, "b_dtype": 0, "order": 0, "out": 0, "accumulation": 1}
    assert list(fit_cost.twins(float8)) == [float8]
