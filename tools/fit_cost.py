"""Makes the tuned table that ships from what ``tk tune --write`` measured: pins, and weights of predicted times.

    TK_NO_LIBRARY=1 PYTHONPATH=python python tools/fit_cost.py mm 90

of mm, or of another op that ``tk tune`` times. Reads kernels/tuned/sm90/mm_timings.json and writes mm.json beside
it. "pins": the fastest config of every product measured, where another would be predicted; of mm and its like also with
a row of bias, and in the other 16-bit dtype. "coefficients": for every config, precision and operand order non-negative
weights of the terms that its kernel declares (``Plan.terms``), by least squares of the relative error. Prints how the
choice that follows compares with the best config measured, with each problem's size left out of the fit that chooses
for it: what a problem that nobody measured may expect. Needs SciPy (requirements/test.txt).
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

from tk import _cache
from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Variant, bucket_key, buckets, enumerate_grid
from tk.aot.spec import DTYPES, Family, Op
from tk.kernels.gemm.cost import weights_name
from tk.kernels.gemm.problem import DTYPE_AXIS, EPILOGUE_AXIS, ORDER_AXIS
from tk.kernels.tuned_tables import load as load_tuned
from tk.tune import files, pins, timings

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


Size = tuple[int, ...]  # of a problem: all dims but its mode


@dataclass(frozen=True)
class Sample:
    """What one config took for one problem. name: of its weights. rows: few or many. us: measured. counts: in a fit."""

    timing: int
    size: Size
    config: str
    name: str
    rows: str
    terms: numpy.ndarray
    us: float
    counts: float


def order_of(timing: Mapping[str, Any]) -> str:
    """The order in memory as the engine sees it: a single row is a row whichever way it was made."""
    return ORDER_AXIS[timing["key"]["order"]]


def problem_of(timing: Mapping[str, Any], op: Op, arch: int) -> Problem:
    """The problem, as the op's expressions see what was timed."""
    bare = _bare_problem(timing, arch) if "tensors" in timing else _bare_product(timing, arch)
    return replace(bare, locals=evaluate_locals(op.locals.values(), bare))


def _bare_problem(timing: Mapping[str, Any], arch: int) -> Problem:
    problem = pins.problem_of(timing, Path(f"the timings of {timing['op']}"))
    return Problem(timings.values(problem), problem.ints, problem.mode, DEVICES[arch])


def _bare_product(timing: Mapping[str, Any], arch: int) -> Problem:
    """A problem of mm, whose timings say no more than what differs."""
    m, n, k = timing["m"], timing["n"], timing["k"]
    dtype = DTYPES[timing["dtype"]]

    def matrix(rows: int, cols: int, order: str) -> TensorValue:
        return TensorValue((rows, cols), (cols, 1) if order == "n" else (1, rows), dtype)

    a, b = matrix(m, k, order_of(timing)[0]), matrix(k, n, order_of(timing)[1])
    ints = (0, int(timing["precision"] == "tf32"))
    mode = MODE_BITS["static_weights"] * timing["static_weights"]
    return Problem((a, b, None, matrix(m, n, "n")), ints, mode, DEVICES[arch])


def local_of(op: Op, problem: Problem, name: str) -> int:
    return problem.locals[list(op.locals).index(name)]


def size_of(op: Op, problem: Problem) -> Size:
    return tuple(local_of(op, problem, name) for name in op.dims if name != "pdl")


def rows_of(op: Op, problem: Problem) -> str:
    return "few" if local_of(op, problem, "few_rows") else "many"


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
    """The variants of a family on an architecture, by bucket."""

    def __init__(self, family: Family, arch: int):
        self.op = family.op
        self._all = enumerate_grid(family, arch).variants
        self._of_bucket = buckets(family.op, self._all)
        self.terms = tuple(self._all[0].plan.terms)  # the same names in all plans

    def that_fit(self, key: Mapping[str, int], problem: Problem) -> dict[str, Variant]:
        """Config -> the variant that it is for this problem of the bucket."""
        fit: dict[str, Variant] = {}
        for i in self._of_bucket.get(bucket_key(self.op, key), ()):
            variant = self._all[i]
            if all(c.holds.evaluate(problem) for c in variant.plan.constraints):
                fit.setdefault(variant.point.config.name, variant)
        return fit


def samples_of(timings: Sequence[Mapping[str, Any]], problems: Sequence[Problem], variants: Variants) -> list[Sample]:
    found = []
    for i, (timing, problem) in enumerate(zip(timings, problems, strict=True)):
        fit = variants.that_fit(timing["key"], problem)
        size, rows = size_of(variants.op, problem), rows_of(variants.op, problem)
        counts = 1.0 if fit.keys() <= timing["configs"].keys() else EARLIER
        for config, (_, us, _) in timing["configs"].items():
            if config in fit:  # or it was dropped
                name = weights_name(fit[config].point)
                found.append(Sample(i, size, config, name, rows, terms_of(fit[config], problem), us, counts))
    return found


