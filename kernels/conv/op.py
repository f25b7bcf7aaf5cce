"""The op `conv` of the core: out = activation(conv(x, weight) + bias), three-dimensional and grouped."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

from tk.aot.expr import Expr, Tensor, int_arg, mode, select, tensors
from tk.aot.spec import DTYPES, Constraint, Op, Point, Selector, require
from tk.kernels.gemm.problem import DTYPE_AXIS, PRECISION_AXIS, dtype_selector

# x [N, G, C, D, H, W], weight [G, O, C, KD, KH, KW], bias [G, O] or absent, out [N, G, O, PD, PH, PW]: C and O channels
# in each of G groups. Dimensions that a convolution does not have are of size 1. An output pixel p reads x at
# p * stride - padding + tap * dilation. Nothing is said of the padding behind: the size of out says where it ends.
# Padding and dilation may be negative: so the gradient of an input is a convolution as well.
X, WEIGHT, BIAS, OUT = tensors("x", "weight", "bias", "out")
SPATIAL = ("d", "h", "w")
GEOMETRY = tuple(f"{what}_{d}" for what in ("stride", "padding", "dilation") for d in SPATIAL)


def conv_op(name: str, tensors: tuple[Tensor, ...], like: tuple[Tensor, Tensor, Tensor], dtype_of: Tensor,
            ints: tuple[str, ...], **locals: Expr) -> Op:  # fmt: skip
    """like: what has the sizes of x, of the weight and of out. ints: those behind GEOMETRY. locals: more of them.

    The bucket has no layouts, which are constraints."""
    ints = (*GEOMETRY, *ints)
    precision = select(dtype_of.dtype == DTYPES["fp32"], int_arg(ints.index("precision")), 0)
    selectors = {"dtype": dtype_selector(dtype_of), "precision": Selector(precision, 2)}
    return Op(name, tensors, ints, (), conv_locals(*like) | locals, selectors, DIMS)


def conv_locals(x: Tensor, weight: Tensor, out: Tensor) -> dict[str, Expr]:
    """What is worked out once for each problem. weight, out: or the gradients that have their sizes."""
    itemsize = select(x.dtype == DTYPES["fp32"], 4, 2)
    taps = weight.size(3) * weight.size(4) * weight.size(5)
    pixels = out.size(3) * out.size(4) * out.size(5)
    groups, channels_out, channels_in = weight.size(0), weight.size(1), weight.size(2)
    # In batch-invariant mode an image's result must not depend on how many there are: nor may the choice.
    images = select(mode("batch_invariant"), 8, out.size(0))
    return {
        "M": out.size(0) * pixels,
        "N": channels_out,
        "K": taps * channels_in,
        "M_choice": images * pixels,
        "taps": taps,
        "groups": groups,
        # Bytes: each tensor once.
        "traffic": itemsize
        * groups
        * (
            images * channels_in * x.size(3) * x.size(4) * x.size(5)
            + channels_out * channels_in * taps
            + images * channels_out * pixels
        ),
        # What a measured choice depends on besides the sizes of the product.
        "shape": (groups * 4096 + taps) * 4096 + _downscale(x, out),
        "itemsize": itemsize,
    }


def _downscale(x: Tensor, out: Tensor) -> Expr:
    """How many pixels of x there are for one of out, up to 4095."""
    ratio = x.size(3) * x.size(4) * x.size(5) // (out.size(3) * out.size(4) * out.size(5))
    return select(ratio > 4095, 4095, ratio)


DIMS = ("M", "N", "K", "shape")
OP = conv_op("conv", (X, WEIGHT, BIAS, OUT), (X, WEIGHT, OUT), X, ("activation", "precision"))


def makes_sense(point: Point) -> bool:
    """Precision is a choice of fp32 alone."""
    return point.dtype == "fp32" or point.precision == "ieee"


def serves(point: Point) -> Mapping[str, tuple[int, ...]]:
    """tf32 allows a kernel to round its operands, and does not ask for it: one that multiplies in fp32 serves there
    too, and is taken where it is not slower."""
    precisions = PRECISION_AXIS[PRECISION_AXIS.index(point.precision) :] if point.dtype == "fp32" else ("ieee",)
    return {
        "dtype": (DTYPE_AXIS.index(point.dtype),),
        "precision": tuple(map(PRECISION_AXIS.index, precisions)),
    }


OF_PIXELS, OF_TAPS = (0, 3, 4, 5), (1, 3, 4, 5)  # dimensions of images, and of a weight: all but groups and channels


def has_pieces(t: Tensor, dimension: int, piece: int, *also: Expr, others: tuple[int, ...] = OF_PIXELS) -> Expr:
    """Whether the elements of a pixel along `dimension` lie side by side, and every pixel begins on a 16-byte boundary
    and a multiple of `piece` elements: so that they can be loaded by 16 bytes. also: what must hold besides. others:
    the dimensions that tell pixels apart."""
    apart = (t.stride(d) % piece == 0 for d in others)
    return functools.reduce(operator.and_, (t.alignment >= 16, t.stride(dimension) == 1, *also, *apart))


def channels_together(out: Tensor, channels: Expr, others: tuple[int, ...] = OF_PIXELS) -> Constraint:
    """Requires channels as a copy has them that TMA, and loads of 16 bytes, can take."""
    holds = has_pieces(out, 2, 16, channels % 16 == 0, others=others)
    return require(holds, "out with channels together, a multiple of 16, on a 16-byte boundary")


def geometry(op: Op, what: str, d: int) -> Expr:
    """ "stride", "padding" or "dilation" along dimension d of an image."""
    return op.int(f"{what}_{SPATIAL[d]}")


def fits_32_bits(op: Op, x: Tensor) -> Constraint:
    """Rows, columns and coordinates are 32-bit numbers; addresses are not."""
    largest = op.local("M")
    holds = (largest < 2**31 - 2**16) & (op.local("K") < 2**31 - 2**16) & (x.size(3) * x.size(4) * x.size(5) < 2**31)
    return require(holds, "less than 2**31 - 65536 output pixels, taps times channels, and pixels of an image")
