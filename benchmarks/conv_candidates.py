"""``python -m benchmarks.conv_candidates [REGEX]``: every config that fits a layer, in place of the chosen one.

Of listed layers, and of the first that benchmarks/conv.py draws with groups. Forward and gradients, both
layouts. The time is that of the whole op, copies included; 1.00 is torch's.

For the numbers in kernels/conv/cost.py, and for what a config is worth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks import conv
from benchmarks.convolutions import Convolution
from tk import capi, timing
from tk.heuristics.problem import Described, describe_all


def calls_of(p: Convolution) -> Iterator[tuple[str, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]:
    """What it is, tk's and torch's."""
    x, weight, _ = p.make()
    yield "forward", partial(p.run_tk, x, weight, None), partial(p.run_torch, x, weight, None)
    grad = torch.randn_like(p.run_torch(x, weight, None))
    zeros = [0] * p.spatial
    for i, op in enumerate((torch.ops.tk.conv_input_grad, torch.ops.tk.conv_weight_grad)):
        ours = partial(op, grad, x, weight, p.stride, p.padding, p.dilation, p.groups)
        theirs = partial(torch.ops.aten.convolution_backward, grad, x, weight, None, p.stride, p.padding, p.dilation,
                         False, zeros, p.groups, [i == 0, i == 1, False])  # fmt: skip
        yield ("input", "weight")[i], ours, theirs


def times(ours: Callable[[], torch.Tensor], called: list[Described]) -> Iterator[tuple[str, float, bool]]:
    """(config, microseconds, whether it is chosen) of every config of every distinct call, the others as chosen."""
    problems = {(d.problem.op, *(t and (t.sizes, t.strides) for t in d.problem.tensors)): d.problem for d in called}
    for problem in problems.values():
        chosen = capi.choose(problem).config
        for candidate in capi.candidates(problem):
            if not candidate.fits:
                continue
            capi.pin(problem, candidate.config)
            try:
                us = timing.median_time([ours], rounds=3, ms=3, warm_ms=3).us
            finally:
                capi.pin(problem, -1)
            yield f"{problem.op} {candidate.config_name}", us, candidate.config == chosen


def main(pattern: str) -> None:
    torch.backends.cudnn.benchmark = True
    layers = (*conv.LISTED, *conv.RESNET, *conv.CONVNEXT, *conv.VIDEO, *conv.GROUPED, *conv.drawn_groups(12))
    for p in (replace(p, layout=layout) for layout in ("channels_last", "contiguous") for p in layers):
        for what, ours, theirs in calls_of(p):
            label = f"{p.label} {what}"
            if not re.search(pattern, label):
                continue
            called = describe_all(ours)
            torchs = timing.median_time([theirs], rounds=3, ms=3, warm_ms=3).us
            print(f"{label}: torch {torchs:.1f} us; {' '.join(d.problem.op for d in called)}", flush=True)
            for config, us, chosen in times(ours, called):
                print(f"  {'*' if chosen else ' '} {config:60} {us:8.1f} us {torchs / us:5.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
