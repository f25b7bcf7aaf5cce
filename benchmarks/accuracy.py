"""Is a result right? Judged against a reference in higher precision, and against torch's own error.

    mean error <= 1.1 x torch's own      max error <= 2 x torch's own      each plus a small absolute term

The absolute term is what a sum of K products in fp32 may lose by its order alone (torch may have been lucky), plus a
few roundings of the epilogue. It lies far below one rounding to 16 bits, and far below the effect of one element of K
that is missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MEAN_FACTOR = 1.1
MAX_FACTOR = 2.0
FP32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Error:
    """Absolute errors. Infinite when something is NaN or infinite that should not be, or the other way round."""

    mean: float
    max: float


@dataclass(frozen=True)
class Verdict:
    """ours, torch: against the reference. slack: the absolute term of the mean."""

    ours: Error
    torch: Error
    slack: float

    @property
    def ok(self) -> bool:
        if not math.isfinite(self.ours.max):  # whatever torch makes of it
            return False
        mean_holds = self.ours.mean <= MEAN_FACTOR * self.torch.mean + self.slack
        return mean_holds and self.ours.max <= MAX_FACTOR * self.torch.max + 16 * self.slack

    @property
    def ratio(self) -> float:
        """Our mean error over torch's."""
        if self.torch.mean == 0:
            return 1.0 if self.ours.mean <= self.slack else math.inf
        return self.ours.mean / self.torch.mean

    def __str__(self) -> str:
        return (
            f"mean error {self.ours.mean:.3e} (torch {self.torch.mean:.3e}), max {self.ours.max:.3e} "
            f"(torch {self.torch.max:.3e}), slack {self.slack:.1e}"
        )


def error(result: torch.Tensor, reference: torch.Tensor) -> Error:
    """Of `result` against `reference` (fp64, same shape)."""
    if result.numel() == 0:
        return Error(0.0, 0.0)
    difference = (result.double() - reference).abs()
    # Where both are the same infinity, or both NaN, the difference is NaN though nothing is wrong. What is beyond the
    # result's range rounds to infinity.
    rounded, found = reference.to(result.dtype).double(), result.double()  # fp8 has neither isinf nor ==
    same = (rounded.isinf() & (found == rounded)) | (found.isnan() & reference.isnan())
    difference = torch.where(same, 0.0, difference)
    mean, largest = torch.stack([difference.mean(), difference.max()]).tolist()
    return Error(mean, largest) if math.isfinite(largest) else Error(math.inf, math.inf)


def slack(inner: int, magnitude: float, tensor_cores: bool) -> float:
    """What an fp32 sum of `inner` products may lose by its order, where results are of size `magnitude`.

    Rounding errors of a plain sum grow with the square root of its length; tensor cores truncate once for 16 products,
    always towards zero, so theirs grow with it."""
    steps = 4 + math.sqrt(inner) / 2 + (inner / 16 if tensor_cores else 0)
    return steps * FP32_ROUNDING * magnitude


def judge(result: torch.Tensor, torchs: torch.Tensor, reference: torch.Tensor, slack: float) -> Verdict:
    """`torchs`: what torch makes of the same inputs."""
    return Verdict(error(result, reference), error(torchs, reference), slack)
