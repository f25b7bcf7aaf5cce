"""What judges random functions: it takes what nothing settles as it comes, and nothing else."""

from __future__ import annotations

import random_judgement as judgement
import torch
from torch import Tensor


def noise(y: Tensor) -> Tensor:
    """Where rows are equal, the difference is none, or whatever the mean was rounded by."""
    v = y / 1.7 + 2
    v = v - v.mean(-2, keepdim=True)
    return torch.hypot(v, v)


def distance(y: Tensor) -> Tensor:
    return torch.hypot(y, y + 1)


def problems(expected: judgement.Expected, found: Tensor) -> list[str]:
    return list(judgement.compare("it", 2e-4, [found], expected))


def test_a_gradient_by_the_sign_of_noise_is_not_judged() -> None:
    expected = judgement.expected_gradients(noise, [torch.randn(1, 2).expand(17, 2)], [torch.randn(17, 2)])
    found = expected.like[0].clone()
    found[:, 0] = float("nan")
    assert not problems(expected, found)


def test_what_is_settled_is() -> None:
    y = torch.randn(17, 2)
    for function, grads in ((noise, [torch.randn(17, 2)]), (distance, [torch.randn(17, 2)])):
        expected = judgement.expected_gradients(function, [y], grads)
        for wrong in (float("nan"), 3 * float(expected.like[0].abs().max())):
            found = expected.like[0].clone()
            assert not problems(expected, found)
            found[3, 0] = wrong
            assert len(problems(expected, found)) == 1
        assert problems(expected, expected.like[0] * 1.01)
    assert problems(judgement.expected_results(noise, [y]), noise(y) + 0.5)
