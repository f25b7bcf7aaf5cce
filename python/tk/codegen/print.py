"""Print: a kernel and its tile -> Triton source.

Scalar operations are rows of a table, one template each for floats and integers. What is around them — the tile's
indices, masks, loops over the reduced axes and what carries over them — is :class:`Printer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy

from tk.codegen import debug
from tk.codegen.errors import IRError
from tk.codegen.ir import ACCESSES, COMPARE, FLOATS, Kernel, Value, values_in
from tk.codegen.scan import ScanPrinter, is_backwards
from tk.codegen.sort import print_loop, print_sort
from tk.codegen.tile import Access, Layout, Tile, is_in_fours, linear_parts

TL_DTYPES: Mapping[str, str] = {
    "bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32", "fp64": "tl.float64", "i8": "tl.int8",
    "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "u8": "tl.uint8", "i1": "tl.int1",
    "fp8e4nv": "tl.float8e4nv", "fp8e5": "tl.float8e5",
}  # fmt: skip

# op -> source. {0}, {1}, … are the operands. "fast" templates serve where the result is rounded to 16 bits anyway.
_LIBDEVICE = (
    "expm1", "log10", "log1p", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erfc",
    "erfinv", "lgamma", "hypot", "copysign", "nextafter", "atan2", "erfcx", "exp", "exp2", "log", "log2", "sin", "cos",
    "pow", "fmod",
)  # fmt: skip
_LIBDEVICE_NAMES = {
    "lgamma": "lgamma",
    "bessel_j0": "j0",
    "bessel_j1": "j1",
    "i0": "cyl_bessel_i0",
    "ndtri": "normcdfinv",
    "bessel_y0": "y0",
    "bessel_y1": "y1",
    "i1": "cyl_bessel_i1",
}
FLOAT_RULES: Mapping[str, str] = {
    **{name: f"libdevice.{name}({{0}})" for name in _LIBDEVICE},
    **{name: f"libdevice.{name}({{0}}, {{1}})"
       for name in ("hypot", "copysign", "nextafter", "atan2", "pow", "fmod")},
    **{name: f"libdevice.{theirs}({{0}})" for name, theirs in _LIBDEVICE_NAMES.items()},
    "neg": "-{0}", "abs": "tl.abs({0})", "sqrt": "tl.sqrt_rn({0})", "rsqrt": "libdevice.rsqrt({0})",
    "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "libdevice.trunc({0})",
    "round": "libdevice.rint({0})", "reciprocal": "tl.div_rn(tl.full((), 1.0, {0}.dtype), {0})",
    "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "sigmoid": "tl.div_rn(tl.full((), 1.0, {0}.dtype), 1.0 + libdevice.exp(-{0}))",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "tl.div_rn({0}, {1})",
    "trunc_div": "libdevice.trunc(tl.div_rn({0}, {1}))", "floor_div": "device.float_floor_div({0}, {1})",
    "remainder": "device.float_remainder({0}, {1})",
    "maximum": "device.maximum({0}, {1})", "minimum": "device.minimum({0}, {1})",
    "isnan": "{0} != {0}", "isinf": 'tl.abs({0}) == float("inf")', "signbit": "libdevice.signbit({0}) != 0",
}  # fmt: skip
FP64_RULES: Mapping[str, str] = {
    **FLOAT_RULES, "div": "{0} / {1}", "reciprocal": "1.0 / {0}", "sqrt": "libdevice.sqrt({0})",
    "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))", "trunc_div": "libdevice.trunc({0} / {1})",
    "floor": "libdevice.floor({0})", "ceil": "libdevice.ceil({0})", "erf": "libdevice.erf({0})",
}  # fmt: skip
FAST_RULES: Mapping[str, str] = {
    **FLOAT_RULES, "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",
    "reciprocal": "1.0 / {0}", "erfc": "device.erfc({0})",
}  # fmt: skip
INT_RULES: Mapping[str, str] = {
    "neg": "-{0}", "abs": "tl.abs({0})", "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "bitwise_not": "~{0}", "not": "{0} == 0",
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "trunc_div": "{0} // {1}",
    "floor_div": "device.floor_div({0}, {1})", "fmod": "{0} % {1}", "remainder": "device.remainder({0}, {1})",
    "pow": "device.int_pow({0}, {1})", "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "shl": "device.shift_left({0}, {1})", "shr": "device.shift_right({0}, {1})",
}  # fmt: skip
ANY_RULES: Mapping[str, str] = {
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})",
}  # fmt: skip
BOOL_RULES: Mapping[str, str] = {
    "not": "{0} == 0", "maximum": "{0} | {1}", "minimum": "{0} & {1}", "mul": "{0} & {1}", "add": "{0} | {1}",
}  # fmt: skip


def expression(v: Value, operands: list[str], dtype: str) -> str:
    """The source of a scalar operation on operands of `dtype`. Raises IRError where there is no rule."""
    if v.op in ANY_RULES:
        return ANY_RULES[v.op].format(*operands)
    if dtype in FLOATS:
        rules = FP64_RULES if dtype == "fp64" else FAST_RULES if v.fast else FLOAT_RULES
    else:
        rules = BOOL_RULES if dtype == "i1" else INT_RULES
    if v.op not in rules:
        raise IRError(f"{v}: there is no rule for {v.op} of {dtype}")
    return rules[v.op].format(*operands)


# Ops beside whose tensor operand a literal of fp32 can stand.
_INFIX = {"add", "sub", "mul", "where", *COMPARE}


def literal(value: Any, dtype: str, plain: bool = True) -> str:
    """A constant that has exactly this dtype and value. plain: it may be a Python number."""
    if plain and dtype == "fp32" and math.isfinite(value) and _is_fp32_literal(value):
        return repr(value)
    text = f'float("{value}")' if isinstance(value, float) and not math.isfinite(value) else repr(value)
    return f"tl.full((), {text}, {TL_DTYPES[dtype]})"


def _is_fp32_literal(value: float) -> bool:
    """Triton makes fp32 of a Python float of ordinary size."""
    return (value == 0.0 and math.copysign(1, value) > 0) or 2.0**-126 <= abs(value) <= (2 - 2**-23) * 2.0**127


IDENTITY = {"sum": 0, "prod": 1, "any": 0, "all": 1, "xor": 0, "mean": 0, "m2": 0}
COMBINE = {"prod": "multiply", "any": "bit_or", "all": "bit_and", "xor": "bit_xor", "max": "maximum", "min": "minimum"}


def identity(kind: str, dtype: str) -> str:
    if kind in IDENTITY:
        value: Any = IDENTITY[kind]
        return literal(float(value) if dtype in FLOATS else bool(value) if dtype == "i1" else value, dtype)
    is_low = kind in ("max", "argmax")
    if dtype in FLOATS:
        return literal(-math.inf if is_low else math.inf, dtype)
    bits = {"u8": 8, "i8": 7, "i16": 15, "i32": 31, "i64": 63}[dtype]
    low = 0 if dtype == "u8" else -(2**bits)
    return literal(low if is_low else 2**bits - 1, dtype)


def _together(names: list[str], how: str) -> str:
    """These reduced with each other."""
    if how == "sum":
        return " + ".join(names)
    text = names[0]
    for other in names[1:]:
        text = f"device.{COMBINE[how]}({text}, {other})"
    return text


VECTOR = 8  # elements that vectors at any address hold
EDGES = "edges"  # the segment of what lies before a row's first whole vector and behind its last
EDGE = 2 * VECTOR  # more than these


def _in_segment(line: str, k: int | str, along: set[int], axes: set[str]) -> str:
    """A line with the names of what varies along the row those of its segment `k`."""

    def own(match: re.Match[str]) -> str:
        name = match[0]
        is_along = name in ("q", "q_mask", "place") or name in axes
        if number := re.fullmatch(r"(?:v|acc)(\d+)", name):
            is_along = int(number[1]) in along
        return f"{name}_{k}" if is_along else name

    line = re.sub(r"\b(q_mask|q|place|v\d+|acc\d+|[ar]\d+)\b", own, line).replace("SEGMENT", str(k))
    return line.replace("BLOCK_Q", "EDGES") if k == EDGES else line


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
    a thread has the same columns of all of them. rereads, ahead, vectors: see
    Setting."""

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
    row: str = ""  # where such a row begins
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

    # --- The whole ---

    def function(self, name: str, params: list[str]) -> str:
        head = f"@triton.jit\ndef {name}({', '.join(params)}):"
        self.scans = ScanPrinter(self)
        if self.tile.walk:
            self._walked()
            return "\n".join([head, *self.out.text]) + "\n"
        if self.spread:
            self._part_of_a_row()
        else:
            self._program()
        if self.looped:
            self._looped()
        elif self.is_in_segments:
            self._in_segments()
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
        self.out(f"pid = tl.program_id(0){wide}")
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
            self._flat_vectors() if self.vectors and n == "q" else self._range(n, f"start_{n}")

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
            self.out(f"shift = ({self.row} % {self.realigned}).to(tl.int32)")
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

    @property
    def is_in_segments(self) -> bool:
        return self.segments > 1 or self.vectors

    @property
    def _every_segment(self) -> list[int | str]:
        return [*range(self.segments), *([EDGES] if self.vectors else [])]

    def _repeat(self, print_lines: Callable[[], None]) -> None:
        """What varies along the row, once for every segment."""
        if not self.is_in_segments:
            print_lines()
            return
        before = len(self.out.text)
        print_lines()
        lines = self.out.text[before:]
        del self.out.text[before:]
        for k in self._every_segment:
            self.out.text += [_in_segment(line, k, self._along_q, {a.name for a in self.tile.q}) for line in lines]

    @cached_property
    def _along_q(self) -> set[int]:
        return {v.number for v in self.kernel.values if "q" in self.dims_of(v)}

    def _whole_row(self) -> None:
        """Its places and their masks."""
        if self.vectors:
            self._whole_vectors()
        elif self.segments == 1:
            self._range("q", "0")
        else:
            self._repeat(lambda: self._range("q", "SEGMENT * BLOCK_Q"))
        for k in range(self.segments - 1):  # the row is longer than these
            self.out(f"q_mask_{k} = tl.full({self.shape_of('q')}, True, tl.int1)")

    def _whole_vectors(self) -> None:
        """A row's places as they lie in memory: vectors between two 16-byte addresses, and the up to seven elements
        before and behind them. place: counted from the first vector."""
        row = next(self._row_text(v) for v in self.kernel.accesses if self._is_in_vectors(v))
        self.out(f"lead = ((0 - ({row})) & {VECTOR - 1}).to(tl.int32)")
        self.out(f"inner = (q_size - lead) // {VECTOR} * {VECTOR}")
        for k in range(self.segments):
            self.out(f"place_{k} = {f'{k} * BLOCK_Q + ' if k else ''}{self.offsets('q')}")
            self.out(f"q_{k} = lead + place_{k}")
            self.out(f"q_mask_{k} = place_{k} < inner")
        # As many as threads have a row, so that the same threads have a row's edges. By turns from both ends: were they
        # neighbours, the compiler would give a thread several.
        self.out(f"EDGES: tl.constexpr = {EDGE} if BLOCK_P == 1 or BLOCK_Q <= {16 * VECTOR} else 32")
        self.out(f"edge = {self.offsets('q').replace('BLOCK_Q', 'EDGES')}")
        self.out(f"q_{EDGES} = tl.where(edge % 2 == 0, edge // 2, q_size - 1 - edge // 2)")
        is_edge = f"(q_{EDGES} < lead) | (q_{EDGES} >= lead + inner)"
        self.out(f"q_mask_{EDGES} = (edge < {EDGE}) & ({is_edge})")
        self.out(f"place_{EDGES} = q_{EDGES} - lead")
        if self._needs_axes("q"):
            self._repeat(lambda: self._decompose("q", self.tile.q))

    def _flat_vectors(self) -> None:
        """Of elements that run together: whole vectors. The up to seven behind them are the first program's."""
        self.out(f"inner = q_size // {VECTOR} * {VECTOR}")
        self.out(f"q_0 = start_q + {self.offsets('q')}")
        self.out("q_mask_0 = q_0 < inner")
        self.out(f"EDGES: tl.constexpr = {EDGE}")
        self.out(f"q_{EDGES} = inner + {self.offsets('q').replace('BLOCK_Q', 'EDGES')}")
        self.out(f"q_mask_{EDGES} = q_{EDGES} < tl.where(start_q == 0, q_size, 0)")
        if self._needs_axes("q"):
            self._repeat(lambda: self._decompose("q", self.tile.q))

    def _row_text(self, v: Value) -> str:
        access = self.accesses[v.number]
        return " + ".join([*access.base, *([access.p] if access.p else [])]) or "0"

    def _is_in_vectors(self, v: Value) -> bool:
        """An access to rows without gaps."""
        access = self.accesses[v.number]
        return not access.elementwise and access.q == "q" and self._index_dims(v) == {"p", "q"}

    def _of_row(self, v: Value) -> None:
        """A value of a program that has whole rows, or a reduction of them."""
        if v.op == "reduce":
            self._reduce_segments(v) if self.is_in_segments else self._reduce_at_once(v)
        elif v.number in self._along_q:
            self._repeat(lambda: self._value(v))
        else:
            self._value(v)

    def _in_segments(self) -> None:
        """As at once, with what varies along the row once for every segment, and reductions over all of them."""
        if self.reduced_dim:
            self._whole_row()
        for v in self.kernel.values:
            self._of_row(v)

    def _reduce_segments(self, v: Value) -> None:
        """Element by element over the segments first: what is left is the reduction of one."""
        repeat = self._repeat
        n, operand = v.number, self.kernel.value(v.args[0])
        kind = v.data.removeprefix("arg")
        x = f"v{v.args[0]}"
        masked = f"tl.where(q_mask, {x}, {identity(v.data, operand.dtype)})"

        def over_row(name: str, how: str) -> str:
            """The reduction of a variable. The edges have another shape, and so a reduction of their own."""
            found = self._combined(how, _together([f"{name}_{k}" for k in range(self.segments)], how))
            return _together([found, self._combined(how, f"{name}_{EDGES}")], how) if self.vectors else found

        if kind in ("mean", "m2"):
            mean = f"mean_{v.args[0]}"
            if mean not in self.done:
                self.done.add(mean)
                repeat(lambda: self.out(f"t{n}_SEGMENT = {masked}"))
                self.out(f"{mean} = ({over_row(f't{n}', 'sum')}) / tl.cast(q_size, {TL_DTYPES[operand.dtype]})")
            if kind == "mean":
                self.out(f"v{n} = {mean}")
                return
            zero = identity("sum", operand.dtype)
            repeat(lambda: self.out(f"d{n}_SEGMENT = tl.where(q_mask, {x} - {mean}, {zero})"))
            repeat(lambda: self.out(f"s{n}_SEGMENT = d{n}_SEGMENT * d{n}_SEGMENT"))
            self.out(f"v{n} = {over_row(f's{n}', 'sum')}")
            return
        repeat(lambda: self.out(f"x{n}_SEGMENT = {masked}"))
        if kind == v.data:
            self.out(f"v{n} = {over_row(f'x{n}', kind)}")
            return
        self.out(f"m{n} = {over_row(f'x{n}', kind)}")
        own = f"x{n}_SEGMENT"
        found = f"({own} == m{n})" + (f" | ({own} != {own})" if operand.dtype in FLOATS else "")
        shape = self.shape_of({*self.dims_of(operand), "q"})
        repeat(lambda: self.out(f"at{n}_SEGMENT = tl.where({found}, tl.broadcast_to(q, {shape}), {self._last()})"))
        least = f"at{n}_0"
        for k in range(1, self.segments):
            least = f"tl.minimum({least}, at{n}_{k})"
        least = f"tl.min({least}, {self.axis}{self._keep()})"
        if self.vectors:
            least = f"tl.minimum({least}, tl.min(at{n}_{EDGES}, {self.axis}{self._keep()}))"
        self.out(f"v{n} = {least}.to(tl.int64)")

    def _walked(self) -> None:
        """What no row has a part in, the loop over blocks of rows, and what was added up there."""
        values = self.kernel.values
        self.out("pid = tl.program_id(0)")
        self._decompose("pid", self.tile.batch)
        if self.vectors:  # all rows of a program begin as far from a vector's address as its first
            self._range("p", "pid * BLOCK_P")
        self._whole_row()
        folds = [v for v in values if v.op == "fold"]
        after = {v.number for v in values if v.axes & {a.name for a in self.tile.batch}}
        in_loop = {v.number for v in values if "p" in self.dims_of(v) and v.number not in after}
        if self.segments > 1:  # such rows leave no registers for a weight: it is read again for each
            in_loop |= self._along_q - after
        for v in values:
            if v.number not in in_loop and v.number not in after:
                self._of_row(v)
        for v in folds:
            self._repeat_fold(v, f"acc{v.number} = tl.zeros({self._fold_shape(v)}, {TL_DTYPES[v.dtype]})")
        self._loop_over_rows()
        self.out.depth += 1
        if self.ahead:
            self._fetch_ahead()
        self._range("p", "start_p", is_full=self.rows == 1)
        if self.rereads:
            self._reading_again(in_loop, folds)
        else:
            for v in values:
                if v.number in in_loop:
                    self._of_row(v)
        for v in folds:
            self._repeat_fold(v, f"acc{v.number} += {self._rows_to_add(v)}")
        self.out.depth -= 1
        for v in values:
            if v.op == "fold":
                self._repeat_fold(v, f"v{v.number} = {self._folded(v)}")
            elif v.number in after:
                self._of_row(v)

    def _reading_again(self, in_loop: set[int], folds: list[Value]) -> None:
        """For every generation of reductions, and for what is stored and added up, what it needs is loaded anew."""
        depth, along = self._depths(), self._along_q & in_loop
        last = max(depth[n] for n in in_loop)
        for level in range(last + 1):
            reduces = [v for v in self.kernel.values if v.op == "reduce" and depth[v.number] == level + 1]
            stores = [v for v in self.kernel.values if v.op == "store" and v.number in along]
            needed = self._needed_in_loop([*reduces, *(([*stores, *folds]) if level == last else [])], along)
            # Loads that differ in nothing the compiler would make one. A weight stays in the caches anyway.
            last_use = "evict_first" if level == last else ""
            self.level_hints = ("evict_last" if level == 0 else last_use, "" if level % 2 else "evict_last")
            once = {n for n in in_loop - along if depth[n] == level and self.kernel.value(n).op != "reduce"}
            for v in self.kernel.values:
                if v.number in needed | once:
                    self._of_row(v)
            for v in reduces:
                self._of_row(v)
        self.level_hints = ("", "")

    def _fetch_ahead(self) -> None:
        """Brings the rows of this program's next turn into the L2 cache, a line at a time."""
        self._range("p", "start_p + tl.num_programs(0) * BLOCK_P")
        for v in self.kernel.values:
            if v.op == "load" and self._index_dims(v) == {"p", "q"}:
                row = f"ptr_{v.buffer} + {self._row_text(v)}"
                self.out(f"device.fetch({row}, p_mask, q_size, BLOCK_Q * {self.segments})")

    def _loop_over_rows(self) -> None:
        step = "tl.num_programs(0) * BLOCK_P"
        if self.stages > 1:
            self.out(f"for start_p in tl.range(pid * BLOCK_P, p_size, {step}, num_stages={self.stages}):")
        else:
            self.out(f"for start_p in range(pid * BLOCK_P, p_size, {step}):")

    @property
    def _rows_are_added_at_once(self) -> bool:
        """A block's rows meet in a thread: they are added up before they join the rows before them, so that what is
        kept is a single row."""
        return self.rows == 1 or self.rows_meet

    def _fold_shape(self, v: Value) -> str:
        dims = self.dims_of(self.kernel.value(v.args[0])) - {"p"}
        return self.shape_of(dims if self._rows_are_added_at_once else {*dims, "p"})

    def _repeat_fold(self, v: Value, line: str) -> None:
        """A fold has what it adds up along the row in every segment."""
        self._repeat(lambda: self.out(line)) if v.number in self._along_q else self.out(line)

    def _rows_to_add(self, v: Value) -> str:
        x = self.name(v.args[0])
        if self.rows == 1:
            return x
        x = f"tl.where(p_mask, {x}, {identity(v.data, v.dtype)})"
        return f"tl.sum({x}, 0, keep_dims=True)" if self._rows_are_added_at_once else x

    def _folded(self, v: Value) -> str:
        return f"acc{v.number}" if self._rows_are_added_at_once else f"tl.sum(acc{v.number}, 0, keep_dims=True)"

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
            away = self.kernel.value(exp.args[0]) if exp.op == "exp" else exp
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
        if self.debug and v.op in ("load", "store"):
            for line in debug.before(self, self.debug, v):
                self.out(line)
            self._plain_value(v)
            for line in debug.after(self, self.debug, v):
                self.out(line)
        else:
            self._plain_value(v)

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
        if self.vectors and self._is_in_vectors(v):
            return f"ptr_{v.buffer} + ({self._row_text(v)} + {VECTOR - 1} >> 3) * {VECTOR} + place"
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

    def mask_text(self, v: Value) -> str:
        """Of the block's ends, and what the load or store itself is guarded by."""
        dims = self._index_dims(v) | self._mask_dims(v)
        parts = [f"{n}_mask" for n in self.shape_names if n in dims]  # of one row there is no block's end
        return " & ".join([*parts, *(self.name(a) for a in (v.args if v.op == "load" else v.args[1:]))])

    def _is_realigned(self, v: Value) -> bool:
        """Of a realigned row, whole vectors; what is guarded by a mask of its own goes element by element."""
        return self.accesses[v.number].realigned and len(v.args) == (v.op == "store")

    def _mask(self, v: Value) -> str:
        if v.op == "load" and self._is_realigned(v):
            return ", mask=p_mask & q_any"
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
        names = {s.name for e in v.index for s in e.free_symbols}
        for e in v.index:
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
        """An index expression in 64 bits. All operands of a quotient are at least 0."""
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
        if kind == "FloorDiv":
            return f"({args[0]} // {args[1]})"
        if kind in ("Mod", "PythonMod"):
            return f"({args[0]} % {args[1]})"
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
                found.append(_Online(self, self.kernel.value(self.online[v.number]), v))
            elif v.number in self.online.values():
                continue
            elif v.data in ("mean", "m2"):
                variances.setdefault(v.args[0], []).append(v)
            elif v.data in ("argmax", "argmin"):
                found.append(_Position(self, v))
            else:
                found.append(_Plain(self, v))
        return [*found, *(_Welford(self, operand, group) for operand, group in variances.items())]

    def accumulator_shape(self, operand: Value, over: str | None = None) -> str:
        """Of what is added up over a dimension, the reduced one where none is named."""
        assert self.reduced_dim is not None
        return self.shape_of({*self.dims_of(operand), over or self.reduced_dim})


