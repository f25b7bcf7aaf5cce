"""What several groups' product says of a NaN: nothing, where a weight of zeros between groups was multiplied with one.

Groups that are multiplied as one have a weight that is zero but for blocks on its diagonal, and 0 * NaN is NaN, as is
0 * inf. So a NaN in a group's input turns up in results of others. Nothing but a NaN ever does: results that are
numbers are right. Those that are NaN are worked out again, each by itself, from what it depends on alone.

Where to look is known, too. What is no number in a group's pixel makes NaN of *every* result of *every* other group
that it is multiplied with. Of two results of a pixel, of two groups, one at least is of another group: if neither is
NaN, nothing was carried over. So of each pixel two results are read, however many channels there are.
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
def _repair(row, col, end, x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride, epilogue,
            ROWS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """What is NaN, again, of ROWS pixels from `row` on and COLS channels from `col` on, counted through all groups, of
    which `end` is the first that is not meant."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, COLS)
    there = _across(rows < sizes.pixels, not LAST) & _across(cols < end, LAST)
    image, out_at = pixel(tl.minimum(rows, sizes.pixels - 1), sizes.out)
    inner = tl.minimum(cols, end - 1)
    group = (inner // sizes.out_channels).to(tl.int64)
    channel = inner - group * sizes.out_channels
    of_pixel = image.to(tl.int64) * out_stride.n + place(out_at, out_stride.pixel)
    to = out + _across(of_pixel, not LAST) + _across(group * out_stride.g + channel * out_stride.c, LAST)
    found = tl.load(to, mask=there, other=0.0).to(tl.float32)
    if has_nan(found):
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
        tl.store(to, acc.to(out.dtype.element_ty), mask=there & (found != found))


@triton.jit
def _when_out_is_there(at):
    """The same addresses, none of them 0, when the kernels ahead have ended. ptxas waits before it works out what is
    needed only afterwards, so whether to wait is said to depend on them."""
    wait: tl.constexpr = "{.reg .pred p; setp.ne.s64 p, $1, 0; @p griddepcontrol.wait; mov.b64 $0, $1;}"
    found = tl.inline_asm_elementwise(wait, "=l,l", [at.to(tl.int64)], tl.int64, is_pure=False, pack=1)
    return found.to(at.dtype)


@triton.jit
def conv_contained(x, weight, bias, out, merge, sizes, geometry, x_stride, weight_stride, out_stride, epilogue,
                   PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LAST: tl.constexpr,
                   DEPENDENT: tl.constexpr):  # fmt: skip
    """What of out is NaN, again, `merge` groups having been multiplied as one. A program has PIXELS pixels of these
    groups. It looks at two channels of each, and where one is NaN, at all of them, by pieces of ROWS pixels and COLS
    channels: what a whole block takes of registers would leave a multiprocessor few programs. LAST: channels lie beside
    each other in out, else pixels do. DEPENDENT: it began before out was there."""
    first = tl.program_id(1) * merge
    groups = min(merge, sizes.groups - first)
    row = tl.program_id(0) * PIXELS
    rows = row + tl.arange(0, PIXELS)
    exists = rows < tl.where(groups > 1, sizes.pixels, 0)
    image, out_at = pixel(tl.minimum(rows, sizes.pixels - 1), sizes.out)
    # The last channel of the first group and the first of the second: neighbours, where channels lie beside each other.
    second = out + (image.to(tl.int64) * out_stride.n + place(out_at, out_stride.pixel))
    second += (first + 1).to(tl.int64) * out_stride.g
    to_first = (sizes.out_channels - 1).to(tl.int64) * out_stride.c - out_stride.g
    if DEPENDENT:
        second = _when_out_is_there(second)
    a = tl.load(second + to_first, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(second, mask=exists, other=0.0).to(tl.float32)
    if tl.max(((a != a) | (b != b)).to(tl.int32), axis=0) != 0:
        end = (first + groups) * sizes.out_channels
        for piece in range(row, min(row + PIXELS, sizes.pixels), ROWS):
            for col in range(first * sizes.out_channels, end, COLS):
                _repair(piece, col, end, x, weight, bias, out, sizes, geometry, x_stride, weight_stride, out_stride,
                        epilogue, ROWS, COLS, LAST)  # fmt: skip
