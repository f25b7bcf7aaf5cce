"""Losses over the last dimension."""

import torch

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(x="T[..., V]", target="i64[...]", ignore_index="int", T=FLOATS, grad=True)
def cross_entropy_rows(x, target, ignore_index):
    """-log softmax(x)[target] of every row, 0 where the target is ignore_index.

    The target's logit is picked by comparison, not by an indirect read: so it shares the row's read, and its gradient
    needs no atomics."""
    wide = x.float()
    is_target = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    loss = torch.logsumexp(wide, -1) - torch.where(is_target, wide, 0.0).sum(-1)
    return torch.where(target == ignore_index, 0.0, loss).to(x.dtype)
