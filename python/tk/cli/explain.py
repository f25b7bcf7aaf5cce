"""``tk explain``: which kernel a call would run, and why."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import tk
from tk._dtypes import DTYPES
from tk.cli._given import Shape, parameters, read
from tk.cli._shown import OF_A_PACK, Usage, add_json, as_json, check_device, dtype_name, unknown, unrecognized
from tk.generated import register
from tk.heuristics import described

EXAMPLE = "tk explain linear 512x4096 14336x4096 --activation silu; tk explain topk 512x4096 k=8 dim=-1"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("explain", epilog=f"e.g. {EXAMPLE}")
    parser.add_argument("op", help="mm, linear, softmax, … or an op of a loaded pack")
    parser.add_argument(
        "arguments",
        nargs="*",
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
    parser.set_defaults(run=run, takes_rest=True)


def run(args: argparse.Namespace) -> int:
    texts = [*args.arguments, *_behind_options(args)]
    known = (*tk.inspect.functions(), *register.names())
    if args.op not in known and any(text in known for text in texts):
        raise Usage(f"{args.op!r} is no op; the op comes first, as in {EXAMPLE.split(';')[0]}")
    if args.op not in known:
        raise unknown("op", args.op, known, more=OF_A_PACK)
    if args.arch is not None:
        try:
            described.gpu(args.arch)
        except ValueError as error:
            raise Usage(str(error).removeprefix("tk.explain: ")) from None
    has_gpu = torch.cuda.is_available()
    if args.device:
        check_device(args.device)
    device = args.device or ("cuda" if has_gpu and not args.arch else "cpu")
    if device.startswith("cuda") and not has_gpu:
        raise ValueError("tk explain --device cuda: torch sees no CUDA device; --arch 90 asks as on an H100")
    if not device.startswith("cuda"):
        device = "meta"  # only shapes are given, and ATen would work for minutes

    names = ("activation", "out_dtype", "precision", "config")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    where = f"--arch {args.arch}" if args.arch else f"--device {args.device}" if args.device else ""
    given = read(args.op, texts, f"tk explain {args.op}", options, where)

    def made(x: Any) -> Any:
        return x.tensor(DTYPES[args.dtype], device) if isinstance(x, Shape) else x

    keywords = {name: made(value) for name, value in given.keywords.items()} | options
    if args.out_dtype:
        keywords["out_dtype"] = DTYPES[args.out_dtype]
    if args.arch:
        keywords["arch"] = args.arch
    explanation = tk.explain(args.op, *map(made, given.shapes), **keywords)
    print(as_json(explanation) if args.json else explanation)
    if not (has_gpu or args.json or args.arch or args.device):
        print("There is no GPU here: --arch 90 asks as on an H100, --arch 80 as on an A100.")
    return 0 if explanation.runs else 1


def _behind_options(args: argparse.Namespace) -> list[str]:
    """Shapes and arguments that argparse has left, since an option stands between them and the others."""
    options = [text for text in args.rest if text.startswith("--")]
    if options:
        names = [p.name for p in parameters(args.op)] if args.op in (*tk.inspect.functions(), *register.names()) else []
        first = options[0].lstrip("-").partition("=")[0].replace("-", "_")
        if first in names:
            args.parser.error(f"{options[0]}: an argument of {args.op} goes by its name, without dashes: {first}=VALUE")
        args.parser.error(unrecognized(args.parser, args.rest))
    return args.rest
