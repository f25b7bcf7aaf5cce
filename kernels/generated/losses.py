"""Cross entropy of rows of logits: with the indices of their classes, with weights of these, or with probabilities.
Worked out in fp32, and rounded once."""

import torch

from tk.generated import op
from tk.kernels.generated import FLOATS


def _picked(x, at):
    """x[row, at[row]]: read at an index, which is held against the classes."""
    return x.gather(1, at.unsqueeze(1)).squeeze(1)


def _logsumexp(x):
    """logsumexp, but not torch's, which is infinite where ATen's cross entropy of an infinite logit is NaN."""
    largest = x.amax(-1, keepdim=True).detach()
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


def _share(label_smoothing, x, spread):
    """What smoothing adds. A class of -inf makes it infinite: without smoothing it counts for nothing."""
    smoothing = torch.full((), label_smoothing, device=x.device)
    return torch.where(smoothing == 0, 0.0, smoothing * spread)


def _rows(x, target, ignore_index, label_smoothing):
    """(1 - s)·(lse - x[target]) + s·(lse - mean(x)) with lse = logsumexp(x); 0 where the target is ignore_index."""
    at = torch.where(target == ignore_index, 0, target)
    lse = _logsumexp(x)
    loss = (1 - label_smoothing) * (lse - _picked(x, at)) + _share(label_smoothing, x, lse - x.mean(-1))
    return torch.where(target == ignore_index, 0.0, loss)


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


@op(x="fp32[M, N]", target="i64[M]", weight="fp32[N]", ignore_index="int", label_smoothing="float", grad=True)
def cross_entropy_weighted(x, target, weight, ignore_index, label_smoothing):
    """(the loss of each row with weights of the classes, the weight of its class): both are 0 where the target is
    ignore_index. Smoothing spreads its share over the classes by their weights."""
    weight = weight.detach()
    is_ignored = target == ignore_index
    at = torch.where(is_ignored, 0, target)
    lse, of_class = _logsumexp(x), weight.gather(0, at)
    spread = ((lse.unsqueeze(-1) - x) * weight).mean(-1)
    loss = (1 - label_smoothing) * of_class * (lse - _picked(x, at)) + _share(label_smoothing, x, spread)
    return torch.where(is_ignored, 0.0, loss), torch.where(is_ignored, 0.0, of_class)


@op(x="fp32[M, N]", target="fp32[M, N]", weight="fp32[N]", label_smoothing="float", grad=True)
def cross_entropy_of_probabilities(x, target, weight, label_smoothing):
    """The loss of each row, of which target has the probabilities of all classes."""
    smoothed = target * (1 - label_smoothing) + label_smoothing / x.shape[1]
    return ((_logsumexp(x).unsqueeze(-1) - x) * (smoothed * weight.detach())).sum(-1)
