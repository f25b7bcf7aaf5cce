"""Attention as FlashAttention has it, as a request of the kernels: dense or packed sequences, and a window around the
diagonal that ends at the last query and the last key.

Packed sequences stand one after the other in one batch entry. Their cumulative lengths become an id for each position,
and lists of the blocks that a row of blocks meets, on the device and without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from tk.flex import mods
from tk.flex.checks import NO_LISTS, UNBOUNDED
from tk.flex.tracing import trace
from tk.ops.flex import Request

__all__ = ["Sequences", "Window", "are_same", "dense", "packed"]


class Window(NamedTuple):
    """How many keys a query sees to the left and to the right of its own."""

    left: int
    right: int

    @classmethod
    def of(cls, left: int | None, right: int | None, is_causal: bool = False) -> Window:
        """The window of torch's numbers, where -1 stands for all."""
        right = 0 if is_causal else right
        return cls(*(UNBOUNDED if n is None or n < 0 else min(n, UNBOUNDED) for n in (left, right)))

    @property
    def is_bounded(self) -> bool:
        return self.left != UNBOUNDED or self.right != UNBOUNDED

    @property
    def is_causal(self) -> bool:
        return self.left == UNBOUNDED and self.right == 0


class Sequences(NamedTuple):
    """int32 [n + 1] each: where the sequences of queries and of keys begin, and where the last one ends. are_same: both
    are the same."""

    of_queries: Tensor
    of_keys: Tensor
    are_same: bool


def are_same(a: Tensor, b: Tensor) -> bool:
    """Whether they hold the same, as far as that is known without waiting for a device."""
    if a is b:
        return True
    if a.shape != b.shape or torch.compiler.is_compiling():
        return False
    if _place(a) == _place(b):
        return True
    return a.device.type == "cpu" and not _has_mode() and torch.equal(a, b)


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.stride(), x.dtype


def _has_mode() -> bool:
    """Such as that of fake tensors."""
    return bool(_python_dispatch._len_torch_dispatch_stack())


# --- Requests ---


