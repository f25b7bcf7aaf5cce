"""Activations, with a bias or gated."""

import torch.nn.functional as F

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[...]", tanh="bool", T=FLOATS, grad=True)
def gelu(x, tanh):
    """gelu(x), by its tanh approximation where asked for."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


@op(x="T[..., N]", bias="T[N]", tanh="bool", T=FLOATS, grad=True)
def bias_gelu(x, bias, tanh):
    return F.gelu(x + bias, approximate="tanh" if tanh else "none")


@op(x="T[...]", T=FLOATS, grad=True)
def silu(x):
    return F.silu(x)


@op(x="T[..., N]", bias="T[N]", T=FLOATS, grad=True)
def bias_silu(x, bias):
    return F.silu(x + bias)


@op(gate="T[...]", up="T[...]", T=FLOATS, grad=True)
def swiglu(gate, up):
    """silu(gate) · up."""
    return F.silu(gate) * up


@op(gate="T[...]", up="T[...]", tanh="bool", T=FLOATS, grad=True)
def geglu(gate, up, tanh):
    """gelu(gate) · up."""
    return F.gelu(gate, approximate="tanh" if tanh else "none") * up
