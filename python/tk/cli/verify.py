"""``tk verify``: are the packs whole, and does every kernel compute what it should?"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tk
from tk import _packs, capi, errors
from tk._packs import CoverageRow
from tk._table import table
from tk.cli import _verified, _verified_attention
from tk.cli._judge import error_ratio
from tk.cli._shown import add_json, as_json
from tk.cli._verified import Checked
from tk.heuristics.problem import describe
from tk.ops.mm import ACTIVATIONS, reference

# Rows, columns, inner: whole tiles, a long inner size for split K, ragged edges, few rows.
SIZES = ((256, 256, 256), (16, 512, 8192), (130, 197, 331), (1, 1024, 1024), (300, 264, 520))
DTYPES = ((torch.bfloat16, None), (torch.float16, None), (torch.float32, "ieee"), (torch.float32, "tf32"))
ORDERS = ("nn", "nt", "tn", "tt", "ss")


@dataclass
class Tally:
    """Of one config: how often it ran, its worst error ratios, and whether all were good."""

    runs: int = 0
    mean: float = 0.0
    max: float = 0.0
    is_good: bool = True


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("verify")
    parser.add_argument("packs", nargs="*", type=Path, help="pack files (default: those that are loaded)")
    parser.add_argument("--no-gpu", action="store_true", help="only re-hash")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = Report()
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        _verify(args, report)
    if args.json:
        print(as_json(report.plain()))
    return 0 if report.is_good else 1


def _verify(args: argparse.Namespace, report: Report) -> None:
    for path in args.packs or [Path(p.path) for p in tk.packs()]:
        report.packs.append(_rehash(path))
    if args.no_gpu or not torch.cuda.is_available():
        print("No kernel was run." if args.no_gpu else "There is no GPU: no kernel was run.")
        return
    for path in args.packs:
        tk.load_pack(path)
    compiled = _of_this_gpu(tk.coverage())
    if any(row.op == "mm" for row in compiled):
        _run_products(report)
    _run_others(report)
    report.print_left_out(compiled)


@dataclass(frozen=True)
class Hashed:
    """Of a pack how many images have their hashes, or why it cannot be used."""

    path: str
    images: int = 0
    problem: str = ""


def _rehash(path: Path) -> Hashed:
    try:
        found = Hashed(str(path), images=_packs.verify(path))
    except errors.PackError as error:
        print(error)
        return Hashed(str(path), problem=str(error))
    print(f"{path}: {found.images} images and the index have their hashes")
    return found


@dataclass
class Report:
    """By kernel and config what ran, and why the rest did not: of a config what keeps it out of a call, of a function
    why no call of it was made."""

    packs: list[Hashed] = field(default_factory=list)
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    left_out: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not any(p.problem for p in self.packs) and all(t.is_good for t in self.tallies.values())

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        configs = [dict(kernel=k, config=c, **asdict(t)) for (k, c), t in sorted(self.tallies.items())]
        left_out = [dict(kernel=k, config=c, reasons=list(why)) for (k, c), why in sorted(self.left_out.items())]
        return dict(is_good=self.is_good, packs=self.packs, configs=configs, left_out=left_out)

    def add(self, checked: Checked) -> None:
        if not checked.was_run:
            why = checked.problem.removeprefix(_verified.NOT_RUN)
            self.left_out.setdefault((checked.kernel, checked.config), {})[why] = None
            return
        if checked.problem:
            print(f"{checked.kernel} {checked.config}: {checked.problem}")
        tally = self.tallies.setdefault((checked.kernel, checked.config), Tally())
        tally.runs += 1
        tally.max = _worse(tally.max, checked.error)
        tally.is_good &= checked.is_good

    def print_left_out(self, compiled: Iterable[CoverageRow]) -> None:
        """Of what is compiled for this GPU, and of the calls that could not be made; the same reason once."""
        known = {(row.kernel, row.config): row for row in compiled}
        missing = known.keys() - self.tallies.keys()
        rows = [(known[key].op, *key, self._why(key)) for key in sorted(missing)]
        print(f"{len(known) - len(missing)} of {len(known)} compiled configs were run.")
        if rows:
            print(table(("op", "kernel", "config", "not run, since"), rows))
        calls: dict[tuple[str, str], list[str]] = {}
        for (function, what), reasons in self.left_out.items():
            if (function, what) not in known:
                for why in reasons:
                    calls.setdefault((function, why), []).append(what)
        for (function, why), whats in sorted(calls.items()):
            more = f" and {len(whats) - 1} more" if len(whats) > 1 else ""
            print(f"{function}: not run: {why}{': ' if whats[0] else ''}{whats[0]}{more}")

    def _why(self, key: tuple[str, str]) -> str:
        reasons = list(self.left_out.get(key, {}))
        if not reasons:
            return "no call of its kind was made"
        return f"it needs {' or '.join(reasons[:3])}{' or more' if len(reasons) > 3 else ''}"


def _of_this_gpu(rows: Iterable[CoverageRow]) -> list[CoverageRow]:
    """Of each op the configs for the newest architecture that the current GPU runs; PTX where it has no cubins."""
    major, minor = torch.cuda.get_device_capability()
    serving: dict[str, list[CoverageRow]] = {}
    for row in sorted((row for row in rows if _runs(row.arch, 10 * major + minor)), key=_preference):
        found = serving.setdefault(row.op, [])
        if not found or found[0].arch == row.arch:
            found.append(row)
    return [row for found in serving.values() for row in found]


def _runs(arch: str, capability: int) -> bool:
    """As the core decides: from 9.0 on cubins run on one architecture alone, unless they are a family's."""
    number = int(re.sub(r"\D", "", arch) or 0)
    if arch.startswith("ptx") or number > capability:
        return 0 < number <= capability
    return number == capability if capability >= 90 and not arch.endswith("f") else number // 10 == capability // 10


