"""Block masks against the mask itself and against torch's."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree

import tk
from tk.flex import block_mask as implementation
from tk.flex import mods
from tk.flex.tracing import trace
from tk.ops.flex import LISTS

from . import dense


def make(mask_mod: Any, B: int, H: int, M: int, N: int, block: Any = 16, **kwargs: Any) -> tk.flex.BlockMask:
    return tk.flex.create_block_mask(mask_mod, B, H, M, N, "cpu", block, **kwargs)


def elements(mask: tk.flex.BlockMask, B: int, H: int) -> Tensor:
    """bool [B, H, M, N]: what the lists and the mask_mod say together."""
    M, N = mask.seq_lengths
    kinds = mask.kinds().expand(B, H, -1, -1)
    spread = kinds.repeat_interleave(mask.BLOCK_SIZE[0], 2).repeat_interleave(mask.BLOCK_SIZE[1], 3)[:, :, :M, :N]
    inside = dense.mask_of(mask.mask_mod, B, H, M, N)
    return (spread == 2) | ((spread == 1) & inside)


@pytest.mark.parametrize("name", [n for n in dense.MASKS if n != "none"])
@pytest.mark.parametrize("sizes", [(2, 3, 40, 56, 16), (1, 1, 64, 64, 16), (2, 1, 33, 70, (8, 24))], ids=str)
@pytest.mark.parametrize("separate", [True, False])
def test_as_torch(name: str, sizes: Any, separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_ELEMENTS", 700)  # several chunks of rows and columns
    *shape, block = sizes
    B, H, M, N = shape
    mask_mod = dense.MASKS[name](B, H, M, N)
    ours = make(mask_mod, B, H, M, N, block, separate_full_blocks=separate)
    theirs = torch_flex.create_block_mask(mask_mod, B, H, M, N, "cpu", block, separate_full_blocks=separate)
    for attribute in LISTS:
        x, y = getattr(ours, attribute), getattr(theirs, attribute)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == torch.int32 and torch.equal(x, y), attribute
    assert ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.numel() == theirs.numel()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(elements(ours, B, H), dense.mask_of(mask_mod, B, H, M, N))


def test_memory_is_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kinds = implementation._kinds
    monkeypatch.setattr(implementation, "_kinds", lambda x, block: (seen.append(x.numel()), kinds(x, block))[1])
    make(mods.causal, 1, 1, 1 << 14, 1 << 14, 128)
    assert sum(seen) == 1 << 28 and max(seen) <= implementation._ELEMENTS


def test_entries_and_heads_that_do_not_matter_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    kinds = implementation._kinds
    monkeypatch.setattr(implementation, "_kinds", lambda x, block: (seen.append(x.numel()), kinds(x, block))[1])
    mask = make(mods.document(dense.ids(3, 32)), 3, 8, 32, 32)
    assert sum(seen) == 3 * 32 * 32 and mask.shape == (3, 8, 32, 32)


def test_sparsity_and_picture() -> None:
    mask = make(mods.causal, 1, 1, 64, 64)
    assert mask.sparsity() == 100 * 6 / 16
    assert mask.to_string() == "(0, 0)\n░░      \n██░░    \n████░░  \n██████░░"
    assert "causal" in repr(mask) and "(1, 1, 64, 64)" in str(mask)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1)])
def test_short(lengths: tuple[int, int]) -> None:
    mask = make(mods.causal, 1, 1, *lengths)
    assert mask.seq_lengths == lengths and mask.sparsity() == 0.0


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="BLOCK_SIZE is 0"):
        make(mods.causal, 1, 1, 8, 8, 0)
    with pytest.raises(ValueError, match="Q_LEN is -1"):
        make(mods.causal, 1, 1, -1, 8)
    with pytest.raises(TypeError, match="returns int32; a mask must be bool"):
        make(lambda b, h, q, kv: q - kv, 1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"must be \[B, H, rows\]"):
        tk.flex.BlockMask.from_kv_blocks(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))


# --- Slices ---

SLICES = [
    (slice(1, 2),), (1,), (-1,), (slice(None), 2), (slice(None), slice(1, 3)), (0, 1, 2), (slice(None), slice(None), 1),
    (slice(None), slice(None), slice(1, 3)), (slice(None), slice(None), slice(0, 4, 2)), (slice(None), slice(0, 3, 2)),
    (slice(None), slice(None), torch.tensor([2, 0])), (slice(None), torch.tensor([2, 0, 0])),
    (torch.tensor([False, True]), slice(None), slice(2, None)), (slice(None), slice(None), -1),
]  # fmt: skip


@pytest.mark.parametrize("index", SLICES, ids=str)
@pytest.mark.parametrize("name", ["by_head", "document", "causal", "natten_2d"])
def test_a_slice_says_what_the_mask_said_there(name: str, index: Any) -> None:
    B, H, M, N, block = 2, 3, 60, 50, 16
    mask_mod = dense.MASKS[name](B, H, M, N)
    whole = dense.mask_of(mask_mod, B, H, M, N)
    part = make(mask_mod, B, H, M, N, block)[index]
    padded = (*index, slice(None), slice(None))[:3]
    b, h, rows = (torch.arange(n)[i].reshape(-1) for n, i in zip((B, H, -(-M // block)), padded, strict=True))
    positions = torch.cat([torch.arange(int(r) * block, min(M, (int(r) + 1) * block)) for r in rows])
    expected = whole[b][:, h][:, :, positions]
    assert part.shape == tuple(expected.shape)
    assert torch.equal(elements(part, len(b), len(h)), expected)
    again = part[0]  # a slice of a slice
    assert torch.equal(elements(again, 1, len(h)), expected[:1])


def test_a_slice_runs() -> None:
    q, k, v = (torch.randn(2, 3, 60, 8, dtype=torch.float64) for _ in range(3))
    mask = make(dense.MASKS["by_head"](2, 3, 60, 60), 2, 3, 60, 60)
    out = tk.flex_attention(q, k, v, None, mask)
    part = tk.flex_attention(q[:, 1:2, 32:48], k[:, 1:2], v[:, 1:2], None, mask[:, 1, 2])
    torch.testing.assert_close(part, out[:, 1:2, 32:48])


def test_a_window_at_another_place_is_the_same_mod() -> None:
    """Steps of decoding: the place is an argument."""
    mask = make(mods.sliding_window(20), 1, 1, 64, 64, 1)
    pairs = [trace.pair(None, mask[:, :, i].mask_mod) for i in (5, 6, 60)]
    assert len({p.fingerprint for p in pairs}) == 1


def test_wrong_slices() -> None:
    mask = make(mods.causal, 2, 1, 60, 60)
    with pytest.raises(IndexError, match="index 2 along b, which has 2"):
        mask[2]
    with pytest.raises(IndexError, match="three dimensions"):
        mask[0, 0, 0, 0]
    with pytest.raises(ValueError, match="last row of blocks has 12 queries"):
        mask[:, :, torch.tensor([3, 0])]
    with pytest.raises(ValueError, match="step of -1"):
        mask[:, :, ::-1]


# --- Other lengths ---


@pytest.mark.parametrize("lengths", [(60, 50), (32, 50), (17, 3), (1, 1), (80, 90), (10, 90)], ids=str)
@pytest.mark.parametrize("name", ["causal", "document", "by_head"])
def test_adjust(name: str, lengths: tuple[int, int]) -> None:
    mask_mod = dense.MASKS[name](2, 3, 100, 100)
    adjusted = make(mask_mod, 2, 3, 60, 50).adjust(*lengths)
    assert adjusted.seq_lengths == lengths
    assert torch.equal(elements(adjusted, 2, 3), dense.mask_of(mask_mod, 2, 3, *lengths))


def test_a_mask_of_given_lists_is_not_made_longer() -> None:
    made = make(mods.causal, 1, 1, 32, 32)
    given = tk.flex.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=16, mask_mod=mods.causal)
    assert given.seq_lengths == (32, 32)
    assert torch.equal(given._adjust(16, 16).to_dense(), made.to_dense()[:, :, :1, :1])
    with pytest.raises(ValueError, match="cannot be made longer"):
        given.adjust(64, 64)


# --- As a tree ---


def test_tree_of_tensors() -> None:
    ids = dense.ids(2, 40)
    mask = make(mods.and_masks(mods.causal, mods.document(ids)), 2, 1, 40, 40)
    leaves, spec = _pytree.tree_flatten(mask)
    assert len(leaves) == 9 and any(x is ids for x in leaves)
    same = _pytree.tree_unflatten(leaves, spec)
    assert same.mask_mod is mask.mask_mod
    other = dense.ids(1, 40).expand(2, 40)
    changed = _pytree.tree_unflatten([other if x is ids else x for x in leaves], spec)
    pair = trace.pair(None, changed.mask_mod)
    assert pair.fingerprint == trace.pair(None, mask.mask_mod).fingerprint and pair.values[0] is other
    expected = dense.mask_of(mods.and_masks(mods.causal, mods.document(other)), 2, 1, 40, 40)
    assert torch.equal(dense.mask_of(changed.mask_mod, 2, 1, 40, 40), expected)
    again = make(mods.and_masks(mods.causal, mods.document(ids)), 2, 1, 40, 40)
    assert _pytree.tree_structure(again) == spec
    assert _pytree.tree_structure(make(mods.causal, 2, 1, 40, 40)) != spec


def test_to() -> None:
    mask = make(mods.causal, 1, 1, 40, 40)
    moved = mask.to("meta")
    assert moved.device.type == "meta" and moved.mask_mod is mask.mask_mod and moved.seq_lengths == (40, 40)


def test_lists_are_read_back() -> None:
    for rows, columns in itertools.product((1, 3), (1, 4)):
        chosen = torch.rand(2, 1, rows, columns) > 0.5
        number, order = implementation._listed(chosen)
        assert torch.equal(implementation._dense(number, order, columns), chosen)


# --- Pickled ---

LENGTH = 16
# A call of every function of the library that makes a mask.
MADE: dict[str, Any] = {
    "sliding_window": lambda: mods.sliding_window(5),
    "dilated_window": lambda: mods.dilated_window(3, 2),
    "prefix_lm": lambda: mods.prefix_lm(3),
    "prefix_lm of entries": lambda: mods.prefix_lm(torch.tensor([3, 7])),
    "document": lambda: mods.document(torch.arange(LENGTH) // 5),
    "document of entries": lambda: mods.document(dense.ids(2, LENGTH)),
    "natten_2d": lambda: mods.natten_2d(4, 4, 3),
    "and_masks": lambda: mods.and_masks(mods.causal, mods.or_masks(mods.prefix_lm(2), mods.sliding_window(4)), plain),
    "or_masks": lambda: mods.or_masks(),
    "causal": lambda: mods.causal,
    "a user's": lambda: plain,
}  # fmt: skip


def plain(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx != kv_idx + 1


def test_every_mask_of_the_library_is_here() -> None:
    score_mods = {"alibi", "learned_bias", "per_head_bias", "relative_bias", "soft_cap"}
    assert {name.split()[0] for name in MADE} - {"a"} == set(mods.__all__) - score_mods


def _saved(mask: Any) -> Any:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy, _saved])
def test_a_mask_is_pickled_and_copied(name: str, way: Any) -> None:
    mask = make(MADE[name](), 2, 1, LENGTH, LENGTH)
    again = way(mask)
    assert type(again) is tk.flex.BlockMask and vars(again).keys() == vars(mask).keys()
    for attribute in LISTS:
        assert torch.equal(getattr(again, attribute), getattr(mask, attribute))
    assert (again.seq_lengths, again.BLOCK_SIZE) == (mask.seq_lengths, mask.BLOCK_SIZE)
    assert again.mask_mod.__name__ == mask.mask_mod.__name__
    assert trace.pair(None, again.mask_mod).fingerprint == trace.pair(None, mask.mask_mod).fingerprint
    assert torch.equal(*(dense.mask_of(x.mask_mod, 2, 1, LENGTH, LENGTH) for x in (again, mask)))


def test_another_process_loads_it() -> None:
    mask = make(mods.and_masks(mods.causal, mods.document(torch.arange(LENGTH) // 5)), 1, 1, LENGTH, LENGTH)
    code = "import pickle, sys; m = pickle.load(sys.stdin.buffer); print(m.mask_mod.__name__, m.adjust(24, 24).shape)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(mask), capture_output=True, check=False)
    assert done.returncode == 1 and b"IndexError" in done.stderr, "the ids are of 16 positions"
    code = code.replace("24, 24", "8, 8")
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(mask), capture_output=True, check=True)
    assert done.stdout == b"causal_and_document (1, 1, 8, 8)\n"


def test_what_cannot_be_pickled_is_said_by_name() -> None:
    def local(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    for mod in (local, mods.and_masks(mods.causal, local)):
        mask = make(mod, 1, 1, LENGTH, LENGTH)
        with pytest.raises(
            pickle.PicklingError, match=r"BlockMask: its mask_mod .*local cannot .* top level of a module"
        ):
            pickle.dumps(mask)
        assert copy.copy(mask).mask_mod is mod and copy.deepcopy(mask).mask_mod is mod
        mask.mask_mod = None  # as the message says
        assert pickle.loads(pickle.dumps(mask)).mask_mod is None
    part = make(mods.causal, 1, 2, 4 * LENGTH, 4 * LENGTH)[:, :, 1:]
    with pytest.raises(
        pickle.PicklingError, match=r"a part of a mask cannot be pickled \(part_of_causal\). Pickle the whole"
    ):
        pickle.dumps(part)
    lost = pickle.dumps(make(mods.sliding_window(5), 1, 1, LENGTH, LENGTH)).replace(b"window", b"wandow")
    with pytest.raises(AttributeError, match="wandow"):
        pickle.loads(lost)


MASK = make(mods.causal, 2, 2, 40, 40)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: MASK.adjust(-1, 40), ValueError, "tk.flex.BlockMask.adjust: q_len is -1, must not be negative"),
    (lambda: MASK.adjust(40, True), TypeError, "tk.flex.BlockMask.adjust: kv_len must be an int, is True"),
    (lambda: MASK.adjust(16.0, 40), TypeError, "tk.flex.BlockMask.adjust: q_len must be an int, is 16.0"),
    (lambda: MASK.adjust(None, 40), TypeError, "tk.flex.BlockMask.adjust: q_len must be an int, is None"),
    (lambda: MASK.to_string("4"), TypeError, "tk.flex.BlockMask.to_string: grid_size must be an int, is '4'"),
    (lambda: MASK.to_string((4,) * 3), TypeError, "tk.flex.BlockMask.to_string: grid_size must be an int, is (4, 4"),
    (lambda: MASK.to_string(4, None), TypeError, "tk.flex.BlockMask.to_string: limit must be an int, is None"),
    (lambda: MASK[None], TypeError, "tk.flex.BlockMask: index None along b, must be an int"),
    (lambda: MASK[:, "1"], TypeError, "tk.flex.BlockMask: index '1' along h, must be an int"),
    (lambda: MASK[:, [True, False]], TypeError, "tk.flex.BlockMask: index True along h, must be an int; choose by"),
    (lambda: MASK[:, :, torch.tensor([0.5])], TypeError, "tk.flex.BlockMask: index 0.5 along row, must be an int"),
    (lambda: MASK[[[0]]], TypeError, "tk.flex.BlockMask: index [0] along b, must be an int"),
    (lambda: tk.flex.BlockMask.from_kv_blocks(None, MASK.kv_indices), TypeError,
     "tk.flex.BlockMask: kv_num_blocks must be a Tensor, is NoneType"),
    (lambda: tk.flex.BlockMask.from_kv_blocks(MASK.kv_num_blocks, [0]), TypeError,
     "tk.flex.BlockMask: kv_indices must be a Tensor, is list"),
    (lambda: tk.flex.BlockMask.from_kv_blocks(MASK.kv_num_blocks.to_sparse(), MASK.kv_indices), tk.UnsupportedError,
     "tk.flex.BlockMask: kv_num_blocks is sparse_coo, must be a dense tensor"),
    (lambda: tk.flex.BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, seq_lengths=(1, 2, 3)), ValueError,
     "tk.flex.BlockMask: seq_lengths is (1, 2, 3), must be two"),
    (lambda: tk.flex.BlockMask.from_kv_blocks(MASK.kv_num_blocks, MASK.kv_indices, seq_lengths=(1, 2.5)), TypeError,
     "tk.flex.BlockMask: seq_lengths must be an int, is 2.5"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_wrong_arguments_of_a_mask_are_named(call: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(said)


def test_numbers_of_numpy_index_a_mask() -> None:
    for index in (np.int64(1), [np.int32(1)], np.array([1]), range(1, 2), torch.tensor(1)):
        assert torch.equal(MASK[:, index].to_dense(), MASK[:, 1].to_dense())
