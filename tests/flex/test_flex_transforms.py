"""torch.func over attention: vmap, grad, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tk
from tk.flex import mods


def qkv(n: int = 3) -> list[torch.Tensor]:
    return [torch.randn(n, 2, 2, length, 8, dtype=torch.float64) for length in (5, 6, 6)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 2), (None, None, 0)])
def test_vmap_of_sdpa(in_dims: Any) -> None:
    x = [t.movedim(0, d) if d is not None else t[0] for t, d in zip(qkv(), in_dims, strict=True)]

    def through(attention: Any) -> torch.Tensor:
        return torch.vmap(lambda q, k, v: attention(q, k, v, is_causal=True), in_dims=in_dims)(*x)

    torch.testing.assert_close(through(tk.sdpa), through(scaled_dot_product_attention))


def test_vmap_of_masks_tables_and_batch_entries() -> None:
    q, k, v = qkv()
    bias = torch.randn(3, 2, 2, 5, 6, dtype=torch.float64)
    found = torch.vmap(lambda q, k, v, m: tk.sdpa(q, k, v, attn_mask=m))(q, k, v, bias)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, attn_mask=bias))
    slopes = torch.rand(3, 2, dtype=torch.float64)
    of_entries = mods.prefix_lm(torch.tensor([2, 4]))  # asks which entry of the batch it is
    mask = tk.flex.create_block_mask(of_entries, 2, None, 5, 6, "cpu", 4)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return tk.flex_attention(q, k, v, mods.alibi(s), mask)

    expected = torch.stack([attend(*x) for x in zip(q, k, v, slopes, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v, slopes), expected)


def test_gradients() -> None:
    q, k, v = qkv()

    def loss(attention: Any) -> Any:
        return lambda q, k, v: (attention(q, k, v) ** 2).sum()

    for transform in (lambda f: torch.func.grad(f, (0, 1, 2)), lambda f: torch.vmap(torch.func.grad(f, (0, 1, 2)))):
        found, expected = (transform(loss(a))(q, k, v) for a in (tk.sdpa, scaled_dot_product_attention))
        torch.testing.assert_close(found, expected)
    per_sample = torch.vmap(torch.func.grad(loss(tk.sdpa), 1), in_dims=(0, None, 0))(q, k[0], v)
    torch.testing.assert_close(per_sample[1], torch.func.grad(loss(tk.sdpa), 1)(q[1], k[0], v[1]))


def test_a_gradient_of_a_gradient_is_refused_when_it_is_asked_for() -> None:
    q, k, v = (x[0].requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(tk.sdpa(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no gradient of its gradient"):
        grad.sum().backward()
    k, v = k.detach(), v.detach()
    loss = lambda q: tk.sdpa(q, k, v).sum()  # noqa: E731
    for twice in (torch.func.hessian(loss), torch.func.jacrev(torch.func.jacrev(loss))):
        with pytest.raises(NotImplementedError, match=r"no gradient of its gradient|forward-mode"):
            twice(q.detach())
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(torch.func.grad(loss), (q.detach(),), (q.detach(),))
