"""The ops of the core behind grouped_mm. Group g is [offs[g - 1], offs[g]) of T.

grouped_mm        out[rows of g] = activation(alpha * a[rows of g] @ b[g] + beta * bias[g]), T rows
grouped_mm_inner  out[g] = activation(alpha * a[:, g] @ b[g, :] + beta * bias[g]), T the inner size
"""

from tk.aot.expr import Expr, Tensor, const, int_arg, maximum
from tk.aot.spec import DTYPES, REDUCED_FLOATS, Op, Selector
from tk.kernels.gemm.problem import Batch, Gemm, gemm_locals, gemm_selectors

_INTS = ("activation", "precision")
DTYPE_AXIS = REDUCED_FLOATS

A, INNER_B, OFFS = Tensor("a", 0), Tensor("b", 1), Tensor("offs", 2)
B, BIAS = Batch("b", 1), Batch("bias", 3)
OUT, INNER_OUT = Tensor("out", 4), Batch("out", 4)
GROUPS = OFFS.size(1)  # offs come as a matrix of one row


def _selectors(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Selector]:
    activation, precision = (int_arg(_INTS.index(name)) for name in _INTS)
    found = gemm_selectors(a, b, BIAS, out, activation, precision)
    del found["precision"], found["epilogue"]
    is_16_bit = (a.dtype == DTYPES["bf16"]) | (a.dtype == DTYPES["fp16"])
    return found | {"dtype": Selector((a.dtype == DTYPES["fp16"]) + 2 * ~is_16_bit, 2)}


def _locals(a: Tensor, b: Tensor, out: Tensor, **bytes_of: Expr) -> dict[str, Expr]:
    """bytes_of: what differs from one product's."""
    found = gemm_locals(a, b, out)
    return found | {"pdl": const(0)} | {name: n * found[name] for name, n in bytes_of.items()} | {"groups": GROUPS}


ROWS = Op(
    name="grouped_mm",
    tensors=(A, B, OFFS, BIAS, OUT),
    ints=_INTS,
    floats=("alpha", "beta"),
    locals=_locals(A, B, OUT, b_bytes=GROUPS),
    selectors=_selectors(A, B, OUT),
    dims=("M", "N", "K", "groups"),
)
INNER = Op(
    name="grouped_mm_inner",
    tensors=(A, INNER_B, OFFS, BIAS, INNER_OUT),
    ints=_INTS,
    floats=("alpha", "beta"),
    locals=_locals(A, INNER_B, INNER_OUT, out_bytes=GROUPS),
    selectors=_selectors(A, INNER_B, INNER_OUT),
    dims=("M", "N", "K", "groups"),
)
OF_ROWS = Gemm(ROWS, A, B, BIAS, OUT)
OF_INNER = Gemm(INNER, A, INNER_B, BIAS, INNER_OUT)


def longest(rows: Expr, groups: Expr) -> Expr:
    """What a choice takes for a group's length, which the host does not know: all are alike."""
    return maximum((rows + groups - 1) // maximum(groups, 1), 1)
