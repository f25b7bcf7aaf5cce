"""Hopper's kernels for the gradients of a convolution that are one launch, in the emulator of Gluon, against
float64: plans, coordinates, barriers."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tk.aot.expr import Problem, as_expr
from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import Arg, Bundle, Const, Int, Pointer, TensorMap
from tk.kernels.conv.input_grad.family import FAMILY
from tk.kernels.conv.input_grad.op import OP
from tk.kernels.conv.weight_grad.family import FAMILY as WEIGHT_GRAD_FAMILY
from tk.kernels.conv.weight_grad.op import OP as WEIGHT_GRAD

from . import gluon_emulator
from .launcher import H200, describe, failed_constraint
from .test_conv import Case, as_3d, channels_last, split_groups, without_size_one

VARIANTS = [v for v in enumerate_grid(FAMILY, 90).variants if v.point.dtype == "fp16"]


@pytest.fixture(autouse=True)
def without_layouts(monkeypatch) -> None:
    """Of layouts the kernel only looks at how wide the products are."""
    epilogue, wgmma = (gluon_emulator.module(f"tk.kernels.hopper.{name}") for name in ("epilogue", "wgmma"))
    width = lambda layout, n: types.SimpleNamespace(instr_shape=[0, n, 0])  # noqa: E731
    monkeypatch.setattr(epilogue, "_of_width", width)
    monkeypatch.setattr(wgmma, "accumulator_layout", lambda *_: None)
    monkeypatch.setattr(wgmma, "_issue", issue)


def issue(a: Any, b: Any, acc: Any, layout: Any, a_k_major: bool) -> Any:
    return gluon_emulator._mma(a if a_k_major else a.permute([1, 0]), b, acc, is_async=True)


def memory(t: torch.Tensor) -> np.ndarray:
    size = t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
    return torch.as_strided(t, (size,), (1,)).numpy()


def run(v: Variant, problem: Problem, tensors: list[torch.Tensor]) -> None:
    def number(x: object) -> int:
        return as_expr(x).evaluate(problem)  # type: ignore[arg-type]

    def value(arg: Arg | Bundle) -> Any:
        if isinstance(arg, tuple):
            return type(arg)(*map(value, arg))
        match arg:
            case Const():
                return arg.value
            case Int():
                n = number(arg.value)
                assert not arg.divisible or n % 16 == 0, arg
                return gluon_emulator.T(n)
            case Pointer():
                return gluon_emulator.Pointer(memory(tensors[arg.tensor.index]))
            case TensorMap():
                t = tensors[arg.tensor.index]
                sizes, strides = ([number(s) for s in x] for x in (arg.sizes, arg.strides))
                assert all(s > 0 and s * t.itemsize % 16 == 0 for s in strides[:-1])
                view = np.lib.stride_tricks.as_strided(memory(t), sizes, [s * t.itemsize for s in strides])
                if arg.im2col is None:
                    return gluon_emulator.Descriptor(view, arg.block)
                corners = ([number(x) for x in part] for part in (arg.im2col.lower, arg.im2col.upper, arg.im2col.steps))
                return gluon_emulator.Im2colDescriptor(view, arg.block, *corners)
        raise NotImplementedError(arg)

    (launch,) = v.plan.launches
    gluon_emulator.run(launch.fn, {n: value(a) for n, a in launch.args.items()}, number(launch.grid[0]))


def input_gradient(v: Variant, case: Case, last: bool) -> str | None:
    """By the variant's plan and exactly; why it does not take it."""
    sizes, kernel, out_sizes = as_3d(case.sizes, 1), as_3d(case.kernel, 1), as_3d(case.out_sizes, 1)
    geometry = (*as_3d(case.stride, 1), *as_3d(case.padding, 0), *as_3d(case.dilation, 1))
    grad = torch.randn(case.n, case.o, *out_sizes, dtype=torch.float16)
    weight = torch.randn(case.o, case.c, *kernel, dtype=torch.float16)
    x = torch.zeros(case.n, case.c, *sizes, dtype=torch.float64, requires_grad=True)
    y = F.conv3d(x, weight.double(), None, *(geometry[i : i + 3] for i in (0, 3, 6)))
    (exact,) = torch.autograd.grad(y, x, grad.double())
    out = torch.full((case.n, case.c, *sizes), float("nan"), dtype=torch.float16)
    out = channels_last(out, 1) if last else out
    tensors = [without_size_one(split_groups(t, 1, d)) for t, d in (
        (channels_last(grad, 1), 1), (channels_last(weight, 1), 0), (out, 1))]  # fmt: skip
    # Few multiprocessors: so programs have several tiles each.
    problem = replace(describe(OP, tensors, (*geometry, 0)), device=H200 | {"sm_count": 3})
    if failed := failed_constraint(v.plan, problem):
        return failed
    run(v, problem, tensors)
    eps = 2.0**-10
    bound = eps * exact.abs() + 2.0**-20 * case.o * 9 + eps * 2.0**-3
    assert ((out.double() - exact).abs() <= bound).all(), (out.double() - exact).abs().max()
    return None


