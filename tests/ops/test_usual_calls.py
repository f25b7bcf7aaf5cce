"""A usual call takes the short way: what it asks for, and which ops it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tk
from tk.functional import _call
from tk.ops import _register


class _Ops(TorchDispatchMode):
    """The names of the ops that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removesuffix(".default"))
        return func(*args, **kwargs or {})


X = torch.linspace(-1, 1, 4 * 8).reshape(4, 8)
ROW = torch.linspace(-1, 1, 8)
INDEX = torch.arange(8).flip(0).repeat(4, 1)
IMAGE = torch.linspace(-1, 1, 2 * 4 * 3).reshape(2, 4, 3)

# A call of tk, torch's, and the ops that it runs.
CALLS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor], list[str]]] = {
    "amax": (lambda: tk.amax(X, -1), lambda: torch.amax(X, -1), ["tk.row_amax"]),
    "any": (lambda: tk.any(X > 0, 1), lambda: torch.any(X > 0, 1), ["aten.gt.Scalar", "tk.row_any"]),
    "gather": (lambda: tk.gather(X, 1, INDEX), lambda: torch.gather(X, 1, INDEX), ["tk.gather"]),
    "gelu": (lambda: tk.gelu(X), lambda: F.gelu(X), ["tk.gelu"]),
    "group_norm": (
        lambda: tk.group_norm(IMAGE, 2, torch.ones(4), torch.zeros(4)),
        lambda: F.group_norm(IMAGE, 2),
        ["aten.ones", "aten.zeros", "aten.view", "aten.view", "aten.view", "tk.group_norm", "aten.view"],
    ),
    "layer_norm": (
        lambda: tk.layer_norm(X, (8,), ROW, ROW),
        lambda: F.layer_norm(X, (8,), ROW, ROW),
        ["tk.layer_norm"],
    ),
    "max": (
        lambda: tk.max(X, 1).values,
        lambda: torch.max(X, 1).values,
        ["tk.row_max"],
    ),
    "mean": (lambda: tk.mean(X, 1), lambda: torch.mean(X, 1), ["tk.row_mean"]),
    "searchsorted": (lambda: tk.searchsorted(ROW, X), lambda: torch.searchsorted(ROW, X), ["tk.bucketize"]),
    "softmax": (lambda: tk.softmax(X, -1), lambda: F.softmax(X, -1), ["tk.softmax"]),
    "sum": (lambda: tk.sum(X, -1), lambda: torch.sum(X, -1), ["tk.row_sum"]),
    "swiglu": (lambda: tk.swiglu(X), lambda: F.silu(X[:, :4]) * X[:, 4:], ["aten.split_with_sizes", "tk.swiglu"]),
    "var": (lambda: tk.var(X, -1), lambda: torch.var(X, -1), ["tk.row_var_mean"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_usual_call_runs_its_op_and_nothing_around_it(name: str) -> None:
    call, of_torch, wanted = CALLS[name]
    with _Ops() as ops:
        found = call()
    assert ops.names == wanted
    torch.testing.assert_close(found, of_torch())


@pytest.mark.parametrize("name", CALLS)
def test_without_a_mode_or_a_pin_none_is_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, *_ = CALLS[name]
    wanted = call()
    monkeypatch.setattr(_call, "_ops", {})
    monkeypatch.setattr(_call, "is_strict", lambda: pytest.fail("strict mode is asked for"))
    torch.testing.assert_close(call(), wanted)


@pytest.mark.parametrize(
    "setting", [tk.config.deterministic, lambda: tk.config.override("mm", 0), tk.config.batch_invariant]
)
def test_with_a_mode_or_a_pin_it_is_looked_up(setting: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tk.gelu(X)
    seen = []
    monkeypatch.setitem(_call._ops, "gelu", lambda *args, **kwargs: seen.append(kwargs))
    with setting():
        tk.gelu(X)
    tk.gelu(X, config=3)
    assert seen == [{"config": None}, {"config": 3}]


def test_errors_of_a_usual_call_are_typed() -> None:
    with pytest.raises(TypeError, match="eps must be a float"):
        tk.layer_norm(X, (8,), ROW, ROW, "1e-5")


def test_arguments_left_out_are_their_defaults() -> None:
    op = torch.ops.tk.row_sum.default
    for given in ((X,), (X, 3), (X, 3, 1)):
        assert _register.with_defaults(op, given)[1:] == (*given, *(-1, 0)[len(given) - 1 :])[1:]
    assert _register.with_defaults(op, (X,), {"mode": 1})[1:] == (-1, 1)


GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "gelu": (tk.gelu, ["tk.gelu_backward"]),
    "softmax": (lambda x: tk.softmax(x, -1), ["tk.softmax_backward"]),
    "geglu of halves": (tk.geglu, ["tk.geglu_backward", "aten.cat"]),
    "sum": (lambda x: tk.sum(x, -1), ["aten.unsqueeze", "aten.expand"]),
    "sum of all": (tk.sum, ["aten.expand", "aten.view"]),
    "swiglu of halves": (tk.swiglu, ["tk.swiglu_backward", "aten.cat"]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_runs_its_op_and_nothing_around_it(name: str) -> None:
    function, wanted = GRADIENTS[name]
    x = X.clone().requires_grad_()
    out = function(x)
    with _Ops() as ops:
        torch.autograd.grad(out, x, torch.ones_like(out.detach()))
    assert [op for op in ops.names if op not in ("aten.detach", "aten.ones_like")] == wanted


def test_a_call_makes_a_node_only_where_a_gradient_is_needed() -> None:
    x = X.clone().requires_grad_()
    assert tk.gelu(X).grad_fn is None
    assert type(tk.gelu(x).grad_fn).__name__ == "TkGeluBackward"
    with torch.no_grad():
        assert tk.gelu(x).grad_fn is None
