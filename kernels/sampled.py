"""Families whose tests compile what is usual and what differs from it in one respect: so every value of every axis."""

from collections.abc import Callable, Mapping, Sequence

from tk.aot.spec import Family, Kernel, Op, Point


def _in_one(kernel: Kernel, point: Point) -> int:
    return 1


def sampled_family(
    op: Op,
    kernels: Sequence[Kernel],
    sampled: Mapping[str, tuple[str, ...]],
    usual: Callable[[Kernel, Point], Mapping[str, object]],
    portable: tuple[str, ...] = (),
    respects: Callable[[Kernel, Point], int] = _in_one,
) -> Family:
    """sampled: by kernel the configs that tests compile; all where a kernel has no entry. usual: the values of axes
    that a point is compared with. portable: what is kept as PTX besides the sampled configs. respects: in how many a
    point may differ."""

    def is_sampled(kernel: Kernel, point: Point, *also: str) -> bool:
        return kernel.name not in sampled or point.config.name in (*sampled[kernel.name], *also)

    def sample(kernel: Kernel, point: Point) -> bool:
        if not is_sampled(kernel, point):
            return False
        values = usual(kernel, point)
        differs = sum(point.axes.get(axis, value) != value for axis, value in values.items())
        return differs <= respects(kernel, point)

    def is_portable(kernel: Kernel, point: Point) -> bool:
        return is_sampled(kernel, point, *portable)

    return Family(op, tuple(kernels), sample, tuned=op.name, portable=is_portable)
