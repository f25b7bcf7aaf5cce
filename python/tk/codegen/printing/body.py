"""A kernel's body as source: its places and masks, its values, and where they lie in memory.

Scalar operations are rows of a table (scalars.py). The printers of reductions, loops, segments, walks, scans and sorts
stand over one :class:`Body`: they ask it for names and texts, and have it print values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import sympy

from tk.aot.spec import ITEMSIZE
from tk.codegen import along
from tk.codegen import index as ix
from tk.codegen.errors import IRError
from tk.codegen.interleaved import Steps
from tk.codegen.ir import ACCESSES, ATOMIC, COMPARE, FLOATS, ROUNDED_SUMS, Axis, Kernel, Value, values_in
from tk.codegen.pieces import Piece
from tk.codegen.printing import bounds, debug
from tk.codegen.printing.scalars import TL_DTYPES, expression, literal
from tk.codegen.tile import Access, Layout, LinearParts, Tile, linear_parts

VECTOR = 8  # elements that vectors at any address hold
EDGES = "edges"  # the segment of what lies before a row's first whole vector and behind its last
EDGE = 2 * VECTOR  # more than these

# Ops beside whose tensor operand a literal of fp32 can stand.
_INFIX = {"add", "sub", "mul", "where", *COMPARE}

# By way of which integers ATen's CUDA kernels make narrow ones of floats. The first conversion stops at the ends of its
# range and the second keeps the low bits, so that it shows which one it was: int16 of 3e9 is -1, uint8 of it is 0.
_CAST_BY = {"u8": "i64", "i8": "i32", "i16": "i32"}


@dataclass
class Lines:
    """Source, indented."""

    text: list[str] = field(default_factory=list)
    depth: int = 1

    def __call__(self, line: str) -> None:
        self.text.append("    " * self.depth + line if line else "")

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """What is printed inside stands under `head`."""
        self(head)
        self.depth += 1
        yield
        self.depth -= 1


@dataclass(frozen=True)
class Form:
    """How a setting has a kernel printed. looped: the reduced axes are run through in blocks, else they are one.
    spread: each of the blocks has a program of its own. segments: so many blocks beside each other make a row; what
    varies along it is printed once for each. stages: blocks of a walk that are under way. rows, columns: of a block.
    rows_meet: a thread has the same columns of all of them. by_thread: it has the whole rows. rereads, ahead, vectors:
    see Setting. multiple: a row has a multiple of so many elements. realigned: elements of the vectors in which
    realigned rows are read; 0: they are not. row_start: where such a row begins. piece: a row is a part of everything.
    steps: columns are those of interleaved parts. read_later: buffers that another launch reads after it. first: the
    parameter that is the first program's number, where a launch has others before it."""

    looped: bool = False
    spread: bool = False
    segments: int = 1
    stages: int = 1
    rows: int = 0
    columns: int = 0
    rows_meet: bool = False
    rereads: bool = False
    ahead: bool = False
    vectors: bool = False
    multiple: int = 1
    realigned: int = 0
    row_start: str = ""
    piece: Piece | None = None
    steps: Steps | None = None
    read_later: frozenset[str] = frozenset()
    by_thread: bool = False
    first: str = ""


# Name, size expression, whether 32 bits hold it -> the argument.
SizeArgument = Callable[[str, sympy.Expr, bool], str]
# Size expression, whether it divides numbers of 64 bits -> what device.divided takes beside it.
MagicArgument = Callable[[sympy.Expr, bool], str]


def no_argument(*wanted: object) -> str:
    raise AssertionError("a function without arguments for sizes")


