"""Ops over lists of tensors, by AdamW: numbers, what is written, layouts, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close

import tk
from tk import capi
from tk.heuristics.problem import describe

from .test_generated_launch import CUDA, Kernel, standing_for

SHAPES = ((5,), (3, 4), (), (0, 2), (2, 3, 4))
RATES: dict[str, Any] = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.03)
NAMES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")


def columns(dtype: torch.dtype, moments: torch.dtype | None = None) -> list[list[Tensor]]:
    params, grads = ([torch.randn(s).to(dtype) for s in SHAPES] for _ in range(2))
    averages = [[torch.zeros(s, dtype=moments or dtype) for s in SHAPES] for _ in range(2)]
    return [params, grads, *averages, [torch.tensor(0.0) for _ in SHAPES]]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_as_torchs_optimizer(fused: bool, maximize: bool) -> None:
    """Steps, moments and parameters after several steps."""
    ours = columns(torch.float32)
    theirs = [x.clone() for x in ours[0]]
    optimizer = torch.optim.AdamW(theirs, **RATES, maximize=maximize, fused=fused, foreach=False)
    for _ in range(4):
        ours[1] = [torch.randn_like(x) for x in theirs]
        for x, grad in zip(theirs, ours[1], strict=True):
            x.grad = grad.clone()
        optimizer.step()
        tk.adamw_(*ours, **RATES, maximize=maximize)
    for i, x in enumerate(theirs):
        assert_close(ours[0][i], x, rtol=1e-5, atol=1e-6)
        assert_close(ours[2][i], optimizer.state[x]["exp_avg"])
        assert_close(ours[3][i], optimizer.state[x]["exp_avg_sq"])
        assert ours[4][i].item() == 4


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
def test_sixteen_bits(dtype: torch.dtype, moments: torch.dtype | None) -> None:
    """Worked out in fp32 and rounded once."""
    ours = columns(dtype, moments)
    exact = [[x.double() if i < 4 else x.clone() for x in column] for i, column in enumerate(ours)]
    tk.adamw_(*ours, **RATES)
    tk.adamw_(*exact, **RATES)
    for a, e in zip(ours[0], exact[0], strict=True):
        assert_close(a, e.to(dtype))
    for a, e in zip(ours[2], exact[2], strict=True):
        assert_close(a, e.to(moments or dtype))
    assert [x.item() for x in ours[4]] == [1.0] * len(SHAPES)


def test_the_first_steps_are_exact_enough() -> None:
    """1 - 0.999 in fp32 would be off by 1e-5."""
    x, g = torch.zeros(1), torch.tensor([2.0])
    tk.adamw_([x], [g], [torch.zeros(1)], [torch.zeros(1)], [torch.tensor(0.0)], lr=1.0, eps=0.0, weight_decay=0.0)
    assert_close(x, torch.tensor([-1.0]), rtol=1e-6, atol=0)


def test_no_tensors() -> None:
    tk.adamw_([], [], [], [], [], lr=0.1)
    torch.ops.tk.adamw([], [], [], [], [], 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)


def test_dtypes_are_taken_apart() -> None:
    several = [columns(torch.float32), columns(torch.bfloat16), columns(torch.bfloat16, torch.float32)]
    alone = [[[x.clone() for x in c] for c in one] for one in several]
    together = [[x for one in several for x in one[i]] for i in range(5)]
    tk.adamw_(*together, **RATES)
    for one in alone:
        tk.adamw_(*one, **RATES)
    for i in range(5):
        for a, e in zip(together[i], [x for one in alone for x in one[i]], strict=True):
            assert torch.equal(a, e)


def test_every_layout() -> None:
    base = torch.randn(4, 6)
    views = [base.t().clone().t(), torch.randn(4, 12)[:, ::2], torch.randn(6, 4).t(), torch.randn(4, 6)]
    given = [[v.clone() for v in views] for _ in range(4)]
    strided = [[torch.empty_like(v).copy_(x) if i else v.copy_(x) for v, x in zip(views, column, strict=True)]
               for i, column in enumerate(given)]  # fmt: skip
    given[3] = [x.abs() for x in given[3]]
    for s, g in zip(strided[3], given[3], strict=True):
        s.copy_(g)
    tk.adamw_(*strided, [torch.tensor(2.0) for _ in views], **RATES)
    tk.adamw_(*given, [torch.tensor(2.0) for _ in views], **RATES)
    for i in range(4):
        for s, g in zip(strided[i], given[i], strict=True):
            assert_close(s, g)


def test_autograd_sees_that_they_are_written() -> None:
    ours = columns(torch.float32)
    versions = [x._version for x in ours[0]]
    x = ours[0][0].requires_grad_()
    y = x.square().sum()
    tk.adamw_(*ours, **RATES)
    assert all(a._version > v for a, v in zip(ours[0], versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_one_graph() -> None:
    def step(columns: list[list[Tensor]]) -> Tensor:
        torch.ops.tk.adamw(*columns, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
        return columns[0][0] + 1

    a, b = columns(torch.float32), None
    b = [[x.clone() for x in c] for c in a]
    assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(a), step(b))
    for x, y in zip(a, b, strict=True):
        assert_close(x, y)


def test_opcheck() -> None:
    few = [c[:2] for c in columns(torch.float32)]
    torch.library.opcheck(torch.ops.tk.adamw.default, (*few, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0))


def wrong(change: Callable[[list[list[Tensor]]], None]) -> None:
    given = [c[:2] for c in columns(torch.float32)]
    change(given)
    torch.ops.tk.adamw(*given, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)


def put(column: int, place: int, x: Callable[[list[list[Tensor]]], Tensor]) -> Callable[[list[list[Tensor]]], None]:
    def change(given: list[list[Tensor]]) -> None:
        given[column][place] = x(given)

    return change


REFUSED: dict[str, tuple[str, Callable[[list[list[Tensor]]], None]]] = {
    "length": ("one length; params has 2 tensors, steps 1", lambda g: g[4].pop() and None),
    "sizes": (r"params\[1\] and grads\[1\] must be the same, are \[3, 4\] and \[4, 3\]",
              put(1, 1, lambda g: torch.zeros(4, 3))),
    "dtype": ("grads must have the dtype of params", lambda g: g.__setitem__(1, [x.half() for x in g[1]])),
    "dtypes in a list": (r"exp_avgs\[0\] is float32, exp_avgs\[1\] float16", put(2, 1, lambda g: g[2][1].half())),
    "rank": (r"steps\[0\] must have 0 dimensions, is \[1\]", put(4, 0, lambda g: torch.zeros(1))),
    "repeats": (r"elements of exp_avgs\[0\], which is written, share", put(2, 0, lambda g: torch.zeros(1).expand(5))),
    "twice": (r"params\[0\], which is written, overlaps grads\[0\]", put(1, 0, lambda g: g[0][0])),
    "one step for all": (r"steps\[0\], which is written, overlaps steps\[1\]", put(4, 1, lambda g: g[4][0])),
    "device": (r"params\[0\] is on cpu, grads\[1\] on meta", put(1, 1, lambda g: g[1][1].to("meta"))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    message, change = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        wrong(change)


def test_the_function_says_which_dtypes_it_takes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, device="cuda", dtype=torch.float64)
        with pytest.raises(tk.UnsupportedError, match=r"params, grads, .* are float64, .* it takes bfloat16"):
            tk.adamw_([x], [x], [x], [x], [torch.empty((), device="cuda")], lr=0.1)
    with pytest.raises(ValueError, match="one length; params has 1 tensors, grads 0"):
        tk.adamw_([torch.zeros(1)], [], [], [], [], lr=0.1)
    with pytest.raises(TypeError, match="grads must hold tensors, holds a NoneType"):
        tk.adamw_([torch.zeros(1)], [None], [torch.zeros(1)], [torch.zeros(1)], [torch.tensor(0.0)], lr=0.1)  # type: ignore[list-item]


def test_what_the_kernels_are_told() -> None:
    """A list is one tensor: how many places, how many chunks of 4096 elements, and whether all lie on 16 bytes."""
    given = columns(torch.float32)
    given[0].append(torch.zeros(8193 + 1)[1:])
    for i in range(1, 4):
        given[i].append(torch.zeros(8193))
    given[4].append(torch.tensor(0.0))
    described = Kernel("adamw", capi.describe_device(132, 90, 232448, 50 << 20))(*given, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
    assert described is not None
    found = [t for t in described.problem.tensors if t is not None]
    chunks = sum(-(-x.numel() // 4096) for x in given[0])
    assert [t.sizes for t in found] == [(len(SHAPES) + 1, chunks)] * 5
    assert [t.strides[0] for t in found[:2]] == [1, 16]
    assert capi.choose(described.problem, -1).kernel_name == "adamw"


def test_the_kernel_refuses_a_gradient_and_counts_what_it_writes() -> None:
    """In C++: the gate knows no lists."""
    given, numbers = columns(torch.float32), (0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
    kernel = Kernel("adamw", capi.describe_device(132, 90, 232448, 50 << 20))
    before = [column[0]._version for column in given]
    kernel(*given, *numbers)
    assert [column[0]._version - n for column, n in zip(given, before, strict=True)] == [1, 0, 1, 1, 1]
    given[0][1].requires_grad_()

    def with_gradients() -> None:
        with torch.enable_grad():
            kernel.op.redispatch(CUDA, *given, *numbers)

    with standing_for(kernel.device), pytest.raises(NotImplementedError, match="adamw has no gradient"):
        describe(with_gradients)


def test_the_kernel_refuses_a_tangent() -> None:
    given, numbers = columns(torch.float32), (0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
    kernel = Kernel("adamw", capi.describe_device(132, 90, 232448, 50 << 20))
    with torch.no_grad(), forward_ad.dual_level():
        assert kernel(*given, *numbers) is not None
        given[1][0] = forward_ad.make_dual(given[1][0], torch.ones_like(given[1][0]))
        with pytest.raises(NotImplementedError, match="adamw has no gradient"):
            kernel(*given, *numbers)
        with pytest.raises(NotImplementedError, match="adamw has no gradient"):
            torch.ops.tk.adamw(*given, *numbers)


# --- torch.func ---


def stepped(grad: torch.Tensor) -> torch.Tensor:
    """What a step makes of a parameter of ones."""
    param, average, square = (torch.ones_like(grad) for _ in range(3))
    torch.ops.tk.adamw([param], [grad], [average], [square], [torch.zeros(())], 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
    return param.sum()


TRANSFORMED = {
    "grad": lambda x: torch.func.grad(stepped)(x),
    "vjp": lambda x: torch.func.vjp(stepped, x),
    "jvp": lambda x: torch.func.jvp(stepped, (x,), (x,)),
    "vmap": lambda x: torch.vmap(stepped)(torch.stack((x, x))),
    "hessian": lambda x: torch.func.hessian(stepped)(x),
    "no_grad": lambda x: torch.func.grad(lambda y: torch.no_grad()(stepped)(y))(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_torch_func_transforms_is_refused(name: str) -> None:
    """At the key where its transforms begin, which is the same on CUDA; torch's own fallback would be silent."""
    with pytest.raises(NotImplementedError, match=r"tk\.adamw takes lists of tensors and has neither a gradient nor"):
        TRANSFORMED[name](torch.ones(3))
    assert stepped(torch.ones(3)) < 3  # and nothing of a transform is left


def test_beside_a_transform_lists_are_what_they_are() -> None:
    given = columns(torch.float32)
    expected = copy.deepcopy(given)
    torch.ops.tk.adamw(*expected, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.ops.tk.adamw(*given, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
        return (x * x).sum()

    assert torch.equal(torch.func.grad(function)(torch.ones(3)), torch.full((3,), 2.0))
    assert all(torch.equal(a, b) for x, y in zip(given, expected, strict=True) for a, b in zip(x, y, strict=True))
