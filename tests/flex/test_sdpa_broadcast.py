"""tk.sdpa broadcasts batches and heads as torch's does, with the gradients of what is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import tk
from tk.flex import api, autograd, ops
from tk.ops import flex

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "query's batch": ((1, 4, 9, 8), (3, 4, 11, 8), (3, 4, 11, 8)),
    "key's and value's": ((3, 4, 9, 8), (1, 4, 11, 8), (1, 4, 11, 8)),
    "value's batch": ((3, 4, 9, 8), (3, 4, 11, 8), (1, 4, 11, 8)),
    "key's batch": ((3, 4, 9, 8), (1, 4, 11, 8), (3, 4, 11, 8)),
    "one key head": ((3, 4, 9, 8), (3, 1, 11, 8), (3, 1, 11, 8)),
    "one head of values": ((3, 4, 9, 8), (3, 4, 11, 8), (3, 1, 11, 6)),
    "one query head": ((3, 1, 9, 8), (3, 4, 11, 8), (3, 4, 11, 8)),
    "an outer batch of the query": ((2, 3, 4, 9, 8), (3, 4, 11, 8), (3, 4, 11, 8)),
    "an outer batch of keys": ((3, 4, 9, 8), (2, 3, 4, 11, 8), (3, 4, 11, 8)),
    "a batch of the query alone": ((3, 4, 9, 8), (4, 11, 8), (4, 11, 8)),
    "no heads": ((9, 8), (11, 8), (11, 8)),
    "no batch": ((4, 9, 8), (4, 11, 8), (4, 11, 8)),
    "two batches": ((2, 1, 4, 9, 8), (1, 3, 4, 11, 8), (2, 3, 1, 11, 8)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(shapes: Any, is_causal: bool) -> None:
    given = [torch.randn(s, requires_grad=True) for s in shapes]
    found = tk.sdpa(*given, is_causal=is_causal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*given, is_causal=is_causal)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(x.square().sum(), given) for x in (found, expected)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("of_query", [(1, 4, 9, 8), (2, 3, 4, 9, 8)])
def test_groups(of_query: Any) -> None:
    q, k, v = (torch.randn(s) for s in (of_query, (3, 2, 11, 8), (3, 2, 11, 8)))
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(2, -3), v.repeat_interleave(2, -3))
    torch.testing.assert_close(tk.sdpa(q, k, v, enable_gqa=True), expected)


@pytest.mark.parametrize("heads", [4, 2])
def test_operands_of_equal_batches_and_heads_are_handed_on_as_they_are(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To broadcast them would take most of a call's time on the host."""
    seen: list[flex.Request] = []

    def attend(request: flex.Request) -> Any:
        seen.append(request)
        return ops.forward_on_cpu(request)

    monkeypatch.setattr(autograd, "attend", attend)
    given = [torch.randn(s) for s in ((3, 4, 9, 8), (3, heads, 11, 8), (3, heads, 11, 8))]
    expected = F.scaled_dot_product_attention(*given, enable_gqa=heads < 4)
    torch.testing.assert_close(tk.sdpa(*given, enable_gqa=heads < 4), expected)
    assert all(x is y for x, y in zip(seen[0].operands, given, strict=True))


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "batch": (dict(shapes=((2, 4, 9, 8), (3, 4, 11, 8), (3, 4, 11, 8))), ValueError, "must broadcast"),
    "heads": (dict(shapes=((3, 4, 9, 8), (3, 2, 11, 8), (3, 2, 11, 8))), ValueError, "enable_gqa=True"),
    "head size": (dict(shapes=((3, 4, 9, 8), (3, 4, 11, 7), (3, 4, 11, 8))), ValueError, "head sizes"),
    "one dimension": (dict(shapes=((3, 4, 9, 8), (8,), (8,))), ValueError, "key is"),
    "mask": (dict(attn_mask=torch.ones(9, 11, dtype=torch.int64)), TypeError, "attn_mask is torch.int64"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_messages_name_tk_sdpa(case: Any) -> None:
    given, kind, message = case
    shapes = given.get("shapes", ((3, 4, 9, 8), (3, 4, 11, 8), (3, 4, 11, 8)))
    with pytest.raises(kind, match=f"tk.sdpa: .*{message}"):
        tk.sdpa(*(torch.randn(s) for s in shapes), attn_mask=given.get("attn_mask"))


NO_VALUES: dict[str, tuple[tuple[int, ...], ...]] = {
    "values of no batch": ((1, 2, 9, 8), (1, 2, 11, 8), (0, 2, 11, 8)),
    "keys and values of no batch": ((1, 2, 9, 8), (0, 2, 11, 8), (0, 2, 11, 4)),
    "values of no heads": ((3, 2, 9, 8), (3, 2, 11, 8), (3, 0, 11, 8)),
    "no keys": ((3, 1, 9, 8), (3, 2, 0, 8), (3, 2, 0, 8)),
    "values of size 0": ((9, 8), (11, 8), (11, 0)),
    "outer batches of values": ((2, 9, 8), (2, 11, 8), (0, 2, 11, 8)),
    "batches that do not broadcast": ((3, 2, 9, 8), (2, 2, 11, 8), (0, 2, 11, 8)),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shapes", NO_VALUES.values(), ids=NO_VALUES)
def test_values_without_elements(shapes: Any, device: str) -> None:
    given = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    found, expected = tk.sdpa(*given), F.scaled_dot_product_attention(*given)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    gradients = torch.autograd.grad(found.sum(), given)
    assert [x.shape for x in gradients] == [x.shape for x in given]
    if device == "cpu":
        assert not any(x.any() for x in (found, *gradients))


@pytest.mark.skipif(api._MULTIPLIES, reason="this torch multiplies on CUDA")
@pytest.mark.parametrize("shapes", NO_VALUES.values(), ids=NO_VALUES)
def test_values_without_elements_on_cuda(shapes: Any) -> None:
    with FakeTensorMode():
        given = [torch.empty(s, device="cuda") for s in shapes]
        assert tk.sdpa(*given).shape == F.scaled_dot_product_attention(*given).shape


def test_values_of_no_batch_where_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch 2.11 broadcasts them, as its CPU kernel does not."""
    monkeypatch.setattr(api, "_MULTIPLIES", True)
    with FakeTensorMode():
        query, key, value = (torch.empty(n, 2, m, 8, device="cuda") for n, m in ((1, 9), (1, 11), (0, 11)))
        assert tk.sdpa(query, key, value).shape == (0, 2, 9, 8)
        with pytest.raises(ValueError, match="batches and heads must broadcast"):
            tk.sdpa(query.expand(3, -1, -1, -1), key, value)


def test_values_of_no_columns_where_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch 2.11 refuses sizes that do not go together; its CPU kernel does not look."""
    monkeypatch.setattr(api, "_MULTIPLIES", True)
    Q, K, V = (1, 2, 9, 8), (3, 2, 11, 8), (3, 2, 11, 0)

    def shape_of(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **given: Any) -> list[int]:
        return list(tk.sdpa(*(torch.empty(s, device="cuda") for s in (q, k, v)), **given).shape)

    with FakeTensorMode():
        assert shape_of(Q, K, V) == [3, 2, 9, 0]
        assert shape_of(Q[2:], K[2:], V[2:]) == [9, 0]
        assert shape_of(Q, (3, 1, 11, 8), (3, 1, 11, 0), enable_gqa=True) == [3, 2, 9, 0]
        for shapes, message in (
            ((Q, (3, 2, 5, 8), V), "value has 11 rows, must have 5"),
            (((1, 2, 9, 4), K, V), r"head sizes of query \(4\) and key \(8\)"),
            ((Q, (2, 2, 11, 8), V), "batches and heads must broadcast"),
            ((Q, K[3:], V), r"key is \[8\], must be"),
        ):
            with pytest.raises(ValueError, match=message):
                shape_of(*shapes)
        with pytest.raises(ValueError, match="query has 2 heads, key 3 and value 3"):
            shape_of(Q, (3, 3, 11, 8), (3, 3, 11, 0), enable_gqa=True)


@pytest.mark.parametrize("dims", [(2, 2, 2), (2, 3, 3), (3, 2, 3), (3, 3, 2)])
def test_groups_of_heads_need_heads(dims: tuple[int, ...]) -> None:
    operands = [torch.randn([2, 4, 8][-d:]) for d in dims]
    with pytest.raises(IndexError):
        F.scaled_dot_product_attention(*operands, enable_gqa=True)
    with pytest.raises(ValueError, match=r"is \[4, 8\], must be \[\.\.\., H, length, D\]"):
        tk.sdpa(*operands, enable_gqa=True)
