"""Makes the tuned table that ships from what ``tk tune --write`` measured: pins, and weights of predicted times.

    TK_NO_LIBRARY=1 PYTHONPATH=python python tools/fit_cost.py mm 90

Reads kernels/tuned/sm90/mm_timings.json and writes mm.json beside it. "pins": the fastest config of every product
measured, with and without a row of bias, where another would be predicted. "coefficients": for every config, precision
and operand order non-negative weights of the terms that its kernel declares (``Plan.terms``), by least squares of the
relative error. Prints how the choice that follows compares with the best config measured, with each problem's size left
out of the fit that chooses for it: what a problem that nobody measured may expect. Needs SciPy.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from scipy.optimize import nnls

from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Variant, bucket_key, buckets, enumerate_grid
from tk.aot.spec import DTYPES, Family
from tk.aot.tuned import load as load_tuned
from tk.kernels.gemm.cost import weights_name
from tk.kernels.gemm.problem import DTYPE_AXIS, EPILOGUE_AXIS, ORDER_AXIS
from tk.kernels.mm.op import OP
from tk.tune import files

TUNED = Path(__file__).parents[1] / "kernels" / "tuned"
H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 62914560}
DEVICES = {90: H200}
FEWEST = 8  # measurements that a fit needs
ROWS = ("few", "many")
# What a sample counts that is not quite what the fit is for. 0 and 1 both chose worse.
OTHER_ORDERS = 0.3
OTHER_ROWS = 0.3
EARLIER = 0.3  # measured when there were not all of today's configs, on a GPU that was faster or slower than today's
UNSURE = 1.08  # what a prediction counts beside measured times: the least of several is likely one that is too low


@dataclass(frozen=True)
class Sample:
    """What one config took for one problem. name: of its weights. rows: few or many. us: measured. counts: in a fit."""

    timing: int
    size: tuple[int, int, int]
    config: str
    name: str
    rows: str
    terms: numpy.ndarray
    us: float
    counts: float


def order_of(timing: Mapping[str, Any]) -> str:
    """As the engine sees it: a single row is a row whichever way it was made."""
    return ORDER_AXIS[timing["key"]["order"]]


def problem_of(timing: Mapping[str, Any], op: Any, arch: int) -> Problem:
    m, n, k = timing["m"], timing["n"], timing["k"]
    dtype = DTYPES[timing["dtype"]]

    def matrix(rows: int, cols: int, order: str) -> TensorValue:
        return TensorValue((rows, cols), (cols, 1) if order == "n" else (1, rows), dtype)

    a, b = matrix(m, k, order_of(timing)[0]), matrix(k, n, order_of(timing)[1])
    ints = (0, int(timing["precision"] == "tf32"))
    mode = MODE_BITS["static_weights"] * timing["static_weights"]
    bare = Problem((a, b, None, matrix(m, n, "n")), ints, mode, DEVICES[arch])
    return replace(bare, locals=evaluate_locals(op.locals.values(), bare))


def local_of(problem: Problem, name: str) -> int:
    return problem.locals[list(OP.locals).index(name)]


def rows_of(problem: Problem) -> str:
    return "few" if local_of(problem, "few_rows") else "many"


def with_locals_of(variant: Variant, problem: Problem) -> Problem:
    return replace(problem, locals=evaluate_locals(variant.plan.locals, problem))


def terms_of(variant: Variant, problem: Problem) -> numpy.ndarray:
    full = with_locals_of(variant, problem)
    return numpy.array([t.evaluate(full) for t in variant.plan.terms.values()], dtype=float)


def predicted(fit: Mapping[str, Variant], problem: Problem) -> str:
    """The config that the engine takes by itself, of those that fit."""
    costs = {config: v.plan.cost.evaluate(with_locals_of(v, problem)) for config, v in fit.items()}
    return min(costs, key=costs.__getitem__)


class Variants:
    """Of a family on an architecture, by bucket."""

    def __init__(self, family: Family, arch: int):
        self._op = family.op
        self._all = enumerate_grid(family, arch).variants
        self._of_bucket = buckets(family.op, self._all)
        self.terms = tuple(self._all[0].plan.terms)  # the same names in all plans

    def that_fit(self, key: Mapping[str, int], problem: Problem) -> dict[str, Variant]:
        """Config -> the variant that it is for this problem of the bucket."""
        fit: dict[str, Variant] = {}
        for i in self._of_bucket.get(bucket_key(self._op, key), ()):
            variant = self._all[i]
            if all(c.holds.evaluate(problem) for c in variant.plan.constraints):
                fit.setdefault(variant.point.config.name, variant)
        return fit


def samples_of(timings: Sequence[Mapping[str, Any]], problems: Sequence[Problem], variants: Variants) -> list[Sample]:
    found = []
    for i, (timing, problem) in enumerate(zip(timings, problems, strict=True)):
        fit = variants.that_fit(timing["key"], problem)
        size = (timing["m"], timing["n"], timing["k"])
        rows = rows_of(problem)
        counts = 1.0 if fit.keys() <= timing["configs"].keys() else EARLIER
        for config, (_, us, _) in timing["configs"].items():
            if config in fit:  # or it was dropped
                name = weights_name(fit[config].point)
                found.append(Sample(i, size, config, name, rows, terms_of(fit[config], problem), us, counts))
    return found


def pins_of(timing: Mapping[str, Any], problem: Problem, shipped: Variants,
            fitted: Mapping[tuple[str, str], numpy.ndarray]) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Of a plain product, and of those that cost the same: with a row of bias, with the other 16-bit dtype. None where
    a config that came later, and was not measured, should be the fastest by its fit, nor where the fastest is what
    `shipped`, the variants with their new weights, predict."""

    def us(config: str, variant: Variant) -> float:
        if config in timing["configs"]:
            return timing["configs"][config][1]
        weights = fitted.get((weights_name(variant.point), rows_of(problem)))
        return math.inf if weights is None else UNSURE * float(terms_of(variant, problem) @ weights) * 1e-6

    dims = [local_of(problem, name) for name in OP.dims]
    halves = [DTYPE_AXIS.index(name) for name in ("bf16", "fp16")]
    dtype = timing["key"]["dtype"]
    for twin in halves if dtype in halves else [dtype]:
        for epilogue in ("plain", "vector"):
            key = {**timing["key"], "dtype": twin, "epilogue": EPILOGUE_AXIS.index(epilogue)}
            fit = shipped.that_fit(key, problem)
            times = {config: us(config, variant) for config, variant in fit.items()}
            best = min(times, key=times.__getitem__, default=None)
            if best in timing["configs"] and best != predicted(fit, problem):
                yield {"key": key, "dims": dims, "config": best}


