"""What a plan fills the bundles of kernels/conv/geometry.py with."""

from collections.abc import Callable
from typing import Any

from tk.aot.expr import Expr, Tensor
from tk.aot.spec import Bundle, Const, Int, Op
from tk.kernels.conv.geometry import Geometry, ImageStrides, Sizes, Spatial, WeightStrides
from tk.kernels.conv.op import geometry


def spatial(value: Callable[[int], Expr], dtype: str = "i32", divisible: bool = False) -> Spatial:
    """value: of dimensions 0, 1 and 2, which are d, h and w."""
    return Spatial(*(Int(value(d), dtype, divisible) for d in range(3)))


def extents(t: Tensor) -> Spatial:
    """The extents of images, or of the taps of a weight."""
    return spatial(lambda d: t.size(3 + d))


def geometry_of(op: Op) -> Geometry:
    def of(what: str) -> Spatial:
        return spatial(lambda d: geometry(op, what, d))

    return Geometry(*map(of, Geometry._fields))


def leave_out(bundle: Bundle, *fields: str) -> Any:
    """The same without what a kernel does not read, which then costs it no parameter. fields: or ``field.inner``."""
    for name in fields:
        outer, _, inner = name.partition(".")
        value = leave_out(getattr(bundle, outer), inner) if inner else Const(None)
        bundle = bundle._replace(**{outer: value})  # type: ignore[attr-defined]
    return bundle


def sizes_of(op: Op, x: Tensor, weight: Tensor, out: Tensor) -> Sizes:
    """x, weight, out: or the gradients that have their sizes."""
    return Sizes(
        pixels=Int(op.local("M")),
        groups=Int(op.local("groups")),
        out_channels=Int(op.local("N")),
        channels=Int(weight.size(2)),
        image=extents(x),
        taps=Int(op.local("taps")),
        kernel=extents(weight),
        out=extents(out),
    )


def image_strides(t: Tensor, divisible: bool = False, together: bool = False) -> ImageStrides:
    """divisible: all but that of groups are multiples of 16. together: that of channels is 1."""
    pixel = spatial(lambda d: t.stride(3 + d), "i64", divisible)
    n, c = (Int(t.stride(i), "i64", divisible) for i in (0, 2))
    return ImageStrides(n, Int(t.stride(1), "i64"), Const(1) if together else c, pixel)


def weight_strides(t: Tensor, divisible: bool = False, together: bool = False) -> WeightStrides:
    """A weight's strides, as ``image_strides`` gives those of images."""
    tap = spatial(lambda d: t.stride(3 + d), "i64", divisible)
    o, c = (Int(t.stride(i), "i64", divisible) for i in (1, 2))
    return WeightStrides(Int(t.stride(0), "i64"), o, Const(1) if together else c, tap)
