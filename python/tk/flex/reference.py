"""Attention on the CPU, tile by tile: what every kernel computes, in torch, and never a score for each pair at once.

    s = score_mod(scale * q·k),  s = -inf where masked,  out = softmax(s) v,  lse = log(sum(exp(s)))

Tiles that a block mask leaves out are not computed. The backward works every tile out again from out and lse, and takes
the derivative of score_mod tile by tile with torch's autograd; sums over tiles are in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tk.flex.block_mask import BlockMask
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate, indices, read
from tk.ops.flex import Request

_INF = float("inf")
_Q_TILE, _KV_TILE = 256, 512
_ELEMENTS = 1 << 22  # of scores at a time, over batch entries and heads


class Problem:
    """A request, and what its tiles ask for. kinds: of the blocks, as :func:`_kinds` has them; None without a mask of
    blocks."""

    def __init__(self, request: Request):
        self.request = request
        self.traced = trace.parse(request.pair)
        self.values = self.traced.values_of(request.tensors, request.floats, request.ints)
        self.block = (request.q_block, request.kv_block)
        self.dtype = torch.float64 if request.query.dtype == torch.float64 else torch.float32
        self.B, self.H, self.M = request.query.shape[:3]
        self.H_kv = request.key.shape[1]
        self.group = self.H // self.H_kv if self.H_kv else 1
        pages, rows = request.page_table, request.key.shape[2]
        self.N = rows if pages is None else pages.shape[1] * rows
        self.lengths = [self.N] * self.B if request.kv_lengths is None else request.kv_lengths.tolist()
        self.kinds = _kinds(request)

    def entries(self) -> Iterator[list[int]]:
        """Batch entries that are worked on together: all that share blocks, lengths and pages."""
        if not self.B or not self.H or not self.M:
            return
        is_shared = self.request.kv_lengths is None and self.request.page_table is None
        if is_shared and (self.kinds is None or self.kinds.shape[0] == 1):
            size = max(1, _ELEMENTS // (self.H * _Q_TILE * _KV_TILE))
            for first in range(0, self.B, size):
                yield list(range(first, min(self.B, first + size)))
            return
        for b in range(self.B):
            yield [b]


@dataclass
class _Tile:
    """Some queries against some keys. allowed: [b, H, q, kv] or a broadcast of it; None where nothing is masked."""

    at: tuple[Tensor, Tensor, Tensor, Tensor]
    keys: tuple[int, int]
    allowed: Tensor | None


def forward(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, M, Dv] in the dtype of query; lse and each row's largest score [B, H, M] in float32 (float64 for
    float64)."""
    out = p.request.query.new_zeros(p.B, p.H, p.M, p.request.value.shape[-1])
    lse = torch.full((p.B, p.H, p.M), -_INF, dtype=p.dtype, device=p.request.query.device)
    largest = lse.clone()
    for entries in p.entries():
        for q in _spans(p.M, _q_tile(p)):
            _forward_rows(p, entries, q, out, lse, largest)
    return out, lse, largest


def _forward_rows(
    p: Problem, entries: list[int], q: tuple[int, int], out: Tensor, lse: Tensor, largest: Tensor
) -> None:
    rows = _rows(p, p.request.query, entries, q)
    n, length = len(entries), q[1] - q[0]
    total = torch.zeros(n, p.H, length, p.request.value.shape[-1], dtype=p.dtype, device=out.device)
    top = torch.full((n, p.H, length), -_INF, dtype=p.dtype, device=out.device)
    weight = torch.zeros_like(top)
    for tile in _tiles(p, entries, q):
        s = _scores(p, tile, rows, entries)
        new_top = torch.maximum(top, s.amax(-1))
        shift = torch.where(new_top == -_INF, 0, new_top)
        probability = torch.exp(s - shift.unsqueeze(-1))
        kept = torch.exp(top - shift)
        weight = weight * kept + probability.sum(-1)
        total = total * kept.unsqueeze(-1) + _per_head(p, probability, _columns(p, p.request.value, entries, tile.keys))
        top = new_top
    largest[entries, :, q[0] : q[1]] = top
    if p.request.sinks is not None:
        sink = p.request.sinks.to(p.dtype).view(1, -1, 1)
        new_top = torch.maximum(top, sink)
        shift = torch.where(new_top == -_INF, 0, new_top)
        kept = torch.exp(top - shift)
        weight = weight * kept + torch.exp(sink - shift)
        total, top = total * kept.unsqueeze(-1), new_top
    is_empty = weight == 0
    lse[entries, :, q[0] : q[1]] = torch.where(is_empty, -_INF, top + torch.log(weight))
    result = total / torch.where(is_empty, 1, weight).unsqueeze(-1)
    out[entries, :, q[0] : q[1]] = result.to(out.dtype)


