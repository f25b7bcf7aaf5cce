"""The stand-ins: torch's results and torch's errors, through tk where it takes the arguments."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close
from torch_samples import op_db
from use_models import calls

import tk
from tk.dropin.functions import REPLACEMENTS, stand_ins
from tk.dropin.replacement import Replacement
from tk.dropin.target import Target

TARGET = Target("cpu", "cpu", True)
STAND_INS = stand_ins(TARGET)


def stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    return STAND_INS[original].function


# The share of torch's samples that goes through tk is at least this.
SHARES = {
    "linear": 0.9,
    "mm": 0.9,
    "addmm": 0.6,
    "bmm": 0.9,
    "matmul": 0.2,
    "conv1d": 0.9,
    "conv2d": 0.9,
    "conv3d": 0.9,
    "layer_norm": 0.9,
    "rms_norm": 0.9,
    "group_norm": 0.9,
    "gelu": 0.6,
    "silu": 0.2,
    "softmax": 0.5,
    "log_softmax": 0.5,
    "embedding": 0.3,
    "sdpa": 0.3,
}
SAMPLED = {r.op: r.originals[-1] for r in REPLACEMENTS if r.originals and r.op != "flex_attention"}


def test_every_function_is_tried() -> None:
    assert SAMPLED.keys() == SHARES.keys()


def samples(original: str, dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    name = original.removeprefix("torch.")
    info = next(o for o in op_db if o.name == name and not o.variant_test_name)
    for s in info.sample_inputs("cpu", dtype, requires_grad=False):
        args = (s.input, *s.args)
        yield args[::-1] if name == "nn.functional.embedding" else args, s.kwargs  # samples have the table first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", SAMPLED)
@pytest.mark.filterwarnings("ignore:.*")
def test_torchs_samples(op: str, dtype: torch.dtype) -> None:
    original = pkgutil.resolve_name(SAMPLED[op])
    ours = stand_in(original)
    through_tk = total = 0
    for args, kwargs in samples(SAMPLED[op], dtype):
        if kwargs.get("dropout_p"):
            continue  # drawn anew
        found, expected = ours(*args, **kwargs), original(*args, **kwargs)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        narrow = found.dtype is torch.bfloat16 or dtype is torch.bfloat16
        assert_close(found, expected, rtol=0.03 if narrow else 2e-5, atol=0.03 if narrow else 2e-5, equal_nan=True)
        through_tk += bool(calls(ours, *args, **kwargs))
        total += 1
    assert total
    assert through_tk == 0 if dtype is torch.float64 else through_tk >= SHARES[op] * total, (through_tk, total)


@pytest.mark.parametrize("op", SAMPLED)
@pytest.mark.filterwarnings("ignore:.*")
def test_torchs_errors(op: str) -> None:
    """Word by word: what tk refuses goes to torch."""
    original = pkgutil.resolve_name(SAMPLED[op])
    ours = stand_in(original)
    tried = 0
    for args, kwargs in samples(SAMPLED[op], torch.float32):
        if kwargs.get("dropout_p"):
            continue
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dim()]
        for i in tensors:
            for wrong in (args[i][..., :-1], args[i].half(), args[i][None, None, None], args[i].to("meta"), None, "x"):
                changed = (*args[:i], wrong, *args[i + 1 :])
                try:
                    expected = original(*changed, **kwargs)
                except Exception as error:
                    with pytest.raises(type(error)) as found:
                        ours(*changed, **kwargs)
                    assert str(found.value) == str(error)
                    tried += 1
                else:
                    result = ours(*changed, **kwargs)
                    assert result.shape == expected.shape and result.dtype == expected.dtype
        if tried > 60:
            break
    assert tried


def test_what_stays_torchs() -> None:
    x, table = torch.randn(4, 8), torch.randn(10, 8)
    rows = torch.tensor([1, 2])
    q = torch.randn(1, 2, 16, 8)
    mask = torch.zeros(16, 16, requires_grad=True)
    out = torch.empty(4, 4)
    for original, args, kwargs in [
        (F.silu, (x.clone(),), dict(inplace=True)),
        (F.softmax, (x,), dict(dim=-1, dtype=torch.float64)),
        (F.embedding, (rows, table), dict(max_norm=0.1)),
        (F.embedding, (rows, table), dict(sparse=True)),
        (F.scaled_dot_product_attention, (q, q, q), dict(dropout_p=0.5)),
        (F.scaled_dot_product_attention, (q, q, q, mask), {}),
        (torch.mm, (x, x.T), dict(out=out)),
        (torch.matmul, (x, x[0]), {}),
        (torch.matmul, (q, x.T), {}),
        (F.linear, (x.to_sparse(), table), {}),
        (F.linear, (x, table.to_sparse()), {}),
        (F.gelu, (torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),), {}),
        (F.gelu, (x.double(),), {}),
    ]:  # fmt: skip
        assert calls(stand_in(original), *args, **kwargs) == {}, (original, kwargs)
        torch.manual_seed(0)
        expected = original(*args, **kwargs)
        torch.manual_seed(0)
        found = stand_in(original)(*args, **kwargs)
        if not found.is_nested:
            assert torch.equal(found, expected)


def test_results_lie_in_memory_as_torchs() -> None:
    """Or the call is torch's: a model may look at the result by .view."""
    x = torch.randn(2, 3, 16, 8)
    permuted = x.permute(0, 2, 1, 3)
    for fn in (F.softmax, F.log_softmax):
        for given, dim in ((x, 1), (x, 0), (permuted, -1), (permuted, 2)):
            assert calls(stand_in(fn), given, dim) == {}
        in_order = x, x.mT, x[:, :2], x[..., 1:5], x[:, 0], x[:, :1].permute(0, 2, 1, 3), x[:1].expand(4, -1, -1, -1)
        for given in in_order:
            assert calls(stand_in(fn), given, -1) == {fn.__name__: 1}
    for fn in (F.layer_norm, F.rms_norm):
        assert calls(stand_in(fn), permuted, (8,)) == {}
        assert calls(stand_in(fn), x.permute(0, 2, 3, 1), (3,)) == {fn.__name__: 1}, "images, pixel by pixel"


