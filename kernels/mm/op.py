"""The op `mm` of the core: out = activation(alpha * a @ b + beta * bias)."""

from tk.aot.expr import tensors
from tk.kernels.gemm.problem import GEMM_DIMS, Gemm, gemm_locals, gemm_op, gemm_selectors

A, B, BIAS, OUT = tensors("a", "b", "bias", "out")
OP = gemm_op("mm", (A, B, BIAS, OUT), gemm_locals(A, B, OUT), gemm_selectors(A, B, BIAS, OUT), GEMM_DIMS)
MM = Gemm(OP, A, B, BIAS, OUT)
