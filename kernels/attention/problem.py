"""What a call of an attention op brings, and the records that its kernels share. docs/attention-kernels.md has the op.

One pair of mods is one op, `flex_<fingerprint>`, and one for its gradients, `flex_<fingerprint>_backward`. What is
absent — a block mask, lengths, pages, sinks — is a tensor without elements: [0, 0, 0] block counts, [0] lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_
from typing import Any

from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, maximum, select, tensors
from tk.aot.spec import (
    DTYPES,
    ITEMSIZE,
    Arg,
    Bundle,
    Config,
    Const,
    Constraint,
    Int,
    Op,
    Output,
    Param,
    Point,
    Pointer,
    Selector,
    require,
)
from tk.kernels.attention.bundles import BlockStrides, Lists, ListStrides, Mask, RowStrides, Strides, bundle

# Larger lengths and bands would not leave room for their sums in 32 bits.
MAX_LENGTH = 2**29
PRECISIONS = ("ieee", "tf32")

# Layouts of key and value. aligned: rows contiguous and on 16 bytes; paged: the same, in pages; strided: anything.
LAYOUTS = ("aligned", "paged", "strided")


@dataclass(frozen=True)
class Capture:
    """A run-time argument that a mod captured. kind: "tensor", "float" or "int". grad: its gradient is worked out.
    is_per_score: each element is read by one score at most, so that its gradient is written and no sum. keys: the
    dimension that is read at kv_idx, where other queries read other elements."""

    name: str
    kind: str
    dtype: str = ""
    rank: int = 0
    grad: bool = False
    is_per_score: bool = False
    keys: int | None = None

    @property
    def has_two_widths(self) -> bool:
        """Integers of 64 bits: kernels read those of 32 as well, at their own width (operands.load_integers)."""
        return self.kind == "tensor" and self.dtype == "i64"


@dataclass(frozen=True)
class Head:
    """Head sizes of query and key, and of value, as a tile has them. exact: the call's are the same."""

    qk: int
    v: int
    exact: bool

    def __str__(self) -> str:
        return f"{self.qk}x{self.v}" if self.exact else f"to_{self.qk}x{self.v}"

    def covers(self, other: Head) -> bool:
        """Whether a kernel for these takes a call that one for `other` takes."""
        return self == other or (not self.exact and self.qk >= other.qk and self.v >= other.v)

    @property
    def size(self) -> int:
        """The larger of the two."""
        return max(self.qk, self.v)

    @property
    def is_wide(self) -> bool:
        """Past what fits into registers beside a tile of scores: such heads have the kernels for every layout alone."""
        return self.size > 256


def distinct(configs: Iterable[Config]) -> tuple[Config, ...]:
    """Each once."""
    return tuple({c.name: c for c in configs}.values())


def of_heads(table: Mapping[int, tuple[int, int, int, int]], heads: Sequence[Head]) -> list[tuple[int, int, int, int]]:
    """Settings of `table`, which has them by the larger head size."""
    return [table[h.size] for h in heads if h.size in table]


def takes_layout(layout: str, head: Head, heads: Sequence[Head]) -> bool:
    """Whether there is a kernel: one for every layout of the largest of `heads`, and of the largest not wide."""
    if layout != "strided":
        return not head.is_wide
    return head == heads[-1] or head == next((h for h in reversed(heads) if not h.is_wide), None)


# The tensors of an op before what is captured, with their ranks.
TENSORS: Mapping[str, int] = {
    "query": 4, "key": 4, "value": 4,
    "kv_num_blocks": 3, "kv_indices": 4, "full_kv_num_blocks": 3, "full_kv_indices": 4,
    "q_num_blocks": 3, "q_indices": 4, "full_q_num_blocks": 3, "full_q_indices": 4,
    "kv_lengths": 1, "page_table": 2, "sinks": 1,
}  # fmt: skip
BLOCK_LISTS = tuple(name for name in TENSORS if name.endswith(("_num_blocks", "_indices")))
_INTEGERS = (*BLOCK_LISTS, "kv_lengths", "page_table")  # of 32 bits; other tensors without a dtype of their own: fp32
# band_left, band_right, band_exact: without a block mask keys in [q - left, q + right] are walked; exact: the mask is
# this band, so that inside of it the mask function need not be asked.
INTS = ("q_block", "kv_block", "band_left", "band_right", "band_exact", "precision")
# After the captured numbers, with defaults. grad_captures: of the backward: whether gradients of captured tensors are
# wanted. negative_scale: whether it is, which expressions cannot see of a float. max_scores: of the forward: whether
# lse is twice as wide, with the largest score of each row behind those of a head.
OPTIONS = {"grad_captures": 1, "negative_scale": 0, "max_scores": 0}