def dense(query: Tensor, key: Tensor, value: Tensor, window: Window, scale: float, caller: str) -> Request:
    """The request of operands ``[B, H, M, D]``."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    offset = n_keys - n_queries
    kind = "band" if window.is_bounded else "none"
    if window.is_causal and offset == 0:
        kind = "causal"
    left = UNBOUNDED if window.left == UNBOUNDED else window.left - offset
    right = UNBOUNDED if window.right == UNBOUNDED else window.right + offset
    numbers = {"left": left, "right": right}
    return _request(query, key, value, kind, {}, numbers, NO_LISTS, UNBOUNDED, scale, caller)


def packed(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, window: Window, scale: float, caller: str,
           has_gradient: bool) -> Request:  # fmt: skip
    """The request of operands ``[total, H, D]``. With a window the sequences of queries and keys must be as long, but
    on the CPU. has_gradient: with the lists that a gradient needs."""
    n_queries, n_keys = query.shape[0], key.shape[0]
    of_queries = _ids(sequences.of_queries, n_queries)
    of_keys = of_queries if sequences.are_same else _ids(sequences.of_keys, n_keys)
    ids = {"queries": of_queries.unsqueeze(0), "keys": of_keys.unsqueeze(0)}
    lists, block = NO_LISTS, UNBOUNDED
    kind = "causal_documents" if window.is_causal and sequences.are_same else "documents"
    if window.is_bounded and not sequences.are_same:
        kind = "shifted_documents"
        ends = _ends(sequences.of_keys) - _ends(sequences.of_queries)
        ids["shifts"] = (_at(ends, of_queries) if ends.numel() else torch.zeros_like(of_queries)).unsqueeze(0)
    elif max(n_queries, n_keys) > int((_FEW / max(1, query.shape[1] * query.shape[2])) ** 0.5):
        block = _block(max(n_queries, n_keys))
        lists = _lists(of_queries, sequences.of_keys, n_keys, window, block)
        if has_gradient:
            mirrored = Window(window.right, window.left)
            lists = (*lists, *_lists(of_keys, sequences.of_queries, n_queries, mirrored, block))
        lists = (*lists, *NO_LISTS[len(lists) :])
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    numbers = {"left": window.left, "right": window.right, "offset": 0}
    return _request(query, key, value, kind, ids, numbers, lists, block, scale, caller)


def _request(
    query: Tensor, key: Tensor, value: Tensor, kind: str, ids: dict[str, Tensor], numbers: dict[str, int],
    lists: tuple[Tensor | None, ...], block: int, scale: float, caller: str,
) -> Request:  # fmt: skip
    text, tensors, ints = _pair(kind)
    captured: tuple[Any, ...] = ([ids[n] for n in tensors], [], [numbers[n] for n in ints])
    given = (query, key, value, text, *captured, *lists, None, None, None, scale, block, block, caller)
    return Request(*given)


# --- Pairs of mods: those that the wheel has, in its spelling ---


def _band(left: int, right: int) -> mods.MaskMod:
    def of_distance(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx - q_idx <= right) & (q_idx - kv_idx <= left)

    return of_distance


def _documents(offset: int, of_queries: Tensor, of_keys: Tensor) -> mods.MaskMod:
    def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return of_queries[b, q_idx + offset] == of_keys[b, kv_idx]

    return same


def _shifted_band(left: int, right: int, shifts: Tensor) -> mods.MaskMod:
    """shifts: of each query, how far behind it the key at the same distance from its sequence's end is."""

    def of_distance(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = kv_idx - (q_idx + shifts[b, q_idx])
        return (distance <= right) & (-distance <= left)

    return of_distance


_MASKS: dict[str, Callable[..., mods.MaskMod | None]] = {
    "none": lambda **_: None,
    "causal": lambda **_: mods.causal,
    "band": lambda left, right, **_: _band(left, right),
    "causal_documents": lambda queries, **_: mods.and_masks(mods.causal, mods.document(queries)),
    "documents": lambda left, right, offset, queries, keys, **_: mods.and_masks(
        _band(left, right), _documents(offset, queries, keys)
    ),
    "shifted_documents": lambda left, right, offset, queries, keys, shifts: mods.and_masks(
        _shifted_band(left, right, shifts), _documents(offset, queries, keys)
    ),
}
_pairs: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {}


def _pair(kind: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The pair as the op takes it, and the names of the tensors and the numbers that it captures, in order."""
    if kind not in _pairs:
        numbers = {"left": 5, "right": 7, "offset": 11}  # by which they are told apart
        tensors = {name: torch.zeros(1, 1, dtype=torch.int32) for name in ("queries", "keys", "shifts")}
        pair = trace.pair(None, _MASKS[kind](**numbers, **tensors))
        found, _, ints = pair.traced.by_kind(pair.values)
        of_tensors = tuple(next(name for name, x in tensors.items() if x is t) for t in found)
        of_ints = tuple(next(name for name, n in numbers.items() if n == i) for i in ints)
        _pairs[kind] = pair.traced.text, of_tensors, of_ints
    return _pairs[kind]


_pair._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while the compiler traces, not traced


# --- Ids and lists ---

_FEW = 1 << 34  # pairs of positions, by heads and head size, that are walked sooner than they are listed: an estimate
_BLOCK = 128  # which the kernels' tiles divide
_MOST_BLOCKS = 2048  # a list has a number for each pair


def _block(length: int) -> int:
    block = _BLOCK
    while length > block * _MOST_BLOCKS:
        block *= 2
    return block


def _ids(starts: Tensor, total: int) -> Tensor:
    """int32 [total]: the sequence of each position. What is behind the last one has an id of its own."""
    positions = _constant(("positions", total), starts.device, lambda: _positions(total, starts.device))
    return torch.searchsorted(_ends(starts), positions, right=True, out_int32=True)


# Not by x[…]: that asks for the tensor's device, which a GPU that is described has not (tk.explain with arch).


def _ends(starts: Tensor) -> Tensor:
    return starts.narrow(0, 1, starts.shape[0] - 1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.index.Tensor(x, [index])
    return found


def _positions(total: int, device: torch.device) -> Tensor:
    return torch.arange(total, dtype=torch.int32, device=device)


class _Bounds(NamedTuple):
    """What depends on lengths and the window alone. Four rows each: of the first position that some row of a block
    sees, of the end of these, of the first that all of its rows see, and of the end of these."""

    edges: Tensor  # the row of the block whose sequence it is of
    ends: Tensor  # whether where that sequence ends
    low: Tensor  # what the window leaves
    high: Tensor
    up: Tensor  # to be added before it is rounded down to blocks
    columns: Tensor


def _bounds(n_rows: int, n_columns: int, window: Window, block: int, device: torch.device) -> _Bounds:
    first = torch.arange(0, n_rows, block, dtype=torch.int32, device=device)
    last = (first + (block - 1)).clamp(max=n_rows - 1)
    nothing = torch.zeros_like(first)
    everything = nothing + n_columns
    ends = torch.arange(4, dtype=torch.int32, device=device).view(4, 1) % 2
    is_up = ((ends + torch.arange(4, dtype=torch.int32, device=device).view(4, 1) // 2) == 1).int()
    return _Bounds(
        torch.stack([first, last, last, first]),
        ends,
        torch.stack([first - window.left, nothing, last - window.left, nothing]).clamp(0, n_columns),
        torch.stack([everything, last + (window.right + 1), everything, first + (window.right + 1)]).clamp(
            0, n_columns
        ),
        is_up * (block - 1),
        torch.arange(-(-n_columns // block), dtype=torch.int32, device=device),
    )


def _lists(ids: Tensor, starts: Tensor, n_columns: int, window: Window, block: int) -> tuple[Tensor, ...]:
    """Lists, for each block of positions, the blocks of the other side that it meets: how many in part, which, how many
    entirely, which. ids: of the positions. starts: of the other side's sequences."""
    n_rows = ids.shape[0]
    key = ("bounds", n_rows, n_columns, window, block)
    bounds = _constant(key, ids.device, lambda: _bounds(n_rows, n_columns, window, block, ids.device))
    of_sequence = (_at(ids, bounds.edges) + bounds.ends).clamp(max=starts.shape[0] - 1)
    found = torch.clamp(_at(starts, of_sequence), bounds.low, bounds.high)
    low, high, full_low, full_high = torch.div(found + bounds.up, block, rounding_mode="floor").unsqueeze(2).unbind()
    n_full = (full_high - full_low).clamp(min=0)
    columns = bounds.columns + low
    partial = columns + (columns >= full_low) * n_full
    counts = (high - low - n_full, n_full)
    n_partial, n_full = (x.view(1, 1, -1) for x in counts)
    return n_partial, partial.view(1, 1, *partial.shape), n_full, (bounds.columns + full_low).view(1, 1, *partial.shape)


_constants: dict[Any, Any] = {}
_MAX_CONSTANTS = 64


def _constant(key: tuple[Any, ...], device: torch.device, make: Callable[[], Any]) -> Any:
    """Made once: it is the same in every layer and step. What is made while a CUDA graph is recorded is the graph's,
    and what is made under a mode, such as fake tensors', is the mode's: these are not kept."""
    if torch.compiler.is_compiling() or _has_mode():
        return make()
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else 0  # another one would not wait for it
    key = (*key, device, stream)
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= _MAX_CONSTANTS:
            _constants.clear()
        with torch.inference_mode(False):  # what it makes could not be saved for a gradient
            found = _constants[key] = make()
    return found
