r"""Launches the variants of every generated op that some small problems suit, for a checker to watch:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/gpu/sanitize_generated.py [--part 1/4] [--only REGEX] [--seconds 120]

Every tensor is an allocation of its own, so that one byte too far is seen, and sizes are multiples of nothing, or end
right behind a block. Results are compared with ATen's on the CPU: a checker takes longer for the first launch of a
kernel than for anything else, and torch has many. The exit status is 1 when one was wrong, or an op was left out.
"""

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import Any

import torch
from tests.gpu.op_cases import Case, described, make, problems, variants

from benchmarks import ops
from tk.generated import register
from tk.generated.records import GeneratedOp

SHAPES = ((5, 48), (7, 47), (3, 1040), (130, 33))


def launch_all(op: GeneratedOp) -> tuple[int, list[str]]:
    """(variants launched, what went wrong): each that suits one of the problems, once."""
    launched: set[int] = set()
    wrong = []
    for case in problems(op, SHAPES):
        args = make(case, "cpu")
        on_gpu = [to_gpu(x) for x in args]
        for variant, config in variants(op, on_gpu)[0].items():
            if variant not in launched:
                launched.add(variant)
                wrong += check_launch(case, args, on_gpu, config)
    torch.cuda.synchronize()
    return len(launched), wrong


def to_gpu(x: Any) -> Any:
    """A tensor with its strides and what lies between."""
    if not isinstance(x, torch.Tensor):
        return x
    elements = x.untyped_storage().nbytes() // x.itemsize
    storage = x.as_strided((elements,), (1,), 0).to("cuda")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def check_launch(case: Case, args: list[Any], on_gpu: list[Any], config: int) -> list[str]:
    op = case.example.op
    try:
        ops.judge(op, args, [x.cpu() for x in ops.run_tk(op, on_gpu, config)])
    except (ops.WrongResult, RuntimeError, ValueError) as error:
        return [f"{described(case, on_gpu, config)}: {type(error).__name__}: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="i/n: every n-th op from the i-th on")
    parser.add_argument("--only", default="", help="ops whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no op after so many seconds")
    args = parser.parse_args()
    begun, total, wrong, left = time.monotonic(), 0, [], []
    part, parts = map(int, args.part.split("/"))
    for name in [n for n in register.names() if re.search(args.only, n)][part - 1 :: parts]:
        op = register.find(name)
        if op is None or op.takes_lists:
            continue
        if time.monotonic() - begun > args.seconds:
            left.append(name)
            continue
        count, found = launch_all(op)
        total, wrong = total + count, wrong + found
        wrong += [] if count else [f"{name}: nothing was launched"]
        print(f"{time.monotonic() - begun:5.0f} s  {name:28} {count} variants launched", flush=True)
    print(
        f"{total} variants launched, {len(wrong)} wrong, left out: {', '.join(left) or 'none'}", *wrong[:20], sep="\n"
    )
    return int(bool(wrong or left or not total))


if __name__ == "__main__":
    sys.exit(main())
