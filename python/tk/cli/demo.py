"""``tk demo``: the projections of a Llama-3-8B layer and some generated ops, through tk and through torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tk
from tk import timing
from tk._table import table
from tk.cli import demo_ops
from tk.cli._judge import ErrorRatio, error_ratio, host_us
from tk.cli._shown import check_device
from tk.cli.build import positive

# Inner and outer size of each weight.
PROJECTIONS = {
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}
GPU_ROWS = 512
CPU_ROWS = 32  # a float64 reference of 512 rows would take a laptop minutes


@dataclass(frozen=True)
class Row:
    """Times in microseconds of one product."""

    name: str
    m: int
    n: int
    k: int
    tk_us: float
    torch_us: float
    error: ErrorRatio

    def cells(self) -> tuple[object, ...]:
        tflops = f"{2 * self.m * self.n * self.k / self.tk_us * 1e-6:.3g}"
        verdict = "ok" if self.error.is_good() else "WRONG"
        shape = f"{self.m}x{self.k} @ {self.k}x{self.n}"
        speedup = self.torch_us / self.tk_us
        return (self.name, shape, self.tk_us, self.torch_us, speedup, tflops, self.error.mean, self.error.max, verdict)


HEADER = ("projection", "product", "tk us", "torch us", "speedup", "tk TFLOP/s", "mean error", "max error", "verdict")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo")
    parser.add_argument(
        "--rows",
        type=positive,
        help=f"how many rows each input has (default {GPU_ROWS}, of generated ops {demo_ops.GPU_ROWS}; on the CPU "
        f"{CPU_ROWS})",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help=f"cuda where there is one, else cpu (here {device})")
    parser.add_argument("--all", action="store_true", help="list every kernel that was compiled, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_device(args.device)
    device = torch.device(args.device)
    default = GPU_ROWS if device.type == "cuda" else CPU_ROWS
    m = default if args.rows is None else args.rows
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"tk demo --device {args.device}: torch sees no CUDA device; leave it out, or write cpu")
    print(f"tk {tk.__version__}, torch {torch.__version__}, {_device_name(device)}: {m} rows, bfloat16, random weights")
    if device.type != "cuda":
        print("No GPU: tk's ops run on ATen here, so times are equal at best; tk list shows the kernels.")
    with torch.inference_mode():
        rows = list(_measure(m, device))
        on_gpu = device.type == "cuda" and args.rows is None
        generated = list(demo_ops.measure(demo_ops.GPU_ROWS if on_gpu else m, device))
    print(table(HEADER, (row.cells() for row in rows)))
    print()
    print(demo_ops.report(generated))
    print()
    print("Errors are tk's over torch's, both against float64: ok is a mean <= 1.1 and a max <= 2.")
    if args.all:
        print(tk.coverage())
    return 0 if all(error.is_good() for error in (*(r.error for r in rows), *(r.error for r in generated))) else 1


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _measure(m: int, device: torch.device) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for name, (k, n) in PROJECTIONS.items():
        x = random(m, k).bfloat16()
        weight = (random(n, k) * k**-0.5).bfloat16()
        error = error_ratio(tk.linear(x, weight), F.linear(x, weight), F.linear(x.double(), weight.double()))
        tk_us, torch_us = _times(x, weight)
        yield Row(name, m, n, k, tk_us, torch_us, error)


def _times(x: Tensor, weight: Tensor) -> tuple[float, float]:
    """The times of tk and torch, side by side. On a GPU each call takes another copy of the weight, from memory, as a
    model's layers do."""
    if not x.is_cuda:
        return host_us(lambda: tk.linear(x, weight)), host_us(lambda: F.linear(x, weight))
    copies = timing.copies_to_rotate(weight.nbytes)
    weights = [weight.clone() for _ in range(copies)]
    captures = {
        "tk": timing.capture([lambda w=w: tk.linear(x, w) for w in weights]),  # type: ignore[misc]
        "torch": timing.capture([lambda w=w: F.linear(x, w) for w in weights]),  # type: ignore[misc]
    }
    found = timing.device_times(captures, warm_ms=2.0)
    return found["tk"].us, found["torch"].us