@dataclass(frozen=True)
class Problem:
    """The arguments of one pair's ops. dtypes: of query, key, value. text: of the traced pair, by which a call
    whose numbers are spelled out finds it."""

    name: str
    captures: tuple[Capture, ...]
    dtypes: tuple[str, ...]
    text: str = ""

    # --- Names ---

    @cached_property
    def tensor_captures(self) -> tuple[Capture, ...]:
        return tuple(c for c in self.captures if c.kind == "tensor")

    @cached_property
    def grad_captures(self) -> tuple[Capture, ...]:
        return tuple(c for c in self.tensor_captures if c.grad)

    @cached_property
    def summed_captures(self) -> tuple[Capture, ...]:
        """Those whose gradients are sums (gradients.py)."""
        return tuple(c for c in self.grad_captures if not c.is_per_score)

    def numbers(self, kind: str) -> tuple[str, ...]:
        return tuple(c.name for c in self.captures if c.kind == kind)

    # --- The ops ---

    @cached_property
    def op(self) -> Op:
        """Forward: -> out [B, H, M, Dv], lse fp32 [B, H, M]; with max_scores [B, H, 2 M]."""
        names = [*TENSORS, *(c.name for c in self.tensor_captures)]
        return self._op(self.name, names, ["out", "lse"], self._outputs)

    @cached_property
    def backward_op(self) -> Op:
        """grad_0 and grad_1 are the gradients of out and lse. -> those of query, key, value, sinks, and of the captured
        tensors that have one."""
        names = ["grad_0", "grad_1", *TENSORS, "result_0", "result_1", *(c.name for c in self.tensor_captures)]
        grads = ["grad_query", "grad_key", "grad_value", "grad_sinks", *(f"grad_{c.name}" for c in self.grad_captures)]
        return self._op(f"{self.name}_backward", names, grads, self._backward_outputs)

    def _op(self, name: str, inputs: Sequence[str], outputs: Sequence[str], describe: object) -> Op:
        named = tensors(*inputs, *outputs)
        by_name = {t.name: t for t in named}
        ranks = TENSORS | {c.name: c.rank for c in self.tensor_captures}
        ranks = {"grad_0": 4, "grad_1": 3, "result_0": 4, "result_1": 3} | ranks
        floats = ("scale", *self.numbers("float"))
        ints = (*INTS, *self.numbers("int"), *OPTIONS)
        params = [Param(n, "tensor", rank=ranks[n]) for n in inputs]
        params += [Param(n, "float") for n in floats] + [Param(n, "int", default=OPTIONS.get(n)) for n in ints]
        bare = Op(name, named, ints, floats, {}, {}, (), params=tuple(params))
        op = replace(bare, locals=self._locals(by_name))
        selectors = {
            "dtype": Selector(op.local("dtype"), len(self.dtypes)),
            "precision": Selector(select(by_name["query"].dtype == DTYPES["fp32"], op.int("precision"), 0), 2),
        }
        if self.grad_captures and "grad_0" in inputs:
            selectors["captures"] = Selector(op.int("grad_captures") != 0, 2)
        return replace(
            op,
            dims=("B", "H", "M", "N"),
            selectors=selectors,
            outputs=tuple(describe(op)),  # type: ignore[operator]
            checks=tuple(self._checks(op)),
            meta=self._meta(inputs),
        )

    def _locals(self, t: Mapping[str, Tensor]) -> dict[str, Expr]:
        q, k, pages = t["query"], t["key"], t["page_table"]
        has_pages = pages.size(0) > 0
        return {
            "B": q.size(0), "H": q.size(1), "M": q.size(2),
            "N": select(has_pages, pages.size(1) * k.size(2), k.size(2)),
            "D": q.size(3), "DV": t["value"].size(3), "H_kv": k.size(1), "dtype": dtype_number(q, self.dtypes),
            "has_pages": has_pages,
            "page_size": select(has_pages, k.size(2), MAX_LENGTH),
            "has_lists": t["kv_num_blocks"].size(0) > 0,
            "group": q.size(1) // maximum(k.size(1), 1),
        }  # fmt: skip

    def _outputs(self, op: Op) -> list[Output]:
        q = tensor(op, "query")
        B, H, M, DV = (op.local(n) for n in ("B", "H", "M", "DV"))
        width = M + self.max_at(op)
        return [
            Output(q.dtype, (B, H, M, DV), rows_strides(q, DV)),  # as the query lies: a transpose back costs no copy
            Output(DTYPES["fp32"], (B, H, width), (H * width, width, as_expr(1))),
        ]

    def max_at(self, op: Op) -> Expr:
        """The place in a head's statistics where the largest scores begin; 0 where they are not wanted."""
        return select(op.int("max_scores") != 0, op.local("M"), 0)

    def _backward_outputs(self, op: Op) -> list[Output]:
        found = [_rows_like(tensor(op, n)) for n in ("query", "key", "value")]
        return [*found, *(_dense_like(tensor(op, n), rank) for n, rank in self.dense_grads)]

    @property
    def dense_grads(self) -> tuple[tuple[str, int], ...]:
        """What has a gradient besides query, key and value, with its rank."""
        return (("sinks", 1), *((c.name, c.rank) for c in self.grad_captures))

    # --- Checks ---

    def _checks(self, op: Op) -> list[Constraint]:
        found = [*self._shape_checks(op), *self._list_checks(op), *self._optional_checks(op)]
        for c in self.tensor_captures:
            dtype = tensor(op, c.name).dtype
            if c.has_two_widths:
                is_right = (dtype == DTYPES["i64"]) | (dtype == DTYPES["i32"])
                found.append(require(is_right, f"captured {c.name} must be i64 or i32"))
            else:
                found.append(require(dtype == DTYPES[c.dtype], f"captured {c.name} must be {c.dtype}"))
        return found

    def _shape_checks(self, op: Op) -> list[Constraint]:
        q, k, v = (tensor(op, n) for n in ("query", "key", "value"))
        B, H, has_pages = (op.local(n) for n in ("B", "H", "has_pages"))
        names = " or ".join(self.dtypes)
        return [
            require(op.local("dtype") >= 0, f"query must be of dtype {names}"),
            require((k.dtype == q.dtype) & (v.dtype == q.dtype), "key and value must have the dtype of query"),
            require(k.size(3) == q.size(3), "key must have the head size of query (dimension 3)"),
            require((q.size(3) > 0) & (v.size(3) > 0), "head sizes must not be 0"),
            require(
                (k.size(0) == v.size(0)) & (k.size(1) == v.size(1)) & (k.size(2) == v.size(2)),
                "key and value must agree in batch, heads and length (dimensions 0 to 2)",
            ),
            require(
                has_pages | (k.size(0) == B) | (k.size(0) == 1), "key must have the batch size of query, or 1"
            ),
            require((k.size(1) > 0) & (H % maximum(k.size(1), 1) == 0), "query's heads must be a multiple of key's"),
            require((op.local("M") <= MAX_LENGTH) & (op.local("N") <= MAX_LENGTH), f"lengths must be <= {MAX_LENGTH}"),
            require((op.int("precision") >= 0) & (op.int("precision") <= 1), "precision must be 0 (ieee) or 1 (tf32)"),
        ]  # fmt: skip

    def _list_checks(self, op: Op) -> list[Constraint]:
        """A block mask that does not cover the queries must not read as no mask."""
        B, H, M, N = (op.local(n) for n in ("B", "H", "M", "N"))
        q_block, kv_block = op.int("q_block"), op.int("kv_block")
        found = [
            require((q_block > 0) & (kv_block > 0), "block sizes of a mask must be positive"),
            require((op.int("band_left") >= 0) & (op.int("band_right") >= 0)
                    & (op.int("band_left") <= MAX_LENGTH) & (op.int("band_right") <= MAX_LENGTH),
                    f"band_left and band_right must be 0 to {MAX_LENGTH}"),
        ]  # fmt: skip
        for prefix, rows in (("kv", ceil_div(M, q_block)), ("q", ceil_div(N, kv_block))):
            for full in ("", "full_"):
                counts, indices = (tensor(op, f"{full}{prefix}_{n}") for n in ("num_blocks", "indices"))
                name = f"{full}{prefix}_num_blocks"
                absent = counts.size(0) == 0
                fits = (counts.size(2) >= rows) & ((counts.size(0) == 1) | (counts.size(0) == B))
                fits = fits & ((counts.size(1) == 1) | (counts.size(1) == H))
                same = as_expr(1)
                for d in range(3):
                    same = same & (indices.size(d) == counts.size(d))
                found += [
                    require((counts.dtype == 3) & (indices.dtype == 3), f"{name} and its indices must be int32"),
                    require(absent | fits,
                            f"{name} must be [1 or batch, 1 or heads, at least the blocks of the sequence]"),
                    require(same | absent, f"indices of {name} must have its sizes in front"),
                ]  # fmt: skip
        partial, full, by_key, full_by_key = (
            tensor(op, n).size(0) > 0
            for n in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
        )
        found.append(require(partial | ~full, "full_kv_num_blocks needs kv_num_blocks"))
        if op.name.endswith("_backward"):
            message = "a block mask needs its lists by key (q_num_blocks, full_q_num_blocks) too for gradients"
            found.append(require((partial == by_key) & (full == full_by_key), message))
        return found

    def _optional_checks(self, op: Op) -> list[Constraint]:
        lengths, pages, sinks = (tensor(op, n) for n in ("kv_lengths", "page_table", "sinks"))
        B, H = op.local("B"), op.local("H")
        return [
            require((lengths.dtype == 3) & (pages.dtype == 3), "kv_lengths and page_table must be int32"),
            require((lengths.size(0) == 0) | (lengths.size(0) == B), "kv_lengths must be [batch]"),
            require((pages.size(0) == 0) | (pages.size(0) == B), "page_table must be [batch, pages]"),
            require((sinks.dtype == DTYPES["fp32"]) | (sinks.size(0) == 0), "sinks must be float32"),
            require((sinks.size(0) == 0) | (sinks.size(0) == H), "sinks must be [heads]"),
        ]

    # --- Meta ---

    def _meta(self, inputs: Sequence[str]) -> str:
        """There is no recorded graph and no gradient: torch.ops.tk.flex_attention, which calls these ops, has them."""
        signature = dict.fromkeys(inputs, "T[]")
        meta = dict(doc="Attention with a pair of mods.", signature=signature, graphs=[], backward=None, flex=self.text)
        return json.dumps(meta, sort_keys=True)

    # --- Arguments that several kernels have ---

    def captured(self, op: Op) -> Bundle:
        """What a printed mod unpacks: a tensor's address, sizes and strides; a number."""
        found: dict[str, Arg] = {}
        for c in self.captures:
            if c.kind == "tensor":
                t = tensor(op, c.name)
                found[c.name] = Pointer(t, "i32" if c.has_two_widths else c.dtype, aligned=False)
                if c.has_two_widths:
                    found[f"{c.name}_words"] = Int(select(t.dtype == DTYPES["i64"], 2, 1))
                found |= {f"{c.name}_size_{d}": Int(t.size(d)) for d in range(c.rank)}
                found |= {f"{c.name}_stride_{d}": Int(t.stride(d), "i64") for d in range(c.rank)}
            elif c.kind == "float":
                found[c.name] = op.float(c.name)
            else:
                found[c.name] = Int(op.int(c.name))
        return bundle("Captures", found)

    def pairs(self, op: Op) -> Expr | None:
        """Whether neighbours along keys lie together in all that is read so, and begin on the size of two elements;
        None where nothing is."""
        found = [_has_pairs(tensor(op, c.name), c) for c in self.tensor_captures if c.keys is not None]
        return reduce(and_, found) if found else None

    def pointer(self, op: Op, name: str) -> Pointer:
        """The pointer to a tensor whose layout nothing is known of."""
        return Pointer(tensor(op, name), "i32" if name in _INTEGERS else "fp32", aligned=False)

    def rows(self, op: Op, name: str, point: Point) -> Pointer:
        """The address of a [batch, heads, rows, head size] tensor."""
        return Pointer(tensor(op, name), point.dtype, point.layout != "strided")

    def strides(self, op: Op, name: str, point: Point) -> Strides:
        t, is_aligned = tensor(op, name), point.layout != "strided"
        outer = [Int(t.stride(d), "i64", divisible=is_aligned) for d in range(3)]
        return Strides(*outer, Const(1) if is_aligned else Int(t.stride(3), "i64"))

    def row_strides(self, op: Op, name: str) -> RowStrides:
        t = tensor(op, name)
        return RowStrides(*(Int(t.stride(d), "i64") for d in range(3)))

    def sizes(self, op: Op, names: Sequence[str], point: Point) -> dict[str, Arg]:
        """B_kv: 1 where there are no keys, since sizes are divided by it."""
        known: dict[str, Arg] = {n: Int(op.local(n)) for n in ("B", "H", "H_kv", "M", "N", "group")}
        known |= {n: Int(op.local(n), divisible=point.layout != "strided") for n in ("D", "DV")}
        known |= {"B_kv": Int(maximum(tensor(op, "key").size(0), 1)), "scale": op.float("scale")}
        return {n: known[n] for n in names}

    def mask(self, op: Op) -> Mask:
        return Mask(*(Int(op.int(n)) for n in Mask._fields))

    def lists(self, op: Op, side: str) -> Lists:
        """Addresses of one side's block lists. side: "kv" or "q"."""
        names = (f"{full}{side}_{what}" for full in ("", "full_") for what in ("num_blocks", "indices"))
        return Lists(*(self.pointer(op, name) for name in names))

    def list_strides(self, op: Op, side: str, width: str = "i64") -> BlockStrides:
        """width: of strides, an integer's dtype."""

        def of_list(prefix: str) -> ListStrides:
            counts, indices = (tensor(op, f"{prefix}{side}_{what}") for what in ("num_blocks", "indices"))
            strides = [*(counts.stride(d) for d in range(3)), *(indices.stride(d) for d in range(4))]
            return ListStrides(*(Int(s, width) for s in strides), Int(counts.size(0)), Int(counts.size(1)))

        return BlockStrides(of_list(""), of_list("full_"))

    def optional(self, op: Op) -> dict[str, Arg]:
        """The arguments of kv_lengths, page_table and sinks."""
        lengths, pages, sinks = (tensor(op, n) for n in ("kv_lengths", "page_table", "sinks"))
        return dict(
            stride_length=Int(lengths.stride(0), "i64"),
            stride_sink=Int(sinks.stride(0), "i64"),
            stride_page_b=Int(pages.stride(0), "i64"),
            stride_page_p=Int(pages.stride(1), "i64"),
            page_size=Int(op.local("page_size")),
            has_lengths=Int(lengths.size(0) > 0),
            has_pages=Int(op.local("has_pages")),
            has_sinks=Int(sinks.size(0) > 0),
        )

    # --- Constraints ---

    def constraints(self, op: Op, point: Point, aligned: Sequence[str]) -> tuple[Constraint, ...]:
        """aligned: the tensors whose rows the layout promises to be contiguous and on 16 bytes."""
        # The key has chosen by dtype already: it stands here for people (tk.flex.own_ops), as all that a kernel takes.
        found = [require(op.local("dtype") == self.dtypes.index(point.dtype), f"operands of {point.dtype}")]
        found.append(self._fits_head(op, point.head))
        if point.layout == "aligned":
            found.append(require(~op.local("has_pages"), "key and value without pages"))
        if point.layout == "paged":
            found.append(require(op.local("has_pages"), "key and value in pages"))
        if point.layout != "strided":
            even = (op.local("D") % 16 == 0) & (op.local("DV") % 16 == 0)
            found.append(require(even | point.head.exact, "head sizes that are multiples of 16"))
            for name in aligned:
                t = tensor(op, name)
                holds = (t.alignment >= 16) & ((t.stride(3) == 1) | (t.size(3) == 1))
                for d in range(3):
                    holds = holds & (t.stride(d) % 16 == 0)
                found.append(require(holds, f"rows of {name} contiguous, on 16 bytes, multiples of 16 elements apart"))
        return tuple(found)

    def _fits_head(self, op: Op, head: Head) -> Constraint:
        D, DV = op.local("D"), op.local("DV")
        if head.exact:
            return require((D == head.qk) & (DV == head.v), f"head sizes {head.qk} and {head.v}")
        return require((D <= head.qk) & (DV <= head.v), f"head sizes up to {head.qk} and {head.v}")

    def axes(self, heads: tuple[Head, ...], layouts: tuple[str, ...], tf32: bool = False) -> dict[str, Sequence[Any]]:
        """The axes of a kernel's grid. tf32: it has a variant for that precision."""
        precisions = PRECISIONS if tf32 and "fp32" in self.dtypes else PRECISIONS[:1]
        return {"dtype": self.dtypes, "precision": precisions, "head": heads, "layout": layouts}

    def serves(self, point: Point) -> dict[str, tuple[int, ...]]:
        return {"dtype": (self.dtypes.index(point.dtype),), "precision": (PRECISIONS.index(point.precision),)}

    def makes_sense(self, point: Point) -> bool:
        """Precision is a choice of fp32 alone; what takes every layout takes every head size of its class too."""
        if point.precision == "tf32" and point.dtype != "fp32":
            return False
        return not (point.layout == "strided" and point.head.exact)