@dataclass
class Gradients:
    """sinks: None where there are none. captures: by number of the capture, of those that have one."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    captures: dict[int, Tensor]


def backward(
    p: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, of_captures: bool = True
) -> Gradients:
    """The gradients of all floating-point arguments; of captured tensors those that the score reads."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=p.dtype, device=x.device)

    captured = {i: zeros(p.values[i]) for i in p.traced.differentiable if of_captures}
    sinks_sum = None if p.request.sinks is None else zeros(p.request.sinks)
    sums = Gradients(zeros(p.request.query), zeros(p.request.key), zeros(p.request.value), sinks_sum, captured)
    for entries in p.entries():
        for q in _spans(p.M, _q_tile(p)):
            _backward_rows(p, entries, q, (out, lse, grad_out, grad_lse), sums)
    captures = {i: x.to(p.values[i].dtype) for i, x in sums.captures.items()}
    request = p.request
    sinks = None if request.sinks is None or sums.sinks is None else sums.sinks.to(request.sinks.dtype)
    held = zip((sums.query, sums.key, sums.value), request.operands, strict=True)
    query, key, value = (total.to(x.dtype) for total, x in held)
    return Gradients(query, key, value, sinks, captures)


def _backward_rows(
    p: Problem, entries: list[int], q: tuple[int, int], saved: tuple[Tensor, ...], sums: Gradients
) -> None:
    rows = _rows(p, p.request.query, entries, q)
    out, lse, grad_out, grad_lse = (x[entries, :, q[0] : q[1]].to(p.dtype) for x in saved)
    lse_or_0 = torch.where(lse == -_INF, 0, lse)
    if sums.captures:  # whose sums over many scores cancel, as they do not with an output that was rounded
        delta = _exact_delta(p, entries, q, rows, lse_or_0, grad_out) - grad_lse
    else:
        delta = (grad_out * out).sum(-1) - grad_lse
    for tile in _tiles(p, entries, q):
        keys = _columns(p, p.request.key, entries, tile.keys)
        values = _columns(p, p.request.value, entries, tile.keys)
        product = _products(p, rows, keys)
        reads = _Reads(p, tile, product.shape, set(sums.captures))
        s = _through_mod(p, tile, product, reads)
        probability = torch.exp(s.detach() - lse_or_0.unsqueeze(-1))
        grad_s = probability * (_products(p, grad_out, values) - delta.unsqueeze(-1))
        grad_product = reads.backward(s, product, grad_s, sums.captures) * p.request.scale
        sums.query[entries, :, q[0] : q[1]] += _per_head(p, grad_product, keys)
        _add_columns(p, sums.key, entries, tile.keys, _per_group(p, grad_product, rows))
        _add_columns(p, sums.value, entries, tile.keys, _per_group(p, probability, grad_out))
    if p.request.sinks is not None and sums.sinks is not None:
        share = torch.exp(p.request.sinks.to(p.dtype).view(1, -1, 1) - lse_or_0)
        sums.sinks -= torch.where(lse == -_INF, 0, share * delta).sum((0, 2))


def _exact_delta(
    p: Problem, entries: list[int], q: tuple[int, int], rows: Tensor, lse: Tensor, grad_out: Tensor
) -> Tensor:
    """For each row, the sum of its weights times their gradients."""
    total = torch.zeros_like(lse)
    for tile in _tiles(p, entries, q):
        probability = torch.exp(_scores(p, tile, rows, entries) - lse.unsqueeze(-1))
        total += (probability * _products(p, grad_out, _columns(p, p.request.value, entries, tile.keys))).sum(-1)
    return total


# --- Scores ---


def _scores(p: Problem, tile: _Tile, rows: Tensor, entries: list[int]) -> Tensor:
    return _through_mod(p, tile, _products(p, rows, _columns(p, p.request.key, entries, tile.keys)), None)


