"""What several groups' product says of a NaN: nothing, where a weight of zeros between groups was multiplied with one.

Groups that are multiplied as one have a weight that is zero but for blocks on its diagonal, and 0 * NaN is NaN, as is
0 * inf. So a NaN in a group's input turns up in results of others. Nothing but a NaN ever does: results that are
numbers are right. Those that are NaN are worked out again, each by itself, from what it depends on alone.
"""

import triton
import triton.language as tl

from tk.kernels.conv.geometry import Spatial, first_read, inside, pixel, place, plus, tap_of, times
from tk.kernels.epilogue import activate


@triton.jit
def has_nan(x):
    """Of a block: one truth for all of it."""
    return tl.max(tl.max((x != x).to(tl.int32), axis=1), axis=0) != 0


@triton.jit
def sum_by_itself(acc, x_at, weight_at, at, sizes, geometry, x_stride, weight_stride):
    """acc, a block of zeros, and for each element the sum over its group's taps and channels. x_at: where the group's
    first channel lies, of the pixel that it begins to read, which is `at`; weight_at: its filter. All of shapes that go
    together."""
    for k in range(sizes.taps * sizes.channels):
        tap = k // sizes.channels
        c = (k - tap * sizes.channels).to(tl.int64)
        kernel_at = tap_of(tap, sizes.kernel)
        step = times(kernel_at, geometry.dilation)
        there = inside(plus(at, step), sizes.image)
        a = tl.load(x_at + (place(step, x_stride.pixel) + c * x_stride.c), mask=there, other=0.0)
        b = tl.load(weight_at + (place(kernel_at, weight_stride.tap) + c * weight_stride.c))
        acc += a.to(tl.float32) * b.to(tl.float32)
    return acc


@triton.jit
def _across(x, IS_LINE: tl.constexpr):
    if IS_LINE:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _places(row, col, sizes, out_stride, ROWS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr):
    """Of the block of ROWS pixels and COLS channels that begins at (row, col): the image and the pixel of each row, the
    group and the channel in it of each column, where its elements lie in out, and which of them exist."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    channels = sizes.groups * sizes.out_channels
    there = _across(rows < sizes.pixels, not LAST) & _across(cols < channels, LAST)
    image, out_at = pixel(tl.minimum(rows, sizes.pixels - 1), sizes.out)
    inner = tl.minimum(cols, channels - 1)
    group = (inner // sizes.out_channels).to(tl.int64)
    channel = inner - group * sizes.out_channels
    of_pixel = image.to(tl.int64) * out_stride.n + place(out_at, out_stride.pixel)
    to = _across(of_pixel, not LAST) + _across(group * out_stride.g + channel * out_stride.c, LAST)
    return image, out_at, group, channel, to, there


@triton.jit
def _repair(row, col, x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride, epilogue,
            ROWS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """What of a block is NaN, again."""
    image, out_at, group, channel, to, there = _places(row, col, sizes, out_stride, ROWS, COLS, LAST)
    found = tl.load(out + to, mask=there, other=0.0).to(tl.float32)
    at = first_read(out_at, geometry)
    x_at = x + _across(image.to(tl.int64) * x_stride.n + place(at, x_stride.pixel), not LAST)
    x_at += _across(group * x_stride.g, LAST)
    weight_at = weight + _across(group * weight_stride.g + channel * weight_stride.o, LAST)
    at = Spatial(_across(at.d, not LAST), _across(at.h, not LAST), _across(at.w, not LAST))
    acc = sum_by_itself(tl.zeros_like(found), x_at, weight_at, at, sizes, geometry, x_stride, weight_stride)
    if epilogue.has_bias != 0:
        bias_at = bias + group * epilogue.bias_g + channel * epilogue.bias_o
        acc += _across(tl.load(bias_at).to(tl.float32), LAST)
    acc = activate(acc, epilogue.activation)
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=there & (found != found))


@triton.jit
def conv_contained(x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride, epilogue,
                   ALONG: tl.constexpr, ACROSS: tl.constexpr, PIECE: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """What of out is NaN, again. A program has a block of pixels times channels, ALONG elements in the direction in
    which they lie beside each other and ACROSS in the other. LAST: channels lie beside each other in out, else pixels
    do. A block with a NaN is worked out in pieces, PIECE of ACROSS at a time: what a whole block takes of registers
    would leave a multiprocessor few programs, and looking would be slower than memory."""
    BLOCK_P: tl.constexpr = ACROSS if LAST else ALONG
    BLOCK_C: tl.constexpr = ALONG if LAST else ACROSS
    row = tl.program_id(0) * BLOCK_P
    col = tl.program_id(1) * BLOCK_C
    image, out_at, group, channel, to, there = _places(row, col, sizes, out_stride, BLOCK_P, BLOCK_C, LAST)
    if has_nan(tl.load(out + to, mask=there, other=0.0).to(tl.float32)):
        for piece in range(0, ACROSS, PIECE):
            if LAST:
                _repair(row + piece, col, x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride,
                        epilogue, PIECE, BLOCK_C, LAST)  # fmt: skip
            else:
                _repair(row, col + piece, x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride,
                        epilogue, BLOCK_P, PIECE, LAST)  # fmt: skip
