"""The op `conv_weight_grad` of the core: out[g, o, c, tap] = the sum over pixels of grad[g, o, p] x[g, c, p + tap]."""

from tk.aot.expr import tensors
from tk.kernels.conv.op import conv_op

# grad [N, G, O, PD, PH, PW], x [N, G, C, D, H, W], out [G, O, C, KD, KH, KW]: see kernels/conv/op.py.
GRAD, X, OUT = tensors("grad", "x", "out")
OP = conv_op("conv_weight_grad", (GRAD, X, OUT), (X, OUT, GRAD), X, ("precision",))
