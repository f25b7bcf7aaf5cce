"""The op `bmm` of the core: out[i] = activation(alpha * a[i] @ b[i] + beta * bias[i]), for each i of a batch.

An operand that all of the batch share has a batch stride of 0.
"""

from dataclasses import replace

from tk.aot.expr import Expr, const, mode, select
from tk.aot.spec import ITEMSIZE, Config, Constraint, Point
from tk.kernels.gemm.problem import Batch, Gemm, gemm_locals, gemm_op, gemm_selectors, out_dtype
from tk.kernels.gemm.tiles import Tiles, tiles_of

A, B, BIAS, OUT = (Batch(name, i) for i, name in enumerate(("a", "b", "bias", "out")))

# In batch-invariant mode neither the rows nor the matrices that came along may count.
_BATCH_CHOICE = select(mode("batch_invariant"), 16, A.batch)


def _locals() -> dict[str, Expr]:
    """They are those of one matrix, as of any product. But bytes are those of the whole batch, and rows are few if all
    of a batch's are."""
    found = gemm_locals(A, B, OUT)
    bytes_of = {
        "a_bytes": select(A.batch_stride == 0, 1, _BATCH_CHOICE) * found["a_bytes"],
        "b_bytes": select(B.batch_stride == 0, 1, _BATCH_CHOICE) * found["b_bytes"],
        "out_bytes": _BATCH_CHOICE * found["out_bytes"],
        "k_bytes": _BATCH_CHOICE * found["k_bytes"],
        "few_rows": _BATCH_CHOICE * found["M_choice"] <= 512,
    }
    return found | bytes_of | {"pdl": const(0), "batch": A.batch, "batch_choice": _BATCH_CHOICE}


OP = gemm_op("bmm", (A, B, BIAS, OUT), _locals(), gemm_selectors(A, B, BIAS, OUT), ("batch", "M", "N", "K"))
BMM = Gemm(OP, A, B, BIAS, OUT)
BATCH = OP.local("batch")


def batch_tiles(config: Config) -> Tiles:
    """Cuts all products of the batch into tiles."""
    of_one = tiles_of(BMM, config)
    return replace(of_one, count=of_one.count * BATCH, expected=OP.local("batch_choice") * of_one.expected)


def batches_suit_tma(point: Point) -> tuple[Constraint, ...]:
    """What TMA asks of the matrices of a batch as it does of their rows."""
    dtypes = {A: point.dtype, B: point.dtype, OUT: out_dtype(point)}
    return tuple(t.apart(16 // ITEMSIZE[dtype]) for t, dtype in dtypes.items())