CASES = {
    "3x3": Case(2, 1, 16, 72, (9, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    "no stride": Case(2, 1, 72, 136, (7, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "no stride, dilated": Case(1, 1, 8, 8, (9, 12), (3, 2), (1, 1), (2, 0), (2, 3)),
    "patches": Case(3, 1, 144, 64, (16, 12), (2, 2), (2, 2), (0, 0), (1, 1)),
    "one tap": Case(2, 1, 32, 16, (13, 10), (1, 1), (3, 2), (0, 0), (1, 1)),
    "padding": Case(1, 1, 16, 24, (8, 7), (4, 5), (3, 2), (3, 4), (1, 1)),
    "dilated across": Case(1, 1, 16, 8, (9, 9), (3, 3), (2, 1), (1, 2), (1, 2)),
    "three dimensions": Case(1, 1, 16, 16, (5, 6, 4), (3, 2, 3), (2, 1, 3), (1, 0, 1), (1, 1, 1)),
}


def suits(v: Variant, case: Case) -> bool:
    if v.point.spatial == 2 and len(case.sizes) == 3:
        return False
    if v.point.store == "matrix":
        return set(case.stride) == {1}
    return v.point.store == "contiguous" or case.c % 16 == 0


@pytest.mark.drawn
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: f"{v.point.store}-{v.point.spatial}-{v.point.config.name}")
def test_against_float64(v):
    torch.manual_seed(0)
    for name, case in CASES.items():
        refused = input_gradient(v, case, last=v.point.store != "contiguous")
        assert (refused is None) == suits(v, case), (name, refused)


# --- The weight's gradient in one sum ---

WHOLE = [
    v
    for v in enumerate_grid(WEIGHT_GRAD_FAMILY, 90).variants
    if v.kernel.name == "weight_grad_tma_whole" and v.point.dtype == "fp16"
]


@pytest.mark.parametrize("v", WHOLE, ids=lambda v: f"{v.point.spatial}-{v.point.config.name}")
def test_weight_gradient_in_one_sum(v):
    torch.manual_seed(0)
    for name, case in CASES.items():
        sizes, kernel, out_sizes = as_3d(case.sizes, 1), as_3d(case.kernel, 1), as_3d(case.out_sizes, 1)
        geometry = (*as_3d(case.stride, 1), *as_3d(case.padding, 0), *as_3d(case.dilation, 1))
        grad = torch.randn(case.n, case.o, *out_sizes, dtype=torch.float16)
        x = torch.randn(case.n, case.c, *sizes, dtype=torch.float16)
        weight = torch.zeros(case.o, case.c, *kernel, dtype=torch.float64, requires_grad=True)
        y = F.conv3d(x.double(), weight, None, *(geometry[i : i + 3] for i in (0, 3, 6)))
        (exact,) = torch.autograd.grad(y, weight, grad.double())
        out = channels_last(torch.full(weight.shape, float("nan"), dtype=torch.float16), 1)
        tensors = [without_size_one(split_groups(t, 1, d)) for t, d in (
            (channels_last(grad, 1), 1), (channels_last(x, 1), 1), (out, 0))]  # fmt: skip
        problem = replace(describe(WEIGHT_GRAD, tensors, (*geometry, 0)), device=H200 | {"sm_count": 3})
        failed = failed_constraint(v.plan, problem)
        assert (failed is None) == (v.point.spatial == 3 or len(case.sizes) == 2), (name, failed)
        if failed is None:
            run(v, problem, tensors)
            eps = 2.0**-10
            bound = eps * exact.abs() + 2.0**-20 * case.n * 81 + eps * 2.0**-3
            assert ((out.double() - exact).abs() <= bound).all(), name
