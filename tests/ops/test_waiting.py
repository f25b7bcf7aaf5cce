"""No reduction asks for a value on the host: CUDA graphs could not hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tk


class Waits(TorchDispatchMode):
    """Counts what would wait for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n", [100, 70_001, 1 << 18])
@pytest.mark.parametrize(
    "name", ["argmax", "argmin", "max", "min", "amax", "sum", "mean", "prod", "var", "std_mean", "norm", "any", "all"]
)
def test_all_of_a_tensor_is_reduced_without_waiting(name: str, n: int) -> None:
    x = torch.randn(n)
    with Waits() as waits:
        getattr(tk, name)(x)
    assert waits.count == 0
