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


def read_by_taps(
    x: Tensor, kernel: tuple[int, ...], pixels: tuple[int, ...], geometry: list[int]
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Every tap with what it reads, [N, G, C, *pixels], 0 in the padding."""
    strides, paddings, dilations = geometry[:3], geometry[3:6], geometry[6:9]
    pads, starts = [], []
    for n, taps, count, stride, padding, dilation in zip(
        x.shape[3:], kernel, pixels, strides, paddings, dilations, strict=True
    ):
        first = [tap * dilation - padding for tap in range(taps)]  # of a tap
        low = min(0, *first)
        pads.append((-low, max(0, max(first) + (count - 1) * stride - n + 1)))
        starts.append([place - low for place in first])
    wide = F.pad(x.double(), [end for pad in reversed(pads) for end in pad])
    for tap in itertools.product(*map(range, kernel)):
        found = wide
        for d in range(3):
            start = starts[d][tap[d]]
            found = found[
                (slice(None),) * (3 + d) + (slice(start, start + (pixels[d] - 1) * strides[d] + 1, strides[d]),)
            ]
        yield tap, found


def reached(tap: int, pixels: int, size: int, stride: int, padding: int, dilation: int) -> tuple[Tensor, Tensor]:
    """The places of x, `size` of them, that a tap of the pixels of the result reads, and of which pixels."""
    read = torch.arange(pixels)
    at = read * stride - padding + tap * dilation
    there = (at >= 0) & (at < size)
    return at[there], read[there]


def looked_at(out: Tensor, merge: int) -> Tensor:
    """Where conv_contained sees a NaN: of each pixel, in one of two elements of every `merge` groups."""
    found = torch.zeros(out.shape, dtype=torch.bool)
    for g in range(0, out.shape[1] - 1, merge):
        spoilt = out[:, g, -1].isnan() | out[:, g + 1, 0].isnan()
        found[:, g : g + merge] = spoilt[:, None, None]
    return found


def carry_out(name: str, tensors: list[Tensor | None], ints: list[int], floats: list[float]) -> None:
    if name == "conv_layout":
        x, out = tensors
        out.copy_(x)
    elif name == "conv_unfold":
        x, out = tensors
        taps, stride, padding, dilation = ints
        assert out.stride(2) == 1 and all(s % 16 == 0 for s in out.stride()[3:])
        out.zero_()
        geometry = [1, 1, stride, 0, 0, padding, 1, 1, dilation]
        for (_, _, tap), found in read_by_taps(x, (1, 1, taps), out.shape[3:], geometry):
            out[:, :, tap * x.shape[2] : (tap + 1) * x.shape[2]] = found.to(out.dtype)
    elif name == "conv_blocks":
        weight, out = tensors
        out.zero_()
        for g, filters in enumerate(weight):
            m, at = divmod(g, weight.shape[0] // out.shape[0])
            o, c = at * weight.shape[1], at * weight.shape[2]
            out[m, o : o + weight.shape[1], c : c + weight.shape[2]] = filters
    elif name in ("mm", "bmm"):
        a, b, bias, out = tensors
        z = floats[0] * (a.double() @ b.double())
        out.copy_(ACTIVATIONS[ints[0]](z if bias is None else z + floats[1] * bias.double()))
    elif name in ("conv", "conv_contained"):
        x, weight, bias, out = tensors
        z = torch.zeros(out.shape, dtype=torch.float64)
        for (d, h, w), found in read_by_taps(x, weight.shape[3:], out.shape[3:], ints):
            z += torch.einsum("ngcdhw,goc->ngodhw", found, weight[..., d, h, w].double())
        if bias is not None:
            z += bias.double()[..., None, None, None]
        z = ACTIVATIONS[ints[9]](z).to(out.dtype)
        out.copy_(z if name == "conv" else torch.where(out.isnan() & looked_at(out, ints[11]), z, out))
    elif name == "conv_input_grad":
        grad, weight, out = tensors
        z = torch.zeros(out.shape, dtype=torch.float64)
        for tap in itertools.product(*map(range, weight.shape[3:])):
            filters = weight[..., tap[0], tap[1], tap[2]].double()
            part = torch.einsum("ngodhw,goc->ngcdhw", grad.double(), filters)
            places = []
            for d in range(3):
                at, read = reached(tap[d], grad.shape[3 + d], out.shape[3 + d], *ints[d:9:3])
                part = part.index_select(3 + d, read)
                places.append(at)
            z[..., places[0][:, None, None], places[1][:, None], places[2]] += part
        out.copy_(z)
    elif name == "conv_weight_grad":
        grad, x, out = tensors
        grad = grad.double()
        for (d, h, w), found in read_by_taps(x, out.shape[3:], grad.shape[3:], ints):
            out[..., d, h, w] = torch.einsum("ngodhw,ngcdhw->goc", grad, found).to(out.dtype)
    else:
        raise AssertionError(f"the core has no op {name}")


@contextmanager
def carried_out(
    device: int,
    modes: list[int] | None = None,
    seen: list[tuple[torch.Size, tuple[int, ...]]] | None = None,
    precisions: list[int] | None = None,
) -> Iterator[list[str]]:
    """The names of the ops that were launched; their modes are added to `modes`, sizes and strides of their first
    tensors to `seen`, but for those that only mend, and the precisions of convolutions to `precisions`."""
    names: list[str] = []
    failed: list[Exception] = []

    def run(pointer, _) -> None:
        call = pointer.contents
        name = _library.core().tk_op_name(call.op).decode()
        names.append(name)
        if modes is not None:
            modes.append(call.mode)
        if precisions is not None and name in ("conv", "conv_input_grad", "conv_weight_grad"):
            precisions.append(call.ints[call.n_ints - 1])
        try:
            assert call.device == device
            tensors = [tensor_of(call.tensors[i]) for i in range(call.n_tensors)]
            if seen is not None and name != "conv_contained":
                seen.append((tensors[0].shape, tensors[0].stride()))
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
    assert names("conv2d", x, point) == ["conv_layout", "conv"], "36 pixels are no whole pieces of 16"
    assert names("conv2d", x[..., :4, :4].contiguous(), point) == ["bmm"]
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


def check(
    device: int,
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry,
    activation: int = 0,
    groups: int = 1,
):
    """Result and gradients against torch's in float64; the names of what was launched for each of the three."""
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    name = f"conv{weight.dim() - 2}d"
    result, names = launched(device, name, x, weight, bias, *geometry, groups, activation)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    exact = expected(*wide, None if bias is None else bias.double(), geometry, groups)
    eps = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), ACTIVATIONS[activation](exact.detach()), rtol=eps, atol=eps)
    grad = torch.randn(result.shape).to(dtype)
    if suggests_last(result):
        grad = last(grad)
    of_gradients = []
    gradients = torch.autograd.grad(exact, wide, grad.double())
    for op, reference in zip(("conv_input_grad", "conv_weight_grad"), gradients, strict=True):
        found, called = launched(device, op, grad, x, weight, *geometry, groups)
        torch.testing.assert_close(found.double(), reference, rtol=eps, atol=eps)
        of_gradients.append(called)
    return names, *of_gradients


