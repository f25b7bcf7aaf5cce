"""Where things lie: device functions that turn a row of an implicit product into a pixel, and a tap into a step."""

import triton
import triton.language as tl


@triton.jit
def pixel(row, PD, PH, PW):
    """Of row n * (PD PH PW) + pd * (PH PW) + ph * PW + pw: (n, pd, ph, pw)."""
    rest = row // PW
    pw = row - rest * PW
    plane = rest // PH
    ph = rest - plane * PH
    n = plane // PD
    pd = plane - n * PD
    return n, pd, ph, pw


@triton.jit
def tap_of(t, KH, KW):
    """Of tap kd * (KH KW) + kh * KW + kw: (kd, kh, kw)."""
    rest = t // KW
    kd = rest // KH
    return kd, rest - kd * KH, t - rest * KW


@triton.jit
def inside(d, h, w, D, H, W):
    """Whether (d, h, w) is within an image of D x H x W. What is not reads as 0: the padding."""
    return (d >= 0) & (d < D) & (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def place(d, h, w, stride_d, stride_h, stride_w):
    """The offset, in elements, in 64 bits."""
    return d.to(tl.int64) * stride_d + h.to(tl.int64) * stride_h + w.to(tl.int64) * stride_w
