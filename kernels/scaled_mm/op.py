"""The op `scaled_mm` of the core: out = activation(scale_a * scale_b * (a @ b) + bias), a and b of float8.

scale_a is [M, 1] and scale_b [1, N], float32; one scale for all has a stride of 0. bias is [1, N], of the result's
dtype.
"""

from tk.aot.expr import Expr, Tensor, int_arg, select, tensors
from tk.aot.spec import DTYPES, Op, Selector
from tk.kernels.gemm.problem import GEMM_DIMS, Gemm, gemm_locals

A, B, SCALE_A, SCALE_B, BIAS, OUT = tensors("a", "b", "scale_a", "scale_b", "bias", "out")
_INTS = ("activation", "fast_accumulation")

# Values of the selector axes, in the order of their numbers.
DTYPE_AXIS = ("fp8e4nv", "fp8e5")  # of a; b_dtype: of b
# nt: K is contiguous in a and in b, and rows in the result; ss: any strides.
ORDER_AXIS = ("nt", "ss")
OUT_AXIS = ("bf16", "fp16", "fp32")
# slow: every 128 products of a sum are added to it in fp32. fast: tensor cores add all of them, with fewer bits.
ACCUMULATION_AXIS = ("slow", "fast")
SELECTOR_AXES = {
    "dtype": DTYPE_AXIS,
    "b_dtype": DTYPE_AXIS,
    "order": ORDER_AXIS,
    "out": OUT_AXIS,
    "accumulation": ACCUMULATION_AXIS,
}


def scaled_selectors(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Selector]:
    is_nt = (a.stride(1) == 1) & (b.stride(0) == 1) & (out.stride(1) == 1)
    return {
        "dtype": Selector(a.dtype == DTYPES["fp8e5"], 2),
        "b_dtype": Selector(b.dtype == DTYPES["fp8e5"], 2),
        "order": Selector(~is_nt, 2),
        "out": Selector(_index(out.dtype, OUT_AXIS), 3),
        "accumulation": Selector(int_arg(_INTS.index("fast_accumulation")) != 0, 2),
    }


def _index(dtype: Expr, axis: tuple[str, ...]) -> Expr:
    """The place of a dtype in `axis`; the last if it is nowhere else."""
    found = select(dtype == DTYPES[axis[-2]], len(axis) - 2, len(axis) - 1)
    return select(dtype == DTYPES[axis[0]], 0, found)


OP = Op(
    name="scaled_mm",
    tensors=(A, B, SCALE_A, SCALE_B, BIAS, OUT),
    ints=_INTS,
    floats=(),
    locals=gemm_locals(A, B, OUT, itemsize=1),
    selectors=scaled_selectors(A, B, OUT),
    dims=GEMM_DIMS,
)
SCALED = Gemm(OP, A, B, BIAS, OUT)
