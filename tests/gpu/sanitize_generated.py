r"""Launches a sample of the variants of every generated op, for a checker to watch:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/gpu/sanitize_generated.py [--only REGEX] [--seconds 120]

Every tensor is an allocation of its own, so that one byte too far is seen, and sizes are multiples of nothing, or end
right behind a block. Results are compared with ATen's. The exit status is 1 when one was wrong, or an op was left out.
"""

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import argparse
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tests.gpu.op_cases import check_call, make, problems, variants

from tk.generated import register
from tk.generated.records import GeneratedOp

SHAPES = ((5, 48), (7, 47), (3, 1040), (130, 33))


def launch_all(op: GeneratedOp) -> tuple[int, list[str]]:
    """(variants launched, what went wrong): each that suits one of the problems, once."""
    launched: set[int] = set()
    wrong = []
    for case in problems(op, SHAPES):
        args = make(case)
        for variant, config in variants(op, args)[0].items():
            if variant not in launched:
                launched.add(variant)
                if problem := check_call(case, args, config).problem:
                    wrong.append(problem)
    torch.cuda.synchronize()
    return len(launched), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ops whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no op after so many seconds")
    args = parser.parse_args()
    begun, total, wrong, left = time.monotonic(), 0, [], []
    for name in register.names():
        op = register.find(name)
        if op is None or op.takes_lists or not re.search(args.only, name):
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
