"""Ops to try settings with: the package's own functions under names of their own, for bf16 alone.

tools/time_settings.py builds a pack of them with more settings than ship.
"""

from tk.generated import op
from tk.kernels.generated import activations, losses, norms, quantize, reductions, softmax

BF16 = ("bf16",)


@op(x="T[...]", tanh="bool", T=BF16)
def try_gelu(x, tanh):
    return activations.gelu(x, tanh)


@op(gate="T[...]", up="T[...]", T=BF16)
def try_swiglu(gate, up):
    return activations.swiglu(gate, up)


@op(x="T[..., N]", bias="T[N]", T=BF16)
def try_bias_silu(x, bias):
    return activations.bias_silu(x, bias)


@op(x="T[..., N]", T=BF16, grad=True)
def try_softmax(x):
    return softmax.softmax(x)


@op(x="T[..., N]", weight="T[N]", bias="T[N]", eps="float", T=BF16, grad=True)
def try_layer_norm(x, weight, bias, eps):
    return norms.layer_norm(x, weight, bias, eps)


@op(x="T[..., N]", weight="T[N]", eps="float", T=BF16, grad=True)
def try_rms_norm(x, weight, eps):
    return norms.rms_norm(x, weight, eps)


@op(x="T[..., N]", residual="T[..., N]", weight="T[N]", eps="float", T=BF16)
def try_add_rms_norm(x, residual, weight, eps):
    return norms.add_rms_norm(x, residual, weight, eps)


@op(x="T[..., N]", T=BF16)
def try_quantize_fp8_rows(x):
    return quantize.quantize_fp8_rows(x, False)


@op(x="T[..., N]", T=BF16)
def try_row_sum(x):
    return reductions.row_sum(x)


@op(x="T[..., N]", sign="float", T=BF16)
def try_row_argmax(x, sign):
    return reductions.row_argmax(x, sign)


@op(x="T[..., N]", bessel="float", power="float", T=BF16)
def try_row_var_mean(x, bessel, power):
    return reductions.row_var_mean(x, bessel, power)


@op(x="T[M, N]", T=BF16)
def try_column_sum(x):
    return reductions.column_sum(x)


@op(x="T[M, N]", target="i64[M]", ignore_index="int", label_smoothing="float", T=BF16)
def try_cross_entropy_rows(x, target, ignore_index, label_smoothing):
    return losses.cross_entropy_rows(x, target, ignore_index, label_smoothing)