def pins_of(timing: Mapping[str, Any], problem: Problem, shipped: Variants,
            fitted: Mapping[tuple[str, str], numpy.ndarray]) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Pins of what was timed, and of what costs the same. None where a config that came later, and was not measured,
    should be the fastest by its fit, nor where the fastest is what `shipped`, the variants with their new weights,
    predict."""
    op = shipped.op

    def us(config: str, variant: Variant) -> float:
        if config in timing["configs"]:
            return timing["configs"][config][1]
        weights = fitted.get((weights_name(variant.point), rows_of(op, problem)))
        return math.inf if weights is None else UNSURE * float(terms_of(variant, problem) @ weights) * 1e-6

    dims = [local_of(op, problem, name) for name in op.dims]
    for key in twins(timing["key"]):
        fit = shipped.that_fit(key, problem)
        times = {config: us(config, variant) for config, variant in fit.items()}
        best = min(times, key=times.__getitem__, default=None)
        if best in timing["configs"] and best != predicted(fit, problem):
            yield {"key": key, "dims": dims, "config": best}


def twins(key: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The buckets that cost the same: with a row of bias and in the other 16-bit dtype, where an op has those axes."""
    halves = [DTYPE_AXIS.index(name) for name in ("bf16", "fp16")]
    if "epilogue" not in key:
        yield dict(key)
        return
    for dtype in halves if key["dtype"] in halves else [key["dtype"]]:
        for epilogue in ("plain", "vector"):
            yield {**key, "dtype": dtype, "epilogue": EPILOGUE_AXIS.index(epilogue)}


class Equations:
    """The normal equations of a least-squares fit of the relative error. Those of several samples add up, and can be
    taken away again."""

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
        scaled = self.gram * scale[:, None] * scale[None, :] + 1e-9 * numpy.eye(len(scale))
        return non_negative(scaled, self.sums * scale) * scale


def non_negative(gram: numpy.ndarray, sums: numpy.ndarray) -> numpy.ndarray:
    """The x with no negative element that minimises x gram x / 2 - sums x; gram is positive definite."""
    root = numpy.linalg.cholesky(gram)
    return nnls(root.T, numpy.linalg.solve(root, sums))[0]


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
    def weights(self, name: str, rows: str, left_out: Size | None = None) -> numpy.ndarray | None:
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


def label_of(timing: Mapping[str, Any], size: Size) -> str:
    """A size in words, for people."""
    if "tensors" not in timing:
        static = " static" if timing["static_weights"] else ""
        return " ".join(str(timing[name]) for name in ("m", "n", "k", "dtype", "order")) + static
    axes = " ".join(f"{name} {value}" for name, value in timing["key"].items() if value)
    return f"{timing['op']} {' '.join(map(str, size))} {axes}".rstrip()


def regrets(timings: Sequence[Mapping[str, Any]], samples: Sequence[Sample], fits: Fits) -> list[Regret]:
    """The regret of each problem, the size itself left out of the fits; the worst first."""
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
        label = f"{label_of(timings[i], chosen.size)}: {chosen.config}, best {best.config}"
        found.append(Regret(chosen.us / best.us, label, chosen.rows, chosen.counts == 1))
    return sorted(found, key=lambda regret: -regret.ratio)


def mean(regrets: Sequence[Regret]) -> str:
    geometric = math.exp(sum(math.log(r.ratio) for r in regrets) / max(len(regrets), 1))
    return f"{geometric:.4f} ({len(regrets)})"


def family_of(op: str) -> Family:
    room = import_module(f"tk.kernels.{timings.room(op)}.family")
    return next(f for f in getattr(room, "FAMILIES", None) or [room.FAMILY] if f.op.name == op)


def orders_of(family: Family) -> list[str]:
    return list(dict.fromkeys(order for kernel in family.kernels for order in kernel.axes.get("order", ("nn",))))


def fit(stem: str, arch: int, folder: Path = TUNED) -> str:
    """Writes the table of an op from its timings, in the architecture's folder below `folder`; returns a report."""
    table = folder / f"sm{arch}" / f"{stem}.json"
    measured = json.loads(table.with_name(f"{stem}_timings.json").read_text())
    family = family_of(stem)
    variants = Variants(family, arch)
    timed = measured["timings"]
    problems = [problem_of(timing, family.op, arch) for timing in timed]
    samples = samples_of(timed, problems, variants)
    fits = Fits(samples, variants.terms)
    fitted = {}
    for name in (f"{kind}/{order}" for kind in fits.kinds for order in orders_of(family)):
        for rows in ROWS:
            weights = fits.weights(name, rows)
            if weights is not None:
                fitted[name, rows] = weights
    coefficients: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)
    for (name, rows), weights in fitted.items():
        coefficients[name][rows] = rounded(variants.terms, weights)
    record = {name: value for name, value in measured.items() if name != "timings"}
    _cache.write_json(table, {**record, "coefficients": coefficients, "pins": []})
    load_tuned.cache_clear()
    shipped = Variants(family, arch)  # with the weights that were just written
    found_pins = [pin for t, p in zip(timed, problems, strict=True) for pin in pins_of(t, p, shipped, fitted)]
    _cache.write_json(table, {**record, "coefficients": coefficients, "pins": files.merge([], found_pins)})
    return report(regrets(timed, samples, fits), len(found_pins), len(coefficients))


def report(found: Sequence[Regret], n_pins: int, n_fits: int) -> str:
    complete = [r for r in found if r.complete]
    of_rows = ", ".join(f"{rows} rows {mean([r for r in complete if r.rows == rows])}" for rows in ROWS)
    lines = [
        f"{n_pins} pins; {n_fits} fits; regret of sizes left out, geomean (products): {mean(found)};",
        f"where all configs were measured: {mean(complete)}, {of_rows}; the worst of these:",
        *(f"  {regret.ratio:.3f}  {regret.label}" for regret in complete[:10]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem")
    parser.add_argument("arch", type=int)
    args = parser.parse_args()
    print(fit(args.stem, args.arch))


if __name__ == "__main__":
    main()
