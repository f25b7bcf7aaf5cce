"""Generated ops at their Autograd keys: on CUDA tensors no Python runs where no gradient is at stake."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from tk.generated import register
from tk.ops import _register

from .device import DEVICE

MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def python_calls(call: Callable[[], object]) -> list[str]:
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name in (register.__file__, _register.__file__)]


X = (4, 64)
CALLS = {
    "silu": lambda x: (x,),
    "softmax": lambda x: (x,),
    "row_var_mean": lambda x: (x, 1.0, 1.0),  # two results, a formula of its own
    "embedding": lambda x: (x, torch.tensor([1, 0], device=DEVICE), -1),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_python_runs_where_no_gradient_is_at_stake(name: str) -> None:
    op = getattr(torch.ops.tk, name).default
    args = CALLS[name](torch.randn(X, device=DEVICE))
    op(*args)
    for mode in MODES:
        with mode():  # type: ignore[abstract]
            assert python_calls(lambda: op(*args)) == []
    needy = (args[0].clone().requires_grad_(), *args[1:])
    with torch.no_grad():
        assert python_calls(lambda: op(*needy)) == []
    assert python_calls(lambda: op(*needy)) != [], "this test sees no Python calls"


def test_errors_keep_their_types() -> None:
    x = torch.randn(X, device=DEVICE)
    for needs_grad in (False, True):
        with pytest.raises(ValueError, match="config is -2"):
            torch.ops.tk.row_var_mean(x.requires_grad_(needs_grad), 1.0, 1.0, -2)
