"""What users write first: the recorded graph's numbers, and those of its gradient, against the function itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from wordy import CASES, Case, X, arguments, close, flat, gradients, made, recorded, traced

from tk.aot.errors import BuildError
from tk.codegen.errors import TraceError
from tk.codegen.family import generate, generate_all
from tk.codegen.lowering.rules import RULED
from tk.codegen.tracing.trace import trace_all, trace_backward
from tk.generated import op


@pytest.mark.parametrize("name", CASES)
def test_as_the_function_itself(name: str) -> None:
    case = CASES[name]
    for trace, backward in traced(name):
        args = arguments(trace)
        expected = flat((case.eager or case.fn)(**args))
        for i, (found, e) in enumerate(zip(recorded(trace, args), expected, strict=True)):
            close(found, e, f"result {i}")
        if backward is not None:
            wanted, grads = gradients(case, args)
            for i, (found, e) in enumerate(zip(recorded(backward, {**args, **grads}), wanted, strict=True)):
                close(found, e, f"gradient {i}")


def _by(name: str, operand: Callable[[torch.Tensor], tuple[Any, ...]]) -> Callable[..., Any]:
    """x.sigmoid().name_(*operand(x))"""
    return lambda x: getattr(x.sigmoid(), f"{name}_")(*operand(x))


_ALONE = (
    "abs", "ceil", "cos", "digamma", "erf", "exp", "expm1", "floor", "lgamma", "log", "log1p", "neg", "reciprocal",
    "relu", "round", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh", "trunc",
)  # fmt: skip
_BOTH = ("add", "sub", "mul", "div", "copysign", "fmod", "pow", "remainder", "xlogy", "floor_divide")
_IN_PLACE = {
    **{name: _by(name, lambda x: ()) for name in _ALONE},
    **{f"{name} by a tensor": _by(name, lambda x: (x.exp(),)) for name in (*_BOTH, "atan2", "hypot")},
    **{f"{name} by a number": _by(name, lambda x: (0.3,)) for name in (*_BOTH, "clamp_min")},
    "clamp": lambda x: x.sigmoid().clamp_(0.1, 0.9),
    "addcmul": lambda x: x.sigmoid().addcmul_(x, x, value=0.5),
    "lerp": lambda x: x.sigmoid().lerp_(x, 0.3),
    "hardswish": lambda x: F.hardswish(x.sigmoid(), inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x - 0.5, 0.1, inplace=True),
    "mish": lambda x: F.mish(x.sigmoid(), inplace=True),
}  # fmt: skip


@pytest.mark.parametrize("name", _IN_PLACE)
def test_in_place_in_16_bits(name: str) -> None:
    """Torch does some by Python references, which convert 16 bits."""
    fn = _IN_PLACE[name]
    (graph,) = generate(fn, op(x="fp16[M, N]")(fn).signature, "f").graphs
    x = torch.randn(5, 12).half()
    close(recorded(graph.trace, {"x": x})[0], fn(x.clone()), name)


def test_every_order_of_a_norm() -> None:
    """With elements that are 0, of which ATen's gradient is none."""
    ((trace, _),) = traced("norm")
    x = torch.randn(5, 12)
    for p in (0.0, 1.0, 2.0, 3.5, math.inf, -math.inf, -1.0):
        args = {"x": x.masked_fill(x.abs() < 0.2, 0.0) if p >= 0 else x, "p": p}
        (found,) = recorded(trace, args)
        close(found, CASES["norm"].fn(**args), f"norm of order {p}")


@pytest.mark.parametrize("reduced", [torch.var, torch.std, torch.var_mean])
def test_gradients_of_the_variance_of_one_element(reduced: Callable[..., Any]) -> None:
    """It divides by 0, which is no error of a kernel, nor of ATen's."""
    case = Case(lambda x: reduced(x, -1), X)
    signature = op(grad=True, **X)(case.fn).signature
    (trace,) = trace_all(case.fn, signature, RULED)
    args = {"x": torch.randn(5, 1)}
    wanted, grads = gradients(case, args)
    for found, expected in zip(recorded(trace_backward(case.fn, signature, trace.dtypes, trace.flags, RULED),
                                        {**args, **grads}), wanted, strict=True):  # fmt: skip
        close(found, expected, "gradient")


def test_a_gradients_dtype_that_is_no_variables() -> None:
    generated = made("a cast to the same dtype")
    assert generated.backward is not None
    signature = generated.backward.signature
    assert signature.params["grad_0"].dtype == "fp32" and "x" in signature.params  # x says of which dtype its own is


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_a_class_that_is_none(wrong: int) -> None:
    """On the CPU, as eager torch; a kernel ends with a trap."""
    fn = lambda x: F.one_hot(x, 5)  # noqa: E731
    (graph,) = generate(fn, op(x="i64[N]")(fn).signature, "f").graphs
    x = torch.tensor([0, 4, 2])
    assert torch.equal(recorded(graph.trace, {"x": x})[0], fn(x))
    with pytest.raises(RuntimeError):
        fn(torch.tensor([0, wrong]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        recorded(graph.trace, {"x": torch.tensor([0, wrong])})


BIG = torch.ones(300)
REFUSED = {
    "a product": (
        lambda x: x @ x,
        {"x": "fp32[N, N]"},
        "aten.mm cannot be generated: a product of matrices: call tk.mm",
    ),
    "a convolution": (lambda x: F.conv1d(x, x), {"x": "fp32[B, B, N]"}, "call tk.conv1d"),
    "classes without a number": (lambda x: F.one_hot(x), {"x": "i64[N]"}, "one_hot without num_classes: how many"),
    "no classes": (lambda x: F.one_hot(x, 0), {"x": "i64[N]"}, "num_classes must be at least 1, is 0"),
    "classes of another dtype": (lambda x: F.one_hot(x, 5), {"x": "i32[N]"}, "one_hot: the classes must be int64"),
    "a large capture": (lambda x: x * BIG[:3], {"x": "fp32[3]"}, "one of up to 256 becomes part of the kernel"),
    "a wide window": (
        lambda x: F.max_pool2d(x, 32),
        {"x": "fp32[B, C, H, W]"},
        "windows of 1024 elements; there may be",
    ),
    "nine dimensions": (lambda x: x.unsqueeze(0), {"x": "fp32[A, B, C, D, E, F, G, H]"}, "result 0 has 9 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    fn, texts, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        generate(fn, op(**texts)(fn).signature, "f").op  # noqa: B018


def product(x):
    return x @ x


def convolution(x):
    return F.conv1d(x, x)


def test_all_refusals_of_a_file_at_once() -> None:
    declared = [op(x="fp32[N, N]")(product), op(x="fp32[B, B, N]")(convolution)]
    with pytest.raises(BuildError) as caught:
        generate_all(declared)
    for text in ("call tk.mm", "call tk.conv1d", f"product ({__file__}:", f"convolution ({__file__}:"):
        assert text in str(caught.value)
