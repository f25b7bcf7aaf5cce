"""``tk verify``: are the packs whole, and does every kernel compute what it should?"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tk
from tk import _packs, capi, errors
from tk._packs import CoverageRow
from tk._table import table
from tk.cli import _verified, _verified_attention
from tk.cli._judge import ErrorRatio, error_ratio, largest_allowed
from tk.cli._shown import Usage, add_json, as_json
from tk.cli._verified import Checked
from tk.cli._wrong import ONCE, Asked, Elements, elements, given
from tk.heuristics.problem import describe
from tk.ops.mm import ACTIVATIONS, reference

# Rows, columns, inner: whole tiles, a long inner size for split K, ragged edges, few rows.
SIZES = ((256, 256, 256), (16, 512, 8192), (130, 197, 331), (1, 1024, 1024), (300, 264, 520))
DTYPES = ((torch.bfloat16, None), (torch.float16, None), (torch.float32, "ieee"), (torch.float32, "tf32"))
ORDERS = ("nn", "nt", "tn", "tt", "ss")


@dataclass
class Tally:
    """The tally of one config: how often it ran, its worst error ratios, and whether all were good."""

    runs: int = 0
    mean: float = 0.0
    max: float = 0.0
    is_good: bool = True


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("verify")
    parser.add_argument("packs", nargs="*", type=Path, help="pack files (default: those that are loaded)")
    parser.add_argument("--no-gpu", action="store_true", help="only re-hash")
    parser.add_argument("--only", metavar="REGEX", help="runs alone in whose call, kernel and config this is found")
    parser.add_argument("--repeat", type=int, metavar="N", help="each run N times, in memory whose free parts are NaN")
    parser.add_argument("--seed", type=int, default=0, help="of the arguments (default: 0)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report, asked = Report(), _asked(args)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        _verify(args, report, asked)
    if args.json:
        print(as_json(report.plain()))
    return 0 if report.is_good else 1


def _asked(args: argparse.Namespace) -> Asked:
    """Raises Usage."""
    if args.repeat is not None and args.repeat < 1:
        raise Usage(f"--repeat {args.repeat}: it is how often, 1 at least")
    try:
        return Asked(None if args.only is None else re.compile(args.only), args.repeat, args.seed)
    except re.error as error:
        raise Usage(f"--only {args.only}: it is no regular expression: {error}") from None


def _verify(args: argparse.Namespace, report: Report, asked: Asked) -> None:
    for path in args.packs or [Path(p.path) for p in tk.packs()]:
        report.packs.append(_rehash(path))
    if args.no_gpu or not torch.cuda.is_available():
        print("No kernel was run." if args.no_gpu else "There is no GPU: no kernel was run.")
        return
    for path in args.packs:
        tk.load_pack(path)
    compiled = _of_this_gpu(tk.coverage())
    if any(row.op == "mm" for row in compiled):
        _run_products(report, asked)
    _run_others(report, asked=asked)
    if asked.only is None:
        report.print_left_out(compiled)
    elif not any(tally.runs for tally in report.tallies.values()):
        raise Usage(f"--only {asked.only.pattern}: no run has a call, kernel and config in which this is found")


@dataclass(frozen=True)
class Hashed:
    """How many images of a pack have their hashes, or why it cannot be used."""

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
    """What ran, by kernel and config, and why the rest did not: of a config what keeps it out of a call, of a function
    why no call of it was made."""

    packs: list[Hashed] = field(default_factory=list)
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    left_out: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)
    failures: list[Checked] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not any(p.problem for p in self.packs) and all(t.is_good for t in self.tallies.values())

    def plain(self) -> dict[str, Any]:
        """The report for JSON."""
        configs = [dict(kernel=k, config=c, **asdict(t)) for (k, c), t in sorted(self.tallies.items())]
        left_out = [dict(kernel=k, config=c, reasons=list(why)) for (k, c), why in sorted(self.left_out.items())]
        failures = [dict(asdict(c), command=c.command) for c in self.failures]
        return dict(is_good=self.is_good, packs=self.packs, configs=configs, left_out=left_out, failures=failures)

    def add(self, checked: Checked, ratios: Sequence[ErrorRatio] = ()) -> None:
        """ratios: to torch's errors, where these are what the tables show."""
        if not checked.was_run:
            why = checked.problem.removeprefix(_verified.NOT_RUN)
            self.left_out.setdefault((checked.kernel, checked.config), {})[why] = None
            return
        if not checked.is_good:
            print(checked)
            self.failures.append(checked)
        tally = self.tallies.setdefault((checked.kernel, checked.config), Tally())
        tally.runs += checked.runs
        for error in [ratio.max for ratio in ratios] or [checked.error]:
            tally.max = _worse(tally.max, error)
        for ratio in ratios:
            tally.mean = _worse(tally.mean, ratio.mean)
        tally.is_good &= checked.is_good

    def print_left_out(self, compiled: Iterable[CoverageRow]) -> None:
        """Prints what is left out of what is compiled for this GPU, and of the calls that could not be made; the same
        reason once."""
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
    """The configs of each op for the newest architecture that the current GPU runs; PTX where it has no cubins."""
    major, minor = torch.cuda.get_device_capability()
    serving: dict[str, list[CoverageRow]] = {}
    for row in sorted((row for row in rows if _runs(row.arch, 10 * major + minor)), key=_preference):
        found = serving.setdefault(row.op, [])
        if not found or found[0].arch == row.arch:
            found.append(row)
    return [row for found in serving.values() for row in found]