def suggests_last(x: Tensor) -> bool:
    return x.stride(1) == 1


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, (4, 6)), (torch.float32, (4, 8))])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [0, 1])
def test_one_tap_of_contiguous_images_is_a_product_for_each(h100, dtype, size, bias, activation):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 32, *size), torch.randn(48, 32, 1, 1)
    added = torch.randn(48) if bias else None
    geometry = [[1, 1], [0, 0], [1, 1]]
    names = check(h100, dtype, x, weight, added, geometry, activation)
    assert names[:2] == (["bmm"], ["bmm"])
    # Into a channels-last result, since the weight is; from every second image, a view.
    names = check(h100, dtype, torch.randn(6, 32, *size)[::2], last(weight.expand(48, 32, 1, 1)), added, geometry, 0)
    assert names[0] == ["bmm"]


@pytest.mark.parametrize(
    ("size", "channels"), [((4, 5), 32), ((4, 6), 36)], ids=["20 pixels", "36 channels"]
)  # of 16 bits: no whole pieces of 16 bytes
def test_what_no_fast_kernel_reads_as_a_batch_is_copied(h100, size, channels):
    torch.manual_seed(0)
    x, weight = torch.randn(3, channels, *size), torch.randn(48, channels, 1, 1)
    names = check(h100, torch.bfloat16, x, weight, None, [[1, 1], [0, 0], [1, 1]])
    assert "bmm" not in names[0]
    assert names[0][-1] == "conv"


