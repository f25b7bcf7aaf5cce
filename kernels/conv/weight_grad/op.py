"""The op `conv_weight_grad` of the core: out[g, o, c, tap] = the sum over pixels of grad[g, o, p] x[g, c, p + tap]."""

from tk.aot.expr import int_arg, tensors
from tk.aot.spec import Op
from tk.kernels.conv.op import DIMS, GEOMETRY, conv_locals, conv_selectors

# grad [N, G, O, PD, PH, PW], x [N, G, C, D, H, W], out [G, O, C, KD, KH, KW]: see kernels/conv/op.py.
GRAD, X, OUT = tensors("grad", "x", "out")
_INTS = (*GEOMETRY, "precision")

OP = Op(
    name="conv_weight_grad",
    tensors=(GRAD, X, OUT),
    ints=_INTS,
    floats=(),
    locals=conv_locals(X, OUT, GRAD),
    selectors=conv_selectors(X, int_arg(_INTS.index("precision"))),
    dims=DIMS,
)