def dtype_number(t: Tensor, dtypes: Sequence[str]) -> Expr:
    """Which of `dtypes` it has, -1 for another."""
    number = as_expr(-1)
    for n, dtype in reversed(list(enumerate(dtypes))):
        number = select(t.dtype == DTYPES[dtype], n, number)
    return number


def tensor(op: Op, name: str) -> Tensor:
    return next(t for t in op.tensors if t.name == name)


def _has_pairs(t: Tensor, c: Capture) -> Expr:
    assert c.keys is not None
    others = [t.stride(d) for d in range(c.rank) if d != c.keys]
    is_even = [n % 2 == 0 for n in (t.size(c.keys), *others)]
    return reduce(and_, is_even, (t.alignment >= 2 * ITEMSIZE[c.dtype]) & (t.stride(c.keys) == 1))


def _dense_like(t: Tensor, rank: int) -> Output:
    """Row-major, of the size and dtype of an input."""
    strides = [as_expr(1)]
    for d in range(rank - 1, 0, -1):
        strides.insert(0, strides[0] * t.size(d))
    return Output(t.dtype, tuple(t.size(d) for d in range(rank)), tuple(strides[:rank]))


def _rows_like(t: Tensor) -> Output:
    """Dense, of the sizes of a [batch, heads, rows, head size] tensor, heads inside of rows where it has them so."""
    return Output(t.dtype, tuple(t.size(d) for d in range(4)), rows_strides(t, t.size(3)))


def rows_strides(t: Tensor, columns: Expr) -> tuple[Expr, Expr, Expr, Expr]:
    heads, rows = t.size(1), t.size(2)
    inner = (t.stride(1) < t.stride(2)) & (heads > 1)
    return (heads * rows * columns, select(inner, columns, rows * columns), select(inner, heads * columns, columns),
            as_expr(1))  # fmt: skip


# --- Predicted time ---


def tile_time(rows: int, cols: int, head: Head, itemsize: int, slowdown: int = 1) -> int:
    """Picoseconds of one tile on one multiprocessor: its products at some 3 TF, or its keys and values at 36 GB/s."""
    flops = 2 * rows * cols * (head.qk + head.v) * (1 if itemsize == 2 else 8)
    return max(flops // 3, cols * (head.qk + head.v) * itemsize * 28) * slowdown
