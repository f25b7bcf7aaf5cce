"""What the C++ side of a convolution launches on a GPU: tensors on the CPU stand for some on a described one, and every
call that reaches the core is carried out here, in float64, as docs/conv.md says what it means."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tk import _library, capi
from tk.heuristics import problem as _problem
from tk.ops.product import ACTIVATE

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
DTYPES = {number: dtype for dtype, number in capi.DTYPES.items()}
ACTIVATIONS = tuple(ACTIVATE.values())


# --- The core's calls, carried out ---


def tensor_of(t: capi._Tensor) -> Tensor | None:
    """The memory itself."""
    if t.ndim < 0:
        return None
    sizes, strides, dtype = t.sizes[: t.ndim], t.strides[: t.ndim], DTYPES[t.dtype]
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    assert min(strides) >= 0
    count = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(t.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def gathered(x: Tensor, tap: tuple[int, ...], pixels: tuple[int, ...], geometry: list[int]) -> Tensor:
    """[N, G, C, *pixels]: what a tap reads, 0 in the padding."""
    result = x.double()
    for d in range(3):
        stride, padding, dilation = geometry[d], geometry[3 + d], geometry[6 + d]
        at = torch.arange(pixels[d]) * stride - padding + tap[d] * dilation
        there = (at >= 0) & (at < x.shape[3 + d])
        result = result.index_select(3 + d, at.clamp(0, x.shape[3 + d] - 1))
        result = result * there.view([-1 if i == 3 + d else 1 for i in range(6)])
    return result


def carry_out(name: str, tensors: list[Tensor | None], ints: list[int], floats: list[float]) -> None:
    if name == "conv_layout":
        x, out = tensors
        out.copy_(x)
    elif name == "mm":
        a, b, bias, out = tensors
        z = floats[0] * (a.double() @ b.double())
        out.copy_(ACTIVATIONS[ints[0]](z if bias is None else z + floats[1] * bias.double()))
    elif name == "conv":
        x, weight, bias, out = tensors
        z = torch.zeros(out.shape, dtype=torch.float64)
        for tap in itertools.product(*map(range, weight.shape[3:])):
            filters = weight[..., tap[0], tap[1], tap[2]].double()
            z += torch.einsum("ngcdhw,goc->ngodhw", gathered(x, tap, out.shape[3:], ints), filters)
        if bias is not None:
            z += bias.double()[..., None, None, None]
        out.copy_(ACTIVATIONS[ints[9]](z))
    elif name == "conv_weight_grad":
        grad, x, out = tensors
        for tap in itertools.product(*map(range, out.shape[3:])):
            found = gathered(x, tap, grad.shape[3:], ints)
            out[..., tap[0], tap[1], tap[2]] = torch.einsum("ngodhw,ngcdhw->goc", grad.double(), found).to(out.dtype)
    else:
        raise AssertionError(f"the core has no op {name}")


@contextmanager
def carried_out(device: int) -> Iterator[list[str]]:
    """The names of the ops that were launched."""
    names: list[str] = []
    failed: list[Exception] = []

    def run(pointer, _) -> None:
        call = pointer.contents
        name = _library.core().tk_op_name(call.op).decode()
        names.append(name)
        try:
            assert call.device == device
            tensors = [tensor_of(call.tensors[i]) for i in range(call.n_tensors)]
            carry_out(name, tensors, call.ints[: call.n_ints], call.floats[: call.n_floats])
        except Exception as error:  # it would not survive the way through C
            failed.append(error)

    callback = _problem._Callback(run)
    _library.ops().tk_ops_capture_device(device)
    _problem._capture()(callback, None)
    try:
        yield names
    finally:
        _problem._capture()(_problem._Callback(), None)
        _library.ops().tk_ops_capture_device(-1)
    if failed:
        raise failed[0]


@pytest.fixture(scope="session")
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


# --- Convolutions ---


def launched(device: int, op: str, *args) -> tuple[Tensor, list[str]]:
    with carried_out(device) as names:
        result = getattr(torch.ops.tk, op).default.redispatch(CUDA, *args)
    return result, names


def last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def draw(rng: random.Random) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]], int]:
    spatial = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4))
    c, o = (groups * rng.choice((1, 2, 8, 16)) for _ in range(2))
    while True:
        kernel = [rng.choice((1, 1, 2, 3, 4)) for _ in range(spatial)]
        stride, dilation = ([rng.choice((1, 1, 2, 3)) for _ in range(spatial)] for _ in range(2))
        low, high = ([rng.choice((0, 0, 1, 2)) for _ in range(spatial)] for _ in range(2))
        padding = low if rng.random() < 0.7 else [*low, *high]
        high = padding[-spatial:]
        size = [rng.randint(1, 9) for _ in range(spatial)]
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        if all(n + lo + hi >= span for n, lo, hi, span in zip(size, low, high, spans, strict=True)):
            break
    x, weight = torch.randn(rng.randint(1, 3), c, *size), torch.randn(o, c // groups, *kernel)
    x, weight = (last(t) if rng.random() < 0.5 else t for t in (x, weight))
    bias = torch.randn(o) if rng.random() < 0.5 else None
    return x, weight, bias, [stride, padding, dilation], groups


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: list[list[int]], groups: int) -> Tensor:
    spatial = weight.dim() - 2
    stride, padding, dilation = geometry
    pads = [p for lo, hi in zip(padding[:spatial], padding[-spatial:], strict=True) for p in (hi, lo)][::-1]
    conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return conv(F.pad(x, pads), weight, bias, stride, 0, dilation, groups)


@pytest.mark.parametrize("seed", range(12))
def test_random_convolutions_and_their_gradients(h100, seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    for _ in range(12):
        x, weight, bias, geometry, groups = draw(rng)
        name = f"conv{weight.dim() - 2}d"
        result, _ = launched(h100, name, x, weight, bias, *geometry, groups)
        wide = [t.double().requires_grad_() for t in (x, weight)]
        exact = expected(*wide, None if bias is None else bias.double(), geometry, groups)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
        assert result.stride() == getattr(torch.ops.tk, name)(x, weight, bias, *geometry, groups).stride()
        grad = torch.randn_like(result)
        gradients = torch.autograd.grad(exact, wide, grad.double())
        for op, reference in zip(("conv_input_grad", "conv_weight_grad"), gradients, strict=True):
            found, _ = launched(h100, op, grad, x, weight, *geometry, groups)
            torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-4)
            assert found.stride() == getattr(torch.ops.tk, op)(grad, x, weight, *geometry, groups).stride()


def test_which_calls_are_made(h100):
    x, weight = torch.randn(2, 16, 6, 6), torch.randn(32, 16, 3, 3)
    ones, zeros = [1, 1], [0, 0]

    def names(op: str, *args) -> list[str]:
        return launched(h100, op, *args)[1]

    assert names("conv2d", last(x), last(weight)) == ["conv"]
    assert names("conv2d", x, last(weight)) == ["conv_layout", "conv"]
    assert names("conv2d", x, weight) == ["conv_layout", "conv_layout", "conv"]
    assert names("conv2d", x[:, :3], weight[:, :3]) == ["conv"], "few channels are read as they lie"
    point = torch.randn(32, 16, 1, 1)
    assert names("conv2d", last(x), point) == ["mm"]
    assert names("conv2d", x[:1], point) == ["mm"], "a single image, whatever its layout"
    assert names("conv2d", x, point) == ["conv_layout", "conv"]
    assert names("conv2d", last(x), point, None, [2, 2]) == ["conv"]
    depthwise = torch.randn(16, 1, 3, 3)
    assert names("conv2d", x, depthwise, None, ones, zeros, ones, 16) == ["conv"]
    grad = last(torch.randn(2, 32, 6, 6))
    assert names("conv_input_grad", grad, last(x), point, ones, zeros, ones) == ["mm"]
    strided = last(torch.randn(2, 32, 3, 3))
    assert names("conv_input_grad", strided, last(x), last(weight), [2, 2], ones, ones) == [
        "conv_layout",
        *["conv"] * 4,
    ]
    assert names("conv_weight_grad", strided, last(x), last(weight), [2, 2], ones, ones) == ["conv_weight_grad"]
    assert names("conv2d", x[:0], weight) == []
