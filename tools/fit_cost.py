"""Makes the tuned table that ships from what ``tk tune --write`` measured: pins, and weights of predicted times.

    TK_NO_LIBRARY=1 PYTHONPATH=python python tools/fit_cost.py mm 90

Reads kernels/tuned/sm90/mm_timings.json and writes mm.json beside it. "pins": the fastest config of every product
measured, with and without a row of bias. "coefficients": for every config, precision and operand order non-negative
weights of the terms that its kernel declares (``Plan.terms``), by least squares of the relative error. Prints how the
choice that follows compares with the best config measured, with each problem's size left out of the fit that chooses
for it: what a problem that nobody measured may expect. Needs SciPy.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from scipy.optimize import nnls

from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import DTYPES, Family
from tk.kernels.mm_op import DTYPE_AXIS, EPILOGUE_AXIS, ORDER_AXIS, weights_name
from tk.tune import files

TUNED = Path(__file__).parents[1] / "kernels" / "tuned"
H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 62914560}
DEVICES = {90: H200}
FEWEST = 8  # measurements that a fit needs
ALONE, EARLY = 0, 1  # the terms of what a launch costs
OTHER_ORDERS = 0.3  # what a measurement counts for the weights of another operand order: 0 and 1 both chose worse


@dataclass(frozen=True)
class Sample:
    """What one config took for one problem. name: of its weights. us: measured."""

    timing: int
    size: tuple[int, int, int]
    config: str
    name: str
    terms: numpy.ndarray
    us: float


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
    return Problem(bare.tensors, ints, mode, bare.device, evaluate_locals(op.locals.values(), bare))


def terms_of(variant: Variant, problem: Problem) -> numpy.ndarray:
    values = evaluate_locals(variant.plan.locals, problem)
    full = Problem(problem.tensors, problem.ints, problem.mode, problem.device, values)
    return numpy.array([t.evaluate(full) for t in variant.plan.terms.values()], dtype=float)


class Variants:
    """Of a family on an architecture, by bucket."""

    def __init__(self, family: Family, arch: int):
        self._of_bucket = defaultdict(list)
        for variant in enumerate_grid(family, arch).variants:
            serves = variant.plan.serves
            for values in itertools.product(*(serves[axis] for axis in family.op.selectors)):
                self._of_bucket[values].append(variant)
        self._axes = tuple(family.op.selectors)

    def that_fit(self, key: Mapping[str, int], problem: Problem) -> dict[str, Variant]:
        """Config -> the variant that it is for this problem of the bucket."""
        fit: dict[str, Variant] = {}
        for variant in self._of_bucket[tuple(key[axis] for axis in self._axes)]:
            if all(c.holds.evaluate(problem) for c in variant.plan.constraints):
                fit.setdefault(variant.point.config.name, variant)
        return fit


def samples_of(timings: Sequence[Mapping[str, Any]], problems: Sequence[Problem], variants: Variants) -> list[Sample]:
    found = []
    for i, (timing, problem) in enumerate(zip(timings, problems, strict=True)):
        fit = variants.that_fit(timing["key"], problem)
        for config, (_, us, _) in timing["configs"].items():
            if config in fit:  # or it was dropped
                size = (timing["m"], timing["n"], timing["k"])
                name = weights_name(fit[config].point)
                found.append(Sample(i, size, config, name, terms_of(fit[config], problem), us))
    return found


def pins_of(timing: Mapping[str, Any], problem: Problem, op: Any, variants: Variants,
            fitted: Mapping[str, numpy.ndarray]) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Of a plain product, and of those that cost the same: with a row of bias, with the other 16-bit dtype. None where
    a config that came later, and was not measured, should be the fastest by its fit."""

    def us(config: str, variant: Variant) -> float:
        if config in timing["configs"]:
            return timing["configs"][config][1]
        weights = fitted.get(weights_name(variant.point))
        return math.inf if weights is None else float(terms_of(variant, problem) @ weights) * 1e-6

    names = list(op.locals)
    dims = [problem.locals[names.index(name)] for name in op.dims]
    halves = [DTYPE_AXIS.index(name) for name in ("bf16", "fp16")]
    dtype = timing["key"]["dtype"]
    for twin in halves if dtype in halves else [dtype]:
        for epilogue in ("plain", "vector"):
            key = {**timing["key"], "dtype": twin, "epilogue": EPILOGUE_AXIS.index(epilogue)}
            times = {config: us(config, variant) for config, variant in variants.that_fit(key, problem).items()}
            best = min(times, key=times.__getitem__, default=None)
            if best in timing["configs"]:
                yield {"key": key, "dims": dims, "config": best}


