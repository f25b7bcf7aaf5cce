"""Cross entropy of rows of logits with the indices of their classes. Worked out in fp32, and rounded once."""

import torch

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


def _rows(x, target, ignore_index, label_smoothing):
    """(1 - s)·(lse - x[target]) + s·(lse - mean(x)) with lse = logsumexp(x); 0 where the target is ignore_index, NaN
    where it is no column."""
    columns = torch.arange(x.shape[1], device=x.device)
    # Not a gather, whose gradient would be a scatter: the row is read anyway.
    picked = torch.where(columns == target.unsqueeze(-1), x, 0.0).sum(-1)
    # Not torch.logsumexp, which is infinite where ATen's cross entropy of an infinite logit is NaN.
    largest = x.amax(-1, keepdim=True).detach()
    lse = (x - largest).exp().sum(-1).log() + largest.squeeze(-1)
    smoothing = torch.full((), label_smoothing, device=x.device)
    # A class of -inf makes the mean infinite: without smoothing it counts for nothing.
    spread = torch.where(smoothing == 0, 0.0, smoothing * (lse - x.mean(-1)))
    loss = (1 - label_smoothing) * (lse - picked) + spread
    inside = (target >= 0) & (target < x.shape[1])
    return torch.where(target == ignore_index, 0.0, torch.where(inside, loss, float("nan")))


@op(x="T[M, N]", target="i64[M]", ignore_index="int", label_smoothing="float", T=FLOATS, grad=True)
def cross_entropy_rows(x, target, ignore_index, label_smoothing):
    """The loss of each row."""
    return _rows(x.float(), target, ignore_index, label_smoothing).to(x.dtype)


@op(x="T[M, N]", target="i64[M]", ignore_index="int", label_smoothing="float", T=FLOATS, grad=True)
def cross_entropy_sum(x, target, ignore_index, label_smoothing):
    """The sum of the losses."""
    return _rows(x.float(), target, ignore_index, label_smoothing).sum().to(x.dtype)


@op(x="T[M, N]", target="i64[M]", ignore_index="int", label_smoothing="float", T=FLOATS, grad=True)
def cross_entropy_mean(x, target, ignore_index, label_smoothing):
    """The mean of the losses over the rows whose target is not ignore_index."""
    total = _rows(x.float(), target, ignore_index, label_smoothing).sum()
    return (total / (target != ignore_index).sum()).to(x.dtype)
