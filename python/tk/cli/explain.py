"""``tk explain``: which kernel a call would run, and why."""

from __future__ import annotations

import argparse
import ast
import re
from dataclasses import dataclass
from typing import Any

import torch

import tk
from tk._dtypes import DTYPES, named
from tk.cli._shown import OF_A_PACK, add_json, as_json, dtype_name, unknown
from tk.generated import register
from tk.heuristics import described

EXAMPLE = "tk explain linear 512x4096 14336x4096 --activation silu; tk explain topk 512x4096 k=8 dim=-1"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("explain", epilog=f"e.g. {EXAMPLE}")
    parser.add_argument("op", help="mm, linear, softmax, … or an op of a loaded pack")
    parser.add_argument(
        "arguments",
        nargs="+",
        type=argument,
        metavar="SHAPE|NAME=VALUE",
        help="shapes of the tensors, as 512x4096; a trailing t: stored transposed (512x4096t); int:512 for a tensor of "
        "indices; other arguments of the function by name, as dim=-1",
    )
    parser.add_argument(
        "--dtype", type=dtype_name, default="bf16", help="of the tensors: bf16, torch.bfloat16, … (bf16)"
    )
    parser.add_argument("--activation", help="of a product: gelu, relu, silu, …")
    parser.add_argument("--out-dtype", type=dtype_name, help="of the result, where it is not the tensors'")
    parser.add_argument("--precision", choices=("ieee", "tf32"), help="of fp32 products")
    parser.add_argument("--config", help="a config's name")
    add_json(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", help="cuda where there is one, else cpu", default=None)
    where.add_argument("--arch", help="80 or 90: as on an A100 or H100, on a machine without a GPU too")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Shape:
    """Of a tensor argument. dtype: None for what --dtype says."""

    sizes: tuple[int, ...]
    is_transposed: bool = False
    dtype: torch.dtype | None = None

    def tensor(self, dtype: torch.dtype, device: str) -> torch.Tensor:
        stored = (*self.sizes[:-2], *self.sizes[:-3:-1]) if self.is_transposed else self.sizes
        tensor = torch.zeros(stored, dtype=self.dtype or dtype, device=device)
        return tensor.mT if self.is_transposed else tensor


def argument(text: str) -> Shape | tuple[str, Any]:
    name, separator, value = text.partition("=")
    if separator and name.isidentifier():
        return name, _value(value)
    sizes = text.removeprefix("int:").removesuffix("t")
    try:
        shape = tuple(int(s) for s in sizes.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no argument: write 512x4096, or NAME=VALUE") from None
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write 512x4096; a number goes by its name, as dim=-1")
    return Shape(shape, text.endswith("t"), torch.int64 if text.startswith("int:") else None)


def _value(text: str) -> Any:
    """A number, tuple, True, False or None; the name of a dtype; a shape of floats, as tensors are; else the text."""
    if (name := named(text)) is not None:
        return DTYPES[name]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return argument(text) if re.fullmatch(r"(int:)?\d+(x\d+)+t?", text) else text


def run(args: argparse.Namespace) -> int:
    known = (*tk.inspect.functions(), *register.names())
    if args.op not in known:
        raise unknown("op", args.op, known, more=OF_A_PACK)
    if args.arch is not None:
        try:
            described.gpu(args.arch)
        except ValueError:
            raise unknown("described GPU of architecture", args.arch, map(str, described.GPUS)) from None
    has_gpu = torch.cuda.is_available()
    device = args.device or ("cuda" if has_gpu and not args.arch else "cpu")
    if device.startswith("cuda") and not has_gpu:
        raise ValueError("tk explain --device cuda: torch sees no CUDA device; --arch 90 asks as on an H100")
    if not device.startswith("cuda"):
        device = "meta"  # only shapes are given, and ATen would work for minutes

    def made(x: Any) -> Any:
        return x.tensor(DTYPES[args.dtype], device) if isinstance(x, Shape) else x

    options = dict(
        activation=args.activation,
        out_dtype=DTYPES[args.out_dtype] if args.out_dtype else None,
        precision=args.precision,
        config=args.config,
        arch=args.arch,
    )
    keywords = {name: value for name, value in options.items() if value is not None}
    keywords |= {x[0]: made(x[1]) for x in args.arguments if isinstance(x, tuple)}
    explanation = tk.explain(args.op, *(made(x) for x in args.arguments if isinstance(x, Shape)), **keywords)
    print(as_json(explanation) if args.json else explanation)
    if not (has_gpu or args.json or args.arch or args.device):
        print("There is no GPU here: --arch 90 asks as on an H100, --arch 80 as on an A100.")
    return 0 if explanation.runs else 1