class Equations:
    """Of a least-squares fit of the relative error. Those of several samples add up, and can be taken away again."""

    def __init__(self, gram: numpy.ndarray, sums: numpy.ndarray, seen: numpy.ndarray, count: int):
        self.gram, self.sums = gram, sums
        self.seen, self.count = seen, count  # samples that have a term, and all of them

    @staticmethod
    def of(samples: Sequence[Sample]) -> Equations:
        counts = numpy.array([s.counts for s in samples])
        terms = numpy.array([s.terms / (s.us * 1e6) for s in samples]) * counts[:, None]
        return Equations(terms.T @ terms, counts @ terms, (terms != 0).sum(0), len(samples))

    def __add__(self, other: Equations) -> Equations:
        return Equations(
            self.gram + other.gram, self.sums + other.sums, self.seen + other.seen, self.count + other.count
        )

    def __mul__(self, times: float) -> Equations:
        return Equations(self.gram * times, self.sums * times, self.seen, self.count)

    def without(self, other: Equations) -> Equations:
        return Equations(
            self.gram - other.gram, self.sums - other.sums, self.seen - other.seen, self.count - other.count
        )

    def weights(self) -> numpy.ndarray | None:
        """Picoseconds, none negative. None: too little was measured."""
        if self.count < FEWEST:
            return None
        size = numpy.sqrt(numpy.diag(self.gram).clip(0))
        scale = numpy.divide(1, size, out=numpy.zeros_like(size), where=self.seen > 0)
        root = numpy.linalg.cholesky(self.gram * scale[:, None] * scale[None, :] + 1e-9 * numpy.eye(len(scale)))
        return nnls(root.T, numpy.linalg.solve(root, self.sums * scale))[0] * scale


