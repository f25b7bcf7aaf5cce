"""What a matrix product does to its accumulator before the store: activation(alpha * acc + beta * bias).

Everything is decided at run time, by uniform branches that cost once per tile: an activation, a bias or a factor needs
no kernel of its own. Gluon kernels call these functions as well as Triton's.
"""

import triton
import triton.language as tl

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


@triton.jit
def _reciprocal(x):
    """1 / x of a positive x, within 4e-7 of its value; 0 of infinity. A division takes three times the instructions."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def _gelu(x):
    """x times the normal distribution's function: max(x, 0) - |x| Q(|x|), which keeps its digits where x is negative.
    libdevice's erf branches for every element, and an accumulator does not survive that in registers."""
    # The upper tail of the distribution, Q(z) = exp(-z^2 / 2) t p(t): within 9e-7 of its value (tools/fit_gelu.py).
    z = tl.minimum(tl.abs(x), 14.0)
    t = _reciprocal(1.0 + 0.36 * z)
    p = 0.04705621674656868 * t - 0.17976444959640503
    p = p * t + 0.18095369637012482
    p = p * t + 0.02654953859746456
    p = p * t + 0.1397191882133484
    p = p * t + 0.14177246391773224
    p = p * t + 0.14371304214000702
    return tl.where(x < 0, 0.0, x) - z * (p * t * tl.exp2(-0.72134752 * (z * z)))


@triton.jit
def activate(x, activation):
    """fp32 in and out; `activation` indexes ACTIVATIONS. NaN stays NaN, and what an infinity gives in the limit is what
    it gives here, or NaN."""
    if activation == 1:
        x = tl.where(x < 0, 0.0, x)
    elif activation == 2:
        x = _gelu(x)
    elif activation == 3:
        # 0.5 (1 + tanh u) is sigmoid(2 u). In one expression: what is kept beside x costs a register for each element.
        x = x * _reciprocal(1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
    elif activation == 4:
        x = x * _reciprocal(1.0 + tl.exp2(-1.4426950409 * x))
    return x


@triton.jit
def finish(acc, bias, out, rows, cols, M, N, stride_om, stride_on, epilogue, EPILOGUE: tl.constexpr):
    """Store the block `acc` at (rows, cols) of out, M x N, as a thread at a time has it. epilogue: an ``Epilogue``
    (kernels/gemm/arguments.py). EPILOGUE "vector": bias is one row; "matrix": any broadcast."""
    acc *= epilogue.alpha
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    r = rows.to(tl.int64)
    c = cols.to(tl.int64)
    if epilogue.has_bias != 0:
        if EPILOGUE == "vector":
            z = tl.load(bias + c * epilogue.stride_bias_n, mask=cols < N, other=0.0)[None, :]
        else:
            z = tl.load(
                bias + r[:, None] * epilogue.stride_bias_m + c[None, :] * epilogue.stride_bias_n, mask=inside, other=0.0
            )
        acc += epilogue.beta * z.to(tl.float32)
    acc = activate(acc, epilogue.activation)
    tl.store(out + r[:, None] * stride_om + c[None, :] * stride_on, acc.to(out.dtype.element_ty), mask=inside)
