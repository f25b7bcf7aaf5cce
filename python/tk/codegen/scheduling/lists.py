"""Launches over lists of tensors: a program finds its place in a table, and has a chunk of that place's elements."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import sympy

from tk.aot.expr import Expr, as_expr, ceil_div
from tk.aot.spec import (
    Arg,
    Int,
    Launch,
    Op,
    Pointer,
    Scratch,
)
from tk.codegen import ir, source
from tk.codegen.errors import TraceError
from tk.codegen.lowering.lists import is_of
from tk.codegen.printing import debug as debug_variant
from tk.codegen.printing.body import Body
from tk.codegen.printing.scalars import COMBINE, TL_DTYPES, identity, literal
from tk.codegen.tile import STRIDED, Access, Tile
from tk.codegen.tracing.arguments import LEADING, letter
from tk.codegen.tracing.lists import PLACES

CHUNK = 4096  # elements that a program has: csrc/ops/lists.h
BLOCK = 1024
LANES = 256  # places of a program that has one value of each


def parts_of(kernel: ir.Kernel, names: Iterator[str]) -> Iterator[str]:
    """Scratch memory for what the chunks come to."""
    if is_of(kernel, LEADING):
        yield from (next(names) for v in kernel.values if v.op == "reduce")


@dataclass
class ListLaunch:
    """A kernel's launches: a program for each chunk of each place; where that reduces, one for each place behind; a
    lane for each place where nothing has a size; or one program for all places, which reduces over them.

    lists, columns: the names of the op's, and of what the table has. per_place: the buffers that hold a value for each
    place. scratch: the names of the plan's buffers. partial: those of the kernel's own for what its chunks come to."""

    kernel: ir.Kernel
    op: Op
    lists: Sequence[str]
    columns: Sequence[str]
    per_place: frozenset[str]
    aligned: bool
    scratch: Sequence[str]
    partial: Sequence[str]
    debug: bool = False

    @property
    def reduces(self) -> list[ir.Value]:
        return [v for v in self.kernel.values if v.op == "reduce"]

    @property
    def is_per_place(self) -> bool:
        return not any(a.size == ir.LEADING for a in self.kernel.axes)

    def launches(self) -> Iterator[Launch]:
        per_chunk = self.op.local("chunks")
        if is_of(self.kernel, PLACES):
            yield self._launch("", self._over_places, as_expr(1))
        elif self.is_per_place:
            yield self._launch("", self._per_place, ceil_div(self.op.local(PLACES), LANES))
        elif self.reduces:
            yield self._launch("_chunks", self._chunk_parts, per_chunk)
            yield self._launch("_places", self._place_parts, self.op.local(PLACES))
        else:
            yield self._launch("", self._per_chunk, per_chunk)

    def _launch(self, suffix: str, body: Callable[[dict[str, Arg]], list[str]], grid: Expr) -> Launch:
        ints: dict[str, Arg] = {}
        lines = body(ints)
        text_of_body = "\n".join(lines)
        numbers = {f"arg_{v.data}": self.op.float(v.data, "fp64") for v in self.kernel.values if v.op == "number"}
        table = next(t for t in self.op.tensors if t.name == self.lists[0])
        by_name = {t.name: t for t in self.op.tensors}
        plain: dict[str, Arg] = {}
        for b in self.kernel.buffers:
            if b.name in self.scratch:
                plain[b.name] = Scratch(self.scratch.index(b.name), b.dtype)
            elif b.name not in self.columns:
                plain[b.name] = Pointer(by_name[b.name], b.dtype, aligned=False)
        for name, v in zip(self.partial, self.reduces, strict=bool(self.partial)):
            plain[name] = Scratch(self.scratch.index(name), _stored_as(v.dtype))
        args: dict[str, Arg] = {
            "table": Pointer(table, "i64"),
            **numbers,
            "places": Int(self.op.local(PLACES), "i32"),
            **ints,
            **{name: arg for name, arg in plain.items() if re.search(rf"\b{name}\b", text_of_body)},
        }
        name = self.kernel.name + suffix
        params = textwrap.fill(", ".join(args), 110, initial_indent="    ", subsequent_indent="    ")
        head = f"@triton.jit\ndef {name}(\n{params},\n):"
        text = source.module_text(name, "\n".join([head, *lines]) + "\n")
        options = debug_variant.OPTIONS if self.debug else {}
        return Launch(source.function(name, text), args, (grid, 1, 1), num_warps=4, num_stages=1, options=options)

    # --- Where things lie ---

    def _address(self, dtype: str) -> str:
        return f".to(tl.pointer_type({TL_DTYPES[dtype]}))"

    def _pointers(self, place: str, mask: str) -> list[str]:
        """The pointers of all buffers, at a place, or at a lane's."""
        return [line for b in self.kernel.buffers for line in self._pointer(b, place, mask)]

    def _pointer(self, b: ir.Buffer, place: str, mask: str) -> list[str]:
        if b.name in self.columns:
            at = f"tl.load(table + {2 + self.columns.index(b.name)} * places + {place}{mask})"
            is_vector = self.aligned and bool(b.sizes) and not mask and b.name in self.lists
            address = f"{at}{self._address(b.dtype)}"
            return [f"ptr_{b.name} = {f'tl.multiple_of({address}, 16)' if is_vector else address}"]
        return [f"ptr_{b.name} = {b.name} + {place}" if b.name in self.per_place else f"ptr_{b.name} = {b.name}"]

    def _find_place(self) -> list[str]:
        """The place is the last that begins at this chunk or before; those without elements begin where the next
        does."""
        return [
            "pid = tl.program_id(0).to(tl.int64)",
            "before = tl.zeros([1024], tl.int32)",
            "for start in range(0, places, 1024):",
            "    lanes = start + tl.arange(0, 1024)",
            "    first = tl.load(table + lanes, mask=lanes < places, other=9223372036854775807)",
            "    before += (first <= pid).to(tl.int32)",
            "place = tl.sum(before, 0) - 1",
            f"begin = (pid - tl.load(table + place)) * {CHUNK}",
            "size = tl.load(table + places + place)",
        ]

    # --- Bodies ---

    def _per_place(self, ints: dict[str, Arg]) -> list[str]:
        out = [
            f"q = tl.program_id(0) * {LANES} + tl.arange(0, {LANES})",
            "q_mask = q < places",
            *self._pointers("q", ", mask=q_mask, other=0"),
        ]
        values = self._values(self.kernel.values, ints, ", mask=q_mask", "", 1, LANES)
        if any(re.search(r"\bsize\b", line) for line in values):
            out.append("size = tl.load(table + places + q, mask=q_mask, other=0)")
        return [*(f"    {line}" for line in out), *values]

    def _per_chunk(self, ints: dict[str, Arg]) -> list[str]:
        """A whole chunk needs no masks, so that its loads are vectors."""
        once = [v for v in self.kernel.values if not v.axes and v.op != "store"]
        each = [v for v in self.kernel.values if v not in once]
        return [
            *(f"    {line}" for line in (*self._find_place(), *self._pointers("place", ""))),
            *self._values(once, ints, "", "", 1, BLOCK),
            *self._blocks(lambda mask: self._values(each, ints, mask, " + q", 3, BLOCK)),
        ]

    def _blocks(self, inside: Callable[[str], list[str]]) -> list[str]:
        """A chunk that is not whole has as many blocks as it has elements for: most tensors of a model are small."""
        position = f"            q = begin + start + tl.arange(0, {BLOCK})"
        return [
            f"    if begin + {CHUNK} <= size:",
            f"        for start in range(0, {CHUNK}, {BLOCK}):",
            position,
            *inside(""),
            "    else:",
            f"        for start in range(0, (size - begin).to(tl.int32), {BLOCK}):",
            position,
            "            q_mask = q < size",
            *inside(", mask=q_mask"),
        ]

    def _split(self) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
        """What is worked out once before, for every element, and of what they come to."""
        behind: set[int] = {v.number for v in self.reduces}
        for v in self.kernel.values:
            if v.op == "store" or behind & set(v.args):
                behind.add(v.number)
        once = [v for v in self.kernel.values if not v.axes and v.number not in behind]
        each = [v for v in self.kernel.values if v.axes]
        after = [v for v in self.kernel.values if v.number in behind and v.op != "reduce"]
        if any(v.axes for v in after):
            raise TraceError("a result for every element of a list, in the launch that reduces it")
        return once, each, after

    def _accumulate(self, mask: str, depth: int) -> list[str]:
        lines = []
        for v in self.reduces:
            operand, acc = self.kernel.value(v.args[0]), f"acc{v.number}"
            x = _literal_or_name(operand)
            step = f"{acc} + {x}" if v.data == "sum" else f"device.{COMBINE[v.data]}({acc}, {x})"
            lines.append(f"{acc} = tl.where(q_mask, {step}, {acc})" if mask else f"{acc} = {step}")
        return ["    " * depth + line for line in lines]

    def _start(self, lanes: int) -> list[str]:
        return [
            f"acc{v.number} = tl.full([{lanes}], {identity(v.data, self._reduced_dtype(v))}, "
            f"{TL_DTYPES[self._reduced_dtype(v)]})"
            for v in self.reduces
        ]

    def _reduced_dtype(self, v: ir.Value) -> str:
        return self.kernel.value(v.args[0]).dtype

    def _chunk_parts(self, ints: dict[str, Arg]) -> list[str]:
        once, each, _ = self._split()
        stores = [
            f"tl.store({name} + pid, {_combined(v.data, f'acc{v.number}')}.to({TL_DTYPES[_stored_as(v.dtype)]}))"
            for name, v in zip(self.partial, self.reduces, strict=True)
        ]
        return [
            *(f"    {line}" for line in (*self._find_place(), *self._pointers("place", ""), *self._start(BLOCK))),
            *self._values(once, ints, "", "", 1, BLOCK),
            *self._blocks(lambda mask: [*self._values(each, ints, mask, " + q", 3, BLOCK), *self._accumulate(mask, 3)]),
            *(f"    {line}" for line in stores),
        ]

    def _place_parts(self, ints: dict[str, Arg]) -> list[str]:
        """A place's chunks, in their order."""
        once, _, after = self._split()
        loads, steps = [], []
        for name, v in zip(self.partial, self.reduces, strict=True):
            dtype, acc = self._reduced_dtype(v), f"acc{v.number}"
            loads.append(f"        x{v.number} = tl.load({name} + q, mask=q_mask, other=0).to({TL_DTYPES[dtype]})")
            step = f"{acc} + x{v.number}" if v.data == "sum" else f"device.{COMBINE[v.data]}({acc}, x{v.number})"
            steps.append(f"        {acc} = tl.where(q_mask, {step}, {acc})")
        found = [f"    v{v.number} = {_combined(v.data, f'acc{v.number}')}" for v in self.reduces]
        head = [
            "place = tl.program_id(0).to(tl.int64)",
            "size = tl.load(table + places + place)",
            "first = tl.load(table + place)",
            f"last = first + (size + {CHUNK - 1}) // {CHUNK}",
            *self._pointers("place", ""),
            *self._start(BLOCK),
        ]
        return [
            *(f"    {line}" for line in head),
            *self._values(once, ints, "", "", 1, BLOCK),
            f"    for start in range(first, last, {BLOCK}):",
            f"        q = start + tl.arange(0, {BLOCK})",
            "        q_mask = q < last",
            *loads,
            *steps,
            *found,
            *self._values(after, ints, "", "", 1, BLOCK),
        ]

    def _over_places(self, ints: dict[str, Arg]) -> list[str]:
        once, each, after = self._split()
        found = [f"    v{v.number} = {_combined(v.data, f'acc{v.number}')}" for v in self.reduces]
        of_all = [b for b in self.kernel.buffers if b.name not in self.per_place]
        of_lanes = [b for b in self.kernel.buffers if b.name in self.per_place]
        at_lanes = [f"        {x}" for b in of_lanes for x in self._pointer(b, "q", ", mask=q_mask, other=0")]
        head = [line for b in of_all for line in self._pointer(b, "0", "")]
        return [
            *(f"    {line}" for line in (*head, *self._start(BLOCK))),
            *self._values(once, ints, "", "", 1, BLOCK),
            f"    for start in range(0, places, {BLOCK}):",
            f"        q = start + tl.arange(0, {BLOCK})",
            "        q_mask = q < places",
            *at_lanes,
            *self._values(each, ints, ", mask=q_mask", "", 2, BLOCK),
            *self._accumulate(", mask=q_mask", 2),
            *found,
            *self._values(after, ints, "", "", 1, BLOCK),
        ]

    def _values(
        self, values: Sequence[ir.Value], ints: dict[str, Arg], mask: str, at: str, depth: int, lanes: int
    ) -> list[str]:
        body = _ListBody(self.kernel, self.op, ints, mask, at, self.per_place, lanes)
        body.debug = self.op.name if self.debug else ""
        body.out.depth = depth
        for v in values:
            body.value(v)
        return body.out.text


