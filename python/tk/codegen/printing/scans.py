"""Scans as source: in a block, over blocks with a carry, and over programs with a look-back.

Programs of one row each leave in memory what their block comes to, and a program puts together what came before it from
the blocks of its *window* and of what stands before that. Which blocks are put together, and in which order, follows
from the block's number alone, not from who was quick: repeated calls give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tk.codegen.along import carried, is_backwards, scan_key, scans
from tk.codegen.ir import Kernel, Scanned, Value
from tk.codegen.printing.body import Body, Lines
from tk.codegen.printing.reductions import combined
from tk.codegen.printing.scalars import TL_DTYPES, identity
from tk.codegen.tile import ALIGNED, Tile

WINDOW = 256  # blocks: each window waits for the one before it, and reads as many at once
DEVICE = {"sum": "add", "prod": "multiply", "logaddexp": "logaddexp", "max": "running_max", "min": "running_min"}


def no_change(kind: str, dtype: str) -> str:
    """What a scan of this kind may begin with. Of the running extremes the place of it is never the result's."""
    return identity("max" if kind == "logaddexp" else kind, dtype)


@dataclass
class ScanPrinter:
    """Prints a kernel's scans. known: those whose lines stand, with the names of their results."""

    body: Body
    known: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    started: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def out(self) -> Lines:
        return self.body.out

    def is_plain(self, v: Value) -> bool:
        """Sums and products have a value that changes nothing, and functions of their own."""
        return isinstance(v.data, Scanned) and v.data.kind in ("sum", "prod")

    def dtypes(self, v: Value) -> list[str]:
        return carried(self.body.kernel, v, self.body.layout.wide)

    def combine(self, v: Value) -> str:
        """The function that puts two neighbours together."""
        assert isinstance(v.data, Scanned)
        return v.data.combine.name if v.data.combine else f"device.{DEVICE[v.data.kind]}"

    def in_block(self, v: Value) -> None:
        if self.is_plain(v):
            self._plain(v, "")
            return
        if scan_key(v) not in self.known:
            self.known[scan_key(v)] = self._scanned(v)
        self._result(v)

    def start_loop(self, values: Sequence[Value]) -> None:
        """What the loop that follows carries over from block to block."""
        self.known.clear()
        self.started.clear()
        for v in values:
            self._start_plain_carry(v) if self.is_plain(v) else self._start_carries(v)

    def in_loop(self, v: Value) -> None:
        """Prints a scan after what the blocks before it carry over. Nothing does in the first."""
        if self.is_plain(v):
            self._plain(v, f"carry{v.number}")
            return
        if scan_key(v) not in self.known:
            carries = self.carries(v)
            before = ", ".join(carries)
            self.known[scan_key(v)] = self._after(v, before, f"{'back' if is_backwards(v) else 'start'} == 0")
            for carry, name in zip(carries, self.known[scan_key(v)], strict=True):
                self.out(f"{carry} = device.{self._end(v)}({name}, {self.body.axis})")
        self._result(v)

    def _start_plain_carry(self, v: Value) -> None:
        nothing = identity(v.data.kind, v.dtype)
        self.out(f"carry{v.number} = tl.zeros({self._carry_shape(v)}, {TL_DTYPES[v.dtype]}) + {nothing}")

    def _plain(self, v: Value, carry: str) -> None:
        """Prints the scan of this block, and after what the blocks before it carry over."""
        body, x, kind = self.body, f"x{v.number}", v.data.kind
        sign = "+" if kind == "sum" else "*"
        inside = f"tl.where({body.reduced_mask}, {body.name(v.args[0])}, {identity(kind, v.dtype)})"
        self.out(f"{x} = {inside}")
        scanned = f"tl.cum{kind}({x}, {body.axis}{', reverse=True' if is_backwards(v) else ''})"
        self.out(f"v{v.number} = {f'{carry} {sign} ' if carry else ''}{scanned}")
        if carry:
            self.out(f"{carry} = {carry} {sign} {combined(body, kind, x)}")

    def _carry_shape(self, v: Value) -> str:
        """The shape of what has one value a row."""
        assert self.body.reduced_dim is not None
        kept = self.body.dims_of(v) - {self.body.reduced_dim}
        return self.body.shape_of(kept) if len(self.body.names) > 1 else "[]"

    def _start_carries(self, v: Value) -> None:
        if scan_key(v) in self.started:
            return
        self.started.add(scan_key(v))
        shape = self._carry_shape(v)
        for carry, dtype in zip(self.carries(v), self.dtypes(v), strict=True):
            self.out(f"{carry} = tl.zeros({shape}, {TL_DTYPES[dtype]})")

    def carries(self, v: Value) -> list[str]:
        of = min(w.number for w in scans(self.body.kernel) if scan_key(w) == scan_key(v))
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
        """The lane of a block at which the scan of all of it stands."""
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
        body = self.body
        assert body.reduced_dim is not None
        shape = body.shape_of({*body.dims_of(v), body.reduced_dim})
        operands = []
        for a in v.args:
            is_whole = body.dims_of(body.kernel.value(a)) == set(body.names)
            operands.append(body.name(a) if is_whole else f"tl.broadcast_to({body.name(a)}, {shape})")
        if body.form.realigned or is_backwards(v):
            assert isinstance(v.data, Scanned)
            nothing = no_change(v.data.kind, body.kernel.value(v.args[0]).dtype)
            operands = [f"tl.where({body.reduced_mask}, {x}, {nothing})" for x in operands]
        if isinstance(v.data, Scanned) and v.data.kind in ("max", "min"):
            operands.append(f"tl.broadcast_to({body.reduced_dim}, {shape})")
        names = [f"s{v.number}_{i}" for i in range(len(operands))]
        together = operands[0] if len(operands) == 1 else f"({', '.join(operands)})"
        how = ", reverse=True" if is_backwards(v) else ""
        self.out(f"{', '.join(names)} = tl.associative_scan({together}, {body.axis}, {self.combine(v)}{how})")
        return names

    def _result(self, v: Value) -> None:
        assert isinstance(v.data, Scanned)
        name = self.known[scan_key(v)][v.data.part]
        self.out(f"v{v.number} = {name}.to(tl.int64)" if v.dtype == "i64" else f"v{v.number} = {name}")

    def functions(self) -> list[str]:
        """What the kernel calls besides ``device``: its own scans' combine functions, and the look-back."""
        own = scans(self.body.kernel)
        combines = {v.data.combine.name: v.data.combine for v in own if isinstance(v.data, Scanned) and v.data.combine}
        found = [combine_function(c) for c in combines.values()]
        if self.body.form.spread and own:
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
    body = Body(kernel, Tile((), ()), ALIGNED, {})
    outputs = {v.buffer: body.name(v.args[0]) for v in kernel.values if v.op == "store"}
    sides = [f"{side}{i}" for side in "ab" for i in range(len(outputs))]
    for v in kernel.values:
        if v.op == "load":
            body.out(f"v{v.number} = {v.buffer}")
        elif v.op not in ("store", "constant", "number"):
            body.out(f"v{v.number} = {body.right_side(v)}")
    results = ", ".join(outputs[f"out{i}"] for i in range(len(outputs)))
    body.out(f"return {results}")
    return "\n".join([f"@triton.jit\ndef {kernel.name}({', '.join(sides)}):", *body.out.text]) + "\n"
