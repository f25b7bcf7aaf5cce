"""Wrong and unusual arguments on a GPU, mixtures of devices among them (tests/ops/bad_input.py)."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from tests.ops.bad_input import failures, report

from .device import DEVICE

CASES = 4000


def test_changed_calls_of_every_function(monkeypatch: pytest.MonkeyPatch):
    """Another seed in every run; a failure prints it. An illegal access would show at the synchronisation."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions are compared as float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*failures(seed, CASES, DEVICE, "cpu"), *failures(seed + 1, CASES // 4, DEVICE, "meta")]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert not found, f"seed {seed}:\n{report(found)}"
