"""Scans as source: in a block, over blocks with a carry, and over programs with a look-back.

Programs of one row each leave in memory what their block comes to, and a program puts together what came before it from
the blocks of its *window* and of what stands before that. Which blocks are put together, and in which order, follows
from the block's number alone, not from who was quick: repeated calls give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy

from tk.codegen.along import carried, is_backwards, scan_key, scans
from tk.codegen.ir import Kernel, Scanned, Value
from tk.codegen.printing.scalars import TL_DTYPES, identity

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Printer

WINDOW = 256  # blocks: each window waits for the one before it, and reads as many at once
DEVICE = {"sum": "add", "prod": "multiply", "logaddexp": "logaddexp", "max": "running_max", "min": "running_min"}


def no_change(kind: str, dtype: str) -> str:
    """What a scan of this kind may begin with. Of the running extremes the place of it is never the result's."""
    return identity("max" if kind == "logaddexp" else kind, dtype)


@dataclass
class ScanPrinter:
    """Prints a kernel's scans. known: those whose lines stand, with the names of their results."""

    printer: Printer
    known: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    started: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def out(self):  # type: ignore[no-untyped-def]
        return self.printer.out

    def is_plain(self, v: Value) -> bool:
        """Sums and products have a value that changes nothing, and functions of their own."""
        return isinstance(v.data, Scanned) and v.data.kind in ("sum", "prod")

    def dtypes(self, v: Value) -> list[str]:
        return carried(self.printer.kernel, v, self.printer.layout.wide)

    def combine(self, v: Value) -> str:
        """The function that puts two neighbours together."""
        assert isinstance(v.data, Scanned)
        return v.data.combine.name if v.data.combine else f"device.{DEVICE[v.data.kind]}"

    def in_block(self, v: Value) -> None:
        if scan_key(v) not in self.known:
            self.known[scan_key(v)] = self._scanned(v)
        self._result(v)

    def in_loop(self, v: Value) -> None:
        """After what the blocks before it carry over. Nothing does in the first."""
        if scan_key(v) not in self.known:
            carries = self.carries(v)
            before = ", ".join(carries)
            self.known[scan_key(v)] = self._after(v, before, f"{'back' if is_backwards(v) else 'start'} == 0")
            for carry, name in zip(carries, self.known[scan_key(v)], strict=True):
                self.out(f"{carry} = device.{self._end(v)}({name}, {self.printer.axis})")
        self._result(v)

    def start_carries(self, v: Value) -> None:
        if scan_key(v) in self.started:
            return
        self.started.add(scan_key(v))
        names = self.printer.names
        n = self.printer.reduced_dim
        shape = self.printer.shape_of(self.printer.dims_of(v) - {n}) if len(names) > 1 else "[]"
        for carry, dtype in zip(self.carries(v), self.dtypes(v), strict=True):
            self.out(f"{carry} = tl.zeros({shape}, {TL_DTYPES[dtype]})")

    def carries(self, v: Value) -> list[str]:
        of = min(w.number for w in scans(self.printer.kernel) if scan_key(w) == scan_key(v))
        return [f"carry{of}_{i}" for i in range(len(self.dtypes(v)))]

    def over_programs(self, v: Value) -> None:
        if scan_key(v) not in self.known:
            scanned, n = self._scanned(v), len(self.dtypes(v))
            for i, name in enumerate(scanned):
                self.out(f"whole_{i} = device.{self._end(v)}(tl.ravel({name}), 0)")
                self.out(f"tl.store(ptr_blocks_{i} + ticket, whole_{i})")
            self.out("device.raise_flag(ptr_state + 1 + ticket)")
            pointers = [f"ptr_{what}_{i}" for what in ("blocks", "windows") for i in range(n)]
            before = ", ".join(f"before_{i}" for i in range(n))
            self.out(f"{before} = look_back(ptr_state, {', '.join(pointers)}, ticket, part, n_programs)")
            spread = ", ".join(f"tl.broadcast_to(before_{i}, {scanned[0]}.shape)" for i in range(n))
            self.known[scan_key(v)] = self._after(v, spread, "part == 0", scanned)
        self._result(v)

    def _end(self, v: Value) -> str:
        """Where in a block the scan of all of it stands."""
        return "first" if is_backwards(v) else "last"

    def _after(self, v: Value, before: str, is_first: str, scanned: list[str] | None = None) -> list[str]:
        scanned = scanned or self._scanned(v)
        found = [f"y{name[1:]}" for name in scanned]
        self.out(f"{', '.join(found)} = {self.combine(v)}({before}, {', '.join(scanned)})")
        for name, own in zip(found, scanned, strict=True):
            self.out(f"{name} = tl.where({is_first}, {own}, {name})")
        return found

    def _scanned(self, v: Value) -> list[str]:
        """The scan of this block alone. What lies past the row's end comes after all of it; what may lie before its
        first element is made something that changes nothing."""
        p = self.printer
        assert p.reduced_dim is not None
        shape = p.shape_of({*p.dims_of(v), p.reduced_dim})
        whole = set(p.names)
        operands = [p.name(a) if p.dims_of(p.kernel.value(a)) == whole else f"tl.broadcast_to({p.name(a)}, {shape})"
                    for a in v.args]  # fmt: skip
        if p.realigned or is_backwards(v):
            assert isinstance(v.data, Scanned)
            nothing = no_change(v.data.kind, p.kernel.value(v.args[0]).dtype)
            operands = [f"tl.where({p._mask_of_reduced()}, {x}, {nothing})" for x in operands]
        if isinstance(v.data, Scanned) and v.data.kind in ("max", "min"):
            operands.append(f"tl.broadcast_to({p.reduced_dim}, {shape})")
        names = [f"s{v.number}_{i}" for i in range(len(operands))]
        together = operands[0] if len(operands) == 1 else f"({', '.join(operands)})"
        how = ", reverse=True" if is_backwards(v) else ""
        self.out(f"{', '.join(names)} = tl.associative_scan({together}, {p.axis}, {self.combine(v)}{how})")
        return names

    def _result(self, v: Value) -> None:
        assert isinstance(v.data, Scanned)
        name = self.known[scan_key(v)][v.data.part]
        self.out(f"v{v.number} = {name}.to(tl.int64)" if v.dtype == "i64" else f"v{v.number} = {name}")

    def functions(self) -> list[str]:
        """What the kernel calls besides ``device``: its own scans' combine functions, and the look-back."""
        own = scans(self.printer.kernel)
        combines = {v.data.combine.name: v.data.combine for v in own if isinstance(v.data, Scanned) and v.data.combine}
        found = [combine_function(c) for c in combines.values()]
        if self.printer.spread and own:
            found.append(look_back(self.combine(own[0]), len(self.dtypes(own[0]))))
        return found


