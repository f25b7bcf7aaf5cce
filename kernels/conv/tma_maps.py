"""What TMA sees of images and weights: tensor maps, and what operands must be for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, maximum, minimum, select
from tk.aot.spec import ITEMSIZE, Constraint, Im2col, Op, TensorMap, require
from tk.kernels.conv.arguments import extents, leave_out, spatial
from tk.kernels.conv.geometry import Gather as GatherBundle
from tk.kernels.conv.op import OF_PIXELS, OF_TAPS, geometry


def dense_strides(t: Tensor, dims: tuple[int, ...], least: Expr) -> tuple[Expr, ...]:
    """The strides of `dims`, outermost first. The stride of a dimension of size 1 says nothing, and TMA wants one: as
    if dense, on top of `least`."""
    found: list[Expr] = []
    inner = least
    for d in reversed(dims):
        stride = select(t.size(d) == 1, inner, t.stride(d))
        found.append(stride)
        inner = stride * t.size(d)
    return tuple(reversed(found))


def whole_pieces(t: Tensor, itemsize: int, others: tuple[int, ...] = OF_PIXELS) -> Constraint:
    """That TMA can have it: 16-byte pieces everywhere. The stride of a dimension of size 1 is 0. others: see
    ``has_pieces``."""
    holds = (t.alignment >= 16) & (t.stride(2) == 1)
    for d in others:
        holds = holds & (t.stride(d) * itemsize % 16 == 0)
    name = "the weight" if others is OF_TAPS else t.name
    return require(holds, f"{name} channels-last, in pieces of 16 bytes")


def im2col_map(images: Tensor, dtype: str, channels: Expr, block: tuple[int, int], spatial: int,
               lower: Callable[[int], Expr], upper: Callable[[int], Expr],
               steps: Callable[[int], Expr | int]) -> TensorMap:  # fmt: skip
    """block: pixels and channels. lower, upper, steps: see ``Im2col``; of dimensions 0, 1 and 2, which are d, h and w,
    of which there are the last `spatial`."""
    dims = range(3 - spatial, 3)
    places = (0, *(3 + d for d in dims))
    size = ITEMSIZE[dtype]
    return TensorMap(
        images,
        dtype,
        (*(images.size(p) for p in places), channels),
        (*dense_strides(images, places, channels), 1),
        block,
        layout=repr(NVMMASharedLayout(min(128, size * block[1]), 8 * size, 2)),
        round_to_tf32=dtype == "fp32",
        im2col=Im2col(tuple(map(lower, dims)), tuple(map(upper, dims)), tuple(map(steps, dims))),
    )


def weight_map(weight: Tensor, dtype: str, filters: Expr, channels: Expr, block: tuple[int, int]) -> TensorMap:
    """block: filters and channels, of one tap."""
    size = ITEMSIZE[dtype]
    return TensorMap(
        weight,
        dtype,
        (filters, *(weight.size(p) for p in OF_TAPS[1:]), channels),
        (*dense_strides(weight, OF_TAPS, channels), 1),
        (block[0], 1, 1, 1, block[1]),
        layout=repr(NVMMASharedLayout(min(128, size * block[1]), 8 * size, 5)),
        round_to_tf32=dtype == "fp32",
    )


def has_dimensions(spatial: int, x: Tensor, weight: Tensor, out: Tensor) -> Expr:
    """Whether an im2col map of so many tells all of it."""
    if spatial == 3:
        return x.size(3) >= 1
    return (x.size(3) == 1) & (weight.size(3) == 1) & (out.size(3) == 1)


@dataclass(frozen=True)
class Gather:
    """What TMA gathers of `x` for pixels of `out` and taps of `weight`, tensors of `op`: 0, 1 and 2 stand for d, h and
    w."""

    op: Op
    x: Tensor
    weight: Tensor
    out: Tensor

    def geometry(self, what: str, d: int) -> Expr:
        return geometry(self.op, what, d)

    def shift(self, d: int) -> Expr:
        """What makes the offsets of all taps positive, where they are walked backwards."""
        return maximum(0, (1 - self.weight.size(3 + d)) * self.geometry("dilation", d))

    def lower(self, d: int) -> Expr:
        return -self.geometry("padding", d) - self.shift(d)

    def upper(self, d: int) -> Expr:
        last = (self.out.size(3 + d) - 1) * self.geometry("stride", d)
        return self.lower(d) + last - (self.x.size(3 + d) - 1)

    def bundle(self) -> GatherBundle:
        return GatherBundle(
            out=extents(self.out),
            kernel=leave_out(extents(self.weight), "d"),
            stride=spatial(partial(self.geometry, "stride")),
            lower=spatial(self.lower),
            dilation=spatial(partial(self.geometry, "dilation")),
            shift=spatial(self.shift),
        )

    def image_map(self, dtype: str, spatial: int, pixels: int, channels: int, grouped: bool = False) -> TensorMap:
        count = self.weight.size(2) * self.op.local("groups") if grouped else self.weight.size(2)
        return im2col_map(
            self.x, dtype, count, (pixels, channels), spatial, self.lower, self.upper, partial(self.geometry, "stride")
        )

    def within_reach(self, spatial: int) -> Constraint:
        """Corners and offsets of an im2col map are small numbers."""
        reach, offsets = ((128, 255), (16, 31))[spatial - 2]
        holds = has_dimensions(spatial, self.x, self.weight, self.out)
        if spatial == 2:
            holds = holds & (self.geometry("padding", 0) == 0)
        for d in range(3 - spatial, 3):
            step = self.geometry("dilation", d)
            farthest = (self.weight.size(3 + d) - 1) * maximum(step, -step)
            holds = holds & (minimum(self.lower(d), self.upper(d)) >= -reach) & (farthest <= offsets)
            holds = holds & (maximum(self.lower(d), self.upper(d)) < reach) & (self.geometry("stride", d) <= 8)
        message = f"{spatial} dimensions, a stride of up to 8, padding and taps that reach {reach} pixels"
        return require(holds, message)


def pixel_pitch(t: Tensor) -> Expr:
    """The elements from a pixel to the next, if `is_even`; of a single one, its channels."""
    pitch: Expr = t.size(2)
    for d in (0, 3, 4, 5):
        pitch = select(t.size(d) == 1, pitch, t.stride(d))
    return pitch


def is_even(t: Tensor, itemsize: int) -> Expr:
    """Pixels are the rows of a matrix that TMA can have: all as far from each other. Between them may lie the channels
    of other groups."""
    pitch = pixel_pitch(t)
    holds = (t.stride(2) == 1) & (t.alignment >= 16) & (pitch * itemsize % 16 == 0)
    for d in (5, 4, 3, 0):
        holds = holds & ((t.size(d) == 1) | (t.stride(d) == pitch))
        pitch = pitch * t.size(d)
    return holds
