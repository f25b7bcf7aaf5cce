"""Norms, computed in fp32: over the last dimension, or over groups of channels. The weights have the input's dtype."""

import torch
import torch.nn.functional as F

from tk.generated import op
from tk.kernels.generated import FLOATS


@op(x="T[..., N]", weight="T[N]", eps="float", T=FLOATS, grad=True)
def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@op(x="T[..., N]", weight="T[N]", bias="T[N]", eps="float", T=FLOATS, grad=True)
def layer_norm(x, weight, bias, eps):
    """(x - mean) / sqrt(var + eps) · weight + bias."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@op(x="T[..., N]", residual="T[..., N]", weight="T[N]", eps="float", T=FLOATS, grad=True)
def add_rms_norm(x, residual, weight, eps):
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total


@op(x="T[..., N]", residual="T[..., N]", weight="T[N]", bias="T[N]", eps="float", T=FLOATS, grad=True)
def add_layer_norm(x, residual, weight, bias, eps):
    """(layer_norm(x + residual), x + residual)."""
    total = x + residual
    return F.layer_norm(total, (x.shape[-1],), weight, bias, eps), total


@op(x="T[B, G, K, S]", weight="T[G, K]", bias="T[G, K]", eps="float", T=FLOATS, grad=True)
def group_norm(x, weight, bias, eps):
    """(x - mean) / sqrt(var + eps) · weight + bias, the statistics over K channels of a group and their S positions."""
    wide = x.float()
    variance, mean = torch.var_mean(wide, (2, 3), correction=0, keepdim=True)
    normed = (wide - mean) * torch.rsqrt(variance + eps)
    return (normed * weight.unsqueeze(-1) + bias.unsqueeze(-1)).to(x.dtype)
