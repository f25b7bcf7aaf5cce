"""Attention's plain kernels against float64: every variant of a pair's ops, over mods, masks, lengths and layouts.

fp32 and fp16 only: the interpreter's bf16 `tl.dot` is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tk.aot.spec import Family
from tk.flex.codegen import family
from tk.flex.tracing import trace
from tk.kernels.attention import decode
from tk.kernels.attention.problem import MAX_LENGTH

from . import attention_host
from .attention_host import Call, block_lists, reference, run_all

WANTED = family.Wanted(("fp16", "fp32"), ((64, 64),), ((64, 64),), paged=True)
TOLERANCE = {torch.float16: 3e-3, torch.float32: 2e-5}


@dataclass
class Pair:
    """Mods as a user writes them, and the captured values in the order of the op."""

    score: Any = None
    mask: Any = None
    families: list[Family] = field(init=False)
    captured: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        pair = trace.pair(self.score, self.mask)
        self.families = _families(pair)
        self.captured = {f"c{i}": value for i, value in enumerate(pair.values)}

    def dense(self, B: int, H: int, M: int, N: int) -> torch.Tensor:
        if self.mask is None:
            return torch.ones(1, 1, M, N, dtype=torch.bool)
        at = (torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate((B, H, M, N)))
        keep = self.mask(*at)
        return keep.expand(*(keep.shape[:2]), M, N)


_known: dict[str, list[Family]] = {}


def _families(pair: trace.Pair) -> list[Family]:
    if pair.fingerprint not in _known:
        _known[pair.fingerprint] = family.families(pair.traced, WANTED)
    return _known[pair.fingerprint]


# --- Mods ---


def causal(b, h, q, kv):
    return q >= kv


def window(size: int) -> Any:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < size)


def document(ids: torch.Tensor) -> Any:
    return lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (q >= kv)


def heads_differ(b, h, q, kv):
    return (q + kv) % (h + 2) == 0


def alibi(slopes: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def soft_cap(cap: float) -> Any:
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def relative(table: torch.Tensor, furthest: int) -> Any:
    return lambda score, b, h, q, kv: score + table[h, (kv - q).clamp(-furthest, furthest) + furthest]


def learned(table: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + table[h, q, kv]


def within(table: torch.Tensor) -> Any:
    """By the table's own sizes."""

    def score_mod(score, b, h, q, kv):
        last = table.shape[1] - 1
        return score + table[h, (q - kv + last // 2).clamp(0, last)] * (1 / table.shape[0])

    return score_mod


# --- Running ---


def qkv(B: int, H: int, H_kv: int, M: int, N: int, D: int, DV: int, dtype: torch.dtype, B_kv: int | None = None) -> Any:
    B_kv = B if B_kv is None else B_kv
    return (torch.randn(B, H, M, D).to(dtype), torch.randn(B_kv, H_kv, N, D).to(dtype),
            torch.randn(B_kv, H_kv, N, DV).to(dtype))  # fmt: skip


def check(pair: Pair, call: Call, at_least: int = 1, names: str = "") -> None:
    call.captured = pair.captured
    expected, expected_lse = reference(call, pair.score, pair.mask)
    op = pair.families[0].op
    count = 0
    for name, (out, lse) in run_all(pair.families[0], call.tensors(), call.ints(op), call.floats(op),
                                    lambda v: names in v.name):  # fmt: skip
        tolerance = TOLERANCE[out.dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance, msg=lambda m: f"{name}: {m}")  # noqa: B023
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        count += 1
    assert count >= at_least


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


SHAPES = {  # B, H, H_kv, M, N, D, DV
    "square": (2, 2, 2, 70, 70, 64, 64),
    "grouped": (1, 4, 2, 33, 65, 64, 64),
    "odd_heads": (1, 1, 1, 17, 90, 40, 24),
    "one": (1, 2, 1, 1, 1, 64, 64),
    "few_keys": (1, 1, 1, 80, 3, 32, 64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_no_mods(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(Pair(), Call(*qkv(*shape, dtype)), 1)


@pytest.mark.drawn
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("how", ["dense", "band", "lists", "small_blocks"])
def test_causal(shape: tuple[int, ...], how: str) -> None:
    pair = Pair(mask=causal)
    B, H, _, M, N = shape[:5]
    call = Call(*qkv(*shape, torch.float16))
    if how == "band":
        call.band = (MAX_LENGTH, 0, 1)
    elif how != "dense":
        call.q_block, call.kv_block = (128, 64) if how == "lists" else (24, 20)
        call.lists = block_lists(pair.dense(B, H, M, N), call.q_block, call.kv_block)
    check(pair, call)


MASKS = {
    "window": window(9),
    "document": document(torch.tensor([[0] * 20 + [1] * 30 + [2] * 50, [3] * 70 + [4] * 30])),
    "document_of_32_bits": document(torch.tensor([[0] * 20 + [-1] * 30 + [2] * 50, [3] * 70 + [-4] * 30]).int()),
    "document_past_32_bits": document(torch.tensor([[5] * 20 + [5 + 2**32] * 80, [-1] * 70 + [2**32 - 1] * 30])),
    "heads_differ": heads_differ,
    "nothing": lambda b, h, q, kv: (q < 20) & (kv < 30),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lists", [False, True])
def test_masks(mask: Any, lists: bool) -> None:
    pair = Pair(mask=mask)
    call = Call(*qkv(2, 2, 1, 70, 100, 64, 64, torch.float32))
    if lists:
        call.q_block, call.kv_block = 32, 16
        call.lists = block_lists(pair.dense(2, 2, 70, 100), 32, 16)
    check(pair, call)


SCORES = {
    "alibi": alibi(torch.tensor([0.5, 0.25, 0.1, 0.05])),
    "soft_cap": soft_cap(3.0),
    "relative": relative(torch.randn(4, 9), 4),
    "learned": learned(torch.randn(4, 50, 70).half()),
    "within": within(torch.randn(4, 9)),
    "transposed_table": learned(torch.randn(50, 70, 4).permute(2, 0, 1)),
    "constant": lambda score, b, h, q, kv: -score.abs() + 1,
    "no_score": lambda score, b, h, q, kv: (q * 0.1).float(),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("mask", [None, causal])
def test_scores(score: Any, mask: Any) -> None:
    check(Pair(score, mask), Call(*qkv(1, 4, 2, 50, 70, 64, 64, torch.float32)))


def test_a_table_shorter_than_the_sequence_is_read_within_its_bounds() -> None:
    """Where the mask hides what lies outside."""
    table = torch.randn(2, 20, 30)
    pair = Pair(learned(table), lambda b, h, q, kv: (q < 20) & (kv < 30))
    call = Call(*qkv(1, 2, 2, 40, 50, 64, 64, torch.float32))
    padded = torch.zeros(2, 40, 50)
    padded[:, :20, :30] = table
    call.captured = pair.captured
    expected, _ = reference(call, learned(padded), pair.mask)
    op = pair.families[0].op
    for name, (out, _) in run_all(pair.families[0], call.tensors(), call.ints(op), call.floats(op)):
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5, msg=name)


def test_layouts() -> None:
    """Strides of every kind, and K and V of one batch entry for all."""
    q, k, v = (torch.randn(2, 40, 3, 64).transpose(1, 2).half() for _ in range(3))
    check(Pair(mask=causal), Call(q, k, v), 2)
    q, k, v = (torch.randn(2, 3, 64, 40).transpose(2, 3).half() for _ in range(3))
    check(Pair(mask=causal), Call(q, k, v), 1, "strided")
    check(Pair(), Call(*qkv(3, 2, 2, 20, 50, 64, 64, torch.float16, B_kv=1)))
    k = torch.randn(1, 2, 1, 64).half().expand(1, 2, 40, 64)
    check(Pair(), Call(torch.randn(1, 2, 9, 64).half(), k, k))


def test_lengths_pages_and_sinks() -> None:
    q = torch.randn(3, 4, 20, 64)
    lengths = torch.tensor([0, 7, 64], dtype=torch.int32)
    sinks = torch.tensor([1.0, -2.0, 0.0, float("-inf")])
    for mask in (None, causal):
        call = Call(*qkv(3, 4, 2, 20, 64, 64, 64, torch.float32), kv_lengths=lengths, sinks=sinks)
        check(Pair(mask=mask), call)
        pages = torch.randperm(16)[:12].view(3, 4).int()
        for layout in ((0, 1, 2, 3), (0, 2, 1, 3)):  # pages with heads outside or inside of rows
            k, v = (torch.randn([(16, 2, 16, 64)[d] for d in layout]).permute(layout) for _ in range(2))
            check(Pair(mask=mask), Call(q, k, v, kv_lengths=lengths, page_table=pages, sinks=sinks))


DECODE = {  # B, H, H_kv, M, N, D, DV
    "one_row": (1, 8, 2, 1, 1000, 64, 64),
    "few_rows": (2, 6, 2, 3, 200, 64, 48),
    "many_heads": (1, 20, 1, 1, 300, 64, 64),
    "short": (2, 4, 2, 1, 5, 64, 64),
}


@pytest.mark.parametrize("shape", DECODE.values(), ids=DECODE)
@pytest.mark.parametrize("sinks", [False, True])
def test_decode(shape: tuple[int, ...], sinks: bool) -> None:
    """The rows of a group packed, parts of keys put together; some entries end before a part begins."""
    B, H, _, _, N = shape[:5]
    lengths = torch.tensor([N * 2 // 3, 0][:B], dtype=torch.int32)
    for pair in (Pair(), Pair(alibi(torch.rand(H)), lambda b, h, q, kv: (kv - q) % 3 != 1)):
        call = Call(*qkv(*shape, torch.float16), kv_lengths=lengths)
        call.sinks = torch.randn(H) if sinks else None
        check(pair, call, 1, "decode")


def test_largest_scores() -> None:
    """Behind the log-sum-exps of each head: without the sink, -inf for a row that sees nothing."""
    for rows in (1, 20):
        lengths = torch.tensor([0, 150], dtype=torch.int32)
        call = Call(*qkv(2, 4, 2, rows, 200, 64, 64, torch.float16), kv_lengths=lengths, max_scores=1)
        call.sinks = torch.tensor([50.0, 0.0, -1.0, float("-inf")])
        check(Pair(alibi(torch.rand(4))), call, 2 if rows == 1 else 1)


def test_decode_of_more_parts_than_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of keys for a whole GPU: as many parts as fill it."""
    monkeypatch.setitem(attention_host.SMALL_GPU, "sm_count", 132)
    call = Call(*qkv(1, 2, 1, 1, 2 * decode.CHUNK * 64 + 1000, 64, 64, torch.float16))
    call.sinks = torch.randn(2)
    call.kv_lengths = torch.tensor([2 * decode.CHUNK * 64 - 70], dtype=torch.int32)  # the last parts have nothing
    check(Pair(), call, 1, "decode")


def test_decode_with_lists_pages_and_a_band() -> None:
    pair = Pair(mask=window(40))
    q = torch.randn(2, 4, 2, 64)
    shifted = Pair(mask=lambda b, h, q, kv: kv % 100 < 30)
    keep = shifted.dense(2, 4, 2, 320)
    call = Call(*qkv(2, 4, 2, 2, 320, 64, 64, torch.float32), lists=block_lists(keep[:, :1], 64, 16), q_block=64,
                kv_block=16)  # fmt: skip
    check(shifted, call, 1, "decode")
    check(pair, Call(*qkv(2, 4, 2, 2, 320, 64, 64, torch.float32), band=(39, 0, 1)), 1, "decode")
    pages = torch.randperm(24)[:20].view(2, 10).int()
    k, v = (torch.randn(24, 32, 2, 64).transpose(1, 2) for _ in range(2))
    lengths = torch.tensor([317, 33], dtype=torch.int32)
    check(shifted, Call(q, k, v, kv_lengths=lengths, page_table=pages), 1, "decode")


def lists_that_decide(rows: int, columns: int, q_block: int, kv_block: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Block lists that say something else than any mask_mod: some blocks full, some partial, some neither. And the mask
    that they are with `causal`."""
    kinds = (torch.arange(-(-rows // q_block))[:, None] * 2 + torch.arange(-(-columns // kv_block))[None, :] * 4) % 3
    lists = {}
    for full, kind in (("", 1), ("full_", 2)):
        for side, chosen in (("kv", kinds == kind), ("q", (kinds == kind).T)):
            lists[f"{full}{side}_num_blocks"] = chosen.sum(-1).int()[None, None]
            lists[f"{full}{side}_indices"] = (~chosen).int().argsort(dim=-1, stable=True).int()[None, None]

    def mask(b, h, q, kv):
        kind = kinds[q // q_block, kv // kv_block]
        return (kind == 2) | ((kind == 1) & (q >= kv))

    return lists, mask


def test_what_the_mask_says_of_full_blocks_does_not_count() -> None:
    for rows, blocks in ((70, (32, 20)), (3, (8, 20))):  # the second by decoding, too
        call = Call(*qkv(1, 2, 1, rows, 90, 64, 64, torch.float32), q_block=blocks[0], kv_block=blocks[1])
        call.lists, mask = lists_that_decide(rows, 90, *blocks)
        expected, _ = reference(call, None, mask)
        pair = Pair(mask=causal)
        op, names = pair.families[0].op, []
        for name, (out, _) in run_all(pair.families[0], call.tensors(), call.ints(op), call.floats(op)):
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
            names.append(name)
        assert rows > 3 or any("decode" in name for name in names)


@pytest.mark.parametrize("score", [None, soft_cap(2.0), alibi(torch.tensor([0.5, 0.25]))])
def test_what_is_past_a_length_may_be_no_numbers(score: Any) -> None:
    """Of keys, values, and pages that the table names past the last one."""
    lengths = torch.tensor([0, 7, 64], dtype=torch.int32)
    for rows in (1, 20):
        call = Call(*qkv(3, 2, 1, rows, 64, 64, 64, torch.float32), kv_lengths=lengths)
        pages = torch.arange(12).view(3, 4).int()
        paged = [x.view(3, 1, 4, 16, 64).transpose(1, 2).flatten(0, 1).contiguous() for x in (call.key, call.value)]
        expected, _ = reference(call, score, None)
        for b, length in enumerate(lengths):
            call.key[b, :, length:] = float("nan")
            call.value[b, :, length:] = float("-inf")
            for i, x in enumerate(paged):
                for place in range(int(length), 64):
                    x[b * 4 + place // 16, :, place % 16] = float("nan") if i else float("inf")
            pages[b, -(-int(length) // 16) :] = 2**20
        pair = Pair(score)
        paged_call = Call(call.query, *paged, kv_lengths=lengths, page_table=pages)
        op, count = pair.families[0].op, 0
        for one in (call, paged_call):
            one.captured = pair.captured
            for name, (out, _) in run_all(pair.families[0], one.tensors(), one.ints(op), one.floats(op)):
                torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
                count += 1
        assert count >= (4 if rows == 1 else 2)


def test_wide_heads() -> None:
    """Past 256 there is one kernel, for every layout; beside it that of the largest up to 256."""
    traced = trace.pair(None, causal).traced
    (wide, _) = family.families(traced, family.Wanted(("fp16", "fp32"), (), ((64, 64), (512, 512)), paged=True))
    pair = Pair(mask=causal)
    pair.families = [wide]
    for D, DV in ((300, 300), (512, 40), (24, 257)):
        check(pair, Call(*qkv(1, 2, 1, 9, 20, D, DV, torch.float32)), 1, "to_512x512")
    call = Call(*qkv(1, 2, 1, 9, 20, 48, 48, torch.float16))
    names = [name for name, _ in run_all(wide, call.tensors(), call.ints(wide.op), call.floats(wide.op))]
    assert {"layout=aligned" in name for name in names} == {True, False}


def test_mistakes_are_refused() -> None:
    pair = Pair(mask=causal)
    op = pair.families[0].op

    def refused(call: Call, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            list(run_all(pair.families[0], call.tensors(), call.ints(op), call.floats(op)))

    q, k, v = qkv(2, 4, 2, 30, 40, 64, 64, torch.float32)
    refused(Call(q, k.half(), v), "dtype of query")
    refused(Call(q[:, :3], k, v), "multiple of key's")
    refused(Call(q, k, v[:, :, :5]), "agree in batch, heads and length")
    refused(Call(q, k[..., :8], v), "head size of query")
    refused(Call(torch.cat([q, q]), k, v), "batch size of query, or 1")
    refused(Call(q, k, v, kv_lengths=torch.ones(3, dtype=torch.int32)), "kv_lengths must be \\[batch\\]")
    refused(Call(q, k, v, sinks=torch.ones(3)), "sinks must be \\[heads\\]")
    lists = block_lists(pair.dense(2, 4, 30, 40), 16, 16)
    short = {n: x[:, :, :1] for n, x in lists.items()}
    refused(Call(q, k, v, lists=short, q_block=16, kv_block=16), "at least the blocks of the sequence")


# --- Very large scores ---


def integers(*shape: int, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Whose sums of products are exact in any order."""
    return (torch.randint(-31, 32, shape) * factor).to(dtype)


LARGE = {
    "alibi": alibi(torch.tensor([1e30, -1e30])),
    "alibi_of_1e8": alibi(torch.tensor([1e8, -3e7])),
    "scaled": lambda score, b, h, q, kv: score * 3.3e7,
    "scaled_past_2^31": lambda score, b, h, q, kv: score * 3.3e27,
    "products": None,
}


@pytest.mark.parametrize("mask", [None, causal])
@pytest.mark.parametrize("score", LARGE.values(), ids=LARGE)
def test_very_large_scores(score: Any, mask: Any) -> None:
    """As torch's float32: what is subtracted is what was compared."""
    factor = 512.0 if score is None else 1.0
    q, k = (integers(1, 2, n, 64, factor=factor, dtype=torch.float16) for n in (40, 70))
    v = torch.randn(1, 2, 70, 64).half()
    pair, call = Pair(score, mask), Call(q, k, v, scale=0.125)
    call.captured = pair.captured
    b, h, i, j = (torch.arange(n).view([-1 if d == e else 1 for e in range(4)]) for d, n in enumerate((1, 2, 40, 70)))
    s = q.float() @ k.float().mT * 0.125
    s = s if score is None else score(s, b, h, i, j)
    s = s if mask is None else s.masked_fill(~mask(b, h, i, j), -math.inf)
    assert s[s > -math.inf].abs().max() > 5e7
    op, count = pair.families[0].op, 0
    for name, (out, lse) in run_all(pair.families[0], call.tensors(), call.ints(op), call.floats(op)):
        note = lambda m: f"{name}: {m}"  # noqa: B023, E731
        torch.testing.assert_close(out.float(), s.softmax(-1) @ v.float(), atol=3e-3, rtol=3e-3, msg=note)
        torch.testing.assert_close(lse, s.logsumexp(-1), atol=0, rtol=2e-7, msg=note)
        count += 1
    assert count >= 2
