"""The ops of the core behind int4_mm and uint4x2_mixed_mm.

int4_mm          out = activation(alpha * a @ weight + beta * bias)
int4_dequantize  out = weight

weight[k, n] = (value[k, n] - zero[k // group, n]) * scale[k // group, n], where value is the low (k even) or high
nibble of b[k // 2, n]. There are K / group rows of scales and of zeros. Absent scales are 1, absent zeros 8.
"""

from tk.aot.expr import Expr, Tensor, const, maximum, select, tensors
from tk.aot.spec import DTYPES, REDUCED_FLOATS, Constraint, Op, Point, Selector, require
from tk.kernels.gemm.problem import OUT_AXIS, Gemm, gemm_locals, gemm_op, out_selector

DTYPE_AXIS = REDUCED_FLOATS

A, B, SCALES, ZEROS, BIAS, OUT = tensors("a", "b", "scales", "zeros", "bias", "out")


def _group(scales: Tensor, k: Expr) -> Expr:
    """How many k have a scale in common."""
    return select(scales.present, k // maximum(scales.size(0), 1), k)


def _dtype(t: Tensor) -> Selector:
    return Selector(t.dtype == DTYPES["fp16"], 2)


OP = gemm_op(
    "int4_mm",
    (A, B, SCALES, ZEROS, BIAS, OUT),
    gemm_locals(A, B, OUT) | {"b_bytes": B.size(0) * B.size(1), "pdl": const(0), "group": _group(SCALES, A.size(1))},
    {"dtype": _dtype(A), "out": out_selector(A, OUT)},
    ("M", "N", "K", "group"),
)
INT4 = Gemm(OP, A, B, BIAS, OUT)
GROUP = OP.local("group")

# Of dequantize: named as above, numbered by themselves.
PACKED, OF_PACKED, ZEROS_OF_PACKED, WEIGHT = tensors("b", "scales", "zeros", "out")
DEQUANTIZE = Op(
    name="int4_dequantize",
    tensors=(PACKED, OF_PACKED, ZEROS_OF_PACKED, WEIGHT),
    ints=(),
    floats=(),
    locals={
        "N": WEIGHT.size(1),
        "K": WEIGHT.size(0),
        "group": _group(OF_PACKED, WEIGHT.size(0)),
        "largest": maximum(WEIGHT.size(0), WEIGHT.size(1)),
    },
    selectors={"dtype": _dtype(WEIGHT)},
    dims=("N", "K", "group"),
)


def serves(point: Point) -> dict[str, tuple[int, ...]]:
    return {"dtype": (DTYPE_AXIS.index(point.dtype),), "out": (OUT_AXIS.index(point.out),)}


def _is_row_major(t: Tensor, by: int) -> Expr:
    return (t.stride(1) == 1) & (t.alignment >= 16) & (t.stride(0) % by == 0)


def row_major(t: Tensor, by: int = 16) -> Constraint:
    message = f"{t.name} row-major and on a 16-byte boundary, its rows a multiple of {by} elements apart"
    return require(_is_row_major(t, by), message)


def whole_groups(block_k: int) -> Constraint:
    holds = (GROUP % block_k == 0) & (INT4.K % block_k == 0)
    return require(holds, f"groups (without scales: K) of {block_k}")


def reads_words(b: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Constraint, ...]:
    """That four columns of b are a word and those of a scale two, 16 bytes of which are loaded at once."""
    found = [
        require(_is_row_major(b, 16), "b row-major and on a 16-byte boundary, its rows a multiple of 16 bytes apart"),
        require(b.size(1) % 16 == 0, "N a multiple of 16"),
    ]
    for t in (scales, zeros):
        message = f"{t.name} row-major and on a 16-byte boundary, their rows a multiple of 16 elements apart"
        found.append(require(~t.present | _is_row_major(t, 16), message))
    return tuple(found)
