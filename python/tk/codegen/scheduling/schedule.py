"""Schedule: a kernel -> a launch, with what it takes for granted and what it costs.

A layout says what is known of strides (``tile.LAYOUTS``), a setting how large a block is. From both follow the tile,
the addresses, the launch's arguments and the constraints under which they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, device, maximum, minimum, mode, select
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Buffer,
    Const,
    Constraint,
    Float,
    Int,
    Launch,
    Op,
    Pointer,
    Scratch,
    require,
)
from tk.codegen import along, ir
from tk.codegen import device as functions
from tk.codegen import index as ix
from tk.codegen.errors import IRError
from tk.codegen.printing import debug
from tk.codegen.printing.body import EDGE, VECTOR, Body, Form
from tk.codegen.printing.loops import loops
from tk.codegen.printing.printer import print_function
from tk.codegen.scheduling import combo, sorts
from tk.codegen.scheduling.settings import Setting, settings_of
from tk.codegen.tile import ALIGNED, ROWS, STRIDED, Access, Layout, Tile, choose_tile, coefficients, is_in_fours

# Predicted time, fitted to what tools/time_settings.py measured on an H200: picoseconds.
START, BLOCK = 335_000, 374_000  # of a program, for each pass; of a block that waits for its loads
INSTRUCTION = 29  # 1/1024 ps, of one for one element when all multiprocessors issue
REDUCTION = 64  # a warp's part in a reduction over the block
PER_THREAD = 40  # instructions of a thread that do not depend on how many elements it has
MOST_WARPS = 64  # resident on a multiprocessor
WALK_REDUCTION = 250_000  # ps, of a walk that waits for a sum over the row
WALK_REGISTERS = 40, 6  # of a thread, and for each element that it has of a block
L2_KEPT, L2_LOST = 16 << 20, 40 << 20  # of the rows under way a loop finds all again, and nothing of so many more
INSTRUCTIONS: Mapping[str, int] = {
    "exp": 6, "exp2": 5, "log": 6, "log2": 5, "div": 8, "sqrt": 8, "rsqrt": 4, "reciprocal": 8, "sigmoid": 14,
    "erf": 40, "erfc": 20, "tanh": 30, "sin": 40, "cos": 40, "tan": 60, "pow": 60, "lgamma": 100, "expm1": 25,
    "log1p": 25, "constant": 0, "number": 0, "index": 2,
}  # fmt: skip

LOOK_BACK = 9_000  # picoseconds of a program that looks back, beside all else
REALIGNED = 5  # instructions for an element of a load or store of a realigned row
COLUMN = 5, 16  # of what has one value a column: neighbours in one load, and beside vectors, every eighth
SCANNED = 10  # instructions for an element of a scan
EXCHANGE: Mapping[str, int] = {"i32": 8, "i64": 18}  # instructions for an element in a stage of a sort
MERGED = 10  # picoseconds for an element in a merge of runs
# Picoseconds of a pass over as many rows as a multiprocessor sorts at once by digits, and for each warp of a row more.
DIGIT_PASS: Mapping[str, tuple[int, int]] = {"i32": (2_000_000, 45_000), "i64": (3_300_000, 80_000)}

MOST_DIGITS = 64 << 10  # bytes of a row that is sorted by digits: shared memory holds it twice

MAX_INT32 = 2**31 - 2**17  # a block's last index may lie past the last element


def kind_of(kernel: ir.Kernel, tile: Tile) -> str:
    """The row of the table of settings."""
    if along.sorts(kernel):
        if along.by_digits(kernel):
            return "digits"
        if along.is_narrow(kernel):
            return "narrow"
        return "runs" if along.sorts_runs(kernel) else "top" if along.limits(kernel) else "sort"
    if tile.reduced == "q" and along.scans(kernel):
        return "scan"
    if tile.walk:
        return "walk"
    if tile.reduced is None:
        return "rows" if tile.p else "flat"
    if tile.reduced == "p":
        return "outer"
    return "inner" if tile.p else "full"


def choices(kernel: ir.Kernel, layout: Layout, kind: str = "") -> tuple[Setting, ...]:
    """The settings that a launch may have in a layout. kind: instead of its own."""
    tile = choose_tile(kernel, layout)
    kind = kind or kind_of(kernel, tile)
    found = settings_of(kind, layout.name)
    if kind in ("scan", "sort", "top", "runs", "digits", "narrow"):
        can_be_spread = kind == "runs" or (kind == "scan" and along.can_be_spread(kernel))
        has_rows = bool(tile.p) and _has_rows(kernel, tile)
        can_be_realigned = kind == "scan" and has_rows and along.can_be_realigned(kernel)
        fitting = tuple(s for s in found if (tile.p or s.p == 1) and (can_be_spread or not s.spread)
                        and (can_be_realigned or not s.realigned))  # fmt: skip
        # What serves a call that nothing else takes serves a single row as well.
        found = fitting or tuple(replace(s, p=1, q=s.p * s.q) for s in found[:1] if s.looped and kind == "scan")
        # What is not realigned has a single element a load: where both are there, the first is enough.
        found = tuple(s for s in found if s == found[0] or s.realigned or replace(s, realigned=True) not in found)
    if kind == "digits":
        found = tuple(s for s in found if s.row * ITEMSIZE[along.sorts(kernel)[0].dtype] <= MOST_DIGITS)
    if any(s.vectors for s in found) and not _has_rows(kernel, tile):
        found = tuple(s for s in found if not s.vectors)
    return found


def _has_rows(kernel: ir.Kernel, tile: Tile) -> bool:
    """Whether any access is to rows that may be without gaps."""
    for v in kernel.accesses:
        factors = coefficients(v, kernel.axes)
        if factors is None or v.op == "search":
            continue
        of = dict(zip((a.name for a in kernel.axes), factors, strict=True))
        is_whole = all(of[a.name] for a in (*tile.p, *tile.q))
        if is_whole and of[tile.q[-1].name] == {len(v.index) - 1: sympy.Integer(1)}:
            return True
    return False


def has_secondary_setting(kernel: ir.Kernel, layout: Layout) -> bool:
    return bool(along.sorts(kernel) or choices(kernel, layout))


def secondary_setting(kernel: ir.Kernel, layout: Layout) -> Setting:
    """Of a launch beside the one that a config is about: one that takes as many sizes as it can."""
    if along.sorts(kernel):
        return settings_of("runs" if along.sorts_runs(kernel) else "sort", "rows")[-1]
    return choices(kernel, layout)[0]


# --- What a launch can read of a problem ---


@dataclass(frozen=True)
class Context:
    """The op's side: its tensors by the buffers' names, the sizes of "...", and letters as locals."""

    op: Op
    tensors: Mapping[str, Tensor]
    scratch: Mapping[str, int]  # the number of a scratch buffer in the plan
    debug: bool = False

    def expr(self, e: sympy.Expr) -> Expr:
        """A size expression in the language of packs."""
        e = sympy.sympify(e)
        if e.is_Integer:
            return as_expr(int(e))
        if e.is_Symbol:
            return self.op.int(e.name) if e.name in self.op.ints else self.op.local(e.name)
        kind, args = type(e).__name__, [self.expr(a) for a in e.args]
        if kind in ("FloorDiv", "Mod", "PythonMod"):
            return args[0] // args[1] if kind == "FloorDiv" else args[0] % args[1]
        if kind == "Pow" and e.args[1].is_Integer and 0 < int(e.args[1]) < 5:
            args = [args[0]] * int(e.args[1])
            kind = "Mul"
        fold: Mapping[str, Callable[[Expr, Expr], Expr]] = {
            "Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "Max": maximum, "Min": minimum,
        }  # fmt: skip
        if kind not in fold:
            raise IRError(f"{e}: no expression for {kind}")
        result = args[0]
        for a in args[1:]:
            result = fold[kind](result, a)
        return result

    def dims(self, buffer: ir.Buffer, d: int) -> tuple[int, ...]:
        """The dimensions at run time of the `d`-th as traced."""
        if not buffer.leading:
            return (d,)
        return (0, 1, 2) if d == 0 else (d + 2,)

    def stride(self, buffer: ir.Buffer, d: int) -> Expr:
        """Of the last dimension that the traced one stands for."""
        if buffer.name in self.scratch:
            return self.expr(ix.product(buffer.sizes[d + 1 :]))
        return self.tensors[buffer.name].stride(self.dims(buffer, d)[-1])


# --- One launch ---


@dataclass(frozen=True)
class Work:
    """Of one launch. bytes: read and written for an element; read: those of them that a loop would read again.
    computed: instructions for an element. accesses, columns: loads and stores along rows; those of them that have one
    value a column are the latter. passes: how often a loop goes over what is reduced."""

    bytes: int
    read: int
    computed: int
    accesses: int
    columns: int
    reductions: int
    passes: int


@dataclass
class Scheduled:
    """A launch being put together."""

    kernel: ir.Kernel
    tile: Tile
    layout: Layout
    context: Context
    args: dict[str, Arg] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)
    unit: set[str] = field(default_factory=set)  # buffers that are read along q without gaps
    rows_of: dict[str, list[tuple[Expr, Expr]]] = field(default_factory=dict)  # of these (base, step of a row)
    in_vectors: bool = False  # rows that begin anywhere: see Setting.vectors and Setting.realigned
    buffers: list[Buffer] = field(default_factory=list)  # beside those of context.scratch
    realigned: int = 0  # elements of the vectors in which realigned rows are read; 0: they are not
    row: tuple[str, Expr] | None = None  # of such rows where they begin, and how far apart

    # --- Arguments ---

    def int_arg(self, name: str, value: Expr | int, dtype: str = "i64", divisible: bool = False) -> str:
        """The name of an argument with this value; one value is passed once."""
        key = (as_expr(value).encode(), dtype, divisible)
        if key not in self.known:
            while name in self.args:
                name += "_"
            self.known[key] = name
            self.args[name] = Int(value, dtype, divisible)
        return self.known[key]

    def require(self, holds: Expr | bool, message: str) -> None:
        if not any(c.holds.same(as_expr(holds)) for c in self.constraints):
            self.constraints.append(require(holds, message))

    def extent(self, axes: Sequence[ir.Axis]) -> Expr:
        return self.context.expr(ix.product([a.size for a in axes]))

    def per_16_bytes(self, buffer: ir.Buffer) -> int:
        return 16 // ITEMSIZE[buffer.dtype]

    # --- Addresses ---

    def access(self, v: ir.Value) -> Access:
        buffer = self.kernel.buffer(v.buffer)
        if self.layout.merged and v.op != "search":
            if buffer.leading:
                t = self.context.tensors[buffer.name]
                self.require(
                    (t.size(0) == 1) & (t.size(1) == 1), f"leading dimensions of {buffer.name} that run together"
                )
            linear = self._linear(v, buffer)
            if linear is not None:
                return linear
        return Access(True, strides=tuple(self._strider(buffer, d) for d in range(len(v.index))))

    def _strider(self, buffer: ir.Buffer, d: int) -> Callable[[str], str]:
        dims = self.context.dims(buffer, d)
        if len(dims) == 1 or self.layout.merged:
            stride = self.int_arg(f"stride_{buffer.name}_{dims[-1]}", self.context.stride(buffer, d))
            return lambda text: f"{text} * {stride}"
        t = self.context.tensors[buffer.name]
        s0, s1, s2 = (self.int_arg(f"stride_{buffer.name}_{n}", t.stride(n)) for n in dims)
        n1, n2 = (self.int_arg(f"leading_{n}", self.context.op.local(f"leading_{n}")) for n in (1, 2))
        return lambda x: f"({x} // ({n1} * {n2})) * {s0} + ({x} // {n2} % {n1}) * {s1} + ({x} % {n2}) * {s2}"

    def _linear(self, v: ir.Value, buffer: ir.Buffer) -> Access | None:
        """base + p * step + q, where the index is linear and what is merged runs together; None where it is not."""
        factors = coefficients(v, self.kernel.axes)
        if factors is None:
            return None
        of = dict(zip((a.name for a in self.kernel.axes), factors, strict=True))
        for axes in (self.tile.p, self.tile.q):
            # With one of several axes counted backwards they never run together.
            ways = {(bool(of[a.name]), any(f.is_negative for f in of[a.name].values())) for a in axes}
            if len(ways) > 1:
                return None
        steps = {a.name: self._step(buffer, of[a.name]) for a in self.kernel.axes}
        p = self._merge(buffer, self.tile.p, steps) if any(of[a.name] for a in self.tile.p) else None
        q = self._merge(buffer, self.tile.q, steps) if any(of[a.name] for a in self.tile.q) else None
        last = len(v.index) - 1
        is_unit = q is not None and of[self.tile.q[-1].name] == {last: sympy.Integer(1)}
        if is_unit:
            assert q is not None
            is_dense = (q == 1) | (self.extent(self.tile.q) == 1)
            if not ix.same(buffer.sizes[last], self.tile.q[-1].size):  # of the rows only the first element may be there
                is_dense = is_dense | (self.context.expr(buffer.sizes[last]) == 1)
            self.require(is_dense, f"{buffer.name} without gaps along its rows")
            self.unit.add(buffer.name)
            if p is not None or not self.tile.p:
                step = as_expr(0) if p is None else p
                self.rows_of.setdefault(buffer.name, []).append((self._constant(buffer, v, is_unit), step))
            if self.realigned and p is not None:
                return self._realigned_access(buffer, v, p)
        vector = self.per_16_bytes(buffer) if self.layout.aligned and is_unit else 1
        base = [self._product(buffer, "base", None, self._constant(buffer, v, is_unit), vector)]
        base += [self._product(buffer, f"step_{a.name}", a.name, steps[a.name], vector)
                 for a in self.tile.batch if of[a.name]]  # fmt: skip
        q_step = "" if is_unit else self._product(buffer, "step_q", None, q, 1) or None
        return Access(False, tuple(b for b in base if b), self._product(buffer, "step_p", "p", p, vector), q_step)

    def _realigned_access(self, buffer: ir.Buffer, v: ir.Value, p: Expr) -> Access:
        """From the 16 bytes in which a row begins: in every buffer as far before the row."""
        self.require(self._constant(buffer, v, True) % self.realigned == 0, f"{buffer.name} from its first row on")
        text = self._product(buffer, "step_p", "p", p, 1)
        if self.row is None:
            self.row = text, p
        is_same = ((p - self.row[1]) % self.realigned == 0) | (self.extent(self.tile.p) == 1)
        self.require(is_same, f"rows of {buffer.name} as far from 16 bytes as those of the others")
        base = self._product(buffer, "base", None, self._constant(buffer, v, True), 1)
        in_vectors = f"({text} - shift) // {self.realigned} * {self.realigned}"
        return Access(False, (base,) if base else (), in_vectors, "", realigned=True)

    def _step(self, buffer: ir.Buffer, factors: Mapping[int, sympy.Expr]) -> Expr:
        total: Expr = as_expr(0)
        for d, factor in factors.items():
            total = total + self.context.expr(factor) * self.context.stride(buffer, d)
        return total

    def _constant(self, buffer: ir.Buffer, v: ir.Value, is_unit: bool) -> Expr:
        """Where every axis is 0. is_unit: of the last dimension the step is taken to be 1. Of one of size 1 it is then
        1 here as well, whatever the tensor's is: ``q - 1`` is to be its only element where q is 1."""
        zero = {a.symbol: sympy.Integer(0) for a in self.kernel.axes}
        total: Expr = as_expr(0)
        for d, e in enumerate(v.index):
            stride = self.context.stride(buffer, d)
            if is_unit and d == len(v.index) - 1:
                stride = select(self.context.expr(buffer.sizes[d]) == 1, 1, stride)
            total = total + self.context.expr(sympy.expand(e).xreplace(zero)) * stride
        return total

    def _merge(self, buffer: ir.Buffer, axes: Sequence[ir.Axis], steps: Mapping[str, Expr]) -> Expr:
        """The one step of axes that run together. That of an axis of size 1 says nothing."""
        step, inner = steps[axes[-1].name], self.context.expr(axes[-1].size)
        for a in reversed(axes[:-1]):
            size, own = self.context.expr(a.size), steps[a.name]
            self.require(
                (size == 1) | (inner == 1) | (own == step * inner), f"dimensions of {buffer.name} that run together"
            )
            step = select(inner == 1, own, step)
            inner = inner * size
        return step

    def _product(self, buffer: ir.Buffer, what: str, index: str | None, step: Expr | None, vector: int) -> str:
        """`index * step`, in 64 bits. vector: the step is passed as a multiple of this many elements, so that the
        compiler knows that every row begins at 16 bytes."""
        if step is None or step.value == 0:
            return ""
        if vector > 1:
            is_unused = as_expr(False) if index is None else self._extent_of(index) == 1
            self.require((step % vector == 0) | is_unused, f"rows of {buffer.name} that begin at 16 bytes")
            name = self.int_arg(f"{what}_{buffer.name}", step // vector)
            text = f"({name} * {vector})"
        else:
            text = self.int_arg(f"{what}_{buffer.name}", step)
        return text if index is None else f"{index}.to(tl.int64) * {text}"

    def _extent_of(self, index: str) -> Expr:
        axes = {"p": self.tile.p, "q": self.tile.q}.get(index) or [a for a in self.kernel.axes if a.name == index]
        return self.extent(axes)

    # --- The launch ---

    def launches(self, setting: Setting) -> list[Launch]:
        """The kernel's launch, and what must come before and after it."""
        if setting.digits:
            return [self.launch(replace(setting, q=sorts.TILE, warps=4, spread=True)), self._digits(setting)]
        main = self.launch(setting)
        if not setting.spread:
            return [main]
        if along.sorts(self.kernel):
            return [main, *self._merges()]
        flags = Int(self._programs_spread(setting) * 2 + 1)
        clear = Launch(functions.clear, {"ptr": main.args["ptr_state"], "n": flags, "BLOCK": Const(1024)},
                       (ceil_div(flags.value, 1024), 1, 1))  # fmt: skip
        return [clear, main]

    def _programs_spread(self, setting: Setting) -> Expr:
        return self.extent(self.tile.p) * ceil_div(self.extent(self.tile.q) + max(self.realigned - 1, 0), setting.q)

    def _state(self, setting: Setting) -> dict[str, Arg]:
        """Scratch memory of a scan over programs: flags, and values for blocks and windows."""
        found: dict[str, Arg] = {}
        programs, v = self._programs_spread(setting), along.scans(self.kernel)[0]
        carried = along.carried(self.kernel, v, self.layout.wide)
        wanted = [("ptr_state", "i32", programs * 2 + 1)]
        wanted += [(f"ptr_{what}_{i}", t, programs) for what in ("blocks", "windows") for i, t in enumerate(carried)]
        for name, dtype, count in wanted:
            found[name] = Scratch(len(self.context.scratch) + len(self.buffers), dtype)
            self.buffers.append(Buffer(count * ITEMSIZE[dtype]))
        return found

    def _digits(self, setting: Setting) -> Launch:
        rows, n = self.extent(self.tile.p), self.extent(self.tile.q)
        self.require(n <= setting.q, f"at most {setting.q} elements to sort")
        (store,) = (v for v in self.kernel.values if v.op == "store")
        number = self.context.scratch[store.buffer]
        return sorts.digits(number, store.dtype, rows, n, _half(rows * n, store.dtype), setting.q, setting.warps)

    def _merges(self) -> Iterator[Launch]:
        rows, n = self.extent(self.tile.p), self.extent(self.tile.q)
        groups: dict[tuple[int, ...], dict[int, tuple[int, str]]] = {}
        for v in self.kernel.values:
            if v.op == "store":
                of, number = self.kernel.value(v.args[0]), self.context.scratch[v.buffer]
                groups.setdefault(of.args, {})[of.data.part] = (number, v.dtype)
        for group in groups.values():
            yield from sorts.merges(group, rows, n, lambda dtype: _half(rows * n, dtype))

    def launch(self, setting: Setting) -> Launch:
        return combo.launch([self.printed(setting)])

    def printed(self, setting: Setting, is_behind: bool = False) -> combo.Printed:
        """is_behind: in a launch whose first programs do something else."""
        kernel = self.kernel
        looped = setting.looped and self.tile.reduced is not None
        self.in_vectors = setting.vectors or setting.realigned
        if setting.realigned:
            self.realigned = max(self.per_16_bytes(kernel.buffer(v.buffer)) for v in kernel.accesses)
        accesses = {v.number: self.access(v) for v in kernel.accesses}
        p_size, q_size = self.extent(self.tile.p), self.extent(self.tile.q)
        if setting.realigned:
            self.require(q_size > 0 if self.row else False, "something to read in rows")
        divisible = self.layout.aligned and bool(self.unit)
        if self.layout.aligned and not self.unit:
            self.require(False, "something to read in rows")
        if self.layout.merged:
            self.require((p_size < MAX_INT32) & (q_size < MAX_INT32), f"fewer than {MAX_INT32} rows and columns")
        if divisible:
            self.require(q_size % 16 == 0, "rows of a multiple of 16 elements")
        self.sizes = {"p": p_size, "q": q_size}
        if setting.vectors:
            self._require_vectors(setting)
        self._require_fours()
        reduced = self.tile.reduced
        if setting.spread:
            programs = self._programs_spread(setting)
            self.require((q_size < MAX_INT32) & (programs < MAX_INT32 // 4), f"rows of fewer than {MAX_INT32} elements")
        elif looped and along.sorts(kernel):
            for limit in along.limits(kernel):
                self.require(self.context.expr(limit) <= setting.q, f"at most {setting.q} elements to keep")
            if along.is_narrow(kernel):
                self.require(q_size <= along.LONGEST_NARROW, f"rows of at most {along.LONGEST_NARROW} elements")
        elif reduced and not looped:
            block = setting.p if reduced == "p" else setting.row
            # Of rows in vectors what does not fill one is an edge, of fewer than two vectors' elements.
            block += (VECTOR - 1) * setting.vectors - max(self.realigned - 1, 0)
            self.require(self.sizes[reduced] <= block, f"at most {block} elements to reduce")
            if setting.segments > 1:
                least = setting.row - setting.q + (EDGE - 3) * setting.vectors
                self.require(self.sizes[reduced] > least, f"more than {least} elements to reduce")
        width = "i64" if self.layout.wide else "i32"
        ints: dict[str, Arg] = {"q_size": Int(q_size, width, divisible)}
        if self.tile.p:
            ints["p_size"] = Int(p_size, width)
        text, ints = self._print(accesses, setting, ints, is_behind)
        pointers = {f"ptr_{b.name}": self._pointer(b) for b in kernel.buffers}
        if setting.spread and along.scans(kernel):
            pointers |= self._state(setting)
        numbers = {f"arg_{v.data}": self.context.op.float(v.data, "fp64") for v in kernel.values if v.op == "number"}
        blocks: dict[str, Arg] = {"BLOCK_P": Const(setting.p)} if self.tile.p else {}
        blocks["BLOCK_Q"] = Const(setting.q)
        programs = self.programs(setting)
        # Nothing to put is no reason not to write the base.
        when = programs > 0 if any(v.op == "store" and v.data for v in kernel.values) else 1
        return combo.Printed(
            kernel.name, text, {**pointers, **numbers, **ints, **blocks}, programs, setting.warps, 2 if looped else 1,
            setting.registers, when, debug.OPTIONS if self.context.debug else {},
        )  # fmt: skip

    def _require_vectors(self, setting: Setting) -> None:
        """All rows of the same number begin as far behind a vector's address, and those that one program walks."""
        self.require(self.sizes["q"] >= EDGE, f"rows of at least {EDGE} elements")
        all_rows = [row for of in self.rows_of.values() for row in of]
        if not self.tile.p:
            all_rows = [(as_expr(0), as_expr(0)), *all_rows]  # all begin at an address of 16 bytes
        self.require(bool(all_rows), "rows without gaps")
        for base, step in all_rows:
            for mine, first in zip((base, step), all_rows[0], strict=True):
                if not mine.same(first):
                    self.require((mine - first) % VECTOR == 0, "rows that begin alike beside the addresses of vectors")
        if self.tile.walk:
            programs = self.programs(setting)
            alike = (programs * setting.p % VECTOR == 0) | (programs * setting.p >= self.sizes["p"])
            self.require(alike, f"programs that are a multiple of {VECTOR}")

    def _require_fours(self) -> None:
        """Where four random words are used at once the offset may not begin in the middle of them."""
        for v in self.kernel.values:
            if self.layout.aligned and v.op == "random" and is_in_fours(self.kernel, self.tile, v):
                offset = self.kernel.value(v.args[1])
                first = self.context.expr(offset.data) if offset.op in ("index", "constant") else as_expr(1)
                self.require(first % 4 == 0, "an offset that is a multiple of 4")

    def _print(self, accesses: Mapping[int, Access], setting: Setting, ints: dict[str, Arg],
               is_behind: bool) -> tuple[str, dict[str, Arg]]:  # fmt: skip
        form = Form(
            looped=setting.looped and self.tile.reduced is not None,
            spread=setting.spread,
            segments=setting.segments,
            stages=setting.stages,
            rows=setting.p,
            rows_meet=self._rows_meet(setting),
            rereads=setting.rereads,
            ahead=setting.ahead,
            vectors=setting.vectors,
            realigned=self.realigned,
            row_start=self.row[0] if self.row else "",
            first=combo.FIRST if is_behind else "",
        )
        debug_op = self.context.op.name if self.context.debug else ""
        body = Body(self.kernel, self.tile, self.layout, accesses, self._size_arg, form, debug_op)
        text = print_function(body, self.kernel.name, [combo.PARAMS])
        return text, {**ints, **self.args}

    def _rows_meet(self, setting: Setting) -> bool:
        """Whether a thread has the same columns of all rows of a block, as Triton lays a block out over threads."""
        vector = VECTOR if self.layout.aligned or setting.vectors else 1
        return setting.q >= 32 * setting.warps * vector

    def _size_arg(self, name: str, expr: sympy.Expr, is_narrow: bool) -> str:
        """A size expression as an argument of the launch."""
        dtype = "i32" if is_narrow and self.layout.merged else "i64"
        return self.int_arg(name, self.context.expr(expr), dtype)

    def _pointer(self, b: ir.Buffer) -> Arg:
        if b.name in self.context.scratch:
            is_stored = any(v.op == "store" and v.buffer == b.name for v in self.kernel.values)
            offset = as_expr(0) if is_stored or not b.merged else self._merged_into(b)
            return Scratch(self.context.scratch[b.name], b.dtype, offset)
        t = self.context.tensors[b.name]
        aligned = b.name in (self.unit if self.layout.aligned else self.rows_of if self.in_vectors else ())
        if aligned:
            self.require(t.alignment >= 16, f"{b.name} on 16 bytes")
        return Pointer(t, b.dtype, aligned)

    def _merged_into(self, b: ir.Buffer) -> Expr:
        """The half of a sort's buffer that its last merge has written."""
        half = _half(self.context.expr(ix.product(b.sizes)), b.dtype)
        return sorts.passes(self.context.expr(b.sizes[-1])) % 2 * half

    def programs(self, setting: Setting) -> Expr:
        if setting.spread:
            return self._programs_spread(setting)
        blocks = {"p": setting.p, "q": setting.q}
        total = self.extent(self.tile.batch)
        if self.tile.walk:
            return total
        for n, axes in (("p", self.tile.p), ("q", self.tile.q)):
            if axes and n != self.tile.reduced:
                total = total * ceil_div(self.extent(axes), blocks[n])
        return total

    # --- Predicted time ---

    def cost(self, setting: Setting) -> Expr:
        """Picoseconds: what takes longest of moving bytes, issuing instructions, and waiting where programs are few.

        Only the order of two settings counts. `tools/time_settings.py judge` says how far off it is."""
        work, reduced = self._work, self.tile.reduced
        looped = setting.looped and reduced is not None
        passes = work.passes if looped else 1
        block = {"p": setting.p if self.tile.p else 1, "q": setting.row}
        programs, kept = self.programs(setting), self.extent(self.tile.batch if not self.tile.walk else ())
        for n in ("p", "q"):
            kept = kept * self.sizes[n] if n != reduced and n in self.sizes else kept
        if reduced is not None:
            # The order of a sum follows from the setting: it may not depend on how many rows came with it.
            programs = select(mode("batch_invariant"), 1024, programs)
            kept = select(mode("batch_invariant"), 1024 * block["p" if reduced == "q" else "q"], kept)
        elements = kept * self.sizes[reduced] if reduced else kept
        blocks = as_expr(1)
        if self.tile.walk:
            blocks = ceil_div(kept, programs * setting.p)
        elif looped:
            blocks = ceil_div(self.sizes[reduced or "q"], block[reduced or "q"])
        resident = self._resident(setting)
        # Of what a loop reads again, the share that the L2 cache no longer has, in sixteenths.
        lost = as_expr(0)
        if passes > 1:
            live = self.sizes[reduced or "q"] * (work.read * block["p" if reduced == "q" else "q"])
            live = maximum(live * minimum(device.sm_count * resident, programs) - L2_KEPT, 0)
            lost = minimum(live // (L2_LOST // 16), 16)
        moved = elements * work.bytes + elements * ((passes - 1) * work.read) * lost // 16
        if not looped or passes > 1:  # while a block or pass ends nothing is loaded but by its neighbours
            moved = moved * (2 * resident + 1) // (2 * resident)
        moved = moved * {"aligned": 1, "rows": 1, "strided": 2}[self.layout.name] // 4  # 0.25 ps a byte: 4 TB/s
        full = ceil_div(programs, device.sm_count) * device.sm_count * blocks
        instructions = block["p"] * block["q"] * self._instructions(setting)
        instructions += 32 * setting.warps * PER_THREAD + setting.vectors * self._edge_instructions(setting)
        # A scan's carry is one, too. The edges of several rows are reduced for themselves.
        reductions = work.reductions * (1 + (setting.vectors and setting.p > 1))
        reductions += len(along.scans(self.kernel)) * (4 if looped else 1)
        issued = full * (instructions * INSTRUCTION // 1024 + reductions * setting.warps * passes * REDUCTION)
        waves = ceil_div(programs, device.sm_count * resident)
        per_block = BLOCK if self.layout.aligned or self.in_vectors else BLOCK * 3 // 2
        if self.tile.walk:  # a program's next rows are not loaded before these are done, unless the setting says so
            per_block = per_block * (1 if setting.ahead else 2) // setting.stages + work.reductions * WALK_REDUCTION
        waited = waves * (START * (1 + passes) + blocks * (passes * per_block))
        more = as_expr(1_000_000)
        if setting.digits:
            more = more + self._digits_cost(setting, elements)
        elif setting.spread and along.sorts(self.kernel):  # every merge reads and writes all
            more = more + sorts.passes(self.sizes["q"]) * (elements * MERGED + 10_000_000)
        elif setting.spread:
            more = programs * LOOK_BACK + 4_000_000
        # All but the longest is hidden, to a tenth.
        return (maximum(maximum(moved, issued), waited) * 13 + moved + issued + waited) // 16 + more

    def _resident(self, setting: Setting) -> int:
        """Programs on a multiprocessor. What a walk keeps of its rows and adds up over them takes registers."""
        by_warps = max(1, MOST_WARPS // setting.warps)
        if not self.tile.walk:
            return by_warps
        elements = setting.p * setting.row // (32 * setting.warps)
        wanted = WALK_REGISTERS[0] + WALK_REGISTERS[1] * elements
        most = min(255, 65_536 // (32 * setting.warps), *([setting.registers] if setting.registers else []))
        return max(1, min(by_warps, 65_536 // (32 * setting.warps * min(wanted, most))))

    def _digits_cost(self, setting: Setting, elements: Expr) -> Expr:
        """Of the launch that sorts by digits: its passes, and what it reads and writes."""
        dtype = along.sorts(self.kernel)[0].dtype
        size, (of_pass, of_warp) = ITEMSIZE[dtype], DIGIT_PASS[dtype]
        resident = 32 // setting.warps
        rows = maximum(elements // maximum(self.sizes["q"], 1), device.sm_count * resident // 3)
        passes = size * 2 * (of_pass + of_warp * setting.warps)
        return rows * passes // (device.sm_count * resident) + elements * size // 2 + 1_000_000

    def _instructions(self, setting: Setting) -> int:
        """For each element of a block: what is computed, and what loads and stores take."""
        access = {"aligned": 2, "rows": 12 + min(512 // setting.row, 16), "strided": 30}[self.layout.name]
        of_column = COLUMN[setting.vectors] if self.layout.name == "rows" else access
        if setting.vectors or setting.realigned:
            access = 2 if setting.vectors else REALIGNED
        found = self._work.computed + self._work.accesses * access + self._work.columns * of_column
        if along.sorts(self.kernel) and not setting.digits:
            of_one = EXCHANGE[along.sorts(self.kernel)[0].dtype]
            found += of_one * sorts.stages(setting.q, looped=setting.looped)
        return found

    def _edge_instructions(self, setting: Setting) -> int:
        """Of all threads, each of which has an element of a row's edges, whether there is one or not, and more if the
        block's rows have more."""
        work = self._work
        of_one = work.computed + 6 * (work.accesses + work.columns + work.reductions)
        return max(32 * setting.warps, setting.p * EDGE) * of_one

    @cached_property
    def _work(self) -> Work:
        """Of the values and buffers at every element of the tile: a bias or a row's sum hardly counts."""
        dims = [{a.name for a in axes} for axes in (self.tile.p, self.tile.q) if axes]
        read: dict[str, int] = {}
        written: dict[str, int] = {}
        for v in self.kernel.accesses:
            names = {s.name for e in v.index for s in e.free_symbols}
            if all(names & d for d in dims):
                (read if v.op == "load" else written)[v.buffer] = ITEMSIZE[self.kernel.buffer(v.buffer).dtype]
        inside = [v for v in self.kernel.values if all(v.axes & d for d in dims)]
        along_q = {a.name for a in self.tile.q}
        accesses = [v for v in self.kernel.values if v.op in ("load", "store") and v.axes & along_q]
        columns = [v for v in accesses if not all(v.axes & d for d in dims)]
        reductions = [v for v in self.kernel.values if v.op == "reduce"]
        computed = sum(INSTRUCTIONS.get(v.op, 1) for v in inside if v.op not in ("load", "store"))
        computed += sum(5 if v.data in ("argmax", "argmin") else 2 for v in reductions)
        computed += SCANNED * len({along.scan_key(v) for v in along.scans(self.kernel)})
        passes = loops(self.kernel, self.tile)
        return Work(max(1, sum(read.values()) + sum(written.values())), sum(read.values()), computed,
                    len(accesses) - len(columns), len(columns), len(reductions), passes)  # fmt: skip


def schedule(kernel: ir.Kernel, layout: Layout, context: Context) -> Scheduled:
    return Scheduled(kernel, choose_tile(kernel, layout), layout, context)


def scratch_buffers(kernels: Sequence[ir.Kernel], context: Context) -> Iterator[Buffer]:
    """One for each name, in the order of `context.scratch`."""
    found = {b.name: b for k in kernels for b in k.buffers if b.kind == "scratch"}
    for name in context.scratch:
        b = found[name]
        elements = context.expr(ix.product(b.sizes))
        yield Buffer(_half(elements, b.dtype) * 2 if b.merged else maximum(elements * ITEMSIZE[b.dtype], 16))


def _half(elements: Expr, dtype: str) -> Expr:
    """Bytes, so that what comes after begins at an aligned address."""
    return ceil_div(elements * ITEMSIZE[dtype], 256) * 256


__all__ = ["ALIGNED", "ROWS", "STRIDED", "Context", "Float", "Scheduled", "schedule", "scratch_buffers"]
