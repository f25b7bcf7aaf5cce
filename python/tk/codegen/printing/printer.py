"""Print: a kernel and its tile -> Triton source.

Scalar operations are rows of a table (scalars.py). What is around them — the tile's indices, masks, and loops over the
reduced axes — is :class:`Printer`; rows in segments, walks and scans have printers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen import index as ix
from tk.codegen.along import is_backwards
from tk.codegen.errors import IRError
from tk.codegen.ir import ACCESSES, COMPARE, FLOATS, Kernel, Value, values_in
from tk.codegen.printing import bounds, debug
from tk.codegen.printing.accumulators import Online, Plain, Position, Welford
from tk.codegen.printing.scalars import COMBINE, TL_DTYPES, expression, identity, literal
from tk.codegen.printing.scans import ScanPrinter
from tk.codegen.printing.segments import VECTOR, SegmentPrinter
from tk.codegen.printing.sorts import print_loop, print_sort
from tk.codegen.printing.walks import WalkPrinter
from tk.codegen.tile import Access, Layout, Tile, is_in_fours, linear_parts

# Ops beside whose tensor operand a literal of fp32 can stand.
_INFIX = {"add", "sub", "mul", "where", *COMPARE}


def loops(kernel: Kernel, tile: Tile) -> int:
    """How often a looped launch goes over what is reduced."""
    if tile.reduced is None or tile.walk:
        return 1
    printer = Printer(kernel, tile, Layout("", True, False), {}, True, lambda *_: "")
    depth = printer._depths()
    along = {v.number for v in kernel.values if tile.reduced in printer.dims_of(v)}
    stores = {depth[v.number] for v in kernel.values if v.op == "store" and v.number in along}
    return len(stores | {depth[v.number] - 1 for v in kernel.values if v.op == "reduce"})


@dataclass
class Lines:
    """Source, indented."""

    text: list[str] = field(default_factory=list)
    depth: int = 1

    def __call__(self, line: str) -> None:
        self.text.append("    " * self.depth + line if line else "")


@dataclass
class Printer:
    """One kernel with one tile and layout. looped: the reduced axes are run through in blocks, else they are one.
    spread: each of the blocks has a program of its own. segments: so many blocks beside each other make a row; what
    varies along it is printed once for each. stages: blocks of a walk that are under way. rows: of a block. rows_meet:
    a thread has the same columns of all of them. rereads, ahead, vectors: see Setting."""

    kernel: Kernel
    tile: Tile
    layout: Layout
    accesses: Mapping[int, Access]
    looped: bool
    size_arg: Callable[[str, sympy.Expr, bool], str]  # name, size expression, whether 32 bits hold it -> the argument
    debug: str = ""  # the op's name, in the debug variant
    segments: int = 1
    out: Lines = field(default_factory=Lines)
    spread: bool = False
    stages: int = 1
    rows: int = 0
    rows_meet: bool = False
    rereads: bool = False
    ahead: bool = False
    vectors: bool = False
    realigned: int = 0  # elements of the vectors in which realigned rows are read; 0: they are not
    row_start: str = ""  # where such a row begins
    first: str = ""  # the parameter that is the first program's number, where a launch has others before it
    level_hints: tuple[str, str] = ("", "")  # while something is read again: of rows, of what has one value a column
    done: set[str] = field(default_factory=set)  # lines that stand already: index variables, masks
    again: set[str] = field(default_factory=set)  # buffers that a later loop reads

    # --- Shapes and names ---

    @property
    def names(self) -> tuple[str, ...]:
        """The tile's dimensions, outer first."""
        return ("p", "q") if self.tile.p else ("q",)

    def dims_of(self, v: Value) -> frozenset[str]:
        return self._dims(v.axes)

    def _dims(self, axes: Iterable[str]) -> frozenset[str]:
        """The dimensions of the tile that these axes belong to."""
        of = {"p": self.tile.p, "q": self.tile.q}
        return frozenset(n for n in self.names if not {a.name for a in of[n]}.isdisjoint(axes))

    @property
    def is_one_row(self) -> bool:
        """Whether what has one value a row is a scalar: it then ties no layout of the segments to that of the edges."""
        return self.vectors and self.rows == 1

    @property
    def shape_names(self) -> tuple[str, ...]:
        """The dimensions of a block in the source."""
        return ("q",) if self.is_one_row else self.names

    def shape_of(self, dims: Iterable[str]) -> str:
        return "[" + ", ".join(f"BLOCK_{n.upper()}" if n in dims else "1" for n in self.shape_names) + "]"

    @property
    def reduced_dim(self) -> str | None:
        return self.tile.reduced

    @property
    def axis(self) -> int:
        assert self.reduced_dim is not None
        return self.shape_names.index(self.reduced_dim)

    @cached_property
    def whole_rows(self) -> SegmentPrinter:
        return SegmentPrinter(self)

    @cached_property
    def scans(self) -> ScanPrinter:
        return ScanPrinter(self)

    # --- The whole ---

    def function(self, name: str, params: list[str]) -> str:
        head = f"@triton.jit\ndef {name}({', '.join(params)}):"
        if self.tile.walk:
            WalkPrinter(self, self.whole_rows).print()
            return "\n".join([head, *self.out.text]) + "\n"
        if self.spread:
            self._part_of_a_row()
        else:
            self._program()
        if self.looped:
            self._looped()
        elif self.whole_rows.is_needed:
            self.whole_rows.print()
        else:
            self._once()
        return "\n\n".join([*self.scans.functions(), "\n".join([head, *self.out.text]) + "\n"])

    def _part_of_a_row(self) -> None:
        """Which block of which row. A program that waits for those before it must not have started before them."""
        wide = ".to(tl.int64)" if self.layout.wide else ""
        is_scan = any(v.op == "scan" for v in self.kernel.values)
        self.out("ticket = tl.atomic_add(ptr_state, 1)" if is_scan else "ticket = tl.program_id(0)")
        self.out(f"n_parts = tl.cdiv({self._extent('q')}, BLOCK_Q).to(tl.int32)")
        self.out(f"part = (ticket % n_parts){wide}")
        self.out(f"n_programs = {'p_size * ' if self.tile.p else ''}n_parts")
        if self.tile.p:
            self.out(f"start_p = (ticket // n_parts){wide}")
            self._range("p", "start_p")

    @property
    def is_backwards(self) -> bool:
        return any(is_backwards(v) for v in self.kernel.values)

    def _extent(self, n: str) -> str:
        """How many elements blocks along a dimension must cover."""
        return f"{n}_size + {self.realigned - 1}" if self.realigned and n == "q" else f"{n}_size"

    def _program(self) -> None:
        """Which tile this program has."""
        blocks = [n for n in reversed(self.names) if n != self.reduced_dim]
        wide = ".to(tl.int64)" if self.layout.wide else ""
        left = "pid"
        self.out(f"pid = {f'(tl.program_id(0) - {self.first})' if self.first else 'tl.program_id(0)'}{wide}")
        for i, n in enumerate(blocks):
            is_last = i == len(blocks) - 1 and not self.tile.batch
            self.out(
                f"start_{n} = {left}{'' if is_last else f' % tl.cdiv({n}_size, BLOCK_{n.upper()})'} * BLOCK_{n.upper()}"
            )
            if not is_last:
                self.out(f"{left} = {left} // tl.cdiv({n}_size, BLOCK_{n.upper()})")
        if self.tile.batch:
            self._decompose("pid", self.tile.batch)
        for n in blocks:
            self.whole_rows.flat_vectors() if self.vectors and n == "q" else self._range(n, f"start_{n}")

    def offsets(self, n: str | None) -> str:
        """The places in a block along a dimension of the tile."""
        assert n is not None
        expand = "" if len(self.shape_names) == 1 else "[:, None]" if n == "p" else "[None, :]"
        return f"tl.arange(0, BLOCK_{n.upper()}){expand}" + (".to(tl.int64)" if self.layout.wide else "")

    def _range(self, n: str, start: str, is_full: bool = False) -> None:
        """The places of a block and which of them there are: all where it is full."""
        if self.realigned and n == "q":
            self._range_in_vectors(start)
        elif n == "p" and self.is_one_row:
            self.out(f"p = tl.cast({start}, tl.int32)")
            self.out("p_mask = p < p_size")
        else:
            offsets = self.offsets(n)
            self.out(f"{n} = {start} + {offsets}" if start != "0" else f"{n} = {offsets}")
            self.out(f"{n}_mask = {f'tl.full({self.shape_of(n)}, True, tl.int1)' if is_full else f'{n} < {n}_size'}")
        if self.realigned and n == "p":
            self.out(f"shift = ({self.row_start or 0} % {self.realigned}).to(tl.int32)")
        axes = self.tile.p if n == "p" else self.tile.q
        if self._needs_axes(n):
            self._decompose(n, axes)

    def _range_in_vectors(self, start: str) -> None:
        """A block of rows that begin `shift` elements into their first vector: which vectors hold any of the row, which
        hold nothing else, and the elements of those that do."""
        n, offsets = self.realigned, self.offsets("q")
        self.out(f"place = {start} + {offsets}" if start != "0" else f"place = {offsets}")
        self.out("q = place - shift")
        self.out("q_mask = (q >= 0) & (q < q_size)")
        self.out(f"vector = place // {n} * {n}")
        self.out("q_any = vector < q_size + shift")
        self.out(f"q_all = (vector >= shift) & (vector + {n} <= q_size + shift)")
        self.out("q_some = q_mask & (q_all == 0)")

    def _needs_axes(self, n: str) -> bool:
        """Whether anything reads a single axis of this dimension of the tile."""
        names = {a.name for a in (self.tile.p if n == "p" else self.tile.q)}
        for v in self.kernel.values:
            if v.op == "index" and v.axes & names:
                return True
            if v.op == "random" and any(s.name in names for s in self._place(v)[0].free_symbols):
                return True
            is_elementwise = v.op in ACCESSES and self.accesses[v.number].elementwise
            if is_elementwise and any(s.name in names for e in v.index for s in e.free_symbols):
                return True
        return False

    def _decompose(self, merged: str, axes: Any) -> None:
        inner = sympy.Integer(1)
        for i, a in reversed(list(enumerate(axes))):
            text = merged if inner == 1 else f"{merged} // {self._count(f'inner_{a.name}', inner)}"
            self.out(f"{a.name} = {text}" + (f" % {self._count(f'count_{a.name}', a.size)}" if i > 0 else ""))
            inner = inner * a.size

    def _count(self, name: str, size: sympy.Expr) -> str:
        return str(size) if size.is_Integer else self.size_arg(name, size, True)

    def _once(self) -> None:
        if self.reduced_dim:
            part = "(n_parts - 1 - part)" if self.is_backwards else "part"
            self._range(self.reduced_dim, f"{part} * BLOCK_Q" if self.spread else "0")
        for v in self.kernel.values:
            if v.op == "reduce":
                self._reduce_at_once(v)
            elif v.op == "scan" and self.spread:
                self.scans.over_programs(v)
            elif v.op == "scan" and self.scans.is_plain(v):
                self._scan(v, "")
            elif v.op == "scan":
                self.scans.in_block(v)
            elif v.op == "sort":
                print_sort(self, v)
            else:
                self._value(v)

    def _looped(self) -> None:
        """A loop for every generation of reductions, and one more for what is stored along the reduced axes."""
        if any(v.op == "sort" for v in self.kernel.values):
            print_loop(self)
            return
        depth = self._depths()
        n = self.reduced_dim
        assert n is not None
        along = {v.number for v in self.kernel.values if n in self.dims_of(v)}
        loops = []
        for level in range(max(depth.values()) + 1):
            stores = [
                v for v in self.kernel.values if v.op == "store" and v.number in along and depth[v.number] == level
            ]
            reduces = [v for v in self.kernel.values if v.op == "reduce" and depth[v.number] == level + 1]
            loops.append((stores, reduces, self._needed_in_loop([*stores, *reduces], along)))
        for level, (stores, reduces, needed) in enumerate(loops):
            for v in self.kernel.values:
                if v.number not in along and v.op != "reduce" and depth[v.number] == level:
                    self._value(v)
            if stores or reduces:
                later = [self.kernel.value(m) for _, _, rest in loops[level + 1 :] for m in rest]
                self.again = {v.buffer for v in later if v.op == "load"}
                self._loop(n, needed, reduces)

    def _depths(self) -> dict[int, int]:
        depth: dict[int, int] = {}
        for v in self.kernel.values:
            used = [*v.args, *(m for e in v.index for m in values_in(e))]
            if v.number in self.online:
                used = list(self.kernel.value(self.online[v.number]).args)
            depth[v.number] = max((depth[a] for a in used), default=0) + (v.op == "reduce")
        return depth

    @cached_property
    def online(self) -> dict[int, int]:
        """The sums of exp(x - max(x)), each with its maximum: in a loop both come of one pass."""
        found: dict[int, int] = {}
        for v in self.kernel.values:
            if v.op != "reduce" or v.data != "sum" or self.reduced_dim != "q" or not self.looped:
                continue
            exp = self.kernel.value(v.args[0])
            if exp.op != "exp":
                continue
            away = self.kernel.value(exp.args[0])
            most = self._unguarded(self.kernel.value(away.args[1])) if away.op == "sub" else v
            if most.data == "max" and most.args == away.args[:1] and most.number not in found.values():
                found[v.number] = most.number
        return found

    def _unguarded(self, v: Value) -> Value:
        """The maximum in where(abs(maximum) == inf, 0, maximum), which is what torch.logsumexp takes away."""
        if v.op != "where" or self.kernel.value(v.args[1]).data != 0:
            return v
        test, most = self.kernel.value(v.args[0]), self.kernel.value(v.args[2])
        operands = [self.kernel.value(a) for a in test.args]
        is_guard = test.op == "eq" and operands[0].op == "abs" and operands[1].data == math.inf
        return most if is_guard and operands[0].args == (most.number,) else v

    def _loop(self, n: str, needed: set[int], reduces: list[Value]) -> None:
        accumulators = self._accumulators(reduces)
        for a in accumulators:
            a.start()
        self.scans.known.clear()
        self.scans.started.clear()
        for v in (self.kernel.value(m) for m in sorted(needed)):
            if v.op == "scan" and not self.scans.is_plain(v):
                self.scans.start_carries(v)
            elif v.op == "scan":
                kind = v.data.kind
                shape = self.shape_of(self.dims_of(v) - {n}) if len(self.names) > 1 else "[]"
                self.out(f"carry{v.number} = tl.zeros({shape}, {TL_DTYPES[v.dtype]}) + {identity(kind, v.dtype)}")
        block, size = f"BLOCK_{n.upper()}", self._extent(n)
        self.out(f"for {'back' if self.is_backwards else 'start'} in range(0, {size}, {block}):")
        self.out.depth += 1
        if self.is_backwards:
            self.out(f"start = ({size} - 1) // {block} * {block} - back")
        self._range(n, "start")
        for v in (self.kernel.value(m) for m in sorted(needed)):
            if v.op == "scan" and not self.scans.is_plain(v):
                self.scans.in_loop(v)
            elif v.op == "scan":
                self._scan(v, f"carry{v.number}")
            else:
                self._value(v)
        for a in accumulators:
            a.step()
        self.out.depth -= 1
        for a in accumulators:
            a.finish()

    def _needed_in_loop(self, roots: list[Value], along: set[int], stop: int = -1) -> set[int]:
        """What must be worked out for these anew with every block. stop: a value that stands already."""
        pending = [n for v in roots for n in ([v.number] if v.op == "store" else self._reads(v))]
        found: set[int] = set()
        while pending:
            n = pending.pop()
            v = self.kernel.value(n)
            if n in found or n not in along:
                continue
            found.add(n)
            if n != stop:
                pending += [*v.args, *(m for e in v.index for m in values_in(e))]
        return found

    def _reads(self, v: Value) -> tuple[int, ...]:
        """What a reduction in a loop reads."""
        return self.kernel.value(self.online.get(v.number, v.number)).args

    def _scan(self, v: Value, carry: str) -> None:
        """Of this block, and after what the blocks before it carry over."""
        x, kind = f"x{v.number}", v.data.kind
        sign = "+" if kind == "sum" else "*"
        inside = f"tl.where({self._mask_of_reduced()}, {self.name(v.args[0])}, {identity(kind, v.dtype)})"
        self.out(f"{x} = {inside}")
        scanned = f"tl.cum{kind}({x}, {self.axis}{', reverse=True' if is_backwards(v) else ''})"
        self.out(f"v{v.number} = {f'{carry} {sign} ' if carry else ''}{scanned}")
        if carry:
            self.out(f"{carry} = {carry} {sign} {self._combined(kind, x)}")

    # --- Values ---

    def _value(self, v: Value) -> None:
        if v.op in ACCESSES:
            for line in bounds.before(self, v):
                self.out(line)
        self._plain_value(v)
        if self.debug and v.op == "store":
            for line in debug.after(self, self.debug, v):
                self.out(line)

    def _plain_value(self, v: Value) -> None:
        if v.op == "store":
            how = "tl.store" if v.data in (None, "set") else f"tl.atomic_{v.data}"
            order = "" if how == "tl.store" else ', sem="relaxed"'
            if self._is_realigned(v):
                for mask in ("q_all", "q_some"):
                    self.out(f"tl.store({self._pointer(v)}, {self.name(v.args[0])}, mask=p_mask & {mask})")
                return
            self.out(f"{how}({self._pointer(v)}, {self.name(v.args[0])}{self._mask(v)}{order})")
        elif v.op not in ("constant", "number"):
            self.out(f"v{v.number} = {self._right_side(v)}")

    def _right_side(self, v: Value) -> str:
        if v.op == "load":
            return f"tl.load({self._pointer(v)}{self._mask(v)}{self._hint(v)})"
        if v.op == "index":
            return self._index_value(v)
        if v.op == "random":
            return self._random(v)
        if v.op == "cast" and self.kernel.value(v.args[0]).op == "number":
            return f"tl.cast(arg_{self.kernel.value(v.args[0]).data}, {TL_DTYPES[v.dtype]})"
        if v.op == "search":
            return self._search(v)
        if v.op == "asm":
            asm, constraints, pack, _ = v.data
            given = ", ".join(self.name(a) for a in v.args)
            result = f"dtype={TL_DTYPES[v.dtype]}, is_pure=True, pack={pack}"
            return f"tl.inline_asm_elementwise({asm!r}, {constraints!r}, [{given}], {result})"
        operands = self._operands(v)
        source = self.kernel.value(v.args[0]).dtype
        if v.op == "cast":
            return self._cast(operands[0], source, v.dtype)
        if v.op == "bitcast":
            return f"{operands[0]}.to({TL_DTYPES[v.dtype]}, bitcast=True)"
        dtype = self.kernel.value(v.args[1]).dtype if v.op == "where" else source
        return expression(v, operands, dtype)

    def _search(self, v: Value) -> str:
        count = self._count("count", self.kernel.buffer(v.buffer).sizes[-1])
        step = self.accesses[v.number].strides[-1]("1").removeprefix("1 * ")
        mask = self.mask_text(v) or "True"
        return f"device.search({self._pointer(v)}, {mask}, {step}, {count}, {self.name(v.args[0])}, {v.data})"

    def name(self, number: int) -> str:
        """What stands for a value: constants and numbers are written where they are used."""
        v = self.kernel.value(number)
        if v.op == "number":
            return f"tl.cast(arg_{v.data}, {TL_DTYPES[v.dtype]})"
        return literal(v.data, v.dtype, plain=False) if v.op == "constant" else f"v{number}"

    def _operands(self, v: Value) -> list[str]:
        """Beside a tensor, a Python number does for a constant where Triton gives it that tensor's dtype."""
        constants = [self.kernel.value(a).op == "constant" for a in v.args]
        may_be_plain = v.op in _INFIX and not all(constants[-2:])
        plain = {a: literal(self.kernel.value(a).data, self.kernel.value(a).dtype)
                 for a, is_constant in zip(v.args, constants, strict=True) if is_constant and may_be_plain}  # fmt: skip
        return [plain.get(a) or self.name(a) for a in v.args]

    def _cast(self, operand: str, source: str, target: str) -> str:
        if target == "fp8e5":
            return f"device.to_fp8e5({operand})"
        if source in FLOATS and target in ("u8", "i8", "i16"):  # by way of 64 bits, as C does it
            return f"{operand}.to(tl.int64).to({TL_DTYPES[target]})"
        return f"{operand}.to({TL_DTYPES[target]})"

    def _index_value(self, v: Value) -> str:
        if not v.axes:
            return self.size_arg("value", v.data, False)
        return self.text(v.data)

    def _pointer(self, v: Value) -> str:
        access = self.accesses[v.number]
        if self.vectors and self.is_in_vectors(v):
            return f"ptr_{v.buffer} + ({self.row_text(v)} + {VECTOR - 1} >> 3) * {VECTOR} + place"
        parts = [f"ptr_{v.buffer}", *access.base]
        if access.elementwise:
            parts += [stride(self.text(e)) for e, stride in zip(v.index, access.strides, strict=True) if e != 0]
        else:
            dims = self._index_dims(v)
            q = "place" if access.realigned else access.q
            parts += [part for n, part in (("p", access.p), ("q", q)) if n in dims and part]
        if missing := self._mask_dims(v) - self._index_dims(v):
            parts.append(f"tl.zeros({self.shape_of(missing)}, tl.int32)")
        return " + ".join(parts)

    def row_text(self, v: Value) -> str:
        """Where the rows of an access begin."""
        access = self.accesses[v.number]
        return " + ".join([*access.base, *([access.p] if access.p else [])]) or "0"

    def is_in_vectors(self, v: Value) -> bool:
        """An access to rows without gaps: see Setting.vectors."""
        access = self.accesses[v.number]
        return not access.elementwise and access.q == "q" and self._index_dims(v) == {"p", "q"}

    def mask_text(self, v: Value) -> str:
        """Of the block's ends, what the load or store itself is guarded by, and the bounds of its indices."""
        within = [bounds.name(v)] if bounds.tested(self.kernel, v) else []
        return " & ".join([*self._guards(v, self._index_dims(v) | self._mask_dims(v)), *within])

    def asked(self, v: Value) -> str:
        """The lanes of the indices of an access that are used."""
        tested = [v.index[d] for d in bounds.tested(self.kernel, v)]
        return " & ".join(self._guards(v, self._dims_over(tested)))

    def _guards(self, v: Value, dims: frozenset[str]) -> list[str]:
        parts = [f"{n}_mask" for n in self.shape_names if n in dims]  # of one row there is no block's end
        return [*parts, *(self.name(a) for a in (v.args if v.op == "load" else v.args[1:]))]

    def _is_realigned(self, v: Value) -> bool:
        """Of a realigned row, whole vectors; what is guarded by a mask of its own goes element by element."""
        return self.accesses[v.number].realigned and len(v.args) == (v.op == "store")

    def _mask(self, v: Value) -> str:
        if v.op == "load" and self._is_realigned(v):
            # Of the 16 bytes alone that have some of the row: an element may be larger than those that `vector` counts.
            n = 16 // ITEMSIZE[self.kernel.buffer(v.buffer).dtype]
            has_any = "q_any" if n == self.realigned else f"(place // {n} * {n} < q_size + shift)"
            return f", mask=p_mask & {has_any}"
        mask = self.mask_text(v)
        zero = "0.0" if v.dtype.startswith("fp8") else "0"  # of an integer nothing converts to fp8
        other = f", other={zero}" if v.op == "load" and v.args else ""
        return f", mask={mask}{other}" if mask else ""

    def _hint(self, v: Value) -> str:
        """In a loop: what is read once leaves the caches first, so that what a later loop reads again stays. (Without a
        loop the hints cost up to 5 %.) Nothing is known of what is read at two indices, or at one that is itself read.
        """
        dims = self._index_dims(v)
        reads = {other.index for other in self.kernel.values if other.op == "load" and other.buffer == v.buffer}
        if hint := self.level_hints[dims != frozenset(self.names)]:
            return f', eviction_policy="{hint}"'
        if not self.looped or self.layout.wide or "q" not in dims or len(reads) > 1 or any(map(values_in, v.index)):
            return ""
        is_once = dims == frozenset(self.names) and v.buffer not in self.again
        return f', eviction_policy="evict_{"first" if is_once else "last"}"'

    def _mask_dims(self, v: Value) -> frozenset[str]:
        if v.op == "store" and v.data is not None:
            return frozenset(self.names)
        return self.dims_of(self.kernel.value(v.args[0])) if v.op == "load" and v.args else frozenset()

    def _index_dims(self, v: Value) -> frozenset[str]:
        """The dimensions of the tile over which the address varies."""
        return self._dims_over(v.index)

    def _dims_over(self, index: Iterable[sympy.Expr]) -> frozenset[str]:
        names = {s.name for e in index for s in e.free_symbols}
        for e in index:
            for m in values_in(e):
                names |= self.kernel.value(m).axes
        return self._dims(names)

    # --- Random bits ---

    def _place(self, v: Value) -> tuple[sympy.Expr, str]:
        """A random value's linear index: what is put together from single axes, and the text of the rest."""
        parts = self.layout.merged and linear_parts(self.kernel, self.tile, v)
        if not parts:
            return v.index[0], ""
        rest = parts.rest
        texts = [f"p.to(tl.int64) * {self._count('row', parts.row)}"] if parts.rows else []
        return rest, " + ".join([*texts, "q"])

    def _random(self, v: Value) -> str:
        """In rows that begin at a multiple of 4 elements all four words of a block are used, else one."""
        seed, offset = (self.name(a) for a in v.args)
        rest, tail = self._place(v)
        head = [offset] if rest == 0 else [offset, self.text(rest)]
        if self.layout.aligned and is_in_fours(self.kernel, self.tile, v):
            is_reduced = self.reduced_dim == "q"
            start = "start_q" if not is_reduced else "start" if self.looped else ""
            first = " + ".join([*head, *filter(None, [tail.removesuffix("q").removesuffix(" + "), start])])
            return f"device.random_block({seed}, {first}, {v.data}, BLOCK_Q)"
        return f"device.random_bits({seed}, {' + '.join([*head, *filter(None, [tail])])}, {v.data})"

    # --- Index expressions ---

    def text(self, expr: sympy.Expr) -> str:
        """An index expression in 64 bits. Quotients are rounded down, which those of hardware are from 0 on."""
        expr = sympy.sympify(expr)
        if not any(self._is_variable(s.name) for s in expr.free_symbols) and not expr.is_Integer:
            return self.size_arg(f"size_{expr.name}" if expr.is_Symbol else "size", expr, False)
        if expr.is_Integer:
            return str(expr)
        if expr.is_Symbol:
            return self._symbol(expr.name)
        kind, args = type(expr).__name__, [self.text(a) for a in expr.args]
        if kind == "Add":
            return "(" + " + ".join(args) + ")"
        if kind == "Mul":
            return "(" + " * ".join(args) + ")"
        if kind in ("FloorDiv", "Mod", "PythonMod"):
            if not ix.is_never_negative(expr.args[0], {a.symbol: a.size for a in self.kernel.axes}):
                return f"device.{'floor_div' if kind == 'FloorDiv' else 'remainder'}({args[0]}, {args[1]})"
            return f"({args[0]} {'//' if kind == 'FloorDiv' else '%'} {args[1]})"
        if kind == "Pow" and expr.args[1].is_Integer and 0 < int(expr.args[1]) < 5:
            return "(" + " * ".join([args[0]] * int(expr.args[1])) + ")"
        if kind in ("Max", "Min"):
            text = args[0]
            for other in args[1:]:
                text = f"tl.{kind.lower()}imum({text}, {other})"
            return text
        raise IRError(f"{expr}: no source for {kind} in an index")

    def _symbol(self, name: str) -> str:
        if name[0] == "v" and name[1:].isdigit():
            return self.name(int(name[1:]))
        return name if self.layout.wide else f"{name}.to(tl.int64)"

    def _is_variable(self, name: str) -> bool:
        return name in {a.name for a in self.kernel.axes} or (name[0] == "v" and name[1:].isdigit())

    # --- Reductions ---

    def _mask_of_reduced(self) -> str:
        return f"{self.reduced_dim}_mask"

    def _keep(self) -> str:
        return "" if len(self.shape_names) == 1 else ", keep_dims=True"

    def _reduce_at_once(self, v: Value) -> None:
        operand = self.kernel.value(v.args[0])
        mask, x = self._mask_of_reduced(), self.name(v.args[0])
        if v.data in ("mean", "m2"):
            self._two_pass_variance(v, x, mask)
            return
        if v.data in ("argmax", "argmin"):
            self.out(f"x{v.number} = tl.where({mask}, {x}, {identity(v.data, operand.dtype)})")
            self._first_position(v, f"x{v.number}", str(self.reduced_dim))
            return
        inside = f"tl.where({mask}, {x}, {identity(v.data, operand.dtype)})"
        self.out(f"v{v.number} = {self._combined(v.data, inside)}")

    def _last(self) -> str:
        return "9223372036854775807" if self.layout.wide else "2147483647"

    def _combined(self, kind: str, x: str) -> str:
        if kind == "sum":
            return f"tl.sum({x}, {self.axis}{self._keep()})"
        if kind in ("any", "all"):
            to_int = f"({x}).to(tl.int32)"
            return f"tl.{'max' if kind == 'any' else 'min'}({to_int}, {self.axis}{self._keep()}) != 0"
        return f"tl.reduce({x}, {self.axis}, device.{COMBINE[kind]}{self._keep()})"

    def _first_position(self, v: Value, x: str, position: str) -> None:
        """The extreme, then the least position that has it: carrying both through one reduction takes three times as
        long. An extreme that is NaN equals nothing, and then every NaN is one."""
        operand, n = self.kernel.value(v.args[0]), v.number
        self.out(f"m{n} = {self._combined(v.data.removeprefix('arg'), x)}")
        found = f"({x} == m{n})" + (f" | ({x} != {x})" if operand.dtype in FLOATS else "")
        shape = self.shape_of({*self.dims_of(operand), self.reduced_dim})  # type: ignore[arg-type]
        self.out(f"at{n} = tl.where({found}, tl.broadcast_to({position}, {shape}), {self._last()})")
        self.out(f"v{n} = tl.min(at{n}, {self.axis}{self._keep()}).to(tl.int64)")

    def _two_pass_variance(self, v: Value, x: str, mask: str) -> None:
        n, operand = self.reduced_dim, self.kernel.value(v.args[0])
        mean = f"mean_{v.args[0]}"
        if mean not in self.done:
            self.done.add(mean)
            total = self._combined("sum", f"tl.where({mask}, {x}, {identity('sum', operand.dtype)})")
            self.out(f"{mean} = {total} / tl.cast({n}_size, {TL_DTYPES[operand.dtype]})")
        if v.data == "mean":
            self.out(f"v{v.number} = {mean}")
        else:
            self.out(f"d{v.number} = tl.where({mask}, {x} - {mean}, {identity('sum', operand.dtype)})")
            self.out(f"v{v.number} = {self._combined('sum', f'd{v.number} * d{v.number}')}")

    def _accumulators(self, reduces: list[Value]) -> list[Any]:
        found: list[Any] = []
        variances: dict[int, list[Value]] = {}
        for v in reduces:
            if v.number in self.online:
                found.append(Online(self, self.kernel.value(self.online[v.number]), v))
            elif v.number in self.online.values():
                continue
            elif v.data in ("mean", "m2"):
                variances.setdefault(v.args[0], []).append(v)
            elif v.data in ("argmax", "argmin"):
                found.append(Position(self, v))
            else:
                found.append(Plain(self, v))
        return [*found, *(Welford(self, operand, group) for operand, group in variances.items())]

    def accumulator_shape(self, operand: Value, over: str | None = None) -> str:
        """Of what is added up over a dimension, the reduced one where none is named."""
        assert self.reduced_dim is not None
        return self.shape_of({*self.dims_of(operand), over or self.reduced_dim})
