"""conv1d, conv2d and conv3d on the CPU: numbers, layouts, gradients, transforms, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_samples import op_db

import tk
from tk.ops.product import ACTIVATE

CONV: dict[int, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    1: (tk.conv1d, F.conv1d),
    2: (tk.conv2d, F.conv2d),
    3: (tk.conv3d, F.conv3d),
}
INFOS = [info for info in op_db if info.name in tuple(f"nn.functional.conv{n}d" for n in CONV)]
SIZES = {1: (9,), 2: (9, 7), 3: (5, 6, 7)}


def operands(n: int, channels: int = 6, out: int = 8, groups: int = 1, dtype=torch.float32, kernel: int = 3):
    x = torch.randn(2, channels, *SIZES[n], dtype=dtype)
    weight = torch.randn(out, channels // groups, *(kernel,) * n, dtype=dtype)
    return x, weight, torch.randn(out, dtype=dtype)


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_opinfo_samples(info, dtype):
    ours, theirs = CONV[int(info.name[-2])]
    count = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=dtype == torch.float64):
        result = ours(sample.input, *sample.args, **sample.kwargs)
        expected = theirs(sample.input, *sample.args, **sample.kwargs)
        assert result.shape == expected.shape
        torch.testing.assert_close(result, expected)
        count += 1
        if dtype == torch.float64:
            inputs = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor) and t.requires_grad]
            grad = torch.randn_like(expected)
            for got, wanted in zip(
                torch.autograd.grad(result, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
            ):
                torch.testing.assert_close(got, wanted)
    assert count > 5


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_opinfo_error_samples(info):
    ours, theirs = CONV[int(info.name[-2])]
    for error in info.error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises(Exception):  # noqa: B017
            theirs(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises((ValueError, TypeError, tk.Error)):
            ours(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("n", CONV)
@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_activation_is_rounded_once(n, activation, dtype):
    x, weight, bias = operands(n, dtype=dtype)
    exact = ACTIVATE[activation](CONV[n][1](x.double(), weight.double(), bias.double(), 2, 1))
    result = CONV[n][0](x, weight, bias, 2, 1, activation=activation)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=eps, atol=max(eps / 8, 1e-5))


@pytest.mark.parametrize("n", CONV)
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (4, 1), (2, 3), (1, 1)])
def test_padding_in_words(n, kernel, dilation):
    x, weight, bias = operands(n, kernel=kernel)
    x.requires_grad_()
    weight.requires_grad_()
    for padding in ("same", "valid"):
        span = dilation * (kernel - 1)
        if padding == "valid" and span >= min(SIZES[n]):
            continue
        result = CONV[n][0](x, weight, bias, 1, padding, dilation)
        expected = CONV[n][1](x, weight, bias, 1, padding, dilation)
        torch.testing.assert_close(result, expected)
        grad = torch.randn_like(result)
        for got, wanted in zip(
            torch.autograd.grad(result, (x, weight), grad),
            torch.autograd.grad(expected, (x, weight), grad),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n", "last"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_memory_format(n, last):
    x, weight, bias = operands(n)
    conv = CONV[n][0]
    for of_x, of_weight in itertools.product((torch.contiguous_format, last), repeat=2):
        a = x.to(memory_format=of_x).requires_grad_()
        b = weight.to(memory_format=of_weight).requires_grad_()
        result = conv(a, b, bias)
        is_last = last in (of_x, of_weight)
        assert result.is_contiguous(memory_format=last if is_last else torch.contiguous_format)
        grad_x, grad_weight = torch.autograd.grad(result.sum(), (a, b))
        assert grad_x.is_contiguous(memory_format=last if is_last else torch.contiguous_format)
        assert grad_weight.is_contiguous(memory_format=of_weight)
        expected = CONV[n][1](a, b, bias)
        assert expected.stride() == result.stride()


@pytest.mark.parametrize("n", CONV)
def test_layouts_and_views(n):
    x, weight, bias = operands(n)
    strided = torch.empty(*x.shape, 2)[..., 1].copy_(x)
    expanded = x[:1, :1].expand_as(x)
    for view in (strided, expanded, x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(CONV[n][0](view, weight, bias), CONV[n][1](view, weight, bias))


def test_empty_batch_and_channels():
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    x = torch.randn(0, 3, 5, 5, requires_grad=True)
    result = tk.conv2d(x, weight)
    assert result.shape == (0, 4, 3, 3)
    grad_x, grad_weight = torch.autograd.grad(result.sum(), (x, weight))
    assert grad_x.shape == x.shape
    assert torch.equal(grad_weight, torch.zeros_like(weight))
    assert tk.conv2d(torch.randn(2, 3, 5, 5), torch.randn(0, 3, 3, 3)).shape == (2, 0, 3, 3)


@pytest.mark.parametrize("n", CONV)
@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [(1, 1, 1, 1), (2, 1, 2, 2), (3, 0, 1, 1)])
def test_gradients_of_first_and_second_order(n, stride, padding, dilation, groups):
    x, weight, bias = operands(n, channels=2, out=2, groups=groups, dtype=torch.float64, kernel=2)
    tensors = [t.requires_grad_() for t in (x, weight, bias)]

    def convolve(*args: Tensor) -> Tensor:
        return CONV[n][0](*args, stride, padding, dilation, groups)

    assert torch.autograd.gradcheck(convolve, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(convolve, tensors, fast_mode=True)


@pytest.mark.parametrize("activation", [a for a in ACTIVATE if a != "none"])
def test_gradients_of_activations(activation):
    tensors = [t.requires_grad_() for t in operands(2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: tk.conv2d(*t, activation=activation), tensors, fast_mode=True)


def test_only_the_gradients_that_are_asked_for():
    x, weight, bias = operands(2)
    bias.requires_grad_()
    tk.conv2d(x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None


def test_vmap():
    x, weight, bias = operands(2)
    xs, weights = torch.stack([x, 2 * x]), torch.stack([weight, weight - 1])
    single = torch.vmap(lambda image: tk.conv2d(image, weight, bias))(x)
    torch.testing.assert_close(single, F.conv2d(x, weight, bias))
    torch.testing.assert_close(
        torch.vmap(lambda t: tk.conv2d(t, weight, bias), in_dims=1)(xs.movedim(0, 1)),
        torch.stack([F.conv2d(t, weight, bias) for t in xs]),
    )
    torch.testing.assert_close(
        torch.vmap(lambda w: tk.conv2d(x, w, bias))(weights), torch.stack([F.conv2d(x, w, bias) for w in weights])
    )
    per_sample = torch.func.vmap(torch.func.grad(lambda w, t: tk.conv2d(t, w).square().sum()), in_dims=(None, 0))
    expected = torch.func.vmap(torch.func.grad(lambda w, t: F.conv2d(t, w).square().sum()), in_dims=(None, 0))
    torch.testing.assert_close(per_sample(weight, x), expected(weight, x), rtol=1e-4, atol=1e-4)


def test_autocast():
    x, weight, bias = operands(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert tk.conv2d(x, weight, bias).dtype == torch.bfloat16


def test_fake_and_opcheck():
    for n, (stride, padding, groups) in itertools.product(CONV, [((1,), (0,), 1), ((2,), (1,), 2)]):
        x, weight, bias = operands(n, groups=groups)
        op = getattr(torch.ops.tk, f"conv{n}d").default
        torch.library.opcheck(op, (x, weight, bias, stride * n, padding * n, (1,) * n, groups))
        grad = op(x, weight, None, stride * n, padding * n, (1,) * n, groups)
        for name in ("conv_input_grad", "conv_weight_grad"):
            arguments = (grad, x, weight, stride * n, padding * n, (1,) * n, groups)
            torch.library.opcheck(getattr(torch.ops.tk, name).default, arguments)


def test_compiled_with_dynamic_sizes():
    _, weight, bias = operands(2)
    weight.requires_grad_()
    compiled = torch.compile(lambda t: tk.conv2d(t, weight, bias, 2, "valid", activation="relu"), dynamic=True,
                             fullgraph=True, backend="aot_eager")  # fmt: skip
    for size in (7, 10):
        t = torch.randn(2, 6, size, size)
        expected = F.relu(F.conv2d(t, weight, bias, 2))
        torch.testing.assert_close(compiled(t), expected)
        torch.testing.assert_close(
            torch.autograd.grad(compiled(t).sum(), weight), torch.autograd.grad(expected.sum(), weight)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(stride=0), "non-positive stride is not supported"),
        (dict(stride=(1, 2, 3)), "expected stride to be a single integer value or a list of 2 values"),
        (dict(stride=(1, 1, 1)), "expected stride to be a single integer value or a list of 2 values"),
        (dict(padding=(0, 0, 0)), "expected padding to be a single integer value or a list of 2 values"),
        (dict(padding=(0, 1, 0, 1)), "expected padding to be a single integer value or a list of 2 values"),
        (dict(padding=[]), "expected padding to be a single integer value or a list of 2 values"),
        (dict(dilation=(1, 1, 1)), "expected dilation to be a single integer value or a list of 2 values"),
        (dict(padding=-1), "negative padding is not supported"),
        (dict(dilation=0), "dilation should be greater than zero"),
        (dict(groups=0), "non-positive groups is not supported"),
        (dict(groups=4), "Given groups=4, expected weight to be divisible by 4"),
        (dict(groups=3), "Given groups=3, weight of size .* to have 12 channels, but got 4 channels instead"),
        (dict(dilation=9), r"padded input size per channel: \(6 x 6\). Kernel size: \(19 x 19\)"),
        (dict(padding="same", stride=2), "padding='same' is not supported for strided convolutions"),
        (dict(padding="full"), "Invalid padding string"),
        (dict(bias=torch.zeros(5)), "expected bias to be 1-dimensional with 6 elements"),
        (dict(bias=torch.zeros(6, dtype=torch.float64)), "bias is float64; they must have one dtype"),
        (dict(input=torch.zeros(1, 1, 4, 6, 6)), r"Expected 3D \(unbatched\) or 4D \(batched\) input to conv2d"),
        (dict(weight=torch.zeros(6, 4, 3)), "expected 4-dimensional weight"),
        (dict(weight=torch.zeros(6, 4, 0, 3)), "kernel size should be greater than zero"),
        (dict(activation="tanh"), "activation is 'tanh', must be one of"),
        (dict(precision="fp8"), "precision is 'fp8'"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_refused(arguments, message, device):
    given = dict(input=torch.zeros(1, 4, 6, 6), weight=torch.zeros(6, 4, 3, 3)) | arguments
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        tk.conv2d(**given)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [1.0, (1.0, 1.0), (0.0, 0)], ids=str)
def test_numbers_that_are_no_ints_are_refused(name, value):
    with pytest.raises(TypeError, match=f"tk.conv2d: {name} must be an int or a list of ints"):
        tk.conv2d(torch.randn(1, 4, 5, 5), torch.randn(4, 4, 1, 1), **{name: value})


def test_dtypes_without_kernels():
    with pytest.raises(tk.UnsupportedError, match="input is int32"):
        tk.conv2d(torch.zeros(1, 4, 6, 6, dtype=torch.int32), torch.zeros(6, 4, 3, 3, dtype=torch.int32))
    with pytest.raises(TypeError, match="weight must be a Tensor, is int"):
        tk.conv2d(torch.zeros(1, 4, 6, 6), 3)


@pytest.mark.parametrize("batch", [(), (0,), (2,)], ids=str)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("n", CONV)
def test_an_input_without_channels(n, padding, batch):
    """ATen's answer is a result without channels, whatever the weight has."""
    ours, theirs = CONV[n]
    x, weight, bias = torch.randn(*batch, 0, *SIZES[n]), torch.randn(3, 0, *(3,) * n), torch.randn(3)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    result, expected = ours(*inputs, padding=padding), theirs(*inputs, padding=padding)
    assert result.shape == expected.shape
    found = torch.autograd.grad(result.sum(), inputs)
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(found, inputs, strict=True))
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(t.detach()) for t in inputs]
    with mode:
        assert ours(*fakes, padding=padding).shape == expected.shape
