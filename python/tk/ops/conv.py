"""Convolutions: ``conv1d``, ``conv2d`` and ``conv3d``, with bias and activation in the epilogue.

    out = activation(conv(input, weight) + bias)

Sums are float32 (float64 for float64 operands), and the result is rounded once. The kernels are declared in
kernels/conv/. On the CPU ATen ops compute the same formula (csrc/ops/conv_reference.cpp). docs/conv.md explains how the
gradients are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tk import config as _config
from tk._arguments import whole
from tk.ops import _register, product
from tk.ops._register import Record
from tk.ops.product import ACTIVATIONS, Activation, Precision

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker

__all__ = ["conv1d", "conv2d", "conv3d"]

Sizes = int | Sequence[int]
Padding = str | int | Sequence[int]

_CONV: Mapping[int, Any] = {n: _register.overloads(f"conv{n}d")[0] for n in (1, 2, 3)}
_input_grad, _ = _register.overloads("conv_input_grad")
_weight_grad, _ = _register.overloads("conv_weight_grad")


# --- The wrappers ---


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    precision: Precision | None = None,
    config: str | int | None = None,
) -> Tensor:
    """Computes ``activation(torch.nn.functional.conv1d(...))``.

    The input is ``[N, C, L]`` or ``[C, L]``, and the weight ``[O, C / groups, K]``. The other arguments, the result and
    the errors are those of :func:`conv2d`.
    """
    return _convolve(1, input, weight, bias, stride, padding, dilation, groups, activation, precision, config)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    precision: Precision | None = None,
    config: str | int | None = None,
) -> Tensor:
    """Computes ``activation(torch.nn.functional.conv2d(...))``.

    Args:
        input: ``[N, C, H, W]`` or ``[C, H, W]``, bfloat16, float16 or float32 (on the CPU also float64), with any
            strides. Channels-last is fastest. Where the channels are not contiguous, or their number is no multiple of
            16, tk may make a copy in which they are.
        weight: ``[O, C / groups, KH, KW]`` of the same dtype and device, with any strides. It may be copied likewise.
        bias: ``[O]`` of the same dtype, or None.
        stride: one number of pixels, or one for each dimension.
        padding: likewise, or "valid" (none), or "same" (the result has the input's size; only with a stride of 1).
        dilation: one number of pixels, or one for each dimension.
        groups: the number of groups that the channels are divided into.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu". It is applied before the result is rounded.
        precision: "ieee" or "tf32" for float32 operands. By default it is what
            ``torch.backends.cudnn.conv.fp32_precision`` (or the older ``torch.backends.cudnn.allow_tf32``) says.
        config: the name or number of a config for this call. By default it is the one that is predicted to be fastest.

    Returns:
        ``[N, O, OH, OW]``, channels-last where input or weight is, as in torch, and otherwise contiguous.

    Raises:
        TypeError: an argument is not a tensor where one is needed.
        ValueError: shapes, dtypes or devices do not match, or the config does not fit the call.
        tk.UnsupportedError: tk has no kernels for the dtype.
        tk.VariantNotFoundError: no loaded pack has a kernel for this call.
    """
    return _convolve(2, input, weight, bias, stride, padding, dilation, groups, activation, precision, config)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    activation: Activation = "none",
    precision: Precision | None = None,
    config: str | int | None = None,
) -> Tensor:
    """Computes ``activation(torch.nn.functional.conv3d(...))``.

    The input is ``[N, C, D, H, W]`` or ``[C, D, H, W]``, and the weight ``[O, C / groups, KD, KH, KW]``. The other
    arguments, the result and the errors are those of :func:`conv2d`.
    """
    return _convolve(3, input, weight, bias, stride, padding, dilation, groups, activation, precision, config)


def _convolve(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
    activation: str,
    precision: str | None,
    config: str | int | None,
) -> Tensor:
    op = f"conv{spatial}d"
    if type(groups) is not int:
        groups = whole(op, "groups", groups)
    try:
        if isinstance(padding, str):
            padding = _resolved(op, spatial, padding, weight, stride, dilation)
        elif isinstance(padding, list | tuple) and len(padding) == 2 * spatial:
            raise ValueError(_wrong_number(spatial, "padding", padding))  # the op itself takes both ends apart
        settings = product.settings("conv", input, activation, None, precision, config, op)
        settings = settings[:1] + settings[2:]  # a convolution has no out_dtype
        if settings or groups != 1 or not _is_all(dilation, 1, spatial):
            return _CONV[spatial](input, weight, bias, stride, padding, dilation, groups, *settings)
        if not _is_all(stride, 1, spatial) or not _is_all(padding, 0, spatial):
            return _CONV[spatial](input, weight, bias, stride, padding)
        return _CONV[spatial](input, weight, bias)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, op, input=input, weight=weight, bias=bias) from None


def _wrong_number(spatial: int, name: str, values: Sequence[int]) -> str:
    return (
        f"tk.conv{spatial}d: expected {name} to be a single integer value or a list of {spatial} values to match the "
        f"convolution dimensions, but got {name}={list(values)}"
    )


_SAME = {(n, spatial): (n,) * spatial for n in (0, 1) for spatial in (1, 2, 3)}


def _is_all(value: Any, n: int, spatial: int) -> bool:
    """Whether it is the op's default and need not be handed over: the dispatcher takes half a microsecond for a list of
    numbers. False for what it would refuse, and says so."""
    if type(value) is int:
        return value == n
    return type(value) is tuple and value == _SAME[n, spatial] and float not in map(type, value)


def _as_list(value: Sizes, spatial: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * spatial if len(values) == 1 else values


def _resolved(op: str, spatial: int, padding: str, weight: Tensor, stride: Sizes, dilation: Sizes) -> list[int]:
    """A padding in words as numbers: in front, and behind where that differs."""
    if padding == "valid":
        return [0] * spatial
    if padding != "same":
        raise ValueError(f"tk.{op}: Invalid padding string: '{padding}', must be 'same' or 'valid'")
    if any(s != 1 for s in _as_list(stride, spatial)):
        raise ValueError(f"tk.{op}: padding='same' is not supported for strided convolutions")
    spans = [d * (k - 1) for d, k in zip(_as_list(dilation, spatial), weight.shape[2:], strict=False)]
    low = [span // 2 for span in spans]
    high = [span - span // 2 for span in spans]
    return low if low == high else [*low, *high]


# --- Shapes ---

_check = torch._check_value


def _split(padding: Sequence[int], spatial: int) -> tuple[list[int], list[int]]:
    """The padding in front of each dimension, and behind it."""
    if len(padding) == 2 * spatial and spatial > 0:
        return list(padding[:spatial]), list(padding[spatial:])
    both = _as_list(padding, spatial)
    return both, both


def _is_channels_last(x: Tensor, spatial: int) -> bool:
    if spatial < 2 or x.dim() != spatial + 2:
        return False
    return torch._prims_common.suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)


def _empty(like: Tensor, shape: Sequence[Any], channels_last: bool) -> Tensor:
    if not channels_last:
        return like.new_empty(shape)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=last)


def _format_of_result(input: Tensor, weight: Tensor) -> bool:
    """Whether the result is channels-last."""
    spatial = weight.dim() - 2
    batched = input.dim() == spatial + 2
    return batched and (_is_channels_last(input, spatial) or _is_channels_last(weight, spatial))


def _fake_conv(
    spatial: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *settings: int,
) -> Tensor:
    """Refuses what the op refuses, in its words: a program of fake tensors that compiles is one that runs."""
    _check_geometry(spatial, stride, padding, dilation, groups)
    _check_operands(spatial, input, weight, bias, groups)
    low, high = _split(padding, spatial)
    steps = _as_list(stride, spatial)
    padded = [n + lo + hi for n, lo, hi in zip(input.shape[-spatial:], low, high, strict=True)]
    spans = [d * (k - 1) + 1 for d, k in zip(_as_list(dilation, spatial), weight.shape[2:], strict=True)]
    for n, span in zip(padded, spans, strict=True):
        _check(
            n >= span,
            lambda: (
                f"tk.conv{spatial}d: Calculated padded input size per channel: ({' x '.join(map(str, padded))}). "
                f"Kernel size: ({' x '.join(map(str, spans))}). Kernel size can't be greater than actual input size"
            ),
        )
    pixels = [(n - span) // s + 1 for n, span, s in zip(padded, spans, steps, strict=True)]
    shape = (*input.shape[: -spatial - 1], _result_channels(input, weight), *pixels)
    return _empty(input, shape, _format_of_result(input, weight))


def _check_geometry(
    spatial: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> None:
    op = f"tk.conv{spatial}d"
    low, high = _split(padding, spatial)
    for name, values, least, otherwise in (
        ("stride", stride, 1, "non-positive stride is not supported"),
        ("padding", low, 0, "negative padding is not supported"),
        ("padding", high, 0, "negative padding is not supported"),
        ("dilation", dilation, 1, "dilation should be greater than zero"),
    ):
        _check(len(values) in (1, spatial), lambda n=name, v=values: _wrong_number(spatial, n, v))
        _check(all(v >= least for v in values), lambda text=otherwise: f"{op}: {text}")
    _check(groups > 0, lambda: f"{op}: non-positive groups is not supported")


def _check_operands(spatial: int, input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> None:
    op, of_weight = f"tk.conv{spatial}d", f"weight of size {list(weight.shape)}"
    _check(weight.dim() == spatial + 2, lambda: f"{op}: expected {spatial + 2}-dimensional weight, but got {of_weight}")
    _check(
        input.dim() in (spatial + 1, spatial + 2),
        lambda: (
            f"{op}: Expected {spatial + 1}D (unbatched) or {spatial + 2}D (batched) input to conv{spatial}d, but got "
            f"input of size: {list(input.shape)}"
        ),
    )
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None:
            _check(
                x.dtype == input.dtype,
                lambda n=name, x=x: f"{op}: input is {_dtype(input)}, {n} is {_dtype(x)}; they must have one dtype",
            )
    _check(
        weight.shape[0] % groups == 0,
        lambda: (
            f"{op}: Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got "
            f"{of_weight} instead"
        ),
    )
    channels = input.shape[-spatial - 1]
    _check(
        channels == weight.shape[1] * groups,
        lambda: (
            f"{op}: Given groups={groups}, {of_weight}, expected input{list(input.shape)} to have "
            f"{weight.shape[1] * groups} channels, but got {channels} channels instead"
        ),
    )
    _check(
        all(n > 0 for n in weight.shape[2:]),
        lambda: f"{op}: kernel size should be greater than zero, but got ({' x '.join(map(str, weight.shape[2:]))})",
    )
    if bias is not None:
        _check(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: (
                f"{op}: Given {of_weight}, expected bias to be 1-dimensional with {weight.shape[0]} elements, but got "
                f"bias of size {list(bias.shape)} instead"
            ),
        )


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _result_channels(input: Tensor, weight: Tensor) -> Any:
    """An input without channels has a result without, whatever the weight has: ATen's answer."""
    channels = input.shape[1 - weight.dim()]
    return 0 if isinstance(channels, int) and channels == 0 else weight.shape[0]  # a symbolic size is never 0


def _fake_input_grad(grad: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    return _empty(input, input.shape, _format_of_result(input, weight))


def _fake_weight_grad(grad: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    return _empty(weight, weight.shape, _is_channels_last(weight, weight.dim() - 2))


# --- Gradients ---
#
# Each of the three ops is linear in two tensors, and every derivative of one is another of them. So there are gradients
# of any order. The derivative of an activation is that of products.


def _setup_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, stride, padding, dilation, groups, ctx.activation, ctx.precision, _, mode = inputs
    ctx.geometry = (stride, padding, dilation, groups)
    # The gradient is an operand that other kernels are still writing, so it does not count as static weights.
    ctx.mode = mode & ~_config.STATIC_WEIGHTS
    ctx.save_for_backward(
        input,
        weight,
        bias if ctx.activation > ACTIVATIONS["relu"] else None,
        output if ctx.activation == ACTIVATIONS["relu"] else None,
    )


def _backward_conv(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    input, weight, bias, out = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = (*ctx.needs, False)[:3]
    spatial = weight.dim() - 2

    def recompute() -> Tensor:
        return _CONV[spatial](input, weight, bias, *ctx.geometry, 0, ctx.precision, -1, ctx.mode)

    grad_z = product.activation_backward(grad, ctx.activation, out, recompute)
    settings = (*ctx.geometry, ctx.precision, ctx.mode)
    return (
        _input_grad(grad_z, input, weight, *settings) if needs_input else None,
        _weight_grad(grad_z, input, weight, *settings) if needs_weight else None,
        _bias_grad(grad_z, weight) if needs_bias else None,
        *(None,) * 8,
    )


def _bias_grad(grad: Tensor, weight: Tensor) -> Tensor:
    channels = grad.dim() - weight.dim() + 1
    found = grad.sum([d for d in range(grad.dim()) if d != channels])
    return found if found.shape[0] == weight.shape[0] else grad.new_zeros(weight.shape[0])  # the result has no channels


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, input, weight, stride, padding, dilation, groups, ctx.precision, ctx.mode = inputs
    ctx.geometry = (stride, padding, dilation, groups)
    ctx.save_for_backward(grad, input, weight)


def _forward_again(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a gradient with respect to the gradient of the result: a convolution."""
    return _CONV[weight.dim() - 2](input, weight, None, *ctx.geometry, 0, ctx.precision, -1, ctx.mode)


def _backward_input_grad(ctx: Any, grad_grad: Tensor) -> tuple[Any, ...]:
    grad, _, weight = ctx.saved_tensors
    of_grad = _forward_again(ctx, grad_grad, weight) if ctx.needs[0] else None
    of_weight = None
    if ctx.needs[2]:
        of_weight = _weight_grad(grad, grad_grad, weight, *ctx.geometry, ctx.precision, ctx.mode)
    return of_grad, None, of_weight, *(None,) * 6


def _backward_weight_grad(ctx: Any, grad_grad: Tensor) -> tuple[Any, ...]:
    grad, input, _ = ctx.saved_tensors
    of_grad = _forward_again(ctx, input, grad_grad) if ctx.needs[0] else None
    of_input = None
    if ctx.needs[1]:
        of_input = _input_grad(grad, input, grad_grad, *ctx.geometry, ctx.precision, ctx.mode)
    return of_grad, of_input, None, *(None,) * 6


# --- vmap ---


def _vmap_conv(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    input, weight, *others = args
    if any(d is not None for d in in_dims[1:3]):
        return product.loop(op, info, in_dims, *args)
    input = input.movedim(in_dims[0], 0)
    if input.dim() == weight.dim():  # one image for each element of the batch: together a batch of images
        return op(input, weight, *others), 0
    return op(input.flatten(0, 1), weight, *others).unflatten(0, input.shape[:2]), 0


# --- Sharding ---


def _dims(operands: str, input: Tensor, weight: Tensor, groups: int, **_: Any) -> str:
    """operands: with letters for images (n), output channels (o), input channels (i) and positions (+). Channels are
    sharded where they are in one group, and positions never: each reads its neighbours."""
    text = operands.replace("n", "n" if input.ndim == weight.ndim else "").replace("+", "_" * (weight.ndim - 2))
    return text if groups == 1 else text.replace("o", "_").replace("i", "_")


# --- In ATen's ops, which forward mode differentiates ---

_ATEN: Mapping[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _conv_in_aten(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, activation: int, *_: Any,
) -> Tensor:  # fmt: skip
    spatial = weight.dim() - 2
    padded, padding = _padded(product.wide(input), padding, spatial)
    wide_bias = None if bias is None else product.wide(bias)
    z = _ATEN[spatial](padded, product.wide(weight), wide_bias, stride, padding, dilation, groups)
    return product.activated(z, activation, input.dtype)


def _padded(input: Tensor, padding: Sequence[int], spatial: int) -> tuple[Tensor, list[int]]:
    """ATen pads as much behind as in front."""
    low, high = _split(padding, spatial)
    if low == high:
        return input, low
    return F.pad(input, [n for d in reversed(range(spatial)) for n in (low[d], high[d])]), [0] * spatial


def _gradient_in_aten(which: int) -> Callable[..., Tensor]:
    """which: 0 for input, 1 for weight."""

    def gradient(
        grad: Tensor, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, *_: Any,
    ) -> Tensor:  # fmt: skip
        spatial = weight.dim() - 2
        batched = input.dim() == spatial + 2
        grad, images = (x if batched else x.unsqueeze(0) for x in (grad, input))
        padded, both = _padded(product.wide(images), padding, spatial)
        lists = _as_list(stride, spatial), both, _as_list(dilation, spatial)
        found = torch.ops.aten.convolution_backward(
            product.wide(grad), padded, product.wide(weight), None, *lists, False, [0] * spatial, groups,
            [which == 0, which == 1, False],
        )[which]  # fmt: skip
        if which == 0:
            for d in range(-spatial, 0):
                low = (padded.shape[d] - images.shape[d]) // 2  # of a padding "same", which has one more behind
                found = found.narrow(d, low, images.shape[d])
            found = found if batched else found.squeeze(0)
        return found.to(input.dtype)

    return gradient


# --- Right calls ---


def _calls_of_1d(t: Maker) -> Iterator[Call]:
    c = t.c
    yield t.call("conv1d", t(2, 4 * c, 9 * c), t(6 * c, 4 * c, 3), t(6 * c), torchs=F.conv1d)


def _calls_of_2d(t: Maker) -> Iterator[Call]:
    c = t.c
    args = t(2, 4 * c, 9 * c, 7 * c), t(6 * c, 2 * c, 3, 3), t(6 * c)
    yield t.call("conv2d", *args, 1, 1, 1, 2, torchs=F.conv2d)


def _calls_of_3d(t: Maker) -> Iterator[Call]:
    yield t.call("conv3d", t(1, 4 * t.c, 5, 6, 7), t(6 * t.c, 4 * t.c, 2, 2, 2), torchs=F.conv3d)


def _register_all() -> None:
    for n in _CONV:
        _register.fake(f"conv{n}d", functools.partial(_fake_conv, n))
        _register.autograd(f"conv{n}d", _setup_conv, _backward_conv)
        _register.vmap(f"conv{n}d", _vmap_conv)
        _register.autocast(f"conv{n}d")
    _register.fake("conv_input_grad", _fake_input_grad)
    _register.autograd("conv_input_grad", _setup_gradient, _backward_input_grad)
    _register.fake("conv_weight_grad", _fake_weight_grad)
    _register.autograd("conv_weight_grad", _setup_gradient, _backward_weight_grad)
    dims = functools.partial(_dims, "ni+,oi+,o->no+")
    for wrapper, calls in ((conv1d, _calls_of_1d), (conv2d, _calls_of_2d), (conv3d, _calls_of_3d)):
        _register.record(wrapper.__name__, Record(dims, _conv_in_aten, "conv", calls), wrapper)
    for i, (name, letters) in enumerate((("conv_input_grad", "ni+"), ("conv_weight_grad", "oi+"))):
        _register.vmap(name, product.loop)
        dims = functools.partial(_dims, f"no+,ni+,oi+->{letters}")
        _register.record(name, Record(dims, _gradient_in_aten(i)))


_register_all()