def test_the_input_of_a_convolution_is_no_static_weight(h100):
    """A product may read its second operand before the kernels ahead have ended: not where that is the input."""
    static = 8
    weight = torch.randn(32, 16, 1, 1)
    modes: list[int] = []
    for x in (last(torch.randn(2, 16, 4, 4)), torch.randn(1, 16, 4, 4)):
        arguments = (x, weight, None, [1, 1], [0, 0], [1, 1], 1, 0, -1, -1, static)
        with carried_out(h100, modes) as names:
            torch.ops.tk.conv2d.default.redispatch(CUDA, *arguments)
        assert names == ["mm"]
    assert [mode & static for mode in modes] == [static, 0]


# Enough to multiply for copies of input and weight to pay: 2**26.
FEW_CHANNELS = {
    "a line's taps are 21 channels": ((2, 3, 44, 43), (512, 3, 7, 7), [[2, 2], [3, 3], [1, 1]]),
    "each pixel once": ((1, 3, 80, 144), (2048, 3, 8, 8), [[8, 8], [0, 0], [1, 1]]),
    "dilated": ((1, 5, 30, 61), (512, 5, 5, 4), [[1, 1], [2, 0], [2, 3]]),
    "too many for all taps": ((1, 20, 28, 21), (512, 20, 3, 7), [[1, 2], [2, 3], [1, 1]]),
    "three dimensions": ((2, 3, 5, 20, 21), (512, 3, 3, 5, 4), [[1, 2, 2], [1, 3, 1], [1, 1, 1]]),
    "one dimension": ((3, 1, 5000), (2304, 1, 10), [[5], [0], [1]]),
}


@pytest.mark.parametrize("case", FEW_CHANNELS)
def test_few_channels_are_unfolded(h100, case):
    torch.manual_seed(0)
    sizes, filters, geometry = FEW_CHANNELS[case]
    x, weight = torch.randn(sizes), torch.randn(filters)
    names = check(h100, torch.bfloat16, x, weight, torch.randn(filters[0]), geometry, 1)
    assert names[0][:2] == ["conv_unfold"] * 2
    assert "conv_unfold" in names[2]
    if weight.dim() == 4:
        assert check(h100, torch.bfloat16, last(x), weight, None, geometry)[0] == names[0], "whatever the layout"


def test_unfolding_is_for_much_work_on_tensor_cores(h100):
    ones, zeros = [1, 1], [0, 0]
    batch_invariant = 2

    def unfolds(x: Tensor, *, precision: int = 1, config: int = -1, mode: int = 0) -> bool:
        weight = torch.randn(600, 3, 5, 5, dtype=x.dtype)
        names = launched(h100, "conv2d", x, weight, None, ones, zeros, ones, 1, 0, precision, config, mode)[1]
        return names[0] == "conv_unfold"

    few, many = torch.randn(1, 3, 40, 40), torch.randn(2, 3, 40, 40)  # 58 and 117 million multiplications
    assert not unfolds(few)
    assert unfolds(many)
    assert unfolds(few, mode=batch_invariant), "as if there were eight images"
    assert unfolds(many, mode=batch_invariant)
    assert not unfolds(many, precision=0), "fp32 without tensor cores"
    assert unfolds(many.bfloat16(), precision=-1)
    assert not unfolds(many, config=3), "a config says what is launched on the tensors as they are"


