"""Reductions in a loop as source: what each begins with, what a block adds to it, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tk.codegen.ir import Value
from tk.codegen.printing.body import Body
from tk.codegen.printing.reductions import combined, first_position
from tk.codegen.printing.scalars import COMBINE, IDENTITY, TL_DTYPES, expression, identity


class Accumulator(Protocol):
    """Lines before a loop, at the end of each of its blocks, and behind it."""

    def start(self) -> None: ...
    def step(self) -> None: ...
    def finish(self) -> None: ...


def _shape(body: Body, operand: Value, of_q: str = "") -> str:
    """The shape of what is added up over the reduced dimension."""
    assert body.reduced_dim is not None
    return body.shape_of({*body.dims_of(operand), body.reduced_dim}, of_q)


@dataclass
class Plain:
    """Lane by lane, and the lanes together at the end."""

    body: Body
    v: Value

    @property
    def operand(self) -> Value:
        return self.body.kernel.value(self.v.args[0])

    def start(self) -> None:
        shape, dtype = _shape(self.body, self.operand), self.operand.dtype
        value = identity(self.v.data, dtype)
        self.body.out(
            f"acc{self.v.number} = tl.zeros({shape}, {TL_DTYPES[dtype]}) + {value}"
            if dtype != "i1"
            else f"acc{self.v.number} = tl.full({shape}, {bool(IDENTITY[self.v.data])}, tl.int1)"
        )

    def step(self) -> None:
        acc, x = f"acc{self.v.number}", self.body.name(self.v.args[0])
        mask = self.body.reduced_mask
        after = f"{acc} + {x}" if self.v.data == "sum" else f"device.{COMBINE[self.v.data]}({acc}, {x})"
        self.body.out(f"{acc} = tl.where({mask}, {after}, {acc})")

    def finish(self) -> None:
        self.body.out(f"v{self.v.number} = {combined(self.body, self.v.data, f'acc{self.v.number}')}")


@dataclass
class Online:
    """A maximum and the sum of exp(x - maximum) in one pass: of every eight elements that a thread has the maximum so
    far, and the sum relative to it, which is scaled anew when the maximum rises. A block of fewer is one group."""

    body: Body
    most: Value
    total: Value

    @property
    def group(self) -> int:
        return min(8, self.body.form.columns)

    def shape(self, of_q: str = "") -> str:
        of_q = of_q or f"BLOCK_Q // {self.group}"
        return _shape(self.body, self.body.kernel.value(self.most.args[0]), of_q)

    @property
    def eights(self) -> tuple[str, int]:
        """The block's shape with a dimension for a thread's eight, and which it is: neighbours where it loads vectors,
        else one of every eighth of the block."""
        aligned, n = self.body.layout.aligned, self.group
        return self.shape(f"BLOCK_Q // {n}, {n}" if aligned else f"{n}, BLOCK_Q // {n}"), self.body.axis + aligned

    def guarded(self, most: str) -> str:
        """What is taken away: no infinity, from which one more differs by NaN. Where the function itself takes the
        maximum away as it is, that comes at the end."""
        return f"tl.where(tl.abs({most}) == float('inf'), 0.0, {most})"

    def exp(self, x: str) -> str:
        return expression(self.body.kernel.value(self.total.args[0]), [x], self.total.dtype)

    def start(self) -> None:
        body, n, dtype = self.body, self.total.number, TL_DTYPES[self.total.dtype]
        body.out(f"most{n} = tl.zeros({self.shape()}, {dtype}) + {identity('max', self.total.dtype)}")
        body.out(f"acc{n} = tl.zeros({self.shape()}, {dtype})")

    def step(self) -> None:
        body, n, x = self.body, self.total.number, self.body.name(self.most.args[0])
        low, (eights, axis) = identity("max", self.total.dtype), self.eights
        body.out(f"x{n} = tl.reshape(tl.where({body.reduced_mask}, {x}, {low}), {eights})")
        body.out(f"higher{n} = device.maximum(most{n}, tl.reduce(x{n}, {axis}, device.maximum))")
        body.out(f"from{n} = {self.guarded(f'higher{n}')}")
        terms = self.exp(f"(x{n} - tl.expand_dims(from{n}, {axis}))")
        body.out(f"acc{n} = acc{n} * {self.exp(f'(most{n} - from{n})')} + tl.sum({terms}, {axis})")
        body.out(f"most{n} = higher{n}")

    def finish(self) -> None:
        body, n = self.body, self.total.number
        most = f"v{self.most.number}"
        body.out(f"{most} = {combined(body, 'max', f'most{n}')}")
        exp = body.kernel.value(self.total.args[0])
        is_guarded = body.kernel.value(exp.args[0]).args[1] != self.most.number
        scaled = f"acc{n} * {self.exp(f'(most{n} - {self.guarded(most) if is_guarded else most})')}"
        body.out(f"v{n} = {combined(body, 'sum', scaled)}")


@dataclass
class Position:
    """Keeps, for every lane, the extreme so far and where it was. Positions rise, so that an equal one never takes its
    place."""

    body: Body
    v: Value

    def start(self) -> None:
        body, n = self.body, self.v.number
        operand = body.kernel.value(self.v.args[0])
        shape = _shape(body, operand)
        body.out(f"acc{n} = tl.zeros({shape}, {TL_DTYPES[operand.dtype]}) + {identity(self.v.data, operand.dtype)}")
        # Where a lane has nothing but the identity, its first element is the first of them.
        dtype = "tl.int64" if body.layout.wide else "tl.int32"
        body.out(f"from{n} = tl.zeros({shape}, {dtype}) + {body.offsets(body.reduced_dim)}")

    def step(self) -> None:
        body, n, x = self.body, self.v.number, self.body.name(self.v.args[0])
        rule = "is_above" if self.v.data == "argmax" else "is_below"
        body.out(f"take{n} = {body.reduced_mask} & device.{rule}({x}, acc{n})")
        body.out(f"acc{n} = tl.where(take{n}, {x}, acc{n})")
        body.out(f"from{n} = tl.where(take{n}, {body.reduced_dim}, from{n})")

    def finish(self) -> None:
        first_position(self.body, self.v, f"acc{self.v.number}", f"from{self.v.number}")


@dataclass
class Welford:
    """Mean and squared deviations in one pass: every lane for itself, then the lanes together. Means count from that of
    the first block, which all lanes have in common. Numbers of their own would be rounded to what the elements have in
    common, which may be more than they deviate by. Counted from an element, they would be as large as it deviates, and
    each step would round to that.

    The deviations are a sum of squares. Welford's product of those from the old mean and from the new one is a square
    only where the operand rounds as the mean did: a compiler that contracts its last product into the second
    difference makes it negative, and the deviation of equal numbers NaN."""

    body: Body
    operand: int
    reduces: list[Value]

    @property
    def dtype(self) -> str:
        return TL_DTYPES[self.body.kernel.value(self.operand).dtype]

    def start(self) -> None:
        body, n = self.body, self.operand
        v = body.kernel.value(n)
        of_row = body.shape_of(set(body.dims_of(v)) - {str(body.reduced_dim)}) if body.keep_dims else "()"
        for name in ("base", "size"):
            body.out(f"{name}_{n} = tl.full({of_row}, 0.0, {self.dtype})")
        for name in ("mean", "m2"):
            body.out(f"{name}_{n} = tl.zeros({_shape(body, v)}, {self.dtype})")

    def step(self) -> None:
        body, n, mask = self.body, self.operand, self.body.reduced_mask
        dim = str(body.reduced_dim)
        x, block = body.name(n), body.block(dim)
        with body.out.block("if start == 0:"):
            # Divided first: a sum may overflow where the mean does not.
            body.out(f"x_{n} = {x} / tl.cast(tl.minimum({body.extent(dim)}, {block}), {self.dtype})")
            body.out(f"base_{n} = {combined(body, 'sum', f'tl.where({mask}, x_{n}, 0.0)')}")
            apart = f"tl.where({mask}, tl.abs({x} - base_{n}), 0.0)"
            body.out(f"size_{n} = {combined(body, 'max', apart)}")
            body.out(f"base_{n} = device.coarse(base_{n}, size_{n})")
        # Every lane that has anything has had an element of each block: nothing that reduces is scanned backwards.
        body.out(f"share_{n} = 1.0 / tl.cast(start // {block} + 1, {self.dtype})")
        body.out(f"delta_{n} = tl.where({mask}, ({x} - base_{n}) - mean_{n}, 0.0)")
        body.out(f"mean_{n} += delta_{n} * share_{n}")
        body.out(f"m2_{n} += delta_{n} * delta_{n} * (1.0 - share_{n})")

    def finish(self) -> None:
        body, n = self.body, self.operand
        dim = str(body.reduced_dim)
        block, size = body.block(dim), body.extent(dim)
        body.out(f"count_{n} = tl.cast({size}, {self.dtype})")
        lanes = f"({size} - {body.offsets(dim)} + {block} - 1) // {block}"
        body.out(f"weight_{n} = tl.cast({lanes}, {self.dtype})")
        around = combined(body, "sum", f"mean_{n} * (weight_{n} / count_{n})")
        body.out(f"around_{n} = device.coarse({around}, size_{n})")
        body.out(f"away_{n} = mean_{n} - around_{n}")
        terms = ", ".join(f"weight_{n} * {x}" for x in (f"away_{n}", f"away_{n} * away_{n}"))
        both = f"tl.reduce(({terms} + m2_{n}), {body.axis}, device.add_both{body.keep_dims})"
        body.out(f"away_{n}, squares_{n} = {both}")
        body.out(f"mean_{n} = (base_{n} + around_{n}) + away_{n} / count_{n}")
        if any(v.data == "m2" for v in self.reduces):
            body.out(f"m2_{n} = device.centred(squares_{n}, away_{n}, count_{n})")
            body.out(f"m2_{n} += mean_{n} - mean_{n}  # an infinity has none")
        for v in self.reduces:
            body.out(f"v{v.number} = {v.data}_{n}")
