"""The ops of the core behind grouped_mm. Group g is [offs[g - 1], offs[g]) of T.

grouped_mm        out[rows of g] = activation(alpha * a[rows of g] @ b[g] + beta * bias[g]), T rows
grouped_mm_inner  out[g] = activation(alpha * a[:, g] @ b[g, :] + beta * bias[g]), T the inner size
"""

from tk.aot.expr import Expr, Tensor, const, maximum
from tk.aot.spec import DTYPES, REDUCED_FLOATS, Op, Selector
from tk.kernels.gemm.problem import Batch, Gemm, gemm_locals, gemm_op, gemm_selectors

DTYPE_AXIS = REDUCED_FLOATS

A, INNER_B, OFFS = Tensor("a", 0), Tensor("b", 1), Tensor("offs", 2)
B, BIAS = Batch("b", 1), Batch("bias", 3)
OUT, INNER_OUT = Tensor("out", 4), Batch("out", 4)
GROUPS = OFFS.size(1)  # offs come as a matrix of one row


def _selectors(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Selector]:
    found = gemm_selectors(a, b, BIAS, out)
    del found["precision"], found["epilogue"]
    is_16_bit = (a.dtype == DTYPES["bf16"]) | (a.dtype == DTYPES["fp16"])
    return found | {"dtype": Selector((a.dtype == DTYPES["fp16"]) + 2 * ~is_16_bit, 2)}


def group_locals(a: Tensor, b: Tensor, out: Tensor, per_group: str, groups: Expr, itemsize: int | None = None,
                 ) -> dict[str, Expr]:  # fmt: skip
    """They are those of one product, but the bytes `per_group` count once for each group."""
    found = gemm_locals(a, b, out, itemsize)
    return found | {"pdl": const(0), per_group: groups * found[per_group], "groups": groups}


def _op(name: str, b: Tensor, out: Tensor, per_group: str) -> Op:
    locals_ = group_locals(A, b, out, per_group, GROUPS)
    return gemm_op(name, (A, b, OFFS, BIAS, out), locals_, _selectors(A, b, out), GROUP_DIMS)


GROUP_DIMS = ("M", "N", "K", "groups")
ROWS = _op("grouped_mm", B, OUT, "b_bytes")
INNER = _op("grouped_mm_inner", INNER_B, INNER_OUT, "out_bytes")
OF_ROWS = Gemm(ROWS, A, B, BIAS, OUT)
OF_INNER = Gemm(INNER, A, INNER_B, BIAS, INNER_OUT)


def longest(rows: Expr, groups: Expr) -> Expr:
    """What a choice takes for a group's length, which the host does not know: all are alike."""
    return maximum((rows + groups - 1) // maximum(groups, 1), 1)
