"""How far a result is off, against torch's own result of the same call, and what both take on the CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tk.tune.ops import units_of_sum


@dataclass(frozen=True)
class ErrorRatio:
    """Our error over torch's: of the means and of the largest."""

    mean: float
    max: float

    def is_good(self) -> bool:
        """No more than 1.1 times torch's mean error and twice its largest."""
        return self.mean <= MOST_MEAN and self.max <= MOST

    @property
    def over_allowed(self) -> float:
        """The error over what is allowed: at most 1 where it is good; infinite of NaN."""
        if math.isnan(self.mean) or math.isnan(self.max):
            return math.inf
        return max(self.mean / MOST_MEAN, self.max / MOST)


MOST_MEAN, MOST = 1.1, 2.0


def error_ratio(
    result: Tensor, torchs: Tensor, reference: Tensor, terms: int = 1, sums: Tensor | None = None
) -> ErrorRatio:
    """reference: float64, the same shape; terms: how many each element sums; sums: what they come to, where an
    activation makes most of them smaller, but not the errors of the largest. NaN anywhere gives NaN, which is not
    good."""
    ours, theirs = ((x.double() - reference).abs() for x in (result, torchs))
    slack = _slack(reference, terms, sums)
    ratios = torch.stack([ours.mean() / (theirs.mean() + slack), ours.max() / (theirs.max() + slack)]).tolist()
    return ErrorRatio(*ratios)


def largest_allowed(torchs: Tensor, reference: Tensor, terms: int = 1, sums: Tensor | None = None) -> float:
    """What one element of a result may be off by."""
    return MOST * float((torchs.double() - reference).abs().max() + _slack(reference, terms, sums))


def _slack(reference: Tensor, terms: int, sums: Tensor | None) -> Tensor:
    return units_of_sum(terms) * torch.finfo(torch.float32).eps * (reference if sums is None else sums).abs().mean()


def host_us(call: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some calls on the CPU, in microseconds."""

    def once() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    return min(once() for _ in range(repeats))