def _through_mod(p: Problem, tile: _Tile, product: Tensor, reads: _Reads | None) -> Tensor:
    """[b, H, q, kv]: products with scale and score_mod, -inf where masked."""
    s = product * p.request.scale
    graph = p.traced.score
    if reads is not None:
        s = reads.of_score(s)
    with torch.set_grad_enabled(reads is not None):
        if graph is not None:
            gather = None if reads is None else reads.gather
            s = evaluate(graph, (s, *tile.at), p.values, tile.allowed, gather).to(p.dtype).expand(product.shape)
        return s if tile.allowed is None else s.masked_fill(~tile.allowed, -_INF)


class _Reads:
    """A tile's reads of captured tensors, each with a gradient of its own."""

    def __init__(self, p: Problem, tile: _Tile, shape: torch.Size, wanted: set[int]):
        self.p, self.tile, self.shape = p, tile, shape
        self.numbers = {str(n.target): n.meta["capture"] for n in (p.traced.score.captures if p.traced.score else [])}
        self.wanted = wanted
        self.found: list[tuple[int, list[Any], torch.Size, Tensor]] = []
        self.score: Tensor | None = None

    def of_score(self, s: Tensor) -> Tensor:
        if self.p.traced.score is None:
            return s
        self.score = s.detach().requires_grad_()
        return self.score

    def gather(self, node: fx.Node, source: Tensor, at: list[Any]) -> Tensor:
        held = read(source.detach(), at)
        number = self.numbers[str((node if node.op == "placeholder" else node.all_input_nodes[0]).target)]
        if number not in self.wanted:
            return held
        # One for every score, so that what is masked out can be left out of the sum.
        spread = held.expand(self.shape).requires_grad_()
        self.found.append((number, at, held.shape, spread))
        return spread

    def backward(self, s: Tensor, product: Tensor, grad_s: Tensor, sums: dict[int, Tensor]) -> Tensor:
        """The gradient of scaled products; those of captured tensors are added to `sums`."""
        if self.score is None:
            return grad_s
        if not s.requires_grad:  # the score does not depend on anything
            return torch.zeros_like(grad_s)
        inputs = [self.score, *(spread for *_, spread in self.found)]
        grads = torch.autograd.grad(s, inputs, grad_s, allow_unused=True)
        first, *rest = (None if g is None else self._allowed(g) for g in grads)
        for (number, at, shape, _), grad in zip(self.found, rest, strict=True):
            if grad is not None:
                _add_read(sums[number], at, grad.sum_to_size(shape).to(sums[number].dtype))
        return torch.zeros_like(grad_s) if first is None else first

    def _allowed(self, grad: Tensor) -> Tensor:
        """A derivative may be infinite where it does not count."""
        return grad if self.tile.allowed is None else torch.where(self.tile.allowed, grad, 0)


def _add_read(total: Tensor, at: list[Any], grad: Tensor) -> None:
    if not at:
        total += grad.sum()
    elif all(not isinstance(i, Tensor) for i in at):
        total[tuple(at)] += grad.sum()
    else:
        places: list[Tensor | None] = [torch.as_tensor(i, device=total.device).long() for i in at]
        total.index_put_(places, grad, accumulate=True)


# --- Tiles ---


def _q_tile(p: Problem) -> int:
    """A multiple of the query blocks where these are small enough."""
    block = p.block[0]
    return _Q_TILE // block * block if block < _Q_TILE else _Q_TILE


def _spans(n: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, n, size):
        yield first, min(n, first + size)


def _tiles(p: Problem, entries: list[int], q: tuple[int, int]) -> Iterator[_Tile]:
    """Those that have a score to compute."""
    block = p.block[1]
    size = _KV_TILE // block * block if block < _KV_TILE else _KV_TILE
    for kv in _spans(p.lengths[entries[0]], size):
        kinds = None if p.kinds is None else _kinds_of(p, p.kinds, entries, q, kv)
        if kinds is not None and not bool(kinds.any()):
            continue
        at = indices(entries, range(p.H), q, kv, p.request.query.device)
        allowed = _allowed(p, kinds, at)
        if allowed is None or bool(allowed.any()):
            yield _Tile(at, kv, allowed)


