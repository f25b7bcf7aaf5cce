"""Scans and sorts to try settings with, as tools/settings_candidates.py has the other ops."""

from tk.generated import op
from tk.kernels.generated import scans, sorts

BF16 = ("bf16",)


@op(x="T[..., N]", T=BF16, grad=True)
def try_cumsum(x):
    return scans.cumsum(x)


@op(x="T[..., N]", T=BF16)
def try_cummax(x):
    return scans.cummax(x)


@op(x="T[..., N]", T=BF16)
def try_sort(x):
    return sorts.sort(x, False)


@op(x="T[..., N]", T=("fp32",))
def try_sort_fp32(x):
    return sorts.sort(x, False)


@op(x="T[..., N]", k="int", T=BF16)
def try_topk(x, k):
    return sorts.topk(x, k, True)
