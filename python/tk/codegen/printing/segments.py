"""Rows in segments as source: a program has a whole row at once, as blocks beside each other.

What varies along the row is printed once for each segment, reductions go over all of them. Rows in vectors have one
segment more, of what lies before the first whole vector of a row and behind its last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tk.codegen.ir import PLACES, Value
from tk.codegen.printing.body import EDGE, EDGES, VECTOR, Body, Lines
from tk.codegen.printing.reductions import BlockReductions, combined, is_extreme, moments, past_the_last
from tk.codegen.printing.scalars import COMBINE, identity


@dataclass
class SegmentPrinter:
    """Prints what a program does with whole rows; where they are one block, as such. variances: the operands of those
    whose lines stand."""

    body: Body
    variances: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.of_block = BlockReductions(self.body)

    @property
    def out(self) -> Lines:
        return self.body.out

    @property
    def is_needed(self) -> bool:
        return self.body.form.segments > 1 or self.body.form.vectors

    def repeat(self, print_lines: Callable[[], None]) -> None:
        """What varies along the row, once for every segment."""
        if not self.is_needed:
            print_lines()
            return
        for k in [*range(self.body.form.segments), *([EDGES] if self.body.form.vectors else [])]:
            with self.body.in_segment(k):
                print_lines()

    def repeat_line(self, line: Callable[[], str]) -> None:
        self.repeat(lambda: self.out(line()))

    # --- Places ---

    def whole_row(self) -> None:
        """Its places and their masks."""
        body = self.body
        if body.form.vectors:
            self._whole_vectors()
        elif body.form.segments == 1:
            body.places("q", "0")
        else:
            self.repeat(lambda: body.places("q", f"{body.segment} * BLOCK_Q"))
        for k in range(body.form.segments - 1):  # the row is longer than these
            self.out(f"q_mask_{k} = tl.full({body.shape_of('q')}, True, tl.int1)")

    def _whole_vectors(self) -> None:
        """A row's places as they lie in memory: vectors between two 16-byte addresses, and the up to seven elements
        before and behind them. place: counted from the first vector."""
        body = self.body
        row = next(body.row_text(v) for v in body.kernel.accesses if body.is_in_vectors(v))
        self.out(f"lead = ((0 - ({row})) & {VECTOR - 1}).to(tl.int32)")
        self.out(f"inner = (q_size - lead) // {VECTOR} * {VECTOR}")
        for k in range(body.form.segments):
            self.out(f"place_{k} = {f'{k} * BLOCK_Q + ' if k else ''}{body.offsets('q')}")
            self.out(f"q_{k} = lead + place_{k}")
            self.out(f"q_mask_{k} = place_{k} < inner")
        # As many as threads have a row, so that the same threads have a row's edges. By turns from both ends: were they
        # neighbours, the compiler would give a thread several.
        self.out(f"EDGES: tl.constexpr = {EDGE} if BLOCK_P == 1 or BLOCK_Q <= {16 * VECTOR} else 32")
        self.out(f"edge = {self._edge_offsets()}")
        self.out(f"q_{EDGES} = tl.where(edge % 2 == 0, edge // 2, q_size - 1 - edge // 2)")
        is_edge = f"(q_{EDGES} < lead) | (q_{EDGES} >= lead + inner)"
        self.out(f"q_mask_{EDGES} = (edge < {EDGE}) & ({is_edge})")
        self.out(f"place_{EDGES} = q_{EDGES} - lead")
        self.repeat(lambda: body.single_axes("q"))

    def flat_vectors(self) -> None:
        """Prints elements that run together, in whole vectors. The up to seven behind them are the first program's."""
        self.out(f"inner = q_size // {VECTOR} * {VECTOR}")
        self.out(f"q_0 = start_q + {self.body.offsets('q')}")
        self.out("q_mask_0 = q_0 < inner")
        with self.body.in_segment(0):
            self.body.single_axes("q")

    def _edge_offsets(self) -> str:
        with self.body.in_segment(EDGES):
            return self.body.offsets("q")

    # --- Values and reductions ---

    def print(self) -> None:
        """Prints a row as if it were read at once, with what varies along it once for every segment, and reductions
        over all of them."""
        if not self.body.reduced_dim:
            self._flat()
            return
        self.whole_row()
        for v in self.body.kernel.values:
            self.value(v)

    def _flat(self) -> None:
        """What does not reduce. The other programs do nothing about what lies behind the last whole vector."""
        body = self.body
        with body.in_segment(0):
            for v in body.kernel.values:
                body.value(v)
        self.out(f"EDGES: tl.constexpr = {EDGE}")
        with self.out.block("if start_q == 0:"), body.in_segment(EDGES):
            self.out(f"q_{EDGES} = inner + {body.offsets('q')}")
            self.out(f"q_mask_{EDGES} = q_{EDGES} < q_size")
            body.single_axes("q")
            for v in body.kernel.values:
                if v.number in body.along_q:
                    body.value(v)

    def value(self, v: Value) -> None:
        """A value of a program that has whole rows, or a reduction of them."""
        if v.op == "reduce":
            self._reduce(v) if self.is_needed else self.of_block.print(v)
        elif v.number in self.body.along_q:
            self.repeat(lambda: self.body.value(v))
        else:
            self.body.value(v)

    def _reduce(self, v: Value) -> None:
        """Element by element over the segments first: what is left is the reduction of one."""
        if v.data in ("mean", "m2"):
            self._variance(v)
            return
        body, n = self.body, v.number
        nothing = identity(v.data, body.kernel.value(v.args[0]).dtype)
        self.repeat_line(lambda: f"{self._own('x', n)} = {self._inside(body.variable(v.args[0]), nothing)}")
        if v.data in PLACES:
            self._position(v)
        else:
            self.out(f"v{n} = {self._over_row(f'x{n}', v.data)}")

    def _own(self, name: str, n: int) -> str:
        """A segment's variable of a reduction."""
        return self.body.of_segment(f"{name}{n}")

    def _inside(self, x: str, nothing: str) -> str:
        """What a segment has of x, and `nothing` where that ends."""
        return f"tl.where({self.body.mask_of('q')}, {x}, {nothing})"

    def _over_row(self, name: str, how: str) -> str:
        """The reduction of a variable. The edges have another shape, and so a reduction of their own."""
        body = self.body
        found = combined(body, how, _together([f"{name}_{k}" for k in range(body.form.segments)], how))
        return _together([found, combined(body, how, f"{name}_{EDGES}")], how) if body.form.vectors else found

    def _variance(self, v: Value) -> None:
        body, n = self.body, v.args[0]
        zero = identity("sum", body.kernel.value(n).dtype)

        def operand() -> str:
            return body.variable(n)

        def deviate(mean: str) -> None:
            self.repeat_line(lambda: f"{self._own('d', n)} = {self._inside(f'{operand()} - {mean}', zero)}")
            self.repeat_line(lambda: f"{self._own('s', n)} = {self._own('d', n)} * {self._own('d', n)}")
            self.out(f"away_{n} = {self._over_row(f'd{n}', 'sum')}")
            self.out(f"squares_{n} = {self._over_row(f's{n}', 'sum')}")

        if n not in self.variances:
            self.variances.add(n)
            self.repeat_line(lambda: f"{self._own('t', n)} = {self._inside(operand(), zero)}")
            moments(body, n, self._over_row(f"t{n}", "sum"), deviate)
        self.out(f"v{v.number} = {v.data}_{n}")

    def _position(self, v: Value) -> None:
        """The least position of the extreme of x: see reductions.first_position."""
        body, n = self.body, v.number
        operand = body.kernel.value(v.args[0])
        self.out(f"m{n} = {self._over_row(f'x{n}', v.data.removeprefix('arg'))}")

        def positions() -> str:
            found = is_extreme(self._own("x", n), f"m{n}", operand.dtype)
            place = f"tl.broadcast_to({body.place('q')}, {body.shape_of({*body.dims_of(operand), 'q'})})"
            return f"{self._own('at', n)} = tl.where({found}, {place}, {past_the_last(body)})"

        self.repeat_line(positions)
        least = f"at{n}_0"
        for k in range(1, body.form.segments):
            least = f"tl.minimum({least}, at{n}_{k})"
        least = f"tl.min({least}, {body.axis}{body.keep_dims})"
        if body.form.vectors:
            least = f"tl.minimum({least}, tl.min(at{n}_{EDGES}, {body.axis}{body.keep_dims}))"
        self.out(f"v{n} = {least}.to(tl.int64)")


def _together(names: list[str], how: str) -> str:
    """These reduced with each other."""
    if how == "sum":
        return " + ".join(names)
    text = names[0]
    for other in names[1:]:
        text = f"device.{COMBINE[how]}({text}, {other})"
    return text