@dataclass
class Body:
    """One kernel with one tile and layout. debug: the op's name, in the debug variant. segment: the one whose lines are
    being printed, None where a row is one block. again: buffers that a later loop reads. level_hints: while something
    is read again, how the caches are to keep rows, and what has one value a column."""

    kernel: Kernel
    tile: Tile
    layout: Layout
    accesses: Mapping[int, Access]
    size_arg: SizeArgument = no_argument
    magic_arg: MagicArgument = no_argument
    form: Form = Form()
    debug: str = ""
    out: Lines = field(default_factory=Lines)
    segment: int | str | None = None
    again: set[str] = field(default_factory=set)
    level_hints: tuple[str, str] = ("", "")

    # --- Dimensions ---

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

    def index_dims(self, v: Value) -> frozenset[str]:
        """The dimensions of the tile over which the address of an access varies."""
        return self._dims_over(v.index)

    def _dims_over(self, index: Iterable[sympy.Expr]) -> frozenset[str]:
        names = {s.name for e in index for s in e.free_symbols}
        for e in index:
            for m in values_in(e):
                names |= self.kernel.value(m).axes
        return self._dims(names)

    @cached_property
    def along_q(self) -> frozenset[int]:
        """The values that vary along q."""
        return frozenset(v.number for v in self.kernel.values if "q" in self.dims_of(v))

    @property
    def is_one_row(self) -> bool:
        """Whether what has one value a row is a scalar: it then ties no layout of the segments to that of the edges."""
        return self.form.vectors and self.form.rows == 1

    @property
    def is_shifted(self) -> bool:
        """Whether parts of everything are counted from the 16 bytes that hold its first element."""
        return self.form.piece is not None and not self.layout.aligned

    @property
    def shape_names(self) -> tuple[str, ...]:
        """The dimensions of a block in the source. Of what lies apart in memory a warp's threads have neighbours along
        the last: of whole rows, each of which is then one thread's, where these are short."""
        if self.is_one_row:
            return ("q",)
        return self.names[::-1] if self.form.by_thread else self.names

    def shape_of(self, dims: Iterable[str], of_q: str = "") -> str:
        """The shape of what varies over these. of_q: instead of the block's own extent along q."""
        extents = {"p": "BLOCK_P", "q": of_q or self.block("q")}
        return "[" + ", ".join(extents[n] if n in dims else "1" for n in self.shape_names) + "]"

    def block(self, n: str) -> str:
        """The block's extent along a dimension."""
        return "EDGES" if n == "q" and self.segment == EDGES else f"BLOCK_{n.upper()}"

    @property
    def reduced_dim(self) -> str | None:
        return self.tile.reduced

    @property
    def reduced_mask(self) -> str:
        return f"{self.reduced_dim}_mask"

    @property
    def axis(self) -> int:
        """The reduced dimension's place in a block."""
        assert self.reduced_dim is not None
        return self.shape_names.index(self.reduced_dim)

    @property
    def keep_dims(self) -> str:
        """The argument with which the result of what reduces a block has the block's dimensions."""
        return "" if len(self.shape_names) == 1 else ", keep_dims=True"

    @property
    def is_backwards(self) -> bool:
        return any(along.is_backwards(v) for v in self.kernel.values)

    # --- Names ---

    @contextmanager
    def in_segment(self, segment: int | str) -> Iterator[None]:
        """What varies along the row is that segment's."""
        before, self.segment = self.segment, segment
        yield
        self.segment = before

    def of_segment(self, name: str) -> str:
        """A variable that varies along q."""
        return name if self.segment is None else f"{name}_{self.segment}"

    def place(self, n: str) -> str:
        """The places in a dimension of the tile."""
        return self.of_segment(n) if n == "q" else n

    def mask_of(self, n: str) -> str:
        """Which of these there are."""
        return self.of_segment("q_mask") if n == "q" else f"{n}_mask"

    def variable(self, number: int, prefix: str = "v") -> str:
        """The variable of a value. prefix: of what is worked out on its way."""
        return self.of_segment(f"{prefix}{number}") if number in self.along_q else f"{prefix}{number}"

    def name(self, number: int) -> str:
        """What stands for a value: constants and numbers are written where they are used."""
        v = self.kernel.value(number)
        if v.op == "number":
            return f"tl.cast(arg_{v.data}, {TL_DTYPES[v.dtype]})"
        return literal(v.data, v.dtype, plain=False) if v.op == "constant" else self.variable(number)

    def count(self, name: str, size: sympy.Expr) -> str:
        """A number of elements, as an argument that 32 bits hold."""
        return str(size) if size.is_Integer else self.size_arg(name, size, True)

    # --- Places ---

    def extent(self, n: str) -> str:
        """How many elements blocks along a dimension must cover."""
        return f"{n}_size + {self.form.realigned - 1}" if self.form.realigned and n == "q" else f"{n}_size"

    def offsets(self, n: str | None) -> str:
        """The places in a block along a dimension of the tile."""
        assert n is not None
        expand = "" if len(self.shape_names) == 1 else "[:, None]" if n == self.shape_names[0] else "[None, :]"
        return f"tl.arange(0, {self.block(n)}){expand}" + (".to(tl.int64)" if self.layout.wide else "")

    def places(self, n: str, start: str, is_full: bool = False) -> None:
        """The places of a block and which of them there are: all where it is full."""
        if self.form.realigned and n == "q":
            self._places_in_vectors(start)
        elif n == "p" and self.is_one_row:
            self.out(f"p = tl.cast({start}, tl.int32)")
            self.out("p_mask = p < p_size")
        else:
            name, offsets = self.place(n), self.offsets(n)
            self.out(f"{name} = {start} + {offsets}" if start != "0" else f"{name} = {offsets}")
            inside = f"tl.full({self.shape_of(n)}, True, tl.int1)" if is_full else f"{name} < {n}_size"
            self.out(f"{self.mask_of(n)} = {inside}")
        if self.form.realigned and n == "p":
            self.out(f"shift = ({self.form.row_start or 0} % {self.form.realigned}).to(tl.int32)")
        self.single_axes(n)

    def _places_in_vectors(self, start: str) -> None:
        """A block of rows that begin `shift` elements into their first vector: which vectors hold any of the row, which
        hold nothing else, and the elements of those that do."""
        n, offsets = self.form.realigned, self.offsets("q")
        self.out(f"place = {start} + {offsets}" if start != "0" else f"place = {offsets}")
        self.out("q = place - shift")
        self.out("q_mask = (q >= 0) & (q < q_size)")
        self.out(f"vector = place // {n} * {n}")
        self.out("q_any = vector < q_size + shift")
        self.out(f"q_all = (vector >= shift) & (vector + {n} <= q_size + shift)")
        self.out("q_some = q_mask & (q_all == 0)")

    def single_axes(self, n: str) -> None:
        """The places along each axis of a dimension of the tile, where anything reads one."""
        axes = self.tile.p if n == "p" else self.tile.q
        if self._needs_axes({a.name for a in axes}):
            self.decompose(self.place(n), axes, f"{n}_size" if n == "p" else "")

    def _needs_axes(self, names: set[str]) -> bool:
        for v in self.kernel.values:
            is_printed = self.form.steps is None or v.number != self.form.steps.place
            if v.op == "index" and v.axes & names and is_printed:
                return True
            if v.op == "random" and any(s.name in names for s in self._random_place(v)[1].free_symbols):
                return True
            if v.op not in ACCESSES:
                continue
            access = self.accesses[v.number]
            read = {s.name for e in v.index for s in e.free_symbols} if access.elementwise else access.axes
            if not names.isdisjoint(read):
                return True
        return False

    def decompose(self, merged: str, axes: Sequence[Axis], extent: str = "") -> None:
        """The places along axes of which `merged` counts the points. extent: how many it counts; where the last axis
        has them all there is nothing to divide, which is as usual as divisions are slow."""
        names = [self._symbol_of_axis(a.name) for a in axes]
        self.out(f"{names[-1]} = {merged}")
        if len(axes) == 1:
            return
        counts = [self.count(f"count_{a.name}", a.size) for a in axes]
        if not extent or axes[-1].size.is_Integer:
            self._divide(merged, names, axes, counts)
            return
        for name in names[:-1]:
            self.out(f"{name} = {merged} * 0")
        with self.out.block(f"if {extent} > {counts[-1]}:"):
            self._divide(merged, names, axes, counts)

    def _divide(self, merged: str, names: Sequence[str], axes: Sequence[Axis], counts: Sequence[str]) -> None:
        left = merged
        for name, outer, axis, count in reversed(list(zip(names[1:], names, axes[1:], counts[1:], strict=False))):
            divided = f"{left} // {count}"
            if not axis.size.is_Integer:
                divided = f"device.divided({left}, {count}, {self.magic_arg(axis.size, self.layout.wide)})"
            self.out(f"{outer} = {divided}")
            self.out(f"{name} = {left} - {outer} * {count}")
            left = outer

    def _symbol_of_axis(self, name: str) -> str:
        return self.of_segment(name) if name in {a.name for a in self.tile.q} else name

    # --- Values ---

    def value(self, v: Value) -> None:
        """The lines of a value that is neither reduced, scanned nor sorted."""
        if v.op in ACCESSES:
            for line in bounds.before(self.kernel, v, self.text, self.asked(v), self.debug):
                self.out(line)
        self._plain_value(v)
        if self.debug and v.op == "store":
            operand, shape = self.name(v.args[0]), self.shape_of(self.names)
            for line in debug.after(self.debug, self.kernel.buffer(v.buffer), v, operand, shape, self.mask_text(v)):
                self.out(line)

    def _plain_value(self, v: Value) -> None:
        if v.op == "store":
            if v.data == "add" and v.dtype in ROUNDED_SUMS:
                mask = self.mask_text(v) or "True"
                self.out(f"device.add_16({self.pointer(v)}, {self.name(v.args[0])}, {mask})")
                return
            how = f"tl.atomic_{v.data}" if v.data in ATOMIC else "tl.store"
            order = "" if how == "tl.store" else ', sem="relaxed"'
            if self._is_realigned(v):
                for mask in ("q_all", "q_some"):
                    self.out(f"tl.store({self.pointer(v)}, {self.name(v.args[0])}, mask=p_mask & {mask})")
                return
            self.out(f"{how}({self.pointer(v)}, {self.name(v.args[0])}{self.mask(v)}{order})")
        elif v.op not in ("constant", "number"):
            self.out(f"{self.variable(v.number)} = {self.right_side(v)}")

    def right_side(self, v: Value) -> str:
        """What a value is made of."""
        if v.op == "load":
            return f"tl.load({self.pointer(v)}{self.mask(v)}{self._hint(v)})"
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
        count = self.count("count", self.kernel.buffer(v.buffer).sizes[-1])
        step = self.accesses[v.number].strides[-1]("1").removeprefix("1 * ")
        mask = self.mask_text(v) or "True"
        return f"device.search({self.pointer(v)}, {mask}, {step}, {count}, {self.name(v.args[0])}, {v.data})"

    def _operands(self, v: Value) -> list[str]:
        """The operands. Beside a tensor, a Python number does for a constant where Triton gives it that tensor's
        dtype."""
        constants = [self.kernel.value(a).op == "constant" for a in v.args]
        may_be_plain = v.op in _INFIX and not all(constants[-2:])
        plain = {a: literal(self.kernel.value(a).data, self.kernel.value(a).dtype)
                 for a, is_constant in zip(v.args, constants, strict=True) if is_constant and may_be_plain}  # fmt: skip
        return [plain.get(a) or self.name(a) for a in v.args]

    def _cast(self, operand: str, source: str, target: str) -> str:
        if target == "fp8e5":
            return f"device.to_fp8e5({operand})"
        if source in FLOATS and target in _CAST_BY:
            return f"{operand}.to({TL_DTYPES[_CAST_BY[target]]}).to({TL_DTYPES[target]})"
        return f"{operand}.to({TL_DTYPES[target]})"

    def _index_value(self, v: Value) -> str:
        if not v.axes:
            return self.size_arg("value", v.data, False)
        return self.text(v.data)

    # --- Memory ---

    def pointer(self, v: Value) -> str:
        """The addresses of an access."""
        access = self.accesses[v.number]
        if self.is_shifted and "q" in self.index_dims(v):
            return "part + q"
        if self.form.vectors and self.is_in_vectors(v):
            start = f"({self.row_text(v)} + {VECTOR - 1} >> 3) * {VECTOR}"
            return f"ptr_{v.buffer} + {start} + {self.of_segment('place')}"
        parts = [f"ptr_{v.buffer}", *access.base]
        if access.elementwise:
            parts += [stride(self.text(e)) for e, stride in zip(v.index, access.strides, strict=True) if e != 0]
        else:
            dims = self.index_dims(v)
            parts += [part for n, part in (("p", access.p), ("q", self._step(access))) if n in dims and part]
        if missing := self._mask_dims(v) - self.index_dims(v):
            parts.append(f"tl.zeros({self.shape_of(missing)}, tl.int32)")
        return " + ".join(parts)

    def _step(self, access: Access) -> str:
        """The way from a row's beginning to its elements."""
        if access.realigned:
            return "place"
        if access.q_step is None:
            return ""
        return f"{self.place('q')}.to(tl.int64) * {access.q_step}" if access.q_step else self.place("q")

    def row_text(self, v: Value) -> str:
        """The text of where the rows of an access begin."""
        access = self.accesses[v.number]
        return " + ".join([*access.base, *([access.p] if access.p else [])]) or "0"

    def is_in_vectors(self, v: Value) -> bool:
        """An access to rows without gaps: see Setting.vectors."""
        access = self.accesses[v.number]
        return not access.elementwise and access.q_step == "" and self.index_dims(v) == {"p", "q"}

    def mask_text(self, v: Value) -> str:
        """The mask of the block's ends, of what the load or store itself is guarded by, and of the bounds of its
        indices."""
        within = [bounds.name(v)] if bounds.tested(self.kernel, v) else []
        return " & ".join([*self._guards(v, self.index_dims(v) | self._mask_dims(v)), *within])

    def asked(self, v: Value) -> str:
        """The lanes of the indices of an access that are used."""
        tested = [v.index[d] for d in bounds.tested(self.kernel, v)]
        return " & ".join(self._guards(v, self._dims_over(tested)))

    def _guards(self, v: Value, dims: frozenset[str]) -> list[str]:
        parts = [self.mask_of(n) for n in self.shape_names if n in dims]  # of one row there is no block's end
        return [*parts, *(self.name(a) for a in (v.args if v.op == "load" else v.args[1:]))]

    def _is_realigned(self, v: Value) -> bool:
        """Whether an access is of a realigned row's whole vectors; what is guarded by a mask of its own goes element by
        element."""
        return self.accesses[v.number].realigned and len(v.args) == (v.op == "store")

    def mask(self, v: Value) -> str:
        """An access's mask as an argument, empty where it has none."""
        if v.op == "load" and self._is_realigned(v):
            # Of the 16 bytes alone that have some of the row: an element may be larger than those that `vector` counts.
            n = 16 // ITEMSIZE[self.kernel.buffer(v.buffer).dtype]
            has_any = "q_any" if n == self.form.realigned else f"(place // {n} * {n} < q_size + shift)"
            return f", mask=p_mask & {has_any}"
        mask = self.mask_text(v)
        zero = "0.0" if v.dtype.startswith("fp8") else "0"  # of an integer nothing converts to fp8
        other = f", other={zero}" if v.op == "load" and v.args else ""
        return f", mask={mask}{other}" if mask else ""

    def _hint(self, v: Value) -> str:
        """The hint of a load in a loop: what is read once leaves the caches first, so that what a later loop reads
        again stays. (Without a loop the hints cost up to 5 %.) Nothing is known of what is read at two indices, or at
        one that is itself read."""
        dims = self.index_dims(v)
        reads = {other.index for other in self.kernel.values if other.op == "load" and other.buffer == v.buffer}
        if hint := self.level_hints[dims != frozenset(self.names)]:
            return f', eviction_policy="{hint}"'
        is_looped = self.form.looped and not self.layout.wide
        if not is_looped or "q" not in dims or len(reads) > 1 or any(map(values_in, v.index)):
            return ""
        if v.buffer in self.form.read_later:
            return ""
        is_once = dims == frozenset(self.names) and v.buffer not in self.again
        return f', eviction_policy="evict_{"first" if is_once else "last"}"'

    def _mask_dims(self, v: Value) -> frozenset[str]:
        if v.op == "store" and v.data is not None:
            return frozenset(self.names)
        return self.dims_of(self.kernel.value(v.args[0])) if v.op == "load" and v.args else frozenset()

    # --- Random bits ---

    def _random_place(self, v: Value) -> tuple[LinearParts | None, sympy.Expr]:
        """A random value's linear index, and what of it is put together from single axes."""
        parts = linear_parts(self.kernel, self.tile, v) if self.layout.merged else None
        return parts, parts.rest if parts else v.index[0]

    def _random(self, v: Value) -> str:
        """Random numbers. Where the elements of a tile's rows follow each other they share Philox blocks; else each has
        its own."""
        seed, offset = (self.name(a) for a in v.args)
        parts, rest = self._random_place(v)
        head = [offset] if rest == 0 else [offset, self.text(rest)]
        rows = [f"p.to(tl.int64) * {self.count('row', parts.row)}"] if parts and parts.rows else []
        steps = self._steps(parts) if parts else None
        # Rows in vectors begin as addresses say; across rows a block's faster dimension is another; and a seed that is
        # read under a mask has an element's shape.
        by_address = (self.form.vectors and self.tile.p) or self.form.realigned or self.segment == EDGES
        is_turned = self.layout.across or self.form.by_thread
        if steps is None or by_address or is_turned or self.kernel.value(v.args[0]).args:
            places = [*head, *rows, *([self.place("q")] if parts else [])]
            return f"device.random_bits({seed}, {' + '.join(places)}, {v.data})"
        first = " + ".join([*head, *rows, *self._start_of_block()])
        return f"device.random_run({seed}, {first}, {' | '.join([offset, *steps])}, {v.data}, {self.block('q')})"

    def _steps(self, parts: LinearParts) -> list[str] | None:
        """What the linear index of a row's first element is made of multiples of; None where it is no such sum."""
        found = [parts.row] if parts.rows else []
        for term in sympy.Add.make_args(sympy.expand(parts.rest)):
            for a in self.tile.p:
                term = sympy.cancel(term / a.symbol) if a.symbol in term.free_symbols else term
            if term.free_symbols & {a.symbol for a in self.tile.p}:
                return None
            found.append(term)
        return [self.count("row", x) if x == parts.row else self.text(x) for x in found if x != 0]

    def _start_of_block(self) -> list[str]:
        """The lines that say where in its row a block begins, if not with it."""
        if self.segment:
            return [f"{self.segment} * BLOCK_Q"]
        if self.reduced_dim != "q":
            return ["start_q"]
        return ["start"] if self.form.looped else []

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
        place = self._symbol_of_axis(name)
        return place if self.layout.wide else f"{place}.to(tl.int64)"

    def _is_variable(self, name: str) -> bool:
        return name in {a.name for a in self.kernel.axes} or (name[0] == "v" and name[1:].isdigit())