class Fits:
    """Weights by name and rows, also with one size left out."""

    def __init__(self, samples: Sequence[Sample], terms: Sequence[str]):
        self._launch, self._pdl_launch = terms.index("launch"), terms.index("pdl_launch")
        parts = defaultdict(list)
        for s in samples:
            for name in (s.name, without_order(s.name)):
                parts[name, s.rows, s.size].append(s)
        self._parts = {key: Equations.of(s) for key, s in parts.items()}
        self._whole: dict[tuple[str, str], Equations] = {}
        for (name, rows, _), part in self._parts.items():
            self._whole[name, rows] = self._whole[name, rows] + part if (name, rows) in self._whole else part
        self.kinds = sorted({without_order(s.name) for s in samples})

    @functools.cache  # noqa: B019  (one of these lives as long as the program)
    def weights(self, name: str, rows: str, left_out: tuple[int, int, int] | None = None) -> numpy.ndarray | None:
        kind = without_order(name)
        if (kind, rows) not in self._whole:
            rows = next(r for r in ROWS if r != rows)  # a config that is for few rows alone
        total = None
        for of, order_counts in ((name, 1.0), (kind, OTHER_ORDERS)):
            for r in ROWS:
                whole, part = self._whole.get((of, r)), self._parts.get((of, r, left_out))
                if whole is None:
                    continue
                counts = order_counts * (1.0 if r == rows else OTHER_ROWS)
                rest = (whole if part is None else whole.without(part)) * counts**2
                total = rest if total is None else total + rest
        if total is None or (weights := total.weights()) is None:
            return None
        if not total.seen[self._pdl_launch]:  # never measured in static_weights mode
            weights[self._pdl_launch] = weights[self._launch]
        return weights


def rounded(names: Sequence[str], weights: numpy.ndarray) -> dict[str, int]:
    return {name: round(weight) for name, weight in zip(names, weights.tolist(), strict=True) if round(weight)}


def without_order(name: str) -> str:
    return name.rpartition("/")[0]


@dataclass(frozen=True)
class Regret:
    """ratio: time of the config chosen over the best one measured. complete: all of today's configs were."""

    ratio: float
    label: str
    rows: str
    complete: bool


def regrets(timings: Sequence[Mapping[str, Any]], samples: Sequence[Sample], fits: Fits) -> list[Regret]:
    """Of each problem, the size itself left out of the fits; the worst first."""
    of_timing = defaultdict(list)
    for sample in samples:
        of_timing[sample.timing].append(sample)
    found = []
    for i, measured in of_timing.items():
        predicted = []
        for sample in measured:
            weights = fits.weights(sample.name, sample.rows, sample.size)
            predicted.append(math.inf if weights is None else float(sample.terms @ weights))
        chosen = measured[predicted.index(min(predicted))]
        best = min(measured, key=lambda sample: sample.us)
        task = " ".join(str(timings[i][name]) for name in ("m", "n", "k", "dtype", "order"))
        static = " static" if timings[i]["static_weights"] else ""
        label = f"{task}{static}: {chosen.config}, best {best.config}"
        found.append(Regret(chosen.us / best.us, label, chosen.rows, chosen.counts == 1))
    return sorted(found, key=lambda regret: -regret.ratio)


def mean(regrets: Sequence[Regret]) -> str:
    geometric = math.exp(sum(math.log(r.ratio) for r in regrets) / max(len(regrets), 1))
    return f"{geometric:.4f} ({len(regrets)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem")
    parser.add_argument("arch", type=int)
    args = parser.parse_args()
    table = TUNED / f"sm{args.arch}" / f"{args.stem}.json"
    measured = json.loads(table.with_name(f"{args.stem}_timings.json").read_text())
    family: Family = import_module(f"tk.kernels.{args.stem}.family").FAMILY
    variants = Variants(family, args.arch)
    timings = measured["timings"]
    problems = [problem_of(timing, family.op, args.arch) for timing in timings]
    samples = samples_of(timings, problems, variants)
    fits = Fits(samples, variants.terms)
    fitted = {}
    for name in (f"{kind}/{order}" for kind in fits.kinds for order in ORDER_AXIS):
        for rows in ROWS:
            weights = fits.weights(name, rows)
            if weights is not None:
                fitted[name, rows] = weights
    coefficients: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for (name, rows), weights in fitted.items():
        coefficients[name][rows] = rounded(variants.terms, weights)
    record = {name: value for name, value in measured.items() if name != "timings"}
    files.write(table, {**record, "coefficients": coefficients, "pins": []})
    load_tuned.cache_clear()
    shipped = Variants(family, args.arch)  # with the weights that were just written
    pins = [pin for t, p in zip(timings, problems, strict=True) for pin in pins_of(t, p, shipped, fitted)]
    files.write(table, {**record, "coefficients": coefficients, "pins": files.merge([], pins)})
    found = regrets(timings, samples, fits)
    complete = [r for r in found if r.complete]
    of_rows = ", ".join(f"{rows} rows {mean([r for r in complete if r.rows == rows])}" for rows in ROWS)
    print(f"{len(pins)} pins; {len(coefficients)} fits; regret of sizes left out, geomean (products): {mean(found)};")
    print(f"where all configs were measured: {mean(complete)}, {of_rows}; the worst of these:")
    for regret in complete[:10]:
        print(f"  {regret.ratio:.3f}  {regret.label}")


if __name__ == "__main__":
    main()