def test_the_gradient_of_the_weight_of_one_tap_is_a_product_where_there_are_many_tiles(h100):
    geometry = [[1, 1], [0, 0], [1, 1]]
    for is_last, channels, expected_names in ((True, 1024, ["mm"]), (True, 512, ["conv_weight_grad"])):
        x, weight = torch.randn(2, 1024, 4, 4), torch.randn(channels, 1024, 1, 1)
        assert check(h100, torch.bfloat16, last(x), weight, None, geometry)[2] == expected_names, is_last


# Sizes of images and filters, stride, padding, dilation.
ALL_PHASES = {
    "3x3": ((2, 16, 6, 8), (32, 16, 3, 3), [[2, 2], [1, 1], [1, 1]]),
    "no stride": ((2, 16, 6, 8), (32, 16, 3, 3), [[1, 1], [1, 1], [1, 1]]),
    "no stride, dilated": ((2, 16, 9, 8), (32, 16, 3, 2), [[1, 1], [2, 1], [2, 3]]),
    "patches": ((2, 16, 8, 8), (32, 16, 2, 2), [[2, 2], [0, 0], [1, 1]]),
    "one tap of nine places": ((2, 16, 7, 8), (32, 16, 1, 1), [[3, 3], [0, 0], [1, 1]]),
    "lines left over": ((1, 24, 9, 11), (8, 24, 4, 5), [[3, 2], [2, 1], [1, 1]]),
    "dilated across": ((1, 16, 9, 11), (16, 16, 3, 3), [[2, 1], [1, 2], [1, 2]]),
    "more in front than taps": ((1, 16, 6, 5), (16, 16, 2, 3), [[2, 3], [2, 3], [1, 1]]),
    "three dimensions": ((1, 16, 5, 6, 7), (8, 16, 3, 2, 3), [[2, 1, 3], [1, 0, 1], [1, 1, 1]]),
    "one dimension": ((2, 16, 31), (8, 16, 5), [[4], [2], [1]]),
}


@pytest.mark.parametrize("case", ALL_PHASES)
def test_on_hopper_the_gradient_of_the_input_is_one_launch(h100, case):
    torch.manual_seed(0)
    sizes, filters, geometry = ALL_PHASES[case]
    x, weight = torch.randn(sizes), torch.randn(filters)
    names = check(h100, torch.bfloat16, last(x), last(weight), None, geometry)[1]
    assert names == ["conv_input_grad"] if weight.dim() == 4 else names[-1] == "conv_input_grad"
    *copies, name = check(h100, torch.bfloat16, x, weight, None, geometry)[1]
    assert name == "conv_input_grad" and set(copies) <= {"conv_layout"}
    assert len(copies) == 2 or case != "3x3"
    a100 = capi.describe_device(108, 80, 166912, 40 << 20)
    assert "conv_input_grad" not in check(a100, torch.bfloat16, last(x), last(weight), None, geometry)[1]
    assert "conv_input_grad" not in check(h100, torch.float32, last(x), last(weight), None, geometry)[1]


