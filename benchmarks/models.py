"""Whole models under tk.use against eager torch and, with ``--compiled``, torch.compile: the examples' Llama and
ResNet-50 (examples/llama.py, examples/resnet.py; need transformers and torchvision).

Milliseconds of a step with the host's time, decoding as a CUDA graph. A result that differs by more than the dtype
allows is a failure.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial

from benchmarks.report import Goal, Report, Row
from benchmarks.runner import ROOT, Options

GOALS = {
    "prefill": Goal(1.05, 1.0),
    "decode": Goal(1.05, 1.0),
    "training step": Goal(1.0, 0.95),
    "inference": Goal(1.0, 0.95),
}
DIFFERENCE = 0.05  # of the largest value, after many layers in bfloat16


def measure(name: str, options: Options, report: Report) -> None:
    example = importlib.import_module(name)
    given = ["--rounds", "10" if options.quick else "20"] + ["--compile"] * options.compiled
    for label, found in example.run(example.arguments(given)).items():
        report.attempt(f"{name}, {label}", partial(add, report, name, label, found))


def add(report: Report, name: str, label: str, found: dict[str, float]) -> None:
    if found["difference"] > DIFFERENCE:
        raise AssertionError(f"off by {found['difference']:.1e} of the largest value")
    kind = next(kind for kind in GOALS if label.startswith(kind))
    us = {way: 1e3 * ms for way, ms in found.items() if way != "difference"}
    more = {"difference": found["difference"]}
    group = report.group(f"{name}_{kind.split()[0]}", f"{name}, {kind}", "eager torch", GOALS[kind])
    group.rows.append(Row(label, us["torch"] / us["tk"], us, more))
    if "compiled" in us:
        group = report.group(f"{name}_{kind.split()[0]}_compiled", f"{name}, {kind}", "torch.compile")
        group.rows.append(Row(label, us["compiled"] / us["tk"], us, more))


def run(options: Options, report: Report) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    for name in ("resnet", "llama"):
        if options.wants(name) and options.has_time():
            report.attempt(name, partial(measure, name, options, report))
