"""The op `mm` of the core: out = activation(alpha * a @ b + beta * bias)."""

from tk.aot.expr import int_arg, tensors
from tk.aot.spec import Op
from tk.kernels.gemm.problem import GEMM_DIMS, Gemm, gemm_locals, gemm_selectors

A, B, BIAS, OUT = tensors("a", "b", "bias", "out")
_INTS = ("activation", "precision")

OP = Op(
    name="mm",
    tensors=(A, B, BIAS, OUT),
    ints=_INTS,
    floats=("alpha", "beta"),
    locals=gemm_locals(A, B, OUT),
    selectors=gemm_selectors(A, B, BIAS, OUT, *(int_arg(_INTS.index(name)) for name in _INTS)),
    dims=GEMM_DIMS,
)
MM = Gemm(OP, A, B, BIAS, OUT)
