"""Functions that the tests generate."""

import torch
import torch.nn.functional as F
from torch._higher_order_ops import associative_scan

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(x="T[..., N]", bias="T[N]", alpha="float", T=FLOATS)
def scaled_gelu(x, bias, alpha):
    return F.gelu(x * alpha + bias)


@op(x="T[..., N]", T=FLOATS)
def softmax(x):
    return F.softmax(x, -1)


@op(x="T[..., N]", residual="T[..., N]", weight="T[N]", eps="float", T=FLOATS)
def add_rms_norm(x, residual, weight, eps):
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, eps), total


@op(x="T[..., N]", weight="T[N]", bias="T[N]", eps="float", T=("bf16", "fp32"))
def layer_norm(x, weight, bias, eps):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@op(x="fp32[M, N]")
def column_sum(x):
    return x.sum(0), x.mean(0)


@op(x="fp32[M, N]")
def column_statistics(x):
    variance, mean = torch.var_mean(x, 0)
    return variance, mean, x.amax(0), x.amin(0), (x > 0).any(0), (x > -9).all(0), (x * 0.1 + 1).prod(0), x - x.mean(0)


@op(x="fp32[B, M, N]")
def middle(x):
    return x.amax(1), x.argmax(1)


@op(x="T[...]", T=("fp32", "i32"))
def total(x):
    return x.sum()


@op(x="fp32[M, N]")
def normalized(x):
    return x / x.sum(), x.mean(0)


@op(x="fp32[M, N]", y="fp32[N]")
def add_in_place(x, y):
    x.add_(y)
    return x.sum(-1)


@op(x="fp32[M, N]")
def shift_in_place(x):
    x.copy_(x.flip(-1) * 2)


@op(x="T[..., N]", T=FLOATS)
def statistics(x):
    variance, mean = torch.var_mean(x, -1)
    return variance, mean, x.argmax(-1), x.argmin(-1), torch.logsumexp(x, -1), x.amin(-1, keepdim=True)


@op(x="T[..., N]", scale="bool", T=("fp32",))
def maybe_scaled(x, scale):
    return x * 2 if scale else x + 1


@op(x="fp32[B, C, H]", weight="fp32[C]", bias="fp32[C]", eps="float")
def group_norm(x, weight, bias, eps):
    return F.group_norm(x, 4, weight, bias, eps)


@op(x="T[..., N]", T=("bf16", "fp32"))
def swiglu(x):
    n = x.shape[-1] // 2
    return F.silu(x[..., :n]) * x[..., n:]


@op(x="fp32[M, N]", y="fp32[M, K]")
def joined(x, y):
    return torch.cat([x, y * 2, x], 1), F.pad(x, (1, 2, 3, 0), value=5.0)


@op(x="fp32[M, N]")
def views(x):
    return x.t().contiguous() + 1, x.flip(0)[1:], x.reshape(-1) * 2, x.unsqueeze(1).expand(-1, 3, -1) + 1


@op(x="fp32[M, N]", y="fp32[M, N]")
def scattered(x, y):
    x = x.clone()
    x[1:, ::2] = y[1:, ::2] * 2
    x[:, 3] = 7
    x[0, -2:] += 1
    return x


@op(weight="T[V, D]", at="i64[...]", T=("bf16", "fp32"))
def embedding(weight, at):
    return F.embedding(at, weight)


@op(x="fp32[M, N]", at="i64[M, K]")
def gathered(x, at):
    return torch.gather(x, 1, at), x[:, at[0]]


@op(x="fp32[M, N]", n="int", a="float")
def numbers(x, n, a):
    return x * n + a * 2, x.shape[0] * x, (x.to(torch.int64) + n) * 3


@op(x="T[..., M, N]", row="T[..., 1, N]", column="T[M, 1]", scalar="fp32[]", T=("bf16", "fp32"))
def broadcast(x, row, column, scalar):
    return x * row + column * scalar, row + 1


@op(x="T[M, N]", T=("bf16", "fp32", "i32"))
def scans(x):
    return x.cumsum(-1), x.cumsum(0), (x * 0 + 1).cumprod(-1) + x


@op(x="fp32[M, N]")
def scan_and_reduction(x):
    total = x.cumsum(-1)
    return total / x.sum(-1, keepdim=True), total.amax(-1), total.t() + 1


@op(x="fp32[S, D]", cos="fp32[S, H]")
def rotated(x, cos):
    half = x.shape[1] // 2
    return x[:, :half] * cos[:, :half]


@op(x="T[..., N]", T=("fp32", "i64"))
def running_extremes(x):
    values, indices = torch.cummax(x, -1)
    return values, indices, torch.cummin(x * 2, -1).values


@op(x="T[..., N]", T=FLOATS)
def running_logsumexp(x):
    return torch.logcumsumexp(x * 2, -1) + 1


@op(x="T[..., N]", T=("bf16", "fp32", "i32"))
def backward_cumsum(x):
    return x.flip(-1).cumsum(-1).flip(-1)


@op(x="T[..., N]", T=("bf16", "fp32", "fp64", "i8", "bool"), descending="bool")
def sorted_rows(x, descending):
    return torch.sort(x, dim=-1, stable=True, descending=descending)


@op(x="T[M, N]", T=("fp32", "fp64"))
def sorted_columns(x):
    return torch.argsort(x, dim=0, stable=True), torch.sort(x * 2 + 1, dim=1).values - 1


@op(x="T[..., N]", k="int", T=("bf16", "fp32"))
def largest(x, k):
    return torch.topk(x, k)


@op(x="fp32[..., N]")
def three_smallest(x):
    values, indices = torch.topk(x + 1, 3, largest=False)
    return values - 1, indices, torch.kthvalue(x, 2, -1).values


def affine(before, after):
    """Two steps of h = a * h + b as one."""
    return before[0] * after[0], after[0] * before[1] + after[1]


@op(a="T[..., N]", b="T[..., N]", T=("fp32", "bf16"))
def recurrence(a, b):
    """h[t] = a[t] * h[t - 1] + b[t]: an order that matters."""
    return associative_scan(affine, (torch.sigmoid(a), b), -1)[1] * 2


@op(x="i32[M, N]")
def last_positive(x):
    """Along columns from the end, and along rows."""
    keep = lambda before, after: torch.where(after > 0, after, before)  # noqa: E731
    return associative_scan(keep, x, 0, reverse=True), associative_scan(keep, x, 1)


@op(x="T[..., N]", p="float", T=("fp32", "bf16"))
def dropped(x, p):
    return F.dropout(F.silu(x), p)


@op(x="T[M, N]", at="i64[K]", y="T[K, N]", T=("bf16", "fp32"))
def added_at(x, at, y):
    return x.index_add(0, at, y)


@op(x="fp32[M, N]", at="i64[K, N]", y="fp32[K, N]")
def largest_at(x, at, y):
    return x.scatter_reduce(0, at, y, "amax")


@op(x="fp32[M, N]", rows="fp32[M, K]")
def searched(x, rows):
    return torch.searchsorted(rows, x)