@dataclass
class _Plain:
    printer: Printer
    v: Value

    @property
    def operand(self) -> Value:
        return self.printer.kernel.value(self.v.args[0])

    def start(self) -> None:
        shape, dtype = self.printer.accumulator_shape(self.operand), self.operand.dtype
        value = identity(self.v.data, dtype)
        self.printer.out(
            f"acc{self.v.number} = tl.zeros({shape}, {TL_DTYPES[dtype]}) + {value}"
            if dtype != "i1"
            else f"acc{self.v.number} = tl.full({shape}, {bool(IDENTITY[self.v.data])}, tl.int1)"
        )

    def step(self) -> None:
        acc, x = f"acc{self.v.number}", self.printer.name(self.v.args[0])
        mask = self.printer._mask_of_reduced()
        after = f"{acc} + {x}" if self.v.data == "sum" else f"device.{COMBINE[self.v.data]}({acc}, {x})"
        self.printer.out(f"{acc} = tl.where({mask}, {after}, {acc})")

    def finish(self) -> None:
        self.printer.out(f"v{self.v.number} = {self.printer._combined(self.v.data, f'acc{self.v.number}')}")


@dataclass
class _Online:
    """A maximum and the sum of exp(x - maximum) in one pass: of every eight elements that a thread has the maximum so
    far, and the sum relative to it, which is scaled anew when the maximum rises."""

    printer: Printer
    most: Value
    total: Value

    @property
    def shape(self) -> str:
        operand = self.printer.kernel.value(self.most.args[0])
        return self.printer.accumulator_shape(operand).replace("BLOCK_Q", "BLOCK_Q // 8")

    @property
    def eights(self) -> tuple[str, int]:
        """The block's shape with a dimension for a thread's eight, and which it is: neighbours where it loads vectors,
        else one of every eighth of the block."""
        p = self.printer
        aligned = p.layout.aligned
        inside = "BLOCK_Q // 8, 8" if aligned else "8, BLOCK_Q // 8"
        return self.shape.replace("BLOCK_Q // 8", inside), p.axis + aligned

    def guarded(self, most: str) -> str:
        """What is taken away: no infinity, from which one more differs by NaN. Where the function itself takes the
        maximum away as it is, that comes at the end."""
        return f"tl.where(tl.abs({most}) == float('inf'), 0.0, {most})"

    def exp(self, x: str) -> str:
        return expression(self.printer.kernel.value(self.total.args[0]), [x], self.total.dtype)

    def start(self) -> None:
        p, n, dtype = self.printer, self.total.number, TL_DTYPES[self.total.dtype]
        p.out(f"most{n} = tl.zeros({self.shape}, {dtype}) + {identity('max', self.total.dtype)}")
        p.out(f"acc{n} = tl.zeros({self.shape}, {dtype})")

    def step(self) -> None:
        p, n, x = self.printer, self.total.number, self.printer.name(self.most.args[0])
        low, (eights, axis) = identity("max", self.total.dtype), self.eights
        p.out(f"x{n} = tl.reshape(tl.where({p._mask_of_reduced()}, {x}, {low}), {eights})")
        p.out(f"higher{n} = device.maximum(most{n}, tl.reduce(x{n}, {axis}, device.maximum))")
        p.out(f"from{n} = {self.guarded(f'higher{n}')}")
        terms = self.exp(f"(x{n} - tl.expand_dims(from{n}, {axis}))")
        p.out(f"acc{n} = acc{n} * {self.exp(f'(most{n} - from{n})')} + tl.sum({terms}, {axis})")
        p.out(f"most{n} = higher{n}")

    def finish(self) -> None:
        p, n = self.printer, self.total.number
        most = f"v{self.most.number}"
        p.out(f"{most} = {p._combined('max', f'most{n}')}")
        exp = p.kernel.value(self.total.args[0])
        is_guarded = p.kernel.value(exp.args[0]).args[1] != self.most.number
        scaled = f"acc{n} * {self.exp(f'(most{n} - {self.guarded(most) if is_guarded else most})')}"
        p.out(f"v{n} = {p._combined('sum', scaled)}")


