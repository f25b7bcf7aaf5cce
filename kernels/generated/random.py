"""Random numbers, and dropout. Every bit follows from seed, offset and the element's place (tk.generated.random). The
gradient of dropout is dropout with the same seed, which tk.generated.gradients has."""

import torch
import torch.nn.functional as F

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[...]", seed="i64[]", p="float", offset="int", T=FLOATS)
def dropout(x, seed, p, offset):
    """x / (1 - p), and 0 with probability p."""
    return F.dropout(x, p)


@op(x="T[...]", residual="T[...]", seed="i64[]", p="float", offset="int", T=FLOATS)
def dropout_add(x, residual, seed, p, offset):
    """dropout(x) + residual."""
    return F.dropout(x, p) + residual


@op(out="T[...]", seed="i64[]", offset="int", T=FLOATS)
def fill_uniform(out, seed, offset):
    """Fills out with numbers from 0 to below 1."""
    out.copy_(torch.rand_like(out))


@op(out="T[...]", seed="i64[]", offset="int", T=FLOATS)
def fill_normal(out, seed, offset):
    """Fills out with numbers of mean 0 and deviation 1."""
    out.copy_(torch.randn_like(out))


@op(out="i64[...]", seed="i64[]", low="int", high="int", offset="int")
def fill_integers(out, seed, low, high, offset):
    """Fills out with integers, low <= x < high."""
    out.copy_(torch.randint_like(out, low, high))
