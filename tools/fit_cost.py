"""Fits the weights of predicted times to what ``tk tune --write`` measured.

    TK_NO_LIBRARY=1 PYTHONPATH=python python tools/fit_cost.py mm 90

Reads kernels/tuned/sm90/mm_timings.json and writes the "coefficients" of mm.json beside it: for every config, precision
and operand order non-negative weights of the terms that its kernel declares (``Plan.terms``), by least squares of the
relative error. Prints how the choice that follows compares with the best config measured, with each problem's size left
out of the fit that chooses for it: what a problem that nobody measured may expect. Needs SciPy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
from scipy.optimize import nnls

from tk.aot.expr import Problem, TensorValue, evaluate_locals
from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import DTYPES, Family
from tk.kernels.mm_op import ORDER_AXIS, weights_name
from tk.tune import files

TUNED = Path(__file__).parents[1] / "kernels" / "tuned"
H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 62914560}
DEVICES = {90: H200}
FEWEST = 8  # measurements that a fit needs
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
    bare = Problem((a, b, None, matrix(m, n, "n")), ints, 0, DEVICES[arch])
    return Problem(bare.tensors, ints, 0, bare.device, evaluate_locals(op.locals.values(), bare))


def terms_of(variant: Variant, problem: Problem) -> numpy.ndarray:
    values = evaluate_locals(variant.plan.locals, problem)
    full = Problem(problem.tensors, problem.ints, problem.mode, problem.device, values)
    return numpy.array([t.evaluate(full) for t in variant.plan.terms.values()], dtype=float)


def fits(variant: Variant, key: Mapping[str, int], problem: Problem) -> bool:
    plan = variant.plan
    served = all(key[axis] in values for axis, values in plan.serves.items())
    return served and all(c.holds.evaluate(problem) for c in plan.constraints)


def samples_of(timings: Sequence[Mapping[str, Any]], family: Family, arch: int) -> list[Sample]:
    by_config = defaultdict(list)
    for variant in enumerate_grid(family, arch).variants:
        by_config[variant.point.config.name].append(variant)
    found = []
    for i, timing in enumerate(timings):
        problem = problem_of(timing, family.op, arch)
        for config, (_, us, _) in timing["configs"].items():
            variant = next((v for v in by_config[config] if fits(v, timing["key"], problem)), None)
            if variant is not None:
                size = (timing["m"], timing["n"], timing["k"])
                name = weights_name(variant.point)
                found.append(Sample(i, size, config, name, terms_of(variant, problem), us))
    return found


def fit(own: Sequence[Sample], all_orders: Sequence[Sample]) -> numpy.ndarray | None:
    """Picoseconds. own: what was measured with one operand order; with the others it counts less. None: too little was
    measured."""
    samples = [*own, *all_orders]  # so own ones are in it twice, with both weights
    if len(samples) < FEWEST:
        return None
    counts = numpy.array([1.0] * len(own) + [OTHER_ORDERS] * len(all_orders))
    terms = numpy.array([s.terms / (s.us * 1e6) for s in samples])
    weights, _ = nnls(terms * counts[:, None], counts)
    return weights


def by_name(samples: Sequence[Sample]) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]]]:
    """Of each name, and of each name without the order."""
    own, all_orders = defaultdict(list), defaultdict(list)
    for sample in samples:
        own[sample.name].append(sample)
        all_orders[without_order(sample.name)].append(sample)
    return own, all_orders


def without_order(name: str) -> str:
    return name.rpartition("/")[0]


def regrets(timings: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> list[tuple[float, str]]:
    """Of each problem: time of the config chosen over the best, the size itself left out of the fits."""
    own, all_orders = by_name(samples)
    predicted: dict[int, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        rest = [s for s in own[sample.name] if s.size != sample.size]
        others = [s for s in all_orders[without_order(sample.name)] if s.size != sample.size]
        weights = fit(rest, others)
        if weights is not None:
            predicted[sample.timing][sample.config] = float(sample.terms @ weights)
    found = []
    for i, timing in enumerate(timings):
        times = {config: us for config, (_, us, _) in timing["configs"].items()}
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
    timings = json.loads(table.with_name(f"{args.stem}_timings.json").read_text())["timings"]
    family: Family = import_module(f"tk.kernels.{args.stem}").FAMILY
    samples = samples_of(timings, family, args.arch)
    names = tuple(next(iter(enumerate_grid(family, args.arch).variants)).plan.terms)
    own, all_orders = by_name(samples)
    coefficients = {}
    for name, others in sorted(all_orders.items()):
        for order in ORDER_AXIS:
            weights = fit(own.get(f"{name}/{order}", []), others)
            if weights is not None:
                rounded = zip(names, map(round, weights.tolist()), strict=True)
                coefficients[f"{name}/{order}"] = {term: weight for term, weight in rounded if weight}
    tuned = json.loads(table.read_text())
    tuned["coefficients"] = coefficients
    files.write(table, tuned)
    found = sorted(regrets(timings, samples), reverse=True)
    mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
    print(f"{len(coefficients)} fits; regret of sizes left out: geomean {mean:.4f} over {len(found)}, worst:")
    for regret, shown in found[:10]:
        print(f"  {regret:.3f}  {shown}")


if __name__ == "__main__":
    main()