def _preference(row: CoverageRow) -> tuple[bool, int, bool]:
    return row.arch.startswith("ptx"), -int(re.sub(r"\D", "", row.arch)), row.arch.endswith("f")


def _run_others(report: Report, device: str = "cuda") -> None:
    """Every other op of the packs."""
    others = Report(left_out=report.left_out)
    for checked in itertools.chain(
        _verified.functions(device),
        _verified.convolutions(device),
        _verified.generated_ops(device),
        _verified_attention.mods(device),
    ):
        others.add(checked)
    rows = [(*name, t.runs, t.max, "ok" if t.is_good else "WRONG") for name, t in sorted(others.tallies.items())]
    print(table(("kernel", "config", "runs", "error", "verdict"), rows))
    print("Errors are the largest deviation from float64 over what the precision that was asked for allows.")
    for name, tally in others.tallies.items():  # mm's of bmm's and the like count once more
        known = report.tallies.setdefault(name, tally)
        known.is_good &= tally.is_good


def _run_products(report: Report) -> None:
    with torch.inference_mode():
        for call in _calls():
            _run_candidates(call, report)
    tallies = report.tallies
    rows = [(*name, t.runs, t.mean, t.max, "ok" if t.is_good else "WRONG") for name, t in sorted(tallies.items())]
    print(table(("kernel", "config", "runs", "mean error", "max error", "verdict"), rows))
    print("Errors are tk's over torch's, both against float64.")


@dataclass(frozen=True)
class Call:
    a: Tensor
    b: Tensor
    bias: Tensor | None
    activation: str
    out_dtype: torch.dtype | None
    precision: str | None

    def settings(self) -> dict[str, Any]:
        return dict(activation=self.activation, out_dtype=self.out_dtype, precision=self.precision)


def _calls() -> Iterator[Call]:
    generator = torch.Generator("cuda").manual_seed(0)
    activations = itertools.cycle(ACTIVATIONS)
    for (m, n, k), (dtype, precision), order in itertools.product(SIZES, DTYPES, ORDERS):
        a = _operand(m, k, order[0], dtype, generator)
        b = _operand(k, n, order[1], dtype, generator) * k**-0.5
        b = _laid_out(b, order[1])
        row, matrix = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in ((n,), (m, n)))
        wide = (None,) if dtype is torch.float32 else (None, torch.float32)
        for bias, out_dtype in itertools.product((None, row, matrix), wide):
            yield Call(a, b, bias, next(activations), out_dtype, precision)


def _operand(rows: int, cols: int, letter: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return _laid_out(torch.randn(rows, cols, generator=generator, device="cuda").to(dtype), letter)


def _laid_out(x: Tensor, letter: str) -> Tensor:
    """n: rows contiguous, t: columns, s: neither."""
    if letter == "n":
        return x.contiguous()
    if letter == "t":
        return x.t().contiguous().t()
    spread = torch.empty(x.shape[0], x.shape[1], 3, dtype=x.dtype, device=x.device)[..., 1]
    return spread.copy_(x)


def _run_candidates(call: Call, report: Report) -> None:
    described = describe(tk.mm, call.a, call.b, call.bias, **call.settings())
    assert described is not None  # no size is 0
    exact, sums = (_reference(c, torch.float64) for c in (call, replace(call, activation="none")))
    torchs = _peer(call).to(call.out_dtype or call.a.dtype)
    for candidate in capi.candidates(described.problem):
        name = candidate.kernel_name, candidate.config_name
        if not candidate.fits:
            report.add(Checked(*name, problem=f"{_verified.NOT_RUN}{candidate.failed_constraint}"))
            continue
        tally = report.tallies.setdefault(name, Tally())
        tally.runs += 1
        try:
            result = tk.mm(call.a, call.b, call.bias, config=candidate.config, **call.settings())
            ratio = error_ratio(result, torchs, exact, terms=call.a.shape[1], sums=sums)
        except errors.Error as error:
            print(f"{candidate.kernel_name}/{candidate.config_name}: {error}")
            tally.is_good = False
            continue
        tally.mean, tally.max = (_worse(*pair) for pair in ((tally.mean, ratio.mean), (tally.max, ratio.max)))
        tally.is_good &= ratio.is_good()


def _worse(x: float, y: float) -> float:
    return math.nan if math.isnan(y) else max(x, y)


def _peer(call: Call) -> Tensor:
    """What an error is judged against: torch's own, or with tf32, which torch does not use for every size where it may,
    a product of operands that were cut to tf32."""
    if call.precision != "tf32":
        return _reference(call, call.a.dtype)
    return _reference(replace(call, a=_cut(call.a), b=_cut(call.b)), torch.float64)


def _cut(x: Tensor) -> Tensor:
    """float32 without the bits that tf32 has not."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _reference(call: Call, dtype: torch.dtype) -> Tensor:
    bias = None if call.bias is None else call.bias.to(dtype)
    return reference(call.a.to(dtype), call.b.to(dtype), bias, activation=call.activation)  # type: ignore[arg-type]
