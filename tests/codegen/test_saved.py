"""Results that a backward reads: which functions' they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tk.codegen.errors import TraceError
from tk.codegen.family import Generated, generate
from tk.generated.signature import parse


def made(fn: Callable[..., Any], **texts: str) -> Generated:
    names = [n for n in texts if n != "T"]
    return generate(fn, parse(texts, names, {}), "function", grad=True)


def read(op: Generated) -> list[str]:
    assert op.backward is not None
    return [n for n in op.backward.signature.tensors if not n.startswith("grad_")]


def reductions(op: Generated) -> int:
    assert op.backward is not None
    return sum(v.op == "reduce" for k in op.backward.graphs[0].kernels for v in k.values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("fn", "result"),
    [
        (lambda x: F.softmax(x, -1), "result_0"),
        (lambda x: F.log_softmax(x * 2, -1), "result_0"),
        (lambda x: torch.tanh(x + 1), "result_0"),
        (lambda x: x.exp(), "result_0"),
        (lambda x: x.sin(), "x"),
        (lambda x: F.gelu(x), "x"),
        (lambda x: x, ""),
    ],
)
def test_a_result_is_read_in_place_of_the_argument(fn: Callable[..., Any], result: str, dtype: str) -> None:
    op = made(fn, x=f"{dtype}[..., N]")
    assert read(op) == ([result] if result else [])


def test_fewer_reductions_are_left() -> None:
    assert reductions(made(lambda x: F.softmax(x, -1), x="bf16[..., N]")) == 1
    assert reductions(made(lambda x: torch.logsumexp(x, -1), x="fp32[..., N]")) == 0


def test_a_rounded_result_is_not_read_beside_its_argument() -> None:
    """The rounding of logsumexp(x) would not cancel in exp(x - logsumexp(x))."""
    assert read(made(lambda x: torch.logsumexp(x, -1), x="bf16[..., N]")) == ["x"]
    assert read(made(lambda x: torch.logsumexp(x, -1), x="fp32[..., N]")) == ["result_0", "x"]
    both = made(lambda x: torch.logsumexp(x, -1), x="T[..., N]", T=("bf16", "fp32"))  # type: ignore[arg-type]
    assert read(both) == ["result_0", "x"]


def test_what_is_compared_is_worked_out_again() -> None:
    """The softmax inside may have other last bits than the forward's, so that no element were the maximum."""
    assert read(made(lambda x: F.softmax(x, -1).amax(-1), x="fp32[..., N]")) == ["x"]


def test_no_more_is_read_than_without() -> None:
    """Beside x, which the second result's gradient needs, exp(x) would be read besides."""
    op = made(lambda x: (x.exp(), x.sin()), x="fp32[..., N]")
    assert read(op) == ["x"]


def test_one_result_in_place_of_two_arguments() -> None:
    """All of which are kept: where one result has no gradient, the other's is worked out of them."""

    def fn(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return F.rms_norm(total, (x.shape[-1],), weight, 1e-5), total

    op = made(fn, x="bf16[..., N]", y="bf16[..., N]", weight="bf16[N]")
    assert read(op) == ["result_1", "weight"]
    found = op._backward_meta()
    assert found is not None and (found["saved_inputs"], found["saved_outputs"]) == ([0, 1, 2], [1])


def test_integers_are_results_too() -> None:
    """x is where the size is known from."""
    op = made(lambda x: x.max(-1), x="fp32[..., N]")
    assert read(op) == ["result_1", "x"] and reductions(op) == 0


@pytest.mark.parametrize("name", ["grad_0", "result_0"])
def test_a_parameter_that_is_called_as_an_argument_of_the_gradient(name: str) -> None:
    fn = {"grad_0": lambda grad_0: grad_0.sin(), "result_0": lambda result_0: result_0.sin()}[name]
    with pytest.raises(TraceError, match=f"the gradient's op has an argument {name} of its own; rename the parameter"):
        made(fn, **{name: "fp32[..., N]"})
