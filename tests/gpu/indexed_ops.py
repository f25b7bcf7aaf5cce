"""A user's file: functions that draw, write at indices and search, for test_indexed_ops.py and test_debug.py."""

import torch
import torch._higher_order_ops as higher_order
import torch.nn.functional as F

import tk


@tk.op(x="T[..., N]", p="float", T=("fp32", "bf16"), grad=True)
def gpu_dropped(x, p):
    return F.dropout(F.silu(x), p), torch.rand_like(x)


@tk.op(x="T[M, N]", at="i64[K, N]", y="T[K, N]", T=("fp32", "bf16"))
def gpu_scatter_add(x, at, y):
    return x.scatter_add(0, at, y)


@tk.op(x="fp32[M, N]", at="i64[K, N]", y="fp32[K, N]")
def gpu_extremes(x, at, y):
    return x.scatter_reduce(0, at, y, "amax"), x.scatter_reduce(0, at, y, "amin"), x.scatter(0, at, y)


@tk.op(x="fp32[M, N]", at="i64[K]", y="fp32[K, N]")
def gpu_add_in_place(x, at, y):
    x.index_add_(0, at, y)


@tk.op(x="fp32[M, N]", rows="fp32[M, K]", one="fp32[L]")
def gpu_searches(x, rows, one):
    return torch.searchsorted(rows, x), torch.bucketize(x, one, right=True), *torch.frexp(x)


if hasattr(higher_order, "inline_asm_elementwise"):  # which torch 2.11 lacks

    @tk.op(x="fp32[M, N]")
    def gpu_ptx(x):
        assembly = dict(asm_str="ex2.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32)
        return higher_order.inline_asm_elementwise(x, **assembly) * 2


@tk.op(weight="fp32[V, D]", at="i64[M, K]")
def gpu_look_up(weight, at):
    return F.embedding(at, weight) * 2
