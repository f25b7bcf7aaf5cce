"""The verifier refuses what is malformed; passes change what they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from tk.codegen import passes
from tk.codegen.errors import IRError
from tk.codegen.index import floor_div, modulo, reshape
from tk.codegen.ir import Axis, Buffer, Builder, Kernel, axis_symbol, verify

N, M = sympy.symbols("N M", integer=True, positive=True)
A, R = axis_symbol("a0"), axis_symbol("r0")
X, OUT = Buffer("x", "input", "bf16", (M, N)), Buffer("out", "output", "bf16", (M,))


def row_sum() -> Kernel:
    b = Builder({"a0": Axis("a0", M), "r0": Axis("r0", N, True)}, {"x": X, "out": OUT})
    total = b.add("reduce", "bf16", b.add("load", "bf16", buffer="x", index=(A, R)), data="sum")
    b.add("store", "bf16", total, buffer="out", index=(A,))
    return b.finish("row_sum")


def changed(kernel: Kernel, number: int, **fields: object) -> Kernel:
    values = list(kernel.values)
    values[number] = replace(values[number], **fields)  # type: ignore[arg-type]
    return replace(kernel, values=tuple(values))


def test_a_good_kernel() -> None:
    assert verify(row_sum()).values[1].axes == {"a0"}


@pytest.mark.parametrize(
    ("number", "fields", "message"),
    [
        (0, {"buffer": "y"}, "no such buffer"),
        (0, {"index": (A,)}, "the buffer has 2 dimensions"),
        (0, {"dtype": "fp32"}, "the buffer is bf16"),
        (1, {"op": "frobnicate"}, "no such op"),
        (1, {"data": "median"}, "no such reduction"),
        (1, {"dtype": "fp32"}, "reduces bf16"),
        (1, {"args": (2,)}, "does not come before"),
        (1, {"axes": frozenset({"a0", "r0"})}, "varies over what it reduces"),
        (2, {"buffer": "x", "index": (A, A)}, "stores into an input"),
        (2, {"args": (0,)}, "varies over an axis that its index does not name"),
    ],
)
def test_malformed(number: int, fields: dict[str, object], message: str) -> None:
    with pytest.raises(IRError, match=message):
        verify(changed(row_sum(), number, **fields))


def test_equal_values_are_one_and_zeros_of_two_signs_are_not() -> None:
    b = Builder({})
    assert b.add("constant", "fp32", data=0.0) == b.add("constant", "fp32", data=0.0)
    assert b.add("constant", "fp32", data=0.0) != b.add("constant", "fp32", data=-0.0)
    assert b.add("constant", "i1", data=True) != b.add("constant", "i1", data=1)


def test_16_bit_floats_are_computed_in_fp32() -> None:
    kernel = passes.run(row_sum())
    assert [v.op for v in kernel.values] == ["load", "cast", "reduce", "cast", "store"]
    assert kernel.values[2].dtype == "fp32" and kernel.values[4].dtype == "bf16"


def test_index_arithmetic() -> None:
    a, b = axis_symbol("a0"), axis_symbol("a1")
    ranges = {a: M, b: N}
    assert floor_div(a * N + b, N, ranges) == a and modulo(a * N + b, N, ranges) == b
    assert str(floor_div(a * N + b, M, ranges)) == "((N*a0 + a1)//M)"  # nothing is known of it
    assert reshape((a, b), (M, N), (M, N), ranges) == (a, b)
    assert reshape((a * N + b,), (M * N,), (M, N), ranges) == (a, b)
    assert reshape((a, b), (M, N), (M * N,), ranges) == (a * N + b,)
    assert reshape((a, sympy.Integer(0), b), (M, 1, N), (M, N), ranges) == (a, b)
