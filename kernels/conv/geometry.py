"""The places of things: bundles of what says which convolution it is, filled by plans and read by kernels; and device
functions that turn a row of an implicit product into a pixel, and a tap into a step."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# --- Bundles: in a plan their fields are arguments of a launch, in a kernel numbers. ---


class Spatial(NamedTuple):
    """One for each dimension of an image: sizes, steps, strides, or a place. Dimensions that a convolution lacks are of
    size 1."""

    d: Any
    h: Any
    w: Any


class Sizes(NamedTuple):
    """Of a convolution. image, kernel, out: of x, of the weight and of out."""

    pixels: Any  # of out, in all images
    groups: Any
    out_channels: Any  # of a group, as are the next
    channels: Any
    image: Spatial
    taps: Any
    kernel: Spatial
    out: Spatial


class Geometry(NamedTuple):
    """Pixel p of the result reads pixel p * stride - padding + tap * dilation of x."""

    stride: Spatial
    padding: Spatial
    dilation: Spatial


class Gather(NamedTuple):
    """What TMA gathers of x for pixels of `out` and taps of `kernel`. A pixel reads from pixel * stride + lower on, tap
    t at offset t * dilation + shift, which is never negative."""

    out: Spatial
    kernel: Spatial
    stride: Spatial
    lower: Spatial
    dilation: Spatial
    shift: Spatial


class ImageStrides(NamedTuple):
    """Of images [N, G, C, D, H, W], in elements."""

    n: Any
    g: Any
    c: Any
    pixel: Spatial


class WeightStrides(NamedTuple):
    """Of a weight [G, O, C, KD, KH, KW], in elements."""

    g: Any
    o: Any
    c: Any
    tap: Spatial


class Epilogue(NamedTuple):
    """activation(sum + bias), bias being [G, O], or nothing where has_bias is 0."""

    bias_g: Any  # its strides
    bias_o: Any
    activation: Any
    has_bias: Any


# --- Device functions. Places are `Spatial`. ---


@triton.jit
def line(row, sizes):
    """Of row n * (D H) + d * H + h, with images of `sizes` (D, H, W): n, d, h."""
    plane = row // sizes.h
    h = row - plane * sizes.h
    n = plane // sizes.d
    d = plane - n * sizes.d
    return n, d, h


@triton.jit
def pixel(row, sizes):
    """Of row n * (D H W) + d * (H W) + h * W + w, with images of `sizes` (D, H, W): n, (d, h, w)."""
    of_lines = row // sizes.w
    w = row - of_lines * sizes.w
    n, d, h = line(of_lines, sizes)
    return n, Spatial(d, h, w)


@triton.jit
def tap_of(t, kernel):
    """Of tap kd * (KH KW) + kh * KW + kw: (kd, kh, kw)."""
    rest = t // kernel.w
    kd = rest // kernel.h
    return Spatial(kd, rest - kd * kernel.h, t - rest * kernel.w)


@triton.jit
def first_read(p, geometry):
    """Where pixel p of the result begins to read x."""
    stride, padding = geometry.stride, geometry.padding
    return Spatial(p.d * stride.d - padding.d, p.h * stride.h - padding.h, p.w * stride.w - padding.w)


@triton.jit
def read_by(tap, geometry):
    """The pixel of x that pixel 0 of the result reads by a tap."""
    dilation, padding = geometry.dilation, geometry.padding
    return Spatial(tap.d * dilation.d - padding.d, tap.h * dilation.h - padding.h, tap.w * dilation.w - padding.w)


@triton.jit
def times(a, b):
    return Spatial(a.d * b.d, a.h * b.h, a.w * b.w)


@triton.jit
def plus(a, b):
    return Spatial(a.d + b.d, a.h + b.h, a.w + b.w)


@triton.jit
def down(at):
    """Of places in a line: along the rows of a block."""
    return Spatial(at.d[:, None], at.h[:, None], at.w[:, None])


@triton.jit
def across(at):
    """Of places in a line: along the columns of a block."""
    return Spatial(at.d[None, :], at.h[None, :], at.w[None, :])


@triton.jit
def inside(at, sizes):
    """Whether a place is within an image. What is not reads as 0: the padding."""
    return (at.d >= 0) & (at.d < sizes.d) & (at.h >= 0) & (at.h < sizes.h) & (at.w >= 0) & (at.w < sizes.w)


@triton.jit
def place(at, stride):
    """The offset, in elements, in 64 bits."""
    return at.d.to(tl.int64) * stride.d + at.h.to(tl.int64) * stride.h + at.w.to(tl.int64) * stride.w