@pytest.mark.parametrize(
    ("sizes", "filters", "geometry", "groups"),
    [
        ((1, 16, 9, 9), (16, 16, 3, 3), [[2, 1], [1, 1], [2, 1]], 1),  # stride and dilation of one dimension
        ((1, 16, 19, 9), (16, 16, 3, 3), [[9, 1], [1, 1], [1, 1]], 1),
        ((1, 20, 9, 9), (16, 20, 3, 3), [[2, 2], [1, 1], [1, 1]], 1),
        ((1, 16, 9, 9), (16, 8, 3, 3), [[2, 2], [1, 1], [1, 1]], 2),
        ((1, 16, 270, 3), (16, 16, 260, 1), [[1, 1], [0, 0], [1, 1]], 1),
    ],
    ids=["dilated", "a stride of 9", "20 channels", "groups", "260 taps"],
)
def test_what_that_launch_does_not_take_is_a_convolution_for_each_remainder(h100, sizes, filters, geometry, groups):
    torch.manual_seed(0)
    x, weight = torch.randn(sizes), torch.randn(filters)
    names = check(h100, torch.bfloat16, last(x), last(weight), None, geometry, 0, groups)[1]
    assert "conv" in names and "conv_input_grad" not in names


def test_places_that_no_tap_reaches_are_zeros(h100):
    """A stride beyond the taps: one convolution for what they reach."""
    x, weight = last(torch.randn(2, 16, 7, 8)), torch.randn(32, 16, 1, 2)
    names = check(h100, torch.float32, x, last(weight), None, [[2, 3], [0, 1], [1, 1]])
    assert names[1] == ["conv_layout"] + ["conv"] * 2
    names = check(h100, torch.float32, x, weight[:, :, :, :1], None, [[2, 2], [0, 0], [1, 1]])
    assert names[1] == ["conv_layout", "conv"]