def test_arguments_by_name() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    assert calls(stand_in(F.linear), input=x, weight=w, bias=None) == {"linear": 1}
    assert calls(stand_in(F.softmax), input=x, dim=1, _stacklevel=5, dtype=torch.bfloat16) == {"softmax": 1}
    assert calls(stand_in(F.layer_norm), x, normalized_shape=[8], eps=1e-3) == {"layer_norm": 1}
    assert calls(stand_in(F.conv1d), input=x[None], weight=torch.randn(4, 4, 3), padding="same") == {"conv1d": 1}


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention(mask: str | None, heads: int) -> None:
    q = torch.randn(2, 4, 12, 16, requires_grad=True)
    k, v = torch.randn(2, 2, heads, 20, 16).unbind()
    table = {None: None, "bool": torch.rand(12, 20) > 0.3, "float": torch.randn(2, 1, 12, 20)}[mask]
    kwargs = dict(attn_mask=table, scale=0.3, enable_gqa=heads != 4)
    ours = stand_in(F.scaled_dot_product_attention)
    assert calls(ours, q, k, v, **kwargs) == {"flex_attention": 1}
    found, expected = ours(q, k, v, **kwargs), F.scaled_dot_product_attention(q, k, v, **kwargs)
    assert_close(found, expected)
    weights = torch.randn_like(found)
    (one,), (other,) = (torch.autograd.grad((o * weights).sum(), q) for o in (found, expected))
    assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_flex_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 32, 16).unbind()
    ours = stand_ins(TARGET)[flex_attention].function
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - i)

    assert calls(ours, q, k, v, mod, block_mask=block_mask) == {"flex_attention": 1}
    assert_close(ours(q, k, v, mod, block_mask=block_mask), flex_attention(q, k, v, mod, block_mask=block_mask))


def test_autocast_casts_as_torchs() -> None:
    x, w, b = torch.randn(4, 8), torch.randn(3, 8), torch.randn(3)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((x, w, b), (x.bfloat16(), w, b), (x, w, None)):
            assert calls(stand_in(F.linear), *given) == {"linear": 1}
            found, expected = stand_in(F.linear)(*given), F.linear(*given)
            assert found.dtype is expected.dtype is torch.bfloat16
            assert_close(found, expected, rtol=0.02, atol=0.02)


def test_of_the_device_alone() -> None:
    """A model on the CPU does not run through tk elsewhere, where other rules hold."""
    ours = stand_ins(Target("cuda", "sm_90", True))[F.linear].function
    assert calls(ours, torch.randn(4, 8), torch.randn(3, 8)) == {}


# --- What a pack is asked for ---

EXAMPLES: dict[str, nn.Module] = {
    "linear": nn.Linear(8, 4),
    "conv1d": nn.Conv1d(4, 6, 3, dilation=2),
    "conv2d": nn.Conv2d(4, 6, (3, 1), stride=2, groups=2),
    "conv3d": nn.Conv3d(2, 3, 2, padding=1),
    "layer_norm": nn.LayerNorm((4, 8)),
    "rms_norm": nn.RMSNorm(8),
    "gelu": nn.Linear(8, 4),
    "silu": nn.Linear(8, 4),
    "embedding": nn.Embedding(10, 8),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS, ids=lambda r: r.op)
def test_examples_are_calls(replacement: Replacement) -> None:
    """Of the function of tk, which a used model would make."""
    op = replacement.op
    example = replacement.example(EXAMPLES.get(op, nn.ReLU()), torch.float32)
    assert (example is None) == (op not in EXAMPLES)
    if example is not None:
        assert calls(getattr(tk, op), *example) == {op: 1}
