"""What the ops that copy an operand of a convolution have in common. Of an element only its size matters."""

from collections.abc import Callable, Mapping, Sequence

from tk.aot.expr import Expr, select, tensors
from tk.aot.spec import DTYPES, Arg, Bundle, Config, Constraint, Family, Kernel, Launch, Op, Plan, Point, Selector
from tk.kernels.gemm.pointer import ARCHS

X, OUT = tensors("x", "out")
_BITS = ("i16", "i32")


def copy_op(name: str, sizes: Mapping[str, Expr], ints: tuple[str, ...] = ()) -> Op:
    """sizes: the dimensions that tell a problem's size."""
    is_wide = X.dtype == DTYPES["fp32"]
    return Op(
        name=name,
        tensors=(X, OUT),
        ints=ints,
        floats=(),
        locals={**sizes, "itemsize": select(is_wide, 4, 2)},
        selectors={"bits": Selector(is_wide, len(_BITS))},
        dims=tuple(sizes),
    )


def copy_plan(
    point: Point,
    fn: object,
    args: Mapping[str, Arg | Bundle],
    grid: tuple[Expr | int, Expr | int, Expr | int],
    constraints: Sequence[Constraint],
    on_device: Expr,
) -> Plan:
    """on_device: picoseconds that the copy takes once it runs."""
    return Plan(
        constraints=tuple(constraints),
        serves={"bits": (_BITS.index(point.bits),)},
        launches=(Launch(fn, args, grid, num_warps=4),),
        cost=3_000_000 + on_device,
    )


def copy_family(
    op: Op,
    plan: Callable[[Point], Plan],
    configs: tuple[Config, ...],
    axes: Mapping[str, tuple[object, ...]] | None = None,
) -> Family:
    """The family of one kernel, all of which tests compile."""
    kernel = Kernel(op.name, op, {"bits": _BITS, **(axes or {})}, dict.fromkeys(ARCHS, configs), plan)
    return Family(op, (kernel,), sample=lambda kernel, point: True)
