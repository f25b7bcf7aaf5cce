"""tk.enable on CUDA: every op over drawn shapes, layouts and dtypes, beside ATen and float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tk
from tk.dropin import beneath

from .device import DEVICE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of the largest element of the result: what the dtype's rounding makes of a short sum.
LIKELY = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
DRAWS = 40


@pytest.fixture
def handle() -> Iterator[tk.dropin.Enabled]:
    with tk.enable(only_faster=False, device=DEVICE) as handle:
        yield handle


def draw(rng: Random, dtype: torch.dtype, *sizes: int) -> Tensor:
    """In some layout: contiguous, transposed, a part of something larger, or every other element."""

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=DEVICE).to(dtype)

    kind = rng.randrange(5)
    if kind == 1 and len(sizes) > 1:
        return randn(*sizes[:-2], sizes[-1], sizes[-2]).mT
    if kind == 2:
        return randn(*sizes[:-1], sizes[-1] + rng.randint(1, 9))[..., : sizes[-1]]
    if kind == 3:
        return randn(*sizes[:-1], 2 * sizes[-1])[..., ::2]
    return randn(*sizes)


def size(rng: Random) -> int:
    return rng.choice([1, rng.randint(2, 40), 8 * rng.randint(1, 40), 64 * rng.randint(1, 8), rng.randint(40, 600)])


def matrices(rng: Random, dtype: torch.dtype) -> list[Tensor]:
    m, k, n = (size(rng) for _ in range(3))
    return [draw(rng, dtype, m, k), draw(rng, dtype, k, n)]


def batches(rng: Random, dtype: torch.dtype) -> list[Tensor]:
    b, m, k, n = rng.randint(1, 9), *(size(rng) for _ in range(3))
    return [draw(rng, dtype, b, m, k), draw(rng, dtype, b, k, n)]


def rows(rng: Random, dtype: torch.dtype) -> list[Tensor]:
    return [draw(rng, dtype, *(rng.randint(1, 9) for _ in range(rng.randint(0, 2))), size(rng), 4 * size(rng))]


class Out(torch.autograd.Function):
    """A product, and those of its gradients, in memory that is given."""

    @staticmethod
    def forward(ctx: Any, multiply: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(a, b)
        return multiply(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        columns = a.new_empty(*a.shape[:-2], a.shape[-1], a.shape[-2]).mT
        return None, ctx.multiply(grad, b.mT, out=columns), ctx.multiply(a.mT, grad, out=torch.empty_like(b))


# A function whose forward or backward calls the op, and its arguments.
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[Random, torch.dtype], list[Tensor]]]] = {
    "mm": (torch.mm, matrices),
    "bmm": (torch.bmm, batches),
    "mm.out": (lambda a, b: Out.apply(torch.mm, a, b), matrices),
    "bmm.out": (lambda a, b: Out.apply(torch.bmm, a, b), batches),
    "gelu": (F.gelu, rows),
    "gelu_backward": (lambda x: F.gelu(x, approximate="tanh"), rows),
    "silu": (F.silu, rows),
    "silu_backward": (F.silu, rows),
    "_softmax": (lambda x: x.softmax(-1), rows),
    "_softmax_backward_data": (lambda x: x.softmax(-1), rows),
    "_log_softmax": (lambda x: x.log_softmax(-1), rows),
    "_log_softmax_backward_data": (lambda x: x.log_softmax(-1), rows),
}


def forward_and_backward(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(beneath._OPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", CASES)
def test_drawn(op: str, dtype: torch.dtype) -> None:
    function, make = CASES[op]
    rng = Random(f"{op} {dtype}")
    total = 0
    for _ in range(DRAWS):
        inputs = make(rng, dtype)
        grad = torch.randn_like(function(*inputs))
        torchs = forward_and_backward(function, inputs, grad)
        exact = forward_and_backward(function, [x.double() for x in inputs], grad)
        with tk.enable([op], only_faster=False, device=DEVICE) as handle:
            found = forward_and_backward(function, inputs, grad)
            total += handle.calls[op][0]
        for mine, theirs, expected in zip(found, torchs, exact, strict=True):
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            scale = float(expected.abs().max()) or 1.0
            error, of_torch = (float((x.double() - expected).abs().max()) / scale for x in (mine, theirs))
            assert error <= max(2 * of_torch, LIKELY[dtype]), (op, [(x.shape, x.stride()) for x in inputs])
    assert total > 0, "no call was served"


def test_special_values(handle: tk.dropin.Enabled) -> None:
    x = torch.randn(8, 64, device=DEVICE)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), -float("inf")
    calls = (lambda: F.gelu(x), lambda: F.silu(x), lambda: x.softmax(-1), lambda: x.log_softmax(-1))
    found = [call() for call in calls]
    handle.undo()
    for mine, call in zip(found, calls, strict=True):
        torch.testing.assert_close(mine, call(), equal_nan=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.gelu(self.first(x)))
        return torch.bmm(y, y.mT.contiguous()).log_softmax(-1)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=3e-2, atol=3e-2 * float(y.abs().max()))


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_model(backend: str | None) -> None:
    model, x = Block().to(DEVICE), torch.randn(4, 32, 64, device=DEVICE)
    expected = step(model, x)
    run: Any = model
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend)
    with tk.enable(only_faster=False, device=DEVICE) as handle:
        y = run(x)
        y.square().sum().backward()
        assert any(served for served, _ in handle.calls.values()), handle
    assert_near([y.detach()], expected[:1])
    assert_near(step(model, x), expected)


def test_autocast_and_checkpoint(handle: tk.dropin.Enabled) -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = Block().to(DEVICE), torch.randn(4, 32, 64, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = checkpoint(model, x, use_reentrant=False)
    y.square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert handle.calls["mm"][0] > 4
    handle.undo()
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = model(x)
    y.square().sum().backward()
    assert_near(found, [p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_a_cuda_graph(handle: tk.dropin.Enabled) -> None:
    model, x = Block().to(DEVICE), torch.randn(4, 32, 64, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    before = handle.calls["mm"][0]
    with torch.cuda.graph(graph):
        y = model(x)
        y.square().sum().backward()
    assert handle.calls["mm"][0] > before
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    found = [y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    handle.undo()
    assert_near(found, step(model, x))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_streams_and_threads(handle: tk.dropin.Enabled) -> None:
    x = torch.randn(512, 512, device=DEVICE)
    expected = x.double() @ x.double()
    found: list[Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(50):
                y = x @ x
            found.append(y)
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert handle.calls["mm"][0] == 200
    for y in found:
        torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_no_memory_is_atens_error(handle: tk.dropin.Enabled) -> None:
    column = torch.ones(1, 1, device=DEVICE).expand(1 << 21, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.mm(column, column.T)
    assert handle.calls["mm"] == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_left(handle: tk.dropin.Enabled, dtype: torch.dtype) -> None:
    x = torch.randn(8, 8, device=DEVICE).to(dtype)
    found = x @ x
    assert handle.calls["mm"] == (0, 1)
    handle.undo()
    torch.testing.assert_close(found, x @ x, rtol=0, atol=0)


def test_rules_of_the_gpu() -> None:
    with tk.enable(device=DEVICE) as handle:
        F.silu(torch.randn(16, 1024, device=DEVICE))
        torch.randn(300, 72, device=DEVICE).half() @ torch.randn(72, 72, device=DEVICE).half()
        if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):
            assert handle.calls["silu"] == (1, 0)
            assert handle.calls["mm"] == (0, 1)
