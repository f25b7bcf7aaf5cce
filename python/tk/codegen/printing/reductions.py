"""Reductions of a block as source, where it has all of what is reduced."""

from __future__ import annotations

from dataclasses import dataclass, field

from tk.codegen.ir import FLOATS, Value
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


def centred(body: Body, n: int, dtype: str) -> str:
    """Squared deviations from the mean itself, of those from what it was rounded to."""
    return f"device.centred(squares{n}, away{n}, tl.cast({body.reduced_dim}_size, {TL_DTYPES[dtype]}))"


@dataclass
class BlockReductions:
    """Prints a kernel's reductions. means: those whose lines stand."""

    body: Body
    means: set[str] = field(default_factory=set)

    def print(self, v: Value) -> None:
        body, x = self.body, self.body.name(v.args[0])
        if v.data in ("mean", "m2"):
            self._variance(v, x)
            return
        nothing = identity(v.data, body.kernel.value(v.args[0]).dtype)
        inside = f"tl.where({body.reduced_mask}, {x}, {nothing})"
        if v.data in ("argmax", "argmin"):
            body.out(f"x{v.number} = {inside}")
            first_position(body, v, f"x{v.number}", str(body.reduced_dim))
            return
        body.out(f"v{v.number} = {combined(body, v.data, inside)}")

    def _variance(self, v: Value, x: str) -> None:
        """In two passes over the block."""
        body, mean = self.body, f"mean_{v.args[0]}"
        dtype, mask = body.kernel.value(v.args[0]).dtype, body.reduced_mask
        zero = identity("sum", dtype)
        if mean not in self.means:
            self.means.add(mean)
            total = combined(body, "sum", f"tl.where({mask}, {x}, {zero})")
            body.out(f"{mean} = {total} / tl.cast({body.reduced_dim}_size, {TL_DTYPES[dtype]})")
        if v.data == "mean":
            body.out(f"v{v.number} = {mean}")
        else:
            n = v.number
            body.out(f"d{n} = tl.where({mask}, {x} - {mean}, {zero})")
            both = f"tl.reduce((d{n}, d{n} * d{n}), {body.axis}, device.add_both{body.keep_dims})"
            body.out(f"away{n}, squares{n} = {both}")
            body.out(f"v{n} = {centred(body, n, dtype)}")
