"""What is refused says what was given, what is accepted, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tk
from tk.flex import kernel_options, mods


def tensors(**changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: torch.randn(2, 4, 32, 8) for name in ("query", "key", "value")}
    return found | changed


def mask(M: int = 32, N: int = 32, B: int = 1, H: int = 1) -> Any:
    return tk.flex.create_block_mask(mods.causal, B, H, M, N, "cpu", 16)


def sized(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*shape, **kwargs)


INT = {"dtype": torch.int32}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": (dict(key=3), TypeError, "key must be a Tensor, is int"),
    "dimensions": (dict(query=sized(4, 32, 8)), ValueError, r"query is \[4, 32, 8\], must have 4 dimensions"),
    "dtype": (dict(key=sized(2, 4, 32, 8).half()), ValueError, "key is torch.float16, must be torch.float32"),
    "device": (dict(key=sized(2, 4, 32, 8, device="meta")), ValueError, "key is on meta, query on cpu"),
    "head size": (dict(key=sized(2, 4, 32, 16)), ValueError, r"head sizes of query \(8\) and key \(16\)"),
    "length of value": (dict(value=sized(2, 4, 31, 8)), ValueError, r"value is .* must be \[2, 4, 32\]"),
    "heads": (dict(key=sized(2, 2, 32, 8), value=sized(2, 2, 32, 8)), ValueError, "give enable_gqa=True"),
    "groups": (
        dict(key=sized(2, 3, 32, 8), value=sized(2, 3, 32, 8), enable_gqa=True), ValueError,
        r"query has 4 heads and key 3; query's must be as many, or with enable_gqa=True a multiple of key's",
    ),
    "batch": (dict(key=sized(3, 4, 32, 8), value=sized(3, 4, 32, 8)), ValueError, "batch size of key is 3, must be 2"),
    "integers": (
        {n: sized(2, 4, 32, 8, **INT) for n in ("query", "key", "value")}, tk.UnsupportedError, "query is torch.int32",
    ),
    "mask for other lengths": (
        dict(block_mask=mask(64, 64)), ValueError,
        r"block_mask is for 64 queries and 64 keys, the call has 32 and 32; .*adjust\(32, 32\)",
    ),
    "mask shorter than the keys": (dict(block_mask=mask(32, 16)), ValueError, "for 32 queries and 16 keys"),
    "mask of another batch": (dict(block_mask=mask(B=3)), ValueError, r"must be \[1 or 2, 1 or 4, 2\]"),
    "mask of other heads": (dict(block_mask=mask(H=2)), ValueError, r"must be \[1 or 2, 1 or 4, 2\]"),
    "mask elsewhere": (dict(block_mask=mask().to("meta")), ValueError, "block_mask is on meta, query on cpu"),
    "mask that is none": (dict(block_mask=mods.causal), TypeError, "block_mask must be a BlockMask, is function"),
    "tensor as mask": (dict(block_mask=sized(32, 32)), TypeError, "must be a BlockMask, is Tensor"),
    "options": (dict(kernel_options={"BLOCK_Q": 3}), ValueError, "kernel_options 'BLOCK_Q'"),
    "sinks": (dict(sinks=sized(3)), ValueError, r"sinks is \[3\], must be \[4\]"),
    "integer sinks": (dict(sinks=sized(4, **INT)), TypeError, "sinks is torch.int32, must be floating-point"),
    "lengths": (dict(kv_lengths=sized(3, **INT)), ValueError, r"kv_lengths is \[3\], must be \[2\]"),
    "long lengths": (dict(kv_lengths=sized(2, dtype=torch.int64)), TypeError, "torch.int64, must be int32"),
    "lengths past the end": (
        dict(kv_lengths=torch.tensor([3, 33], **INT)), ValueError, "from 3 to 33, must be from 0 to 32",
    ),
    "negative lengths": (dict(kv_lengths=torch.tensor([-1, 3], **INT)), ValueError, "from -1 to 3"),
    "pages": (dict(page_table=sized(3, 2, **INT)), ValueError, r"page_table is \[3, 2\], must be \[2, pages\]"),
    "score of integers": (dict(score_mod=lambda s, b, h, q, kv: q - kv), TypeError, "must be floating-point"),
    "capture elsewhere": (
        dict(score_mod=mods.per_head_bias(sized(4, device="meta"))), ValueError,
        "bias, which the score_mod captures, is on meta, query on cpu; move it",
    ),
    "capture too short": (
        dict(score_mod=mods.per_head_bias(sized(3))), IndexError, "reads index 3 of a captured tensor of 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        tk.flex_attention(**tensors(**arguments))


def test_both_ways_to_ask_for_lse() -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = tk.flex_attention(**tensors(), return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == (2, 4, 32) and out.shape == (2, 4, 32, 8)
    with pytest.raises(ValueError, match="not both"):
        tk.flex_attention(**tensors(), return_aux=AuxRequest(lse=True), return_lse=True)


MODS = {
    "prefix": (lambda: mods.prefix_lm(torch.zeros(2)), TypeError, "length is torch.float32, must be of integers"),
    "ids": (lambda: mods.document(torch.zeros(2, 2, 2).int()), ValueError, "ids has 3 dimensions, must have 1 or 2"),
    "natten": (lambda: mods.natten_2d(3, 9, 5), ValueError, "kernel is 5, must fit into 3 x 9"),
    "window": (lambda: mods.sliding_window(0), ValueError, "size is 0, must be more than 0"),
    "cap": (lambda: mods.soft_cap(-1.0), ValueError, "cap is -1.0"),
    "table": (lambda: mods.relative_bias(torch.zeros(4, 5), 3), ValueError, r"must be \[H, 7\]"),
    "combination": (lambda: mods.and_masks(mods.causal, 3), TypeError, "3 is no mask_mod"),
    "combination of a score_mod": (
        lambda: mods.or_masks(mods.causal, mods.soft_cap(2.0)),
        TypeError,
        r"tk.flex.or_masks: mask_mod soft_cap_2 .* must take \(b, h, q_idx, kv_idx\); it takes \(score, b, h, ",
    ),
    "slopes": (lambda: mods.alibi(torch.zeros(4).int()), TypeError, "must be floating-point"),
}


@pytest.mark.parametrize("name", MODS)
def test_mods_of_the_library_check(name: str) -> None:
    make, error, message = MODS[name]
    with pytest.raises(error, match=message):
        make()


ACCEPTED = [
    {}, {"PRESCALE_QK": True}, {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": False}, {"fwd_USE_TMA": True},
    {"bwd_WRITE_DQ": False}, {"BACKEND": "AUTO"}, {"BACKEND": "TRITON"}, {"FORCE_USE_FLEX_ATTENTION": False},
    {"BLOCK_M": 192, "BLOCK_N": 32}, {"fwd_BLOCK_M": 128, "fwd_num_warps": 4, "fwd_num_stages": 3},
]  # fmt: skip
REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"BLOCK_M1": 64}, tk.UnsupportedError, "'BLOCK_M1' is 64: of the forward pass alone"),
    ({"bwd_BLOCK_N": 64}, tk.UnsupportedError, "'bwd_BLOCK_N' is 64: of the forward pass alone"),
    ({"fwd_BLOCK_N2": 64}, tk.UnsupportedError, "fwd_BLOCK_N2"),
    ({"BLOCK_M": -64}, ValueError, "must be a multiple of 16"),
    ({"BLOCK_N": 63}, ValueError, "must be a multiple of 16"),
    ({"bwd_BLOCK_M1": "64"}, TypeError, "must be an integer"),
    ({"num_warps": 4}, tk.UnsupportedError, "num_warps"),
    ({"num_warps": -4}, ValueError, "power of two"),
    ({"num_stages": 3}, tk.UnsupportedError, "found by BLOCK_M, BLOCK_N, fwd_num_warps and fwd_num_stages"),
    ({"num_stages": 0}, ValueError, "1 or more"),
    ({"PRESCALE_QK": "yes"}, TypeError, "True or False"),
    ({"FORCE_USE_FLEX_ATTENTION": True}, tk.UnsupportedError, "leave it out"),
    ({"BACKEND": "FLASH"}, tk.UnsupportedError, "takes 'AUTO' and 'TRITON'"),
    ({"BACKEND": "cudnn"}, ValueError, "must be one of AUTO"),
    ({"kpack": 2}, tk.UnsupportedError, "AMD"),
    ({"OUTPUT_LOGSUMEXP": True}, ValueError, "return_lse"),
    ({"BLOCKS": 64}, ValueError, "torch has BACKEND"),
    ({3: 64}, ValueError, "no kernel_options 3"),
    ([("BLOCK_M", 64)], TypeError, "must be a dict"),
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_options_that_say_what_is_allowed(options: dict[str, Any]) -> None:
    q = torch.randn(1, 1, 4, 8)
    assert torch.equal(tk.flex_attention(q, q, q, kernel_options=options), tk.flex_attention(q, q, q))


@pytest.mark.parametrize("options, kind, message", REFUSED)
def test_options_that_are_refused(options: Any, kind: type[Exception], message: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(kind, match=message):
        tk.flex_attention(q, q, q, kernel_options=options)


def test_what_is_asked_of_a_config() -> None:
    asked = kernel_options.check({"BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2, "PRESCALE_QK": True})
    assert asked == "BLOCK_M=64 BLOCK_N=32 num_stages=2" and kernel_options.check({"USE_TMA": True}) == ""
    assert kernel_options.has("64x32_s2_w4", asked) and kernel_options.has("hopper_64x32_s2", asked)
    assert kernel_options.has("decode_64x32_s2_w4_p3_dependent", asked + " num_warps=4")
    for other in ("164x32_s2_w4", "64x132_s2_w4", "64x32_s3_w4", "32x64_s2_w4", "hopper_64x32_s22"):
        assert not kernel_options.has(other, asked)
    assert not kernel_options.has("hopper_64x32_s2", "num_warps=4")


def test_tiles_under_torch_compile() -> None:
    """They go with the call into the graph; on the CPU there is nothing to choose."""
    q = torch.randn(1, 1, 16, 8, requires_grad=True)
    options = {"BLOCK_M": 16, "BLOCK_N": 16}
    torch._dynamo.reset()
    run = torch.compile(
        lambda q: tk.flex_attention(q, q, q, kernel_options=options), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(run(q), tk.flex_attention(q, q, q))
    (expected,) = torch.autograd.grad(tk.flex_attention(q, q, q).sum(), q)
    torch.testing.assert_close(torch.autograd.grad(run(q).sum(), q)[0], expected)
    out, _ = torch.vmap(lambda q: tk.flex_attention(q, q, q, kernel_options=options, return_lse=True))(
        torch.stack((q, q))
    )
    torch.testing.assert_close(out[1], tk.flex_attention(q, q, q))


def test_a_mod_of_the_other_kind_is_told_where_it_goes():
    q = torch.ones(1, 2, 16, 16)
    takes = r"score_mod causal \(.*\) must take \(score, b, h, q_idx, kv_idx\); it takes \(b.*\)\. "
    with pytest.raises(TypeError, match=takes + r"A mask_mod does: .*block_mask=tk.flex.create_block_mask.mask_mod, "):
        tk.flex_attention(q, q, q, score_mod=tk.flex.mods.causal)
    alibi = tk.flex.mods.alibi(torch.ones(2))
    takes = r"mask_mod alibi \(.*\) must take \(b, h, q_idx, kv_idx\); it takes \(score.*\)\. "
    with pytest.raises(TypeError, match=takes + r"A score_mod does: .*score_mod=score_mod\)"):
        tk.flex.create_block_mask(alibi, 1, 2, 16, 16, device="cpu")


def test_a_mod_of_neither_kind_is_told_what_it_takes():
    q = torch.ones(1, 2, 16, 16)
    with pytest.raises(TypeError, match=r"must take \(score, b, h, q_idx, kv_idx\); it takes \(a, b\)$"):
        tk.flex_attention(q, q, q, score_mod=lambda a, b: a)
