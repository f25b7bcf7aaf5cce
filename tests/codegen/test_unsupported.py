"""What a user's function calls and no kernel has is refused with the function's line, what was called and what to do;
nothing of torch's tracer is in the message. What the function itself has wrong is said in torch's words."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from unsupported_functions import CASES

from tk.codegen.errors import InternalError, TraceError
from tk.codegen.family import generate
from tk.errors import Error
from tk.generated import op

MACHINERY = re.compile(
    r"INTERNAL ASSERT|SymInt|symbolic|FakeTensor|While executing|num_users|report a bug|\b[su]\d+\b|[Pp]roxy|\.cpp|"
    r"GuardOn|aten\.\w+\.\w+|call_function|customized tensor|\bFX\b|higher order|__torch_|dispatch|/torch/|Dynamo|"
    r"\bmeta\b"
)


def message_of(fn, texts, grad: bool = False) -> str | None:
    """None: it has kernels."""
    try:
        generate(fn, op(**texts)(fn).signature, "f", grad)
    except TraceError as error:
        assert isinstance(error, Error)
        assert not isinstance(error, InternalError)
        return str(error)
    return None


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_torch_says_nothing_of_its_tracer(case) -> None:
    _, fn, texts, *grad = case
    message = message_of(fn, texts, *grad)
    if message is not None:
        assert f"({fn.__code__.co_filename}:" in message
        assert "\n" not in message and not MACHINERY.search(message), message


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has it")
def test_what_torch_calls_otherwise_has_its_public_name() -> None:
    options = getattr(torch.nn, "LinearCrossEntropyOptions", dict)(batch_chunk_size=2)
    message = message_of(
        lambda x, w, t: F.linear_cross_entropy(x, w, t, options=options),
        dict(x="fp32[M, K]", w="fp32[N, K]", t="i64[M]"),
    )
    assert message and "torch.nn.functional.linear_cross_entropy cannot be generated: the loss of a product" in message
    assert message.endswith("call tk.linear_cross_entropy outside of the function")


def test_most_of_these_are_refused() -> None:
    """So that the list keeps its point."""
    assert len(CASES) > 200
    assert sum(message_of(fn, texts, *grad) is not None for _, fn, texts, *grad in CASES[::5]) > 20


NAMED = {
    "addbmm": (lambda a, x, y: torch.addbmm(a, x, y), dict(a="fp32[M, K]", x="fp32[B, M, N]", y="fp32[B, N, K]"),
               "torch.addbmm cannot be generated: .*tk.baddbmm"),
    "bilinear": (lambda x, y, w: F.bilinear(x, y, w), dict(x="fp32[M, I]", y="fp32[M, J]", w="fp32[O, I, J]"),
                 "torch.nn.functional.bilinear cannot be generated: .*tk.bmm"),
    "pinv": (lambda x: torch.linalg.pinv(x), dict(x="fp32[M, N]"), "torch.linalg.pinv cannot be .*linear algebra"),
    "triangular": (lambda x, y: torch.linalg.solve_triangular(x, y, upper=True), dict(x="fp32[M, M]", y="fp32[M, K]"),
                   "solve_triangular cannot be .*linear algebra"),
    "masked": (lambda x, m, y: x.masked_scatter(m, y), dict(x="fp32[N]", m="bool[N]", y="fp32[K]"),
               "aten.masked_scatter cannot be .*torch.where"),
    "cov": (lambda x: torch.cov(x), dict(x="fp32[M, N]"), "torch.cov cannot be generated: .*tk.mm"),
    "fit": (lambda x, y: x + y, dict(x="fp32[M, N]", y="fp32[M, K]"), r"size of tensor a \(N\) must match .* b \(K\)"),
    "dimension": (lambda x: x.softmax(5), dict(x="fp32[M]"), "Dimension out of range"),
    "own": (lambda x: x.summ(), dict(x="fp32[M]"), "'Tensor' object has no attribute 'summ'"),
    "vmap": (lambda x: torch.vmap(torch.sin)(x), dict(x="fp32[M]"), "torch.func or torch.vmap"),
    "pooling": (lambda x: F.adaptive_avg_pool2d(x, 7), dict(x="fp32[B, C, H, W]"), "declare them as numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_is_said(name: str) -> None:
    fn, texts, message = NAMED[name]
    assert re.search(message, message_of(fn, texts) or "")


WITHOUT_GRADIENT = {
    "power": (lambda x, n: x**n, dict(x="i64[N]", n="int"), "no parameter is a floating-point tensor"),
    "sum": (lambda x, y: x + y, dict(x="i64[N]", y="i64[N]"), "no parameter is a floating-point tensor"),
    "in place": (lambda x: x.add_(1), dict(x="fp32[N]"), "changes its arguments has no gradient"),
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_what_has_no_gradient(name: str) -> None:
    fn, texts, message = WITHOUT_GRADIENT[name]
    assert message_of(fn, texts) is None
    said = message_of(fn, texts, True) or ""
    assert message in said and "leave out grad=True" in said


@pytest.mark.parametrize("fn", [lambda x: x > 0, lambda x: x.argmax(-1), lambda x: x.round().to(torch.int32)])
def test_results_without_a_gradient(fn) -> None:
    assert message_of(fn, dict(x="fp32[M, N]"), True) is None


@pytest.mark.parametrize("fn", [
    lambda x: x[..., : int(x.shape[-1] * 0.5)] + 1,
    lambda x: x[..., : round(x.shape[-1] / 2)] + 1,
    lambda x: x[..., math.ceil(x.shape[-1] / 2) :] + 1,
    lambda x: x.new_zeros(int(x.shape[-1] * 1.5)) + x[0, 0, 0, 0],
    lambda x: x.mean(-1, keepdim=True).expand(-1, -1, -1, math.floor(x.shape[-1] * 2.5)) + 1,
    lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    lambda x: F.interpolate(x, scale_factor=1.5),
])  # fmt: skip
def test_sizes_that_floats_make(fn) -> None:
    message = message_of(fn, dict(x="fp32[B, C, H, W]"))
    assert message is not None and "a size is worked out in floating point" in message
    assert not MACHINERY.search(message)


def test_floats_that_sizes_make() -> None:
    fn = lambda x: x / x.shape[-1] ** 0.5 - x.shape[0] * 0.5  # noqa: E731
    assert message_of(fn, dict(x="fp32[M, N]")) is None