def _runs(arch: str, capability: int) -> bool:
    """Whether a GPU runs an architecture's kernels, as the core decides: from 9.0 on cubins run on one architecture
    alone, unless they are a family's."""
    number = int(re.sub(r"\D", "", arch) or 0)
    if arch.startswith("ptx") or number > capability:
        return 0 < number <= capability
    return number == capability if capability >= 90 and not arch.endswith("f") else number // 10 == capability // 10


def _preference(row: CoverageRow) -> tuple[bool, int, bool]:
    return row.arch.startswith("ptx"), -int(re.sub(r"\D", "", row.arch)), row.arch.endswith("f")


def _run_others(report: Report, device: str = "cuda", asked: Asked = ONCE) -> None:
    """Every other op of the packs."""
    others = Report(left_out=report.left_out, failures=report.failures)
    for checked in itertools.chain(
        _verified.functions(device, asked),
        _verified.convolutions(device, asked=asked),
        _verified.generated_ops(device, asked),
        _verified_attention.mods(device, asked=asked),
    ):
        others.add(checked)
    rows = [(*name, t.runs, t.max, "ok" if t.is_good else "WRONG") for name, t in sorted(others.tallies.items())]
    print(table(("kernel", "config", "runs", "error", "verdict"), rows))
    print("Errors are the largest deviation from float64 over what the precision that was asked for allows.")
    for name, tally in others.tallies.items():  # mm's of bmm's and the like count once more
        known = report.tallies.setdefault(name, tally)
        known.is_good &= tally.is_good


def _run_products(report: Report, asked: Asked = ONCE) -> None:
    with torch.inference_mode():
        for call in _calls(asked.seed):
            _run_candidates(call, report, asked)
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

    def __str__(self) -> str:
        return given((self.a, self.b, self.bias), self.settings())


def _calls(seed: int = 0) -> Iterator[Call]:
    generator = torch.Generator("cuda").manual_seed(seed)
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


def _run_candidates(call: Call, report: Report, asked: Asked = ONCE) -> None:
    described = describe(tk.mm, call.a, call.b, call.bias, **call.settings())
    assert described is not None  # no size is 0
    judge = _Judge(call)
    for candidate in capi.candidates(described.problem):
        name = candidate.kernel_name, candidate.config_name
        if not candidate.fits:
            report.add(Checked(*name, problem=f"{_verified.NOT_RUN}{candidate.failed_constraint}"))
            continue
        about = Checked(*name, function="tk.mm", call=str(call), seed=asked.seed)
        if asked.wants(about.name):
            run = partial(tk.mm, call.a, call.b, call.bias, config=candidate.config, **call.settings())
            judge.ratios.clear()
            report.add(_verified.repeated(about, run, judge, str(call.a.device), asked), judge.ratios)


class _Judge:
    """Judges a product's results, against float64 and what torch is off by, which is found out when it is first needed.
    ratios: of each result, in turn."""

    def __init__(self, call: Call):
        self.call = call
        self.ratios: list[ErrorRatio] = []

    @cached_property
    def references(self) -> tuple[Tensor, Tensor, Tensor]:
        call = self.call
        exact, sums = (_reference(c, torch.float64) for c in (call, replace(call, activation="none")))
        return _peer(call).to(call.out_dtype or call.a.dtype), exact, sums

    def __call__(self, found: Tensor) -> tuple[float, tuple[Elements, ...]]:
        torchs, exact, sums = self.references
        terms = self.call.a.shape[1]
        ratio = error_ratio(found, torchs, exact, terms=terms, sums=sums)
        self.ratios.append(ratio)
        if ratio.is_good():
            return ratio.over_allowed, ()
        where = elements(0, found, exact, largest_allowed(torchs, exact, terms=terms, sums=sums))
        return ratio.over_allowed, () if where is None else (where,)


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
