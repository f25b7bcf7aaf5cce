"""The op `scaled_grouped_mm` of the core. Group g is rows [offs[g - 1], offs[g]) of T:

    out[rows of g] = activation(scale_a[rows of g] * scale_b[g] * (a[rows of g] @ b[g]) + bias[g])

scale_a is [T, 1] and scale_b [groups, 1, N], float32; bias is [groups, 1, N], of the result's dtype.
"""

from tk.aot.expr import Tensor
from tk.aot.spec import Op
from tk.kernels.gemm.problem import Batch, Gemm
from tk.kernels.grouped_mm.op import GROUP_DIMS, group_locals
from tk.kernels.scaled_mm.op import scaled_selectors

A, B, SCALE_A = Tensor("a", 0), Batch("b", 1), Tensor("scale_a", 2)
SCALE_B, OFFS, BIAS, OUT = Batch("scale_b", 3), Tensor("offs", 4), Batch("bias", 5), Tensor("out", 6)
GROUPS = OFFS.size(1)  # offs come as a matrix of one row

OP = Op(
    name="scaled_grouped_mm",
    tensors=(A, B, SCALE_A, SCALE_B, OFFS, BIAS, OUT),
    ints=("activation", "fast_accumulation"),
    floats=(),
    locals=group_locals(A, B, OUT, "b_bytes", GROUPS, itemsize=1),
    selectors=scaled_selectors(A, B, OUT),
    dims=GROUP_DIMS,
)
SCALED_ROWS = Gemm(OP, A, B, BIAS, OUT)
