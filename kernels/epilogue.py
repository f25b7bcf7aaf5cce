"""What a matrix product does to its accumulator before the store: activation(alpha * acc + beta * bias).

Everything is decided at run time, by uniform branches that cost once per tile: an activation, a bias or a factor needs
no kernel of its own.
"""

import triton
import triton.language as tl

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


@triton.jit
def activate(x, activation):
    """fp32 in and out; `activation` indexes ACTIVATIONS. NaN stays NaN, infinities end where ATen's do."""
    if activation == 1:
        x = tl.where(x < 0, 0.0, x)
    elif activation == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == 3:
        # 0.5 (1 + tanh u) is sigmoid(2 u). In one expression: what is kept beside x costs a register for each element.
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif activation == 4:
        x = x / (1.0 + tl.exp(-x))
    return x
