"""Ops over lists of tensors on the GPU, by AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tk

from .device import DEVICE

RATES: dict[str, Any] = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
SIZES = [(1,), (3, 5), (0,), (4096,), (4097,), (128, 129), (), (1 << 20,), (7, 0), (300_001,)]


def columns(sizes: Any, dtype: torch.dtype, moments: torch.dtype) -> list[list[Tensor]]:
    params, grads = ([torch.randn(s, device=DEVICE).to(dtype) for s in sizes] for _ in range(2))
    averages = [[torch.zeros(s, device=DEVICE, dtype=moments) for s in sizes] for _ in range(2)]
    return [params, grads, *averages, [torch.zeros((), device=DEVICE) for _ in sizes]]


def clones(given: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[x.clone() for x in column] for column in given]


def check(given: list[list[Tensor]], steps: int = 3) -> None:
    """Against the function itself in fp64, step by step: what is stored is rounded, so each begins at what is there."""
    for _ in range(steps):
        exact = [[x.double() for x in column] for column in given]
        for x, g, m, v, count in zip(*exact, strict=True):
            count += 1
            x.mul_(1 - RATES["lr"] * RATES["weight_decay"])
            m.mul_(0.9).add_(g, alpha=1 - 0.9)
            v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            x.sub_(RATES["lr"] / (1 - 0.9**count) * m / ((v / (1 - 0.999**count)).sqrt() + RATES["eps"]))
        tk.adamw_(*given, **RATES)
        for column, wanted in zip(given, exact, strict=True):
            for a, e in zip(column, wanted, strict=True):
                tolerance = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[a.dtype]
                assert_close(a.double(), e, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
     (torch.float16, torch.float32)],
)  # fmt: skip
def test_steps(dtype: torch.dtype, moments: torch.dtype) -> None:
    check(columns(SIZES, dtype, moments))


def test_as_torchs_fused_step() -> None:
    ours = columns(SIZES, torch.float32, torch.float32)
    theirs = [x.clone() for x in ours[0]]
    optimizer = torch.optim.AdamW(theirs, **RATES, fused=True)
    for _ in range(3):
        for x, g in zip(theirs, ours[1], strict=True):
            x.grad = g.clone()
        optimizer.step()
        tk.adamw_(*ours, **RATES)
    for a, e in zip(ours[0], theirs, strict=True):
        assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_more_tensors_than_a_table_part_or_a_block_holds() -> None:
    check(columns([(i % 50,) for i in range(1500)], torch.float32, torch.float32), steps=1)


def test_odd_addresses_and_any_strides() -> None:
    given = columns([(1000,), (64, 48), (64, 48), (5, 6, 7)], torch.float32, torch.float32)
    for i in range(4):
        given[i][0] = torch.cat([given[i][0], given[i][0]])[1:1001]
        given[i][1] = given[i][1].t()
        given[i][3] = torch.stack([given[i][3]] * 2, -1)[..., 0]
    given[1][2] = given[1][2].t().contiguous().t()
    check(given)


def test_a_captured_step_runs_again() -> None:
    given = columns(SIZES, torch.float32, torch.float32)
    tk.adamw_(*clones(given), **RATES)  # what is loaded at a first call cannot be in a capture
    expected = clones(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tk.adamw_(*given, **RATES)
    torch.empty(1 << 24, device=DEVICE).fill_(float("nan"))
    for _ in range(4):
        graph.replay()
        tk.adamw_(*expected, **RATES)
    for column, wanted in zip(given, expected, strict=True):
        for a, e in zip(column, wanted, strict=True):
            assert torch.equal(a, e)


def test_the_same_bits_again_on_another_stream() -> None:
    given = columns(SIZES, torch.bfloat16, torch.float32)
    again = clones(given)
    tk.adamw_(*given, **RATES)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tk.adamw_(*again, **RATES)
    stream.synchronize()
    for column, other in zip(given, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(column, other, strict=True))


def stepped(grad: torch.Tensor) -> torch.Tensor:
    param, average, square = (torch.ones_like(grad) for _ in range(3))
    step = torch.zeros((), device=grad.device)
    torch.ops.tk.adamw([param], [grad], [average], [square], [step], 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0)
    return param.sum()


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad(stepped),
        lambda x: torch.func.jvp(stepped, (x,), (x,)),
        lambda x: torch.vmap(stepped)(torch.stack((x, x))),
        torch.func.hessian(stepped),
    ],
    ids=["grad", "jvp", "vmap", "hessian"],
)
def test_what_torch_func_transforms_is_refused(transform: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"tk\.adamw takes lists of tensors and has neither a gradient nor"):
        transform(torch.ones(3, device=DEVICE))
    assert stepped(torch.ones(3, device=DEVICE)) < 3


def test_a_tangent_is_refused() -> None:
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        x = torch.ones(3, device=DEVICE)
        assert stepped(x) < 3
        with pytest.raises(NotImplementedError, match="adamw has no gradient"):
            stepped(torch.autograd.forward_ad.make_dual(x, x))
