"""Reductions in a loop as source: what each begins with, what a block adds to it, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk.codegen.ir import Value
from tk.codegen.printing.scalars import COMBINE, IDENTITY, TL_DTYPES, expression, identity

if TYPE_CHECKING:
    from tk.codegen.printing.printer import Printer


@dataclass
class Plain:
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
class Online:
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
class Position:
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
class Welford:
    """Mean and squared deviations in one pass: every lane for itself, then the lanes together.

    The deviations are a sum of squares. Welford's product of those from the old mean and from the new one is a square
    only where the operand rounds as the mean did: a compiler that contracts its last product into the second
    difference makes it negative, and the deviation of equal numbers NaN."""

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
        p.out(f"share_{n} = 1.0 / tl.maximum(weight_{n}, 1.0)")
        p.out(f"mean_{n} += delta_{n} * share_{n}")
        p.out(f"m2_{n} += delta_{n} * delta_{n} * (1.0 - share_{n})")

    def finish(self) -> None:
        p, n = self.printer, self.operand
        names = f"mean_{n}, m2_{n}, weight_{n}"
        p.out(f"{names} = tl.reduce(({names}), {p.axis}, device.welford{p._keep()})")
        if any(v.data == "m2" for v in self.reduces):
            p.out(f"m2_{n} += mean_{n} - mean_{n}  # an infinity has none")
        for v in self.reduces:
            p.out(f"v{v.number} = {v.data}_{n}")