def _stored_as(dtype: str) -> str:
    """Truth is a number in memory."""
    return "i32" if dtype == "i1" else dtype


def _literal_or_name(v: ir.Value) -> str:
    return literal(v.data, v.dtype, plain=False) if v.op == "constant" else f"v{v.number}"


def _combined(kind: str, x: str) -> str:
    if kind == "sum":
        return f"tl.sum({x}, 0)"
    if kind in ("any", "all"):
        return f"(tl.{'max' if kind == 'any' else 'min'}({x}.to(tl.int32), 0) != 0)"
    return f"tl.reduce({x}, 0, device.{COMBINE[kind]})"


class _ListBody(Body):
    """Prints values; where they lie is what the caller says. at: what is added to the address of a tensor that has
    sizes. mask: of what is loaded and stored there, and, with a lane for each place, of what each place has."""

    def __init__(
        self, kernel: ir.Kernel, op: Op, ints: dict[str, Arg], mask: str, at: str, per_place: frozenset[str], lanes: int
    ):
        tile = Tile((), kernel.axes)
        accesses = {v.number: Access(True) for v in kernel.accesses}
        super().__init__(kernel, tile, STRIDED, accesses, self._argument)
        self.op, self.ints, self.guard, self.at, self.lanes = op, ints, mask, at, lanes
        self.guarded = per_place if not at else frozenset()

    def _argument(self, name: str, expr: sympy.Expr, is_narrow: bool) -> str:
        if expr in (ir.LEADING, letter(PLACES)):
            return "size" if expr == ir.LEADING else "places"
        if not (expr.is_Symbol and expr.name in self.op.ints):
            raise TraceError(f"{self.kernel.name}: a function of lists cannot compute with {expr}")
        self.ints[f"int_{expr.name}"] = Int(self.op.int(expr.name), "i64")
        return f"int_{expr.name}"

    def _is_per_element(self, v: ir.Value) -> bool:
        return any(s == ir.LEADING for s in self.kernel.buffer(v.buffer).sizes)

    def pointer(self, v: ir.Value) -> str:
        return f"ptr_{v.buffer}{self.at if self._is_per_element(v) else ''}"

    def mask(self, v: ir.Value) -> str:
        """The mask of an access. Behind a chunk's end there is 1: a division by 0 in fp32, and a root of it, is a call
        of 100 instructions."""
        guard = self._guard_of(v)
        return f"{guard}, other=1" if guard and self.at and v.op == "load" else guard

    def mask_text(self, v: ir.Value) -> str:
        return self._guard_of(v).removeprefix(", mask=")

    def _guard_of(self, v: ir.Value) -> str:
        return self.guard if self._is_per_element(v) or v.buffer in self.guarded else ""

    def shape_of(self, dims: Iterable[str], of_q: str = "") -> str:
        return f"[{self.lanes}]"
