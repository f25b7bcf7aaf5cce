"""The op `bmm` of the core: out[i] = activation(alpha * a[i] @ b[i] + beta * bias[i]), for each i of a batch.

An operand that all of the batch share has a batch stride of 0.
"""

from dataclasses import replace

from tk.aot.expr import const, int_arg, mode, select
from tk.aot.spec import ITEMSIZE, Config, Constraint, Op, Point, require
from tk.kernels.gemm.problem import Batch, Gemm, gemm_locals, gemm_selectors, out_dtype
from tk.kernels.gemm.tiles import Tiles, tiles_of

A, B, BIAS, OUT = (Batch(name, i) for i, name in enumerate(("a", "b", "bias", "out")))
_INTS = ("activation", "precision")

# In batch-invariant mode neither the rows nor the matrices that came along may count.
_BATCH_CHOICE = select(mode("batch_invariant"), 16, A.batch)


def _locals():  # type: ignore[no-untyped-def]
    """Of one matrix as of any product; bytes are those of the whole batch, and rows are few if all of a batch's are."""
    found = gemm_locals(A, B, OUT)
    bytes_of = {
        "a_bytes": select(A.batch_stride == 0, 1, _BATCH_CHOICE) * found["a_bytes"],
        "b_bytes": select(B.batch_stride == 0, 1, _BATCH_CHOICE) * found["b_bytes"],
        "out_bytes": _BATCH_CHOICE * found["out_bytes"],
        "k_bytes": _BATCH_CHOICE * found["k_bytes"],
        "few_rows": _BATCH_CHOICE * found["M_choice"] <= 512,
    }
    return found | bytes_of | {"pdl": const(0), "batch": A.batch, "batch_choice": _BATCH_CHOICE}


OP = Op(
    name="bmm",
    tensors=(A, B, BIAS, OUT),
    ints=_INTS,
    floats=("alpha", "beta"),
    locals=_locals(),
    selectors=gemm_selectors(A, B, BIAS, OUT, *(int_arg(_INTS.index(name)) for name in _INTS)),
    dims=("batch", "M", "N", "K"),
)
BMM = Gemm(OP, A, B, BIAS, OUT)
BATCH = OP.local("batch")


def batch_tiles(config: Config) -> Tiles:
    """Of all of the batch."""
    of_one = tiles_of(BMM, config)
    return replace(of_one, count=of_one.count * BATCH, expected=OP.local("batch_choice") * of_one.expected)


def batches_suit_tma(point: Point) -> tuple[Constraint, ...]:
    """What TMA asks of the matrices of a batch as it does of their rows."""

    def suits(t: Batch, itemsize: int) -> Constraint:
        by = 16 // itemsize
        return require(t.batch_stride % by == 0, f"{t.name}'s matrices a multiple of {by} elements apart")

    sizes = {A: ITEMSIZE[point.dtype], B: ITEMSIZE[point.dtype], OUT: ITEMSIZE[out_dtype(point)]}
    return tuple(suits(t, itemsize) for t, itemsize in sizes.items())
