r"""Launches every variant of mm at sizes that are multiples of nothing, for a checker to watch:

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/gpu/sanitize.py [--part 1/4] [--only REGEX]

(The core asks the driver for a kernel's parameters until there are no more: an API error that is meant.)

Every tensor is an allocation of its own, so that one byte too far is seen. Results are compared with torch's, so that a
launch that did nothing is seen too. The exit status is 1 when a variant was wrong, or was not launched at all.
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
from tests.gpu.variants import BUCKETS, SIZES, Bucket, problems

AWKWARD = tuple((m + 1, n + 8, k) for m, n, k in SIZES)  # tiles that are cut off on both sides


def launch_all(bucket: Bucket, waiting: dict[int, str], launched: set[int], only: str) -> list[str]:
    """Each variant of the bucket that has not been launched yet, once. waiting: those seen that nothing suited so far.
    Returns what went wrong."""
    wrong = []
    for operands in problems(bucket, (*AWKWARD, *SIZES)):
        expected = None
        runs, rests = operands.candidates()
        for row in rests:
            if row.variant not in launched and re.search(only, name := operands.name(row)):
                waiting[row.variant] = f"{name}: {row.failed_constraint}"
        for row in runs:
            name = operands.name(row)
            if row.variant in launched or not re.search(only, name):
                continue
            launched.add(row.variant)
            waiting.pop(row.variant, None)
            if expected is None:
                expected = operands.reference()
            result = operands.run(row.config).double()
            difference = ((result - expected).norm() / expected.norm()).item()
            if not difference < 1e-2:
                wrong.append(f"{name}: off by {difference:.2g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the buckets")
    parser.add_argument("--only", default="", help="variants whose description matches this regular expression")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no bucket after so many seconds")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    torch.manual_seed(0)
    begun, launched, wrong, left = time.monotonic(), set(), [], 0
    waiting: dict[int, str] = {}
    for bucket in BUCKETS[part - 1 :: parts]:
        if time.monotonic() - begun > args.seconds:
            left += 1
            continue
        wrong += launch_all(bucket, waiting, launched, args.only)
        torch.cuda.synchronize()
        print(f"{time.monotonic() - begun:5.0f} s  {bucket!s:28} {len(launched)} variants launched", flush=True)
    print(f"{len(launched)} variants launched, {len(wrong)} wrong, {left} buckets left out", *wrong[:20], sep="\n")
    print(f"{len(waiting)} variants that no problem here suits", *[waiting[v] for v in sorted(waiting)[:20]], sep="\n")
    return int(bool(wrong or left or waiting))


if __name__ == "__main__":
    sys.exit(main())