def look_back(combine: str, count: int) -> str:
    """A device function: what stands before block `part` of a row, undefined for the first. blocks: what each block
    comes to; windows: what stands before each window. The first program of a window leaves that."""
    every = range(count)

    def each(text: str, apart: str = ", ") -> str:
        return apart.join(text.replace("#", str(i)) for i in every)

    scanned = each("x#") if count == 1 else f"({each('x#')})"
    read = 'mask=inside, other=0, cache_modifier=".cg"'
    lines = [
        "lanes = tl.arange(0, WINDOW)",
        "count = device.blocks_before(part, WINDOW)",
        "first = ticket - count",
        "device.wait_for(state + 1 + first, lanes, count)",
        "inside = lanes < count",
        *(f"x{i} = tl.load(blocks_{i} + first + lanes, {read})" for i in every),
        f"{each('x#')} = tl.associative_scan({scanned}, 0, {combine})",
        *(f"y{i} = device.at_place(x{i}, count - 1)" for i in every),
        "if part > count:",
        "    device.wait_for(state + 1 + n_programs + first, lanes, 1)",
        *(f'    w{i} = tl.load(windows_{i} + first, cache_modifier=".cg")' for i in every),
        f"    {each('y#')} = {combine}({each('w#')}, {each('y#')})",
        "if count == WINDOW:",
        *(f"    tl.store(windows_{i} + ticket, y{i})" for i in every),
        "    device.raise_flag(state + 1 + n_programs + ticket)",
        f"return {each('y#')}",
    ]
    params = f"state, {each('blocks_#')}, {each('windows_#')}, ticket, part, n_programs"
    head = f"@triton.jit\ndef look_back({params}, WINDOW: tl.constexpr = {WINDOW}):"
    return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"


def combine_function(kernel: Kernel) -> str:
    """A scalar kernel — loads, arithmetic, stores — as a device function of its loads, a0, a1, …, b0, b1, …"""
    from tk.codegen.printing.printer import Printer
    from tk.codegen.tile import ALIGNED, Tile

    p = Printer(kernel, Tile((), ()), ALIGNED, {}, False, _no_size)
    outputs = {v.buffer: p.name(v.args[0]) for v in kernel.values if v.op == "store"}
    sides = [f"{side}{i}" for side in "ab" for i in range(len(outputs))]
    for v in kernel.values:
        if v.op == "load":
            p.out(f"v{v.number} = {v.buffer}")
        elif v.op not in ("store", "constant", "number"):
            p.out(f"v{v.number} = {p._right_side(v)}")
    results = ", ".join(outputs[f"out{i}"] for i in range(len(outputs)))
    p.out(f"return {results}")
    return "\n".join([f"@triton.jit\ndef {kernel.name}({', '.join(sides)}):", *p.out.text]) + "\n"


def _no_size(name: str, expr: sympy.Expr, is_narrow: bool) -> str:
    raise AssertionError("a combine function has no sizes")