@dataclass
class _Position:
    """Of every lane the extreme so far and where it was. Positions rise, so that an equal one never takes its place."""

    printer: Printer
    v: Value

    def start(self) -> None:
        p, n = self.printer, self.v.number
        operand = p.kernel.value(self.v.args[0])
        shape = p.accumulator_shape(operand)
        p.out(f"acc{n} = tl.zeros({shape}, {TL_DTYPES[operand.dtype]}) + {identity(self.v.data, operand.dtype)}")
        # Where a lane has nothing but the identity, its first element is the first of them.
        dtype = "tl.int64" if p.layout.wide else "tl.int32"
        p.out(f"from{n} = tl.zeros({shape}, {dtype}) + {p.offsets(p.reduced_dim)}")

    def step(self) -> None:
        p, n, x = self.printer, self.v.number, self.printer.name(self.v.args[0])
        rule = "is_above" if self.v.data == "argmax" else "is_below"
        p.out(f"take{n} = {p._mask_of_reduced()} & device.{rule}({x}, acc{n})")
        p.out(f"acc{n} = tl.where(take{n}, {x}, acc{n})")
        p.out(f"from{n} = tl.where(take{n}, {p.reduced_dim}, from{n})")

    def finish(self) -> None:
        self.printer._first_position(self.v, f"acc{self.v.number}", f"from{self.v.number}")