# Sizes of images and filters, groups; how many of these are multiplied as one. 2**28 multiplications for a launch.
GROUPS = {
    "of 8 channels": ((2, 128, 61, 60), (128, 8, 3, 3), 16, 8),
    "of 4 channels": ((1, 64, 86, 85), (64, 4, 3, 3), 16, 16),
    "fewer than a step takes": ((2, 96, 126, 120), (96, 32, 3, 3), 3, 1),
    "other channels out": ((2, 64, 90, 86), (128, 8, 3, 3), 8, 4),
    "of many channels": ((2, 160, 40, 40), (192, 80, 3, 5), 2, 1),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_with_much_to_multiply_are_convolutions_of_one_group(h100, case):
    torch.manual_seed(0)
    sizes, filters, groups, merged = GROUPS[case]
    x, weight, bias = torch.randn(sizes), torch.randn(filters), torch.randn(filters[0])
    geometry = [[1, 1], [1, 1], [1, 1]]
    names = check(h100, torch.bfloat16, last(x), weight, bias, geometry, 1, groups)
    is_wide = merged * filters[1] == 64 and merged * filters[0] // groups == 64  # for Hopper's kernels
    launches = 1 if is_wide else groups // merged
    blocks, mended = (["conv_blocks"], ["conv_contained"]) if merged > 1 else ([], [])
    assert names[0] == blocks + ["conv"] * launches + mended
    assert names[1] == blocks + ["conv"] * launches + mended
    assert names[2] == ["conv_weight_grad"] * (groups // merged)
    if case == "of 8 channels":
        names = check(h100, torch.bfloat16, x, weight, None, geometry, 0, groups)
        assert names[0] == ["conv_layout", "conv_blocks", "conv", "conv_contained"]
        strided = [[2, 1], [1, 0], [1, 1]]
        names = check(h100, torch.bfloat16, last(x.repeat(2, 1, 1, 1)), weight, None, strided, 0, groups)
        assert names[1] == ["conv_blocks"] + ["conv", "conv_contained"] * 2, "two remainders"
        a100 = capi.describe_device(108, 80, 166912, 40 << 20)
        found = check(a100, torch.bfloat16, last(x), weight, bias, geometry, 1, groups)[0]
        assert found == ["conv_blocks", "conv", "conv", "conv_contained"]


def test_what_is_explained_is_the_convolution(h100):
    x, weight = last(torch.randn(3, 16, 14, 14)).bfloat16(), torch.randn(16, 4, 7, 7).bfloat16()
    _library.ops().tk_ops_capture_device(h100)
    try:
        call = torch.ops.tk.conv2d.default.redispatch
        found = _problem.describe(call, CUDA, x, weight, None, [1, 1], [3, 3], [1, 1], 4)
    finally:
        _library.ops().tk_ops_capture_device(-1)
    assert found is not None and found.problem.op == "conv"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("as_last", [True, False])
def test_a_nan_stays_in_its_group(h100, stride, as_last):
    """Though its group is multiplied as one with others, by a weight of zeros between them."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(1, 32, 9, 8), torch.randn(64, 4, 5, 4), torch.randn(64)
    x[0, 5, 4, 4], x[0, 17, 2, 6] = float("nan"), float("inf")
    x, weight, bias = (t.bfloat16() for t in (last(x) if as_last else x, weight, bias))
    geometry = [[stride] * 2, [2, 2], [1, 1]]
    found, names = launched(h100, "conv2d", x, weight, bias, *geometry, 8, 1)
    assert names[-2:] == ["conv", "conv_contained"]
    exact = F.relu(expected(x.double(), weight.double(), bias.double(), geometry, 8))
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7, equal_nan=True)

    clean = torch.randn(x.shape).double().requires_grad_()
    grad = torch.randn(found.shape)
    grad[0, 40, 3, 2] = float("nan")
    grad = grad.bfloat16()
    grad = last(grad) if as_last else grad
    exact = expected(clean, weight.double(), None, geometry, 8)
    (exact,) = torch.autograd.grad(exact, clean, grad.double())
    found, names = launched(h100, "conv_input_grad", grad, clean.detach().bfloat16(), weight, *geometry, 8)
    assert "conv_contained" in names
    assert torch.equal(found.isnan(), exact.isnan()) and exact.isnan().any()
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-6, equal_nan=True)


def test_the_gradient_of_a_depthwise_weight_is_of_channels_last_images(h100):
    torch.manual_seed(0)
    weight, geometry = torch.randn(64, 1, 7, 7), [[1, 1], [3, 3], [1, 1]]
    for images, copies in ((3, ["conv_layout"] * 2), (2, [])):  # 77 and 51 million multiplications
        x = torch.randn(images, 64, 90, 91)
        assert check(h100, torch.bfloat16, x, weight, None, geometry, 0, 64)[2] == [*copies, "conv_weight_grad"]
        assert check(h100, torch.bfloat16, last(x), weight, None, geometry, 0, 64)[2] == ["conv_weight_grad"]


@pytest.mark.parametrize(("channels", "copied"), [(72, True), (76, False)])
def test_pixels_of_the_copies_for_a_depthwise_weight_begin_on_16_bytes(h100, channels, copied):
    x, grad = (torch.randn(3, channels, 90, 91).bfloat16() for _ in range(2))
    weight = torch.randn(channels, 1, 7, 7).bfloat16()
    seen: list[tuple[torch.Size, tuple[int, ...]]] = []
    with carried_out(h100, seen=seen) as names:
        torch.ops.tk.conv_weight_grad.default.redispatch(CUDA, grad, x, weight, [1, 1], [3, 3], [1, 1], channels)
    assert names == ["conv_weight_grad"]  # torch copies what is no multiple of 16
    assert (seen[-1][1][1] == 1) == copied


def test_groups_with_little_to_multiply_are_one_launch(h100):
    x, weight = last(torch.randn(1, 128, 20, 20)), torch.randn(128, 8, 3, 3)
    names = check(h100, torch.bfloat16, x, weight, None, [[1, 1], [1, 1], [1, 1]], 0, 16)
    assert names == (["conv"], ["conv"], ["conv_weight_grad"])


# Sizes of images and filters, groups, stride.
FEW_CHANNELS_OF_GROUPS = {
    "7x7 taps": ((3, 16, 14, 14), (16, 4, 7, 7), 4, 1),
    "apart": ((2, 32, 7, 7), (32, 4, 5, 5), 8, 2),
    "two launches' worth, in one": ((1, 128, 9, 8), (128, 8, 4, 4), 16, 1),
    "other channels out": ((1, 32, 9, 8), (64, 4, 5, 4), 8, 1),
}


@pytest.mark.parametrize("case", FEW_CHANNELS_OF_GROUPS)
def test_groups_of_few_channels_and_many_taps_are_one_product(h100, case):
    """Whatever there is to multiply: the kernels for groups wait for each tap."""
    torch.manual_seed(0)
    sizes, filters, groups, stride = FEW_CHANNELS_OF_GROUPS[case]
    x, weight, bias = torch.randn(sizes), torch.randn(filters), torch.randn(filters[0])
    geometry = [[stride] * 2, [2, 2], [1, 1]]
    seen: list[tuple[torch.Size, tuple[int, ...]]] = []

    def merged(image: Tensor, device: int = h100, dtype: torch.dtype = torch.bfloat16) -> int:
        """Groups that were left, of all."""
        before = check(device, dtype, image, weight, bias, geometry, 1, groups)[0]
        assert [name for name in before if name != "conv_contained"][-1] == "conv"
        args = (image.to(dtype), weight.to(dtype), None, *geometry, groups)
        with carried_out(device, seen=seen) as names:
            torch.ops.tk.conv2d.default.redispatch(CUDA, *args)
        assert names.count("conv") == 1
        return seen[-1][0][1]

    left = max(groups * filters[1] // 64, 1)
    assert merged(last(x)) == left
    assert merged(x) == left, "whatever the layout"
    a100 = capi.describe_device(108, 80, 166912, 40 << 20)
    assert merged(last(x), a100) == groups
    assert merged(last(x), dtype=torch.float32) == groups


@pytest.mark.parametrize(("kernel", "left"), [((3, 3), (8, 1)), ((2, 2), (8, 1)), ((1, 3), (8, 8))])
def test_groups_of_few_channels_and_few_taps_stay_apart(h100, kernel, left):
    """But for results with channels apart, whose kernel waits longer."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 32, 9, 8).bfloat16(), torch.randn(32, 4, *kernel).bfloat16()
    for image, groups in zip((last(x), x), left, strict=True):
        seen: list[tuple[torch.Size, tuple[int, ...]]] = []
        with carried_out(h100, seen=seen):
            torch.ops.tk.conv2d.default.redispatch(CUDA, image, weight, None, [1, 1], [1, 1], [1, 1], 8)
        assert seen[-1][0][1] == groups


@pytest.mark.parametrize("groups", [1, 4])
def test_tf32_only_where_tensor_cores_could_be_faster(h100, groups):
    """Of one channel in a group on either side, and of sums of at most 16 products, float32 is multiplied as float32,
    in all three ops, even where tf32 is allowed or asked for."""

    def precisions(channels: int, out: int, taps: int, named: int) -> set[int]:
        x, weight = torch.randn(2, channels * groups, 9, 9), torch.randn(out * groups, channels, taps, taps)
        geometry = ([2, 2], [0, 0], [1, 1], groups)
        seen: list[int] = []
        with carried_out(h100, precisions=seen):
            result = torch.ops.tk.conv2d.default.redispatch(CUDA, x, weight, None, *geometry, 0, named)
            for op in (torch.ops.tk.conv_input_grad, torch.ops.tk.conv_weight_grad):
                op.default.redispatch(CUDA, torch.randn_like(result), x, weight, *geometry, named)
        assert len(seen) >= 3
        return set(seen)

    for channels, out, taps, tf32 in [
        (1, 8, 3, 0),
        (1, 1, 3, 0),
        (8, 1, 3, 0),
        (4, 8, 2, 0),
        (16, 8, 1, 0),
        (2, 8, 3, 1),
        (24, 8, 1, 1),
    ]:
        assert precisions(channels, out, taps, 1) == {tf32}, (channels, out, taps)
        assert precisions(channels, out, taps, 0) == {0}
