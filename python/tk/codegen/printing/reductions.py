"""Reductions of a block as source, where it has all of what is reduced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tk.codegen.ir import FLOATS, PLACES, Value
from tk.codegen.printing.body import Body
from tk.codegen.printing.scalars import COMBINE, TL_DTYPES, identity


def combined(body: Body, kind: str, x: str) -> str:
    """A block reduced along its reduced dimension."""
    if kind == "sum":
        return f"tl.sum({x}, {body.axis}{body.keep_dims})"
    if kind in ("any", "all"):
        to_int = f"({x}).to(tl.int32)"
        return f"tl.{'max' if kind == 'any' else 'min'}({to_int}, {body.axis}{body.keep_dims}) != 0"
    return f"tl.reduce({x}, {body.axis}, device.{COMBINE[kind]}{body.keep_dims})"


def first_position(body: Body, v: Value, x: str, position: str) -> None:
    """The extreme, then the least position that has it: carrying both through one reduction takes three times as
    long. An extreme that is NaN equals nothing, and then every NaN is one."""
    operand, n = body.kernel.value(v.args[0]), v.number
    assert body.reduced_dim is not None
    body.out(f"m{n} = {combined(body, v.data.removeprefix('arg'), x)}")
    shape = body.shape_of({*body.dims_of(operand), body.reduced_dim})
    found = is_extreme(x, f"m{n}", operand.dtype)
    body.out(f"at{n} = tl.where({found}, tl.broadcast_to({position}, {shape}), {past_the_last(body)})")
    body.out(f"v{n} = tl.min(at{n}, {body.axis}{body.keep_dims}).to(tl.int64)")


def is_extreme(x: str, extreme: str, dtype: str) -> str:
    """Whether an element is the extreme, or may be as good as it."""
    return f"({x} == {extreme})" + (f" | ({x} != {x})" if dtype in FLOATS else "")


def past_the_last(body: Body) -> str:
    """A position behind all others."""
    return "9223372036854775807" if body.layout.wide else "2147483647"


def moments(body: Body, n: int, total: str, deviate: Callable[[str], None]) -> None:
    """The mean of operand n, and the squared deviations from it. total: its sum. deviate: prints `away_{n}`, the sum of
    the deviations from what it is given, and `squares_{n}`, that of their squares.

    Of a row with an infinity the mean is NaN, as by Welford's method."""
    count = f"tl.cast({body.reduced_dim}_size, {TL_DTYPES[body.kernel.value(n).dtype]})"
    body.out(f"around_{n} = ({total}) / {count}")
    deviate(f"around_{n}")
    body.out(f"mean_{n} = device.corrected(around_{n}, squares_{n}, away_{n}, {count})")
    body.out(f"m2_{n} = device.centred(squares_{n}, away_{n}, {count})")


@dataclass
class BlockReductions:
    """Prints a kernel's reductions. variances: the operands of those whose lines stand."""

    body: Body
    variances: set[int] = field(default_factory=set)

    def print(self, v: Value) -> None:
        body, x = self.body, self.body.name(v.args[0])
        if v.data in ("mean", "m2"):
            self._variance(v, x)
            return
        nothing = identity(v.data, body.kernel.value(v.args[0]).dtype)
        inside = f"tl.where({body.reduced_mask}, {x}, {nothing})"
        if v.data in PLACES:
            body.out(f"x{v.number} = {inside}")
            first_position(body, v, f"x{v.number}", str(body.reduced_dim))
            return
        body.out(f"v{v.number} = {combined(body, v.data, inside)}")

    def _variance(self, v: Value, x: str) -> None:
        """Prints a variance in two passes over the block."""
        body, n, mask = self.body, v.args[0], self.body.reduced_mask
        zero = identity("sum", body.kernel.value(n).dtype)

        def deviate(mean: str) -> None:
            body.out(f"d_{n} = tl.where({mask}, {x} - {mean}, {zero})")
            both = f"tl.reduce((d_{n}, d_{n} * d_{n}), {body.axis}, device.add_both{body.keep_dims})"
            body.out(f"away_{n}, squares_{n} = {both}")

        if n not in self.variances:
            self.variances.add(n)
            moments(body, n, combined(body, "sum", f"tl.where({mask}, {x}, {zero})"), deviate)
        body.out(f"v{v.number} = {v.data}_{n}")
