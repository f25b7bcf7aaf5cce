"""Functions of one's own, each an op after

tk build examples/my_ops.py --arch 90 -o my_ops.tkpack      # on any machine, GPU or not
tk.load_pack("my_ops.tkpack"); torch.ops.tk.scaled_tanh(x, 0.5)
"""

import torch
import torch.nn.functional as F

from tk.generated import op

# --- Elementwise ---


@op(x="fp32[...]", scale="float", grad=True)
def scaled_tanh(x, scale):
    return torch.tanh(x * scale)


@op(x="fp32[...]", low="float", high="float")
def squashed(x, low, high):
    return low + (high - low) * torch.sigmoid(x)


@op(x="i32[...]", shift="int")
def shifted_bits(x, shift):
    return (x << shift) ^ x


@op(x="fp32[...]", y="fp32[...]")
def smooth_difference(x, y):
    """Two results of one read."""
    d = x - y
    return torch.where(d.abs() < 1, 0.5 * d * d, d.abs() - 0.5), d.sign()


@op(x="fp32[..., N]", keep="bool[..., N]")
def masked(x, keep):
    return x.masked_fill(~keep, float("-inf"))


@op(x="fp32[...]", invert="bool")
def gate(x, invert):
    """A bool is no argument of a kernel: each of its values is one of its own."""
    return x * torch.sigmoid(-x if invert else x)


# --- Broadcast ---


@op(x="bf16[..., N]", bias="bf16[N]")
def biased_relu(x, bias):
    return F.relu(x + bias)


@op(x="fp32[M, N]", rows="fp32[M, 1]", columns="fp32[N]")
def outer_scaled(x, rows, columns):
    return x * rows * columns


@op(x="fp32[B, C, H, W]", scale="fp32[C]", shift="fp32[C]")
def channel_affine(x, scale, shift):
    return x * scale[:, None, None] + shift[:, None, None]


# --- Along rows, along columns, over everything ---


@op(x="fp32[..., N]")
def row_range(x):
    return x.amax(-1) - x.amin(-1)


@op(x="fp32[..., N]")
def centred(x):
    return x - x.mean(-1, keepdim=True)


@op(x="fp32[..., N]", weight="fp32[N]", eps="float", grad=True)
def unit_rows(x, weight, eps):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * weight


@op(x="fp32[M, N]")
def column_spread(x):
    return x.std(0)


@op(x="fp32[...]")
def any_not_finite(x):
    return (~torch.isfinite(x)).any()


@op(x="fp32[..., N]", temperature="float")
def best(x, temperature):
    """The place of the largest probability, and the probability."""
    return x.argmax(-1), torch.softmax(x / temperature, -1).amax(-1)


# --- Views and places ---


@op(x="fp32[..., N]")
def neighbours(x):
    """Of every element the difference from the one before; the first has none."""
    return F.pad(x[..., 1:] - x[..., :-1], (1, 0))


@op(x="fp32[M, N]")
def mirrored(x):
    return x.flip(-1).t()


@op(table="fp32[V, N]", index="i64[...]")
def looked_up(table, index):
    return table[index] * 2


# --- In place, and of many tensors ---


@op(x="fp32[...]", update="fp32[...]", decay="float")
def decayed_(x, update, decay):
    x.mul_(decay).add_(update, alpha=1 - decay)


@op(xs="fp32[...]*", factor="float")
def scale_all_(xs, factor):
    for x in xs:
        x.mul_(factor)


@op(xs="fp32[...]*", scale="fp32[]", factor="float")
def scaled_copies(xs, scale, factor):
    """A list comes back; the scale, a tensor, is all of theirs."""
    return [x * scale * factor for x in xs]


@op(grads="fp32[...]*", most="float")
def clip_norm_(grads, most):
    """torch.nn.utils.clip_grad_norm_: all tensors have one norm, put together of theirs."""
    total = torch.stack([g.norm() for g in grads]).norm()
    scale = (most / (total + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale)
    return total
