"""Functions of what users write first, for test_worded_ops.py: numbers of the call, windows, captures, lists."""

import torch
import torch.nn.functional as F

from tk.generated import op

TAPS = torch.tensor([0.25, 0.5, 0.25])


@op(x="T[..., N]", p="float", T=("bf16", "fp32"), grad=True)
def gpu_power(x, p):
    return x.abs() ** p + F.softplus(x, p, 20.0)


@op(x="fp32[M, N]", p="float", grad=True)
def gpu_norm(x, p):
    return x.norm(p, -1)


@op(x="fp32[M, N]", y="fp32[M, N]", delta="float", grad=True)
def gpu_huber(x, y, delta):
    return F.huber_loss(x, y, delta=delta)


@op(x="fp32[M, N]", t="i64[M]", smoothing="float", grad=True)
def gpu_smoothed(x, t, smoothing):
    return F.cross_entropy(x, t, label_smoothing=smoothing)


@op(x="fp32[B, C, H, W]", grad=True)
def gpu_pooled(x):
    return F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2)


@op(x="fp32[M, N]", grad=True)
def gpu_padded(x):
    return F.pad(x, (2, 1), mode="reflect")


@op(x="fp32[M, N]", grad=True)
def gpu_cumprod(x):
    return x.cumprod(-1)


@op(x="fp32[M, N]", grad=True)
def gpu_digamma(x):
    return torch.digamma(x)


@op(x="fp32[M, N]")
def gpu_deviation(x):
    return (x / (x.abs() + 1)).std(-1), (x * 0.7).var(-1)


@op(x="T[M, N]", a="T[N]", T=("bf16", "fp32"))
def gpu_kept(x, a):
    """Of what is contracted, approximated and added up on its way: what holds whatever it comes to."""
    y = torch.softmax(x * a + x, -1)
    ordered = y.sort(-1).values
    return (y >= y.topk(5, -1).values[:, -1:], y == y.amax(0), torch.searchsorted(ordered, y),
            torch.searchsorted(ordered, y, right=True))  # fmt: skip


@op(x="fp32[M, N]", a="fp32[N]", grad=True)
def gpu_peak(x, a):
    return (x * a + x).var(-1).amax()


@op(x="i64[N]", y="i64[N]")
def gpu_gcd(x, y):
    return torch.gcd(x, y)


@op(x="T[M, 2*N]", T=("fp16", "fp32"), grad=True)
def gpu_halves(x):
    a, b = x.float().chunk(2, -1)
    return a * torch.sigmoid(b)


@op(x="fp32[M, 3]", grad=True)
def gpu_filtered(x):
    return (x * TAPS).sum(-1)


@op(x="fp32[A, B, C, D, E, G]", grad=True)
def gpu_six(x):
    return x.softmax(2).sum((1, 4))


@op(xs="T[...]*", ys="T[...]*", by="fp32[]", a="float", T=("bf16", "fp32"))
def gpu_times(xs, ys, by, a):
    return [x * by * a + y for x, y in zip(xs, ys, strict=True)], [(x > y).any() for x, y in zip(xs, ys, strict=True)]


@op(grads="T[...]*", most="float", T=("bf16", "fp32"))
def gpu_clip_(grads, most):
    total = torch.stack([g.norm() for g in grads]).norm()
    scale = (most / (total + 1e-6)).clamp(max=1)
    for g in grads:
        g.mul_(scale)
    return total


@op(xs="fp32[...]*")
def gpu_centred(xs):
    return [(x - x.mean()) * torch.rsqrt(x.var() + 1e-3) for x in xs], torch.stack([x.amax() for x in xs]).amax()


@op(x="T[...]", T=("fp64", "fp32", "fp16", "bf16"))
def gpu_casts(x):
    return x.to(torch.int8), x.to(torch.int16), x.to(torch.uint8), x.to(torch.int32), x.to(torch.int64)
