"""``tk explain``: which kernel a call would run, and why."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import tk

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
EXAMPLE = "tk explain linear 512x4096 14336x4096 --activation silu"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("explain", help="which kernel a call would run, and why", epilog=f"e.g. {EXAMPLE}")
    parser.add_argument("op", help="mm, linear, …")
    parser.add_argument(
        "shapes",
        nargs="+",
        type=_shape,
        help="of the tensors, as 512x4096; a trailing t: stored transposed (512x4096t)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--out-dtype", choices=DTYPES)
    parser.add_argument("--precision", choices=("ieee", "tf32"))
    parser.add_argument("--config", help="a config's name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(run=run)


def _shape(text: str) -> tuple[tuple[int, ...], bool]:
    sizes = text.removesuffix("t")
    try:
        return tuple(int(s) for s in sizes.split("x")), text.endswith("t")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write 512x4096") from None


def _tensor(shape: tuple[int, ...], is_transposed: bool, args: argparse.Namespace) -> torch.Tensor:
    stored = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    tensor = torch.empty(stored, dtype=DTYPES[args.dtype], device=args.device)
    return tensor.mT if is_transposed else tensor


def run(args: argparse.Namespace) -> int:
    explanation = tk.explain(
        args.op,
        *(_tensor(shape, is_transposed, args) for shape, is_transposed in args.shapes),
        activation=args.activation,
        out_dtype=DTYPES[args.out_dtype] if args.out_dtype else None,
        precision=args.precision,
        config=args.config,
    )
    print(explanation)
    return 0 if explanation.choice or explanation.problem is None else 1
