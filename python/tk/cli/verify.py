"""``tk verify``: are the packs whole, and does every kernel compute what it should?"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tk
from tk import _packs, capi, errors
from tk._table import table
from tk.cli import _verified
from tk.cli._judge import error_ratio
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
    parser = subparsers.add_parser("verify", help="re-hash packs and run every kernel against torch")
    parser.add_argument("packs", nargs="*", type=Path, help="pack files (default: those that are loaded)")
    parser.add_argument("--no-gpu", action="store_true", help="only re-hash")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    paths = args.packs or [Path(p.path) for p in tk.packs()]
    broken = [path for path in paths if not _rehash(path)]
    if args.no_gpu or not torch.cuda.is_available():
        print("No kernel was run." if args.no_gpu else "There is no GPU: no kernel was run.")
        return 1 if broken else 0
    for path in args.packs:
        tk.load_pack(path)
    good = [_run_products(), _run_others()]
    return 0 if all(good) and not broken else 1


def _rehash(path: Path) -> bool:
    try:
        images = _packs.verify(path)
    except errors.PackError as error:
        print(error)
        return False
    print(f"{path}: {images} images and the index have their hashes")
    return True


def _run_others(device: str = "cuda") -> bool:
    """Every other op of the packs. What no arguments could be made up for is said, and counts for nothing."""
    tallies: dict[tuple[str, str], Tally] = {}
    for checked in itertools.chain(
        _verified.functions(device), _verified.generated_ops(device), _verified.mods(device)
    ):
        if checked.problem:
            print(f"{checked.kernel} {checked.config}: {checked.problem}")
            if checked.problem.startswith("not run"):
                continue
        tally = tallies.setdefault((checked.kernel, checked.config), Tally())
        tally.runs += 1
        tally.max = _worse(tally.max, checked.error)
        tally.is_good &= checked.is_good
    rows = [(*name, t.runs, t.max, "ok" if t.is_good else "WRONG") for name, t in sorted(tallies.items())]
    print(table(("kernel", "config", "runs", "error", "verdict"), rows))
    print("Errors are the largest deviation from float64 over what the precision that was asked for allows.")
    return all(t.is_good for t in tallies.values())


def _run_products() -> bool:
    tallies: dict[tuple[str, str], Tally] = {}
    with torch.inference_mode():
        for call in _calls():
            _run_candidates(call, tallies)
    rows = [(*name, t.runs, t.mean, t.max, "ok" if t.is_good else "WRONG") for name, t in sorted(tallies.items())]
    print(table(("kernel", "config", "runs", "mean error", "max error", "verdict"), rows))
    print("Errors are tk's over torch's, both against float64.")
    return all(t.is_good for t in tallies.values())


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


def _run_candidates(call: Call, tallies: dict[tuple[str, str], Tally]) -> None:
    described = describe(tk.mm, call.a, call.b, call.bias, **call.settings())
    assert described is not None  # no size is 0
    exact = _reference(call, torch.float64)
    torchs = _peer(call).to(call.out_dtype or call.a.dtype)
    for candidate in capi.candidates(described.problem):
        if not candidate.fits:
            continue
        tally = tallies.setdefault((candidate.kernel_name, candidate.config_name), Tally())
        tally.runs += 1
        try:
            result = tk.mm(call.a, call.b, call.bias, config=candidate.config, **call.settings())
            ratio = error_ratio(result, torchs, exact)
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
