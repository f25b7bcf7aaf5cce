"""Which blocks of a mask are worth a visit: BlockMask and create_block_mask, with torch's names and meanings.

No [S, S] tensor is made: the mask is worked out for one row of blocks after another, and what is kept is two lists of
blocks for each row and two for each column.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from tk import errors
from tk._arguments import flag, shape_of, whole
from tk.flex.mods import MaskMod
from tk.flex.pickled import PickledMod
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate, indices
from tk.ops.flex import LISTS

__all__ = ["BlockMask", "create_block_mask"]

_DEFAULT_BLOCK = 128
_ELEMENTS = 1 << 20  # of a mask that are worked out at a time: a few megabytes

Blocks = Callable[[trace.Pair, int, int, int, int, tuple[int, int], torch.device], Tensor]
evaluators: dict[str, Blocks] = {}
"""By device type, instead of :func:`_blocks`: a kernel that says of each block how much of it the mask lets through."""


class BlockMask:
    """A mask by blocks, with the attributes of torch.nn.attention.flex_attention.BlockMask, which tk takes as well.

    Attributes:
        kv_num_blocks, kv_indices: int32 [B, H, rows] and [B, H, rows, columns]: for each row of query blocks the
            key blocks that the mask lets through in part. Entries past a row's count mean nothing. B and H may be 1.
        full_kv_num_blocks, full_kv_indices: the same of blocks that it lets through entirely; None where these are
            not told apart.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same by columns, for gradients.
        seq_lengths: of queries and keys. BLOCK_SIZE: of query and key blocks. mask_mod: asked inside of partial blocks.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        *,
        is_derived: bool = False,
    ):
        """mask_mod: None lets everything through. is_derived: the lists say exactly what mask_mod says, so that they
        may be made again for other lengths."""
        self.seq_lengths = seq_lengths
        self.kv_num_blocks, self.kv_indices = kv_num_blocks, kv_indices
        self.full_kv_num_blocks, self.full_kv_indices = full_kv_num_blocks, full_kv_indices
        self.q_num_blocks, self.q_indices = q_num_blocks, q_indices
        self.full_q_num_blocks, self.full_q_indices = full_q_num_blocks, full_q_indices
        self.BLOCK_SIZE = _block_size(BLOCK_SIZE)
        self.mask_mod = mask_mod
        self.is_derived = is_derived

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "mask_mod": PickledMod(self.mask_mod)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        mod = state["mask_mod"]
        vars(self).update(state, mask_mod=mod.mod if isinstance(mod, PickledMod) else mod)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        is_derived: bool = False,
    ) -> BlockMask:
        """A mask of the lists by rows. Without seq_lengths the last blocks are whole. Raises ValueError, and
        TypeError for what is no tensor or no int."""
        flag("flex.BlockMask", "compute_q_blocks", compute_q_blocks)
        _check_lists(kv_num_blocks, kv_indices, "kv")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise ValueError("tk.flex.BlockMask: give full_kv_num_blocks and full_kv_indices both, or neither")
        q_block, kv_block = _block_size(BLOCK_SIZE)
        rows, columns = kv_indices.shape[-2:]
        by_column: list[Tensor | None] = [None] * 4
        if compute_q_blocks:
            by_column[:2] = _listed(_dense(kv_num_blocks, kv_indices, columns).mT)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            _check_lists(full_kv_num_blocks, full_kv_indices, "full_kv")
            if compute_q_blocks:
                by_column[2:] = _listed(_dense(full_kv_num_blocks, full_kv_indices, columns).mT)
        by_row = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        lengths = (rows * q_block, columns * kv_block)
        if seq_lengths is not None:
            lengths = shape_of("flex.BlockMask", "seq_lengths", seq_lengths)
            if len(lengths) != 2:
                raise ValueError(
                    f"tk.flex.BlockMask: seq_lengths is {seq_lengths}, must be two: of queries and of keys"
                )
        return cls._of((*by_row, *by_column), lengths, (q_block, kv_block), mask_mod, is_derived)

    @classmethod
    def _of(
        cls,
        lists: Sequence[Tensor | None],
        seq_lengths: tuple[int, int],
        block: tuple[int, int],
        mask_mod: MaskMod | None,
        is_derived: bool,
    ) -> BlockMask:
        arguments: Any = (seq_lengths, *lists, block, mask_mod)
        return cls(*arguments, is_derived=is_derived)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, length of queries, length of keys)."""
        return (*self.kv_num_blocks.shape[:-1], *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        return self.kv_num_blocks.device

    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    def sparsity(self) -> float:
        """How many blocks are never visited, in percent."""
        blocks = int(self.kv_num_blocks.sum())
        if self.full_kv_num_blocks is not None:
            blocks += int(self.full_kv_num_blocks.sum())
        total = self.kv_indices.numel()
        return 100 * (1 - blocks / total) if total else 0.0

    def to_dense(self) -> Tensor:
        """int32 ``[B, H, rows, columns]``: 1 for each block that is visited."""
        return (self.kinds() > 0).int()

    def kinds(self) -> Tensor:
        """int8 ``[B, H, rows, columns]`` of blocks: 0 masked out, 1 let through in part, 2 entirely."""
        columns = self.kv_indices.shape[-1]
        found = _dense(self.kv_num_blocks, self.kv_indices, columns).to(torch.int8)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            full = _dense(self.full_kv_num_blocks, self.full_kv_indices, columns)
            found = torch.where(full, torch.full((), 2, dtype=torch.int8, device=full.device), found)
        return found

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        lists = tuple(getattr(self, name) for name in LISTS)
        if flag("flex.BlockMask", "flatten", flatten):
            return (*self.seq_lengths, *lists, *self.BLOCK_SIZE, self.mask_mod)
        return (self.seq_lengths, *lists, self.BLOCK_SIZE, self.mask_mod)

    def to(self, device: torch.device | str) -> BlockMask:
        """The lists on another device. What mask_mod captures stays where it is."""
        moved = [x if (x := getattr(self, name)) is None else x.to(device) for name in LISTS]
        return BlockMask._of(moved, self.seq_lengths, self.BLOCK_SIZE, self.mask_mod, self.is_derived)

    # --- Parts and other lengths ---

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some batch entries, heads and rows of query blocks; its mask_mod still means the same positions.

            block_mask[b], block_mask[:, 2:4], block_mask[:, :, row], block_mask[:, :, torch.tensor([1, 3])]

        A number keeps the dimension, of size 1, and the mask is then that entry's whatever b or h it is asked for.
        Rows are counted in blocks; the part's first row is its position 0. Raises IndexError, ValueError, and TypeError
        for what is neither a slice, an int, ints nor a tensor of ints or bools."""
        given = index if isinstance(index, tuple) else (index,)
        if len(given) > 3:
            raise IndexError(f"tk.flex.BlockMask has three dimensions to index (b, h, row), {len(given)} are given")
        padded = (*given, slice(None), slice(None), slice(None))[:3]
        sizes = self.kv_num_blocks.shape
        picks = [_picked(i, n, name) for i, n, name in zip(padded, sizes, ("b", "h", "row"), strict=True)]

        def part(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            for dim, pick in enumerate(picks):
                x = pick.of(x, dim)
            return x

        names = LISTS[:4]
        num, at, full_num, full_at = (part(getattr(self, name)) for name in names)
        assert num is not None and at is not None
        return BlockMask.from_kv_blocks(
            num,
            at,
            full_num,
            full_at,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=_moved(self.mask_mod, picks, self.BLOCK_SIZE[0], self.device),
            seq_lengths=(self._length_of(picks[2], sizes[2]), self.seq_lengths[1]),
            compute_q_blocks=self.q_indices is not None,
            is_derived=self.is_derived,
        )

    def _length_of(self, rows: _Pick, n: int) -> int:
        """The number of queries in some rows; the last of all may be a short one."""
        block = self.BLOCK_SIZE[0]
        chosen = list(range(n))[rows.index] if isinstance(rows.index, slice) else rows.index
        short = n * block - self.seq_lengths[0]
        if short and n - 1 in chosen[:-1]:
            raise ValueError(
                f"tk.flex.BlockMask: its last row of blocks has {block - short} queries, so it can only come last"
            )
        return len(chosen) * block - (short if chosen and chosen[-1] == n - 1 else 0)

    def adjust(self, q_len: int, kv_len: int) -> BlockMask:
        """The mask for other lengths. Shorter ones keep the upper left of the lists; longer ones are worked out anew,
        for which the mask must come of create_block_mask. Raises ValueError, and TypeError for what is no int."""
        for name, value in (("q_len", q_len), ("kv_len", kv_len)):
            if whole("flex.BlockMask.adjust", name, value) < 0:
                raise ValueError(f"tk.flex.BlockMask.adjust: {name} is {value}, must not be negative")
        old_q, old_kv = self.seq_lengths
        if q_len <= old_q and kv_len <= old_kv:
            return self._cropped(q_len, kv_len)
        if not self.is_derived:
            raise ValueError(
                f"tk.flex.BlockMask for lengths {self.seq_lengths} cannot be made longer, to {(q_len, kv_len)}: its "
                "lists were given; make one with create_block_mask"
            )
        assert self.mask_mod is not None
        B, H = self.kv_num_blocks.shape[:2]
        has_full = self.full_kv_num_blocks is not None
        return create_block_mask(
            self.mask_mod, B, H, q_len, kv_len, self.device, self.BLOCK_SIZE, separate_full_blocks=has_full
        )

    _adjust = adjust  # torch's name

    def _cropped(self, q_len: int, kv_len: int) -> BlockMask:
        rows, columns = (-(-n // block) for n, block in zip((q_len, kv_len), self.BLOCK_SIZE, strict=True))
        kinds = self.kinds()[:, :, :rows, :columns]
        return _from_kinds(
            kinds, (q_len, kv_len), self.BLOCK_SIZE, self.mask_mod, self.full_kv_num_blocks is not None, self.is_derived
        )

    # --- Shown ---

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture: full blocks █, partial ones ░, masked ones blank, brought down to grid_size (-1: all of them).
        limit: how many batch entries and heads. Raises TypeError for what is no int."""
        is_pair = isinstance(grid_size, tuple) and len(grid_size) == 2
        given = grid_size if is_pair else (grid_size, grid_size)
        wanted = [whole("flex.BlockMask.to_string", "grid_size", n) for n in given]  # type: ignore[union-attr]
        limit = whole("flex.BlockMask.to_string", "limit", limit)
        kinds = self.kinds()
        n_rows, n_columns = kinds.shape[-2:]
        steps = [max(1, -(-n // w)) if w > 0 else 1 for n, w in zip((n_rows, n_columns), wanted, strict=True)]
        parts = []
        for i, (b, h) in enumerate((b, h) for b in range(kinds.shape[0]) for h in range(kinds.shape[1])):
            if i == limit:
                parts.append(f"... {kinds.shape[0] * kinds.shape[1] - limit} more")
                break
            parts.append(f"({b}, {h})\n{_picture(kinds[b, h], steps)}")
        return "\n".join(parts)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string()}\n)"

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", self.mask_mod)
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={name}, device={self.device})"


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """The blocks that a mask_mod lets through, as torch.nn.attention.flex_attention.create_block_mask.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` -> bool; see tk.flex.mods.
        B, H: batch size and number of query heads; None where the mask does not depend on them.
        device: the default is torch's current accelerator, or "cpu".
        BLOCK_SIZE: of queries and keys; a multiple of 16 on CUDA.
        separate_full_blocks: tell blocks apart that the mask lets through entirely.

    Raises:
        ValueError: sizes that are no sizes. TypeError, tk.UnsupportedError: as of tk.flex_attention for a mod.
    """
    flag("flex.create_block_mask", "separate_full_blocks", separate_full_blocks)
    q_block, kv_block = _block_size(BLOCK_SIZE)
    for name, value in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if (not isinstance(value, int | torch.SymInt) or isinstance(value, bool)) and (
            value is not None or name not in ("B", "H")
        ):
            raise TypeError(f"tk.flex.create_block_mask: {name} must be an int, is {value!r}")
        if isinstance(value, int) and value >= 2**31:  # what a mod is given is int32
            raise ValueError(f"tk.flex.create_block_mask: {name} is {value}, must be less than 2**31")
        if value is not None and value < 0:
            raise ValueError(f"tk.flex.create_block_mask: {name} is {value}, must not be negative")
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    sizes = (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN)
    if torch.compiler.is_dynamo_compiling():
        kinds = _kinds_when_compiled(mask_mod, sizes, (q_block, kv_block), torch.device(device))
    else:
        pair = trace.pair(None, mask_mod)
        device = torch.device(device)
        _refuse_meta(pair, device)
        kinds = evaluators.get(device.type, _blocks)(pair, *sizes, (q_block, kv_block), device)
    return _from_kinds(kinds, (Q_LEN, KV_LEN), (q_block, kv_block), mask_mod, separate_full_blocks, True)


def _refuse_meta(pair: trace.Pair, device: torch.device) -> None:
    for c in pair.captures:
        if c.kind == "tensor" and c.value.device.type == "meta" != device.type:
            raise ValueError(
                f"tk.flex.create_block_mask: {c.name}, which the mask_mod captures, is on meta, the mask on {device}; "
                "move it"
            )


def _blocks(
    pair: trace.Pair, B: int, H: int, q_len: int, kv_len: int, block: tuple[int, int], device: torch.device
) -> Tensor:
    """int8 [B, H, rows, columns] of a mask: 0 nothing, 1 part, 2 all of a block."""
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    found = torch.zeros(B, H, rows, columns, dtype=torch.int8, device=device)
    if not found.numel():
        return found
    per_block = block[0] * block[1]
    at_once = (max(1, _ELEMENTS // (per_block * columns)), max(1, _ELEMENTS // per_block))  # rows, columns
    uses_b, uses_h = (_uses(pair, name) for name in ("b", "h"))
    found = found[: B if uses_b else 1, : H if uses_h else 1]
    for b, h in itertools.product(range(found.shape[0]), range(found.shape[1])):
        for row, column in itertools.product(range(0, rows, at_once[0]), range(0, columns, at_once[1])):
            q = (row * block[0], min(q_len, (row + at_once[0]) * block[0]))
            kv = (column * block[1], min(kv_len, (column + at_once[1]) * block[1]))
            kinds = _kinds(_mask(pair, indices([b], [h], q, kv, device)), block)
            found[b, h, row : row + at_once[0], column : column + at_once[1]] = kinds[0, 0]
    return found.expand(B, H, rows, columns)


def _uses(pair: trace.Pair, argument: str) -> bool:
    return pair.mask is not None and any(n.name == argument and n.users for n in pair.mask.arguments)


def _mask(pair: trace.Pair, at: tuple[Tensor, ...]) -> Tensor:
    full = tuple(max(sizes) if all(sizes) else 0 for sizes in zip(*(x.shape for x in at), strict=True))
    if pair.mask is None:
        return torch.ones(full, dtype=torch.bool, device=at[0].device)
    return evaluate(pair.mask, at, pair.values).expand(full)


def _kinds(is_let: Tensor, block: tuple[int, int]) -> Tensor:
    """[B, H, Q, KV] -> int8 [B, H, rows, columns]; positions past the ends count as masked."""
    B, H, q_len, kv_len = is_let.shape
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    pad = (0, columns * block[1] - kv_len, 0, rows * block[0] - q_len)
    padded = torch.nn.functional.pad(is_let, pad) if any(pad) else is_let
    by_row = padded.view(torch.uint8).reshape(B, H, rows, block[0], -1)  # amax of bytes is ten times as fast as any
    some, all_ = (x.reshape(B, H, rows, columns, block[1]) for x in (by_row.amax(3), by_row.amin(3)))
    return (some.amax(4) + all_.amin(4)).to(torch.int8)


def _kinds_when_compiled(
    mask_mod: MaskMod, sizes: tuple[int, int, int, int], block: tuple[int, int], device: torch.device
) -> Tensor:
    """The kinds of blocks in a graph of torch.compile, which sees through the mask_mod itself and fuses mask and
    blocks."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    mapped = mask_mod
    for dim in (3, 2, 1, 0):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if d == dim else None for d in range(4)))
    positions = [torch.arange(n, dtype=torch.int32, device=device) for n in sizes]
    with TransformGetItemToIndex(), _IntsAsTensors():
        is_let = mapped(*positions)
    if is_let.dtype is not torch.bool:
        raise TypeError(f"tk.flex.create_block_mask: mask_mod returns {is_let.dtype}; a mask must be bool")
    return _kinds(is_let.to(torch.uint8), block)  # torch 2.11's Inductor has no view of bools


_ARITHMETIC = frozenset({
    "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__floordiv__", "__truediv__", "add", "sub", "subtract",
    "mul", "multiply", "div", "divide", "true_divide", "floor_divide",
})  # fmt: skip


class _IntsAsTensors(TorchFunctionMode):
    """torch.vmap over fake tensors fails where arithmetic has an int that torch.compile holds as a symbol: it hands the
    symbol to a conversion of tensors. So arithmetic is given tensors there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ARITHMETIC and not kwargs:
            args = tuple([torch.scalar_tensor(x, dtype=torch.int64) if type(x) is int else x for x in args])
        return func(*args, **(kwargs or {}))


# --- Lists ---


def _from_kinds(
    kinds: Tensor,
    seq_lengths: tuple[int, int],
    block: tuple[int, int],
    mask_mod: MaskMod | None,
    separate_full_blocks: bool,
    is_derived: bool,
) -> BlockMask:
    partial = (kinds == 1) if separate_full_blocks else (kinds > 0)
    lists: list[Tensor | None] = [*_listed(partial), None, None, *_listed(partial.mT), None, None]
    if separate_full_blocks:
        lists[2:4] = _listed(kinds == 2)
        lists[6:8] = _listed((kinds == 2).mT)
    return BlockMask._of(lists, seq_lengths, block, mask_mod, is_derived)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """bool [..., rows, columns] -> how many in each row, and which: the chosen ones first, in order."""
    number = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return number.contiguous(), order.contiguous()


def _dense(num_blocks: Tensor, at: Tensor, columns: int) -> Tensor:
    """:func:`_listed` undone: bool [..., rows, columns]."""
    is_used = torch.arange(at.shape[-1], device=at.device) < num_blocks.unsqueeze(-1)
    target = torch.where(is_used, at, columns).long()
    found = torch.zeros(*at.shape[:-1], columns + 1, dtype=torch.bool, device=at.device)
    return found.scatter_(-1, target, True)[..., :columns]


def _check_lists(num_blocks: Tensor, at: Tensor, name: str) -> None:
    for of, x in (("num_blocks", num_blocks), ("indices", at)):
        if not isinstance(x, Tensor):
            raise TypeError(f"tk.flex.BlockMask: {name}_{of} must be a Tensor, is {type(x).__name__}")
        if (refused := errors.not_dense("flex.BlockMask", f"{name}_{of}", x)) is not None:
            raise refused
    if num_blocks.dim() != 3 or at.dim() != 4 or num_blocks.shape != at.shape[:3]:
        raise ValueError(
            f"tk.flex.BlockMask: {name}_num_blocks is {list(num_blocks.shape)}, {name}_indices {list(at.shape)}; they "
            "must be [B, H, rows] and [B, H, rows, columns]"
        )


def _block_size(given: int | tuple[int, int]) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, list | tuple) else (given, given)
    are_ints = all(isinstance(n, int | torch.SymInt) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not are_ints or not all(n > 0 for n in pair):
        raise ValueError(f"tk.flex: BLOCK_SIZE is {given}, must be a positive number or two: of queries and of keys")
    return pair


def _picture(kinds: Tensor, steps: Sequence[int]) -> str:
    lines = []
    for row in range(0, kinds.shape[0], steps[0]):
        line = ""
        for column in range(0, kinds.shape[1], steps[1]):
            part = kinds[row : row + steps[0], column : column + steps[1]]
            line += "██" if bool((part == 2).all()) else "░░" if bool((part > 0).any()) else "  "
        lines.append(line)
    return "\n".join(lines)


# --- Slicing ---


class _Pick:
    """An index of one dimension: a slice of positive steps, or a list of places. name: of the dimension."""

    def __init__(self, index: slice | list[int], is_one: bool):
        self.index = index
        self.is_one = is_one

    def of(self, x: Tensor, dim: int) -> Tensor:
        if isinstance(self.index, slice):
            return x[(slice(None),) * dim + (self.index,)]
        return x.index_select(dim, torch.tensor(self.index, dtype=torch.int64, device=x.device))


def _picked(index: Any, n: int, name: str) -> _Pick:
    if isinstance(index, slice):
        start, stop, step = index.indices(n)
        if step < 1:
            raise ValueError(f"tk.flex.BlockMask: a step of {step} along {name}; it must be positive")
        n_places = len(range(start, stop, step))
        return _Pick(slice(start, max(start, stop), step), is_one=n_places == 1 and n > 1)
    places = index.tolist() if isinstance(index, Tensor) else index
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        places = [i for i, chosen in enumerate(places) if chosen]
    is_several = isinstance(places, Iterable) and not isinstance(places, str | bytes)
    listed = [_place(i, n, name) for i in (places if is_several else [places])]
    if len(listed) == 1:
        return _Pick(slice(listed[0], listed[0] + 1, 1), is_one=n > 1)
    return _Pick(listed, is_one=False)


def _place(index: Any, n: int, name: str) -> int:
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise TypeError(
            f"tk.flex.BlockMask: index {index!r} along {name}, must be an int; choose by bools with a tensor of them"
        )
    i = operator.index(index)
    if not -n <= i < n:
        raise IndexError(f"tk.flex.BlockMask: index {i} along {name}, which has {n}")
    return i % n


def _moved(mask_mod: MaskMod | None, picks: Sequence[_Pick], block: int, device: torch.device) -> MaskMod | None:
    """mask_mod with the places that a part's own b, h and q_idx stand for."""
    if mask_mod is None:
        return None
    steps = [_step(pick, device) for pick in picks[:2]]
    rows = _row_step(picks[2], block, device)
    if not any((*steps, rows)):
        return mask_mod

    def part(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if steps[0]:
            b = steps[0](b)
        if steps[1]:
            h = steps[1](h)
        if rows:
            q_idx = rows(q_idx)
        return mask_mod(b, h, q_idx, kv_idx)

    part.__name__ = f"part_of_{getattr(mask_mod, '__name__', type(mask_mod).__name__)}"
    return part


def _step(pick: _Pick, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """A map from a part's index to the whole's; None where they are the same."""
    if isinstance(pick.index, list):
        table = torch.tensor(pick.index, dtype=torch.int32, device=device)
        return lambda i: table[i]
    start, step = pick.index.start, pick.index.step
    if pick.is_one:
        return lambda i: torch.full_like(i, start)
    if step != 1:
        return lambda i: i * step + start
    return (lambda i: i + start) if start else None


def _row_step(pick: _Pick, block: int, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    if isinstance(pick.index, list):
        table = torch.tensor(pick.index, dtype=torch.int32, device=device)
        return lambda q: table[q // block] * block + q % block
    start, step = pick.index.start * block, pick.index.step
    if step != 1:
        return lambda q: q // block * (step * block) + q % block + start
    return (lambda q: q + start) if start else None


# --- As a tree of tensors ---


def _flatten(mask: BlockMask) -> tuple[list[Any], Any]:
    """Tensors that the mask_mod captures are leaves too."""
    captured = trace.tensors_of(mask.mask_mod)
    present = tuple(name for name in LISTS if getattr(mask, name) is not None)
    leaves = [*(getattr(mask, name) for name in present), *captured]
    return leaves, (present, mask.seq_lengths, mask.BLOCK_SIZE, mask.is_derived, _Mod(mask.mask_mod))


def _unflatten(leaves: Any, context: Any) -> BlockMask:
    present, seq_lengths, block, is_derived, held = context
    leaves = list(leaves)
    lists = dict.fromkeys(LISTS) | dict(zip(present, leaves, strict=False))
    mask_mod = trace.with_tensors(held.mod, leaves[len(present) :])
    return BlockMask._of(list(lists.values()), seq_lengths, block, mask_mod, is_derived)


def _flatten_with_keys(mask: BlockMask) -> tuple[list[Any], Any]:
    leaves, context = _flatten(mask)
    names = [*context[0], *(f"captured_{i}" for i in range(len(leaves) - len(context[0])))]
    return [(_pytree.GetAttrKey(n), leaf) for n, leaf in zip(names, leaves, strict=True)], context


class _Mod:
    """A mask_mod in a tree's structure: equal where it would be traced alike."""

    def __init__(self, mod: MaskMod | None):
        self.mod = mod

    def _key(self) -> Any:
        return trace.structure_of(self.mod)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mod) and (self.mod is other.mod or self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())


_pytree.register_pytree_node(
    BlockMask,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="tk.flex.BlockMask",
)