def _allowed(p: Problem, kinds: Tensor | None, at: tuple[Tensor, ...]) -> Tensor | None:
    """Full blocks entirely, partial ones where the mask lets through. Without a block mask the mask is asked
    everywhere."""
    if kinds is None:
        return None if p.traced.mask is None else evaluate(p.traced.mask, at, p.values)
    if bool((kinds == 2).all()):
        return None
    rows, columns = (x.flatten() // block for x, block in zip(at[2:], p.block, strict=True))
    kind = kinds[:, :, rows - rows[0]][..., columns - columns[0]]
    if p.traced.mask is None:
        return kind > 0
    return (kind == 2) | ((kind == 1) & evaluate(p.traced.mask, at, p.values, kind == 1))


def _kinds(request: Request) -> Tensor | None:
    """int8 [B, H, rows, columns] of block lists: 0 none, 1 partial, 2 full."""
    num, at = request.kv_num_blocks, request.kv_indices
    if num is None or at is None:
        return None
    full_num, full_at = request.full_kv_num_blocks, request.full_kv_indices
    return BlockMask((0, 0), num, at, full_num, full_at, None, None, None, None).kinds()


def _kinds_of(p: Problem, kinds: Tensor, entries: list[int], q: tuple[int, int], kv: tuple[int, int]) -> Tensor:
    """The kinds of the blocks that a tile touches."""
    (q_block, kv_block) = p.block
    batch = kinds if kinds.shape[0] == 1 else kinds[entries]
    return batch[:, :, q[0] // q_block : -(-q[1] // q_block), kv[0] // kv_block : -(-kv[1] // kv_block)]


# --- Operands ---


def _rows(p: Problem, x: Tensor, entries: list[int], q: tuple[int, int]) -> Tensor:
    return x[entries, :, q[0] : q[1]].to(p.dtype)


def _columns(p: Problem, x: Tensor, entries: list[int], kv: tuple[int, int]) -> Tensor:
    """[b, Hkv, kv, D] of key or value."""
    if p.request.page_table is not None:
        page, place = _pages(p, entries[0], kv)
        return x[page, :, place].transpose(0, 1).unsqueeze(0).to(p.dtype)
    x = x if x.shape[0] == 1 else x[entries]
    return x[:, :, kv[0] : kv[1]].to(p.dtype)


def _add_columns(p: Problem, total: Tensor, entries: list[int], kv: tuple[int, int], grad: Tensor) -> None:
    if p.request.page_table is not None:
        page, place = _pages(p, entries[0], kv)
        total.permute(0, 2, 1, 3).index_put_((page, place), grad[0].transpose(0, 1), accumulate=True)
    elif total.shape[0] == 1:
        total[:, :, kv[0] : kv[1]] += grad.sum(0, keepdim=True)
    else:
        total[entries, :, kv[0] : kv[1]] += grad


def _pages(p: Problem, entry: int, kv: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Page and place in it of the keys of a batch entry. Raises IndexError."""
    assert p.request.page_table is not None
    n_pages, size = p.request.key.shape[0], p.request.key.shape[2]
    positions = torch.arange(*kv, device=p.request.query.device)
    page = p.request.page_table[entry, positions // size].long()
    if bool(((page < 0) | (page >= n_pages)).any()):
        raise IndexError(
            f"tk.flex_attention: page_table names pages {int(page.min())} to {int(page.max())} for keys {kv[0]} to "
            f"{kv[1] - 1} of batch entry {entry}; there are {n_pages}"
        )
    return page, positions % size


def _products(p: Problem, rows: Tensor, columns: Tensor) -> Tensor:
    """[b, H, q, D] and [b, Hkv, kv, D] -> [b, H, q, kv]."""
    grouped = rows.unflatten(1, (p.H_kv, p.group))
    return (grouped @ columns.unsqueeze(2).mT).flatten(1, 2)


def _per_head(p: Problem, weights: Tensor, columns: Tensor) -> Tensor:
    """[b, H, q, kv] and [b, Hkv, kv, D] -> [b, H, q, D]."""
    return (weights.unflatten(1, (p.H_kv, p.group)) @ columns.unsqueeze(2)).flatten(1, 2)


def _per_group(p: Problem, weights: Tensor, rows: Tensor) -> Tensor:
    """[b, H, q, kv] and [b, H, q, D] -> [b, Hkv, kv, D], summed over the heads of a group."""
    n, _, q_len, kv_len = weights.shape
    grouped = weights.reshape(n, p.H_kv, p.group * q_len, kv_len)
    return grouped.mT @ rows.reshape(n, p.H_kv, p.group * q_len, -1)