class Equations:
    """Of a least-squares fit of the relative error. Those of several samples add up, and can be taken away again."""

    def __init__(self, gram: numpy.ndarray, sums: numpy.ndarray, seen: numpy.ndarray, count: int):
        self.gram, self.sums = gram, sums
        self.seen, self.count = seen, count  # samples that have a term, and all of them

    @staticmethod
    def of(samples: Sequence[Sample]) -> Equations:
        terms = numpy.array([s.terms / (s.us * 1e6) for s in samples])
        return Equations(terms.T @ terms, terms.sum(0), (terms != 0).sum(0), len(samples))

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
        weights = nnls(root.T, numpy.linalg.solve(root, self.sums * scale))[0] * scale
        if not self.seen[EARLY]:  # never measured in static_weights mode
            weights[EARLY] = weights[ALONE]
        return weights


class Fits:
    """Weights by name, and by name with one size left out. What was measured with other operand orders counts less."""

    def __init__(self, samples: Sequence[Sample]):
        own, all_orders = defaultdict(list), defaultdict(list)
        for sample in samples:
            own[sample.name, sample.size].append(sample)
            all_orders[without_order(sample.name), sample.size].append(sample)
        self._parts = {key: Equations.of(s) for key, s in (own | all_orders).items()}
        self._whole: dict[str, Equations] = {}
        for (name, _), part in self._parts.items():
            self._whole[name] = self._whole[name] + part if name in self._whole else part
        self.kinds = sorted({name for name, _ in all_orders})

    @functools.cache  # noqa: B019  (one of these lives as long as the program)
    def weights(self, name: str, left_out: tuple[int, int, int] | None = None) -> numpy.ndarray | None:
        own, others = self._rest(name, left_out), self._rest(without_order(name), left_out)
        others *= OTHER_ORDERS**2
        return (others if own is None else own + others).weights()

    def _rest(self, name: str, left_out: tuple[int, int, int] | None) -> Equations | None:
        whole, part = self._whole.get(name), self._parts.get((name, left_out))
        return whole if whole is None or part is None else whole.without(part)


def rounded(names: Sequence[str], weights: numpy.ndarray) -> dict[str, int]:
    return {name: round(weight) for name, weight in zip(names, weights.tolist(), strict=True) if round(weight)}


def without_order(name: str) -> str:
    return name.rpartition("/")[0]


def regrets(timings: Sequence[Mapping[str, Any]], samples: Sequence[Sample], fits: Fits) -> list[tuple[float, str]]:
    """Of each problem: time of the config chosen over the best, the size itself left out of the fits."""
    predicted: dict[int, dict[str, float]] = defaultdict(dict)
    of_timing = defaultdict(list)
    for sample in samples:
        of_timing[sample.timing].append(sample)
        weights = fits.weights(sample.name, sample.size)
        if weights is not None:
            predicted[sample.timing][sample.config] = float(sample.terms @ weights)
    found = []
    for i, timing in enumerate(timings):
        times = {sample.config: sample.us for sample in of_timing[i]}
        if predicted[i]:
            chosen = min(predicted[i], key=predicted[i].__getitem__)
            best = min(times, key=times.__getitem__)
            label = f"{timing['m']}x{timing['n']}x{timing['k']} {timing['dtype']} {timing['order']}"
            found.append((times[chosen] / times[best], f"{label}: {chosen}, best {best}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem")
    parser.add_argument("arch", type=int)
    args = parser.parse_args()
    table = TUNED / f"sm{args.arch}" / f"{args.stem}.json"
    measured = json.loads(table.with_name(f"{args.stem}_timings.json").read_text())
    family: Family = import_module(f"tk.kernels.{args.stem}").FAMILY
    variants = Variants(family, args.arch)
    problems = [problem_of(timing, family.op, args.arch) for timing in measured["timings"]]
    timings = measured["timings"]
    samples = samples_of(timings, problems, variants)
    names = tuple(next(iter(enumerate_grid(family, args.arch).variants)).plan.terms)
    fits = Fits(samples)
    fitted = {}
    for name in (f"{kind}/{order}" for kind in fits.kinds for order in ORDER_AXIS):
        weights = fits.weights(name)
        if weights is not None:
            fitted[name] = weights
    coefficients = {name: rounded(names, weights) for name, weights in fitted.items()}
    pins = [pin for t, p in zip(timings, problems, strict=True) for pin in pins_of(t, p, family.op, variants, fitted)]
    record = {name: value for name, value in measured.items() if name != "timings"}
    files.write(table, {**record, "coefficients": coefficients, "pins": files.merge([], pins)})
    found = sorted(regrets(timings, samples, fits), reverse=True)
    mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
    print(f"{len(coefficients)} fits; regret of sizes left out: geomean {mean:.4f} over {len(found)}, worst:")
    for regret, shown in found[:10]:
        print(f"  {regret:.3f}  {shown}")


if __name__ == "__main__":
    main()