@dataclass
class _Welford:
    """Mean and squared deviations in one pass: every lane for itself, then the lanes together."""

    printer: Printer
    operand: int
    reduces: list[Value]

    def start(self) -> None:
        p, n = self.printer, self.operand
        v = p.kernel.value(n)
        for name in ("mean", "m2", "weight"):
            p.out(f"{name}_{n} = tl.zeros({p.accumulator_shape(v)}, {TL_DTYPES[v.dtype]})")

    def step(self) -> None:
        p, n, mask = self.printer, self.operand, self.printer._mask_of_reduced()
        x = p.name(n)
        p.out(f"weight_{n} = tl.where({mask}, weight_{n} + 1.0, weight_{n})")
        p.out(f"delta_{n} = tl.where({mask}, {x} - mean_{n}, 0.0)")
        p.out(f"mean_{n} += delta_{n} / tl.maximum(weight_{n}, 1.0)")
        p.out(f"m2_{n} += tl.where({mask}, delta_{n} * ({x} - mean_{n}), 0.0)")

    def finish(self) -> None:
        p, n = self.printer, self.operand
        names = f"mean_{n}, m2_{n}, weight_{n}"
        p.out(f"{names} = tl.reduce(({names}), {p.axis}, device.welford{p._keep()})")
        for v in self.reduces:
            p.out(f"v{v.number} = {v.data}_{n}")
