"""A product as one would write it for Triton's JIT: what a call through the JIT costs, and the first one."""

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(
    a, b, out, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a += rows[:, None] * stride_am + inner[None, :] * stride_ak
    b += inner[:, None] * stride_bk + cols[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(0, k, BLOCK_K):
        left = k - done
        part_a = tl.load(a, mask=(rows[:, None] < m) & (inner[None, :] < left), other=0.0)
        part_b = tl.load(b, mask=(inner[:, None] < left) & (cols[None, :] < n), other=0.0)
        total = tl.dot(part_a, part_b, total)
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    out += rows[:, None] * stride_om + cols[None, :] * stride_on
    tl.store(out, total.to(out.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b [k, n], of a's dtype."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    _matmul[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return out
