"""What several groups' product says of a NaN: nothing, where a weight of zeros between groups was multiplied with one.

Groups that are multiplied as one have a weight that is zero but for blocks on its diagonal, and 0 * NaN is NaN, as is
0 * inf. So a NaN in a group's input turns up in results of others. Nothing but a NaN ever does: results that are
numbers are right. Those that are NaN are worked out again, each by itself, from what it depends on alone.
"""

import triton
import triton.language as tl

from tk.kernels.conv.geometry import inside, pixel, place, tap_of
from tk.kernels.epilogue import activate


@triton.jit
def has_nan(x):
    """Of a block: one truth for all of it."""
    return tl.max(tl.max((x != x).to(tl.int32), axis=1), axis=0) != 0


@triton.jit
def sum_by_itself(acc, x_at, weight_at, d0, h0, w0, D, H, W, C, taps, KH, KW, dilation_d, dilation_h, dilation_w,
                  x_c, x_d, x_h, x_w, weight_c, weight_d, weight_h, weight_w):  # fmt: skip
    """acc, a block of zeros, and for each element the sum over its group's taps and channels. x_at: where the group's
    first channel lies, of the pixel that it begins to read, which is (d0, h0, w0); weight_at: its filter. All of shapes
    that go together."""
    for k in range(taps * C):
        tap = k // C
        c = (k - tap * C).to(tl.int64)
        kd, kh, kw = tap_of(tap, KH, KW)
        d = kd * dilation_d
        h = kh * dilation_h
        w = kw * dilation_w
        there = inside(d0 + d, h0 + h, w0 + w, D, H, W)
        a = tl.load(x_at + (place(d, h, w, x_d, x_h, x_w) + c * x_c), mask=there, other=0.0)
        b = tl.load(weight_at + (place(kd, kh, kw, weight_d, weight_h, weight_w) + c * weight_c))
        acc += a.to(tl.float32) * b.to(tl.float32)
    return acc


@triton.jit
def _across(x, IS_LINE: tl.constexpr):
    if IS_LINE:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def conv_contained(x, weight, bias, out, M, G, OC, C, D, H, W, taps, KH, KW, PD, PH, PW,
                   stride_d, stride_h, stride_w, padding_d, padding_h, padding_w, dilation_d, dilation_h, dilation_w,
                   x_n, x_g, x_c, x_d, x_h, x_w, weight_g, weight_o, weight_c, weight_d, weight_h, weight_w,
                   out_n, out_g, out_o, out_d, out_h, out_w, bias_g, bias_o, activation, has_bias,
                   BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """What of out is NaN, again. A program has a block of pixels times channels. LAST: channels lie beside each other
    in out, else pixels do."""
    rows = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = _across(rows < M, not LAST) & _across(cols < G * OC, LAST)
    image, pd, ph, pw = pixel(tl.minimum(rows, M - 1), PD, PH, PW)
    col = tl.minimum(cols, G * OC - 1)
    group = (col // OC).to(tl.int64)
    channel = col - group * OC
    of_pixel = image.to(tl.int64) * out_n + place(pd, ph, pw, out_d, out_h, out_w)
    at = out + _across(of_pixel, not LAST) + _across(group * out_g + channel * out_o, LAST)
    found = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if has_nan(found):
        d0 = pd * stride_d - padding_d
        h0 = ph * stride_h - padding_h
        w0 = pw * stride_w - padding_w
        x_at = x + _across(image.to(tl.int64) * x_n + place(d0, h0, w0, x_d, x_h, x_w), not LAST)
        x_at += _across(group * x_g, LAST)
        weight_at = weight + _across(group * weight_g + channel * weight_o, LAST)
        acc = sum_by_itself(tl.zeros_like(found), x_at, weight_at,
                            _across(d0, not LAST), _across(h0, not LAST), _across(w0, not LAST), D, H, W, C, taps,
                            KH, KW, dilation_d, dilation_h, dilation_w, x_c, x_d, x_h, x_w,
                            weight_c, weight_d, weight_h, weight_w)  # fmt: skip
        if has_bias != 0:
            acc += _across(tl.load(bias + group * bias_g + channel * bias_o).to(tl.float32), LAST)
        acc = activate(acc, activation)
        tl.store(at, acc.to(out.dtype.element_ty), mask=there & (found != found))
