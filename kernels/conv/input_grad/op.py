"""The op `conv_input_grad` of the core: out[x] = sum over taps of grad[(x + padding - tap dilation) / stride] w[tap].

Places at the same remainder of the stride are a phase: the same taps reach them."""

from tk.aot.expr import Expr, ceil_div, int_arg, mode, select, tensors
from tk.kernels.conv.op import conv_op

# grad [N, G, O, PD, PH, PW], weight [G, O, C, KD, KH, KW], out [N, G, C, D, H, W]: see kernels/conv/op.py.
GRAD, WEIGHT, OUT = tensors("grad", "weight", "out")


def stride(d: int) -> Expr:
    return int_arg(d)


def places(d: int) -> Expr:
    """The places of a phase along d."""
    return ceil_div(OUT.size(3 + d), stride(d))


_PLACES = places(0) * places(1) * places(2)

OP = conv_op(
    "conv_input_grad",
    (GRAD, WEIGHT, OUT),
    (OUT, WEIGHT, GRAD),
    GRAD,
    ("precision",),
    rows=OUT.size(0) * _PLACES,  # of a phase
    rows_choice=select(mode("batch_invariant"), 8, OUT.size(0)) * _PLACES,
    phases=stride(0) * stride(1) * stride(2),
)
