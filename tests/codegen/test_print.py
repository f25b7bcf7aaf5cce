"""The printer's tables."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tk.codegen import ir, printing, scheduling
from tk.codegen.ir import Value
from tk.codegen.printing import scalars


@pytest.mark.parametrize("op", [*ir.UNARY, *ir.BINARY, *ir.COMPARE, *ir.TEST])
def test_every_op_has_a_rule(op: str) -> None:
    """For floats, or, where it is of integers alone, for those."""
    v = Value(0, op, "fp32")
    found = []
    for dtype in ("fp32", "fp64", "i32"):
        try:
            found.append(scalars.expression(v, ["a", "b"], dtype))
        except ir.IRError:
            assert dtype != "fp64" or not found, f"{op} has a rule for fp32 and none for fp64"
    assert found


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.5, "fp32", "0.5"),
        (1e-46, "fp32", "tl.full((), 1e-46, tl.float32)"),
        (float("inf"), "fp32", 'tl.full((), float("inf"), tl.float32)'),
        (-0.0, "fp32", "tl.full((), -0.0, tl.float32)"),
        (0.1, "fp64", "tl.full((), 0.1, tl.float64)"),
        (2**40, "i64", "tl.full((), 1099511627776, tl.int64)"),
        (True, "i1", "tl.full((), True, tl.int1)"),
    ],
)
def test_literals_have_their_dtype(value: object, dtype: str, text: str) -> None:
    assert scalars.literal(value, dtype) == text


@pytest.mark.parametrize(
    ("kind", "dtype", "text"),
    [
        ("max", "i8", "tl.full((), -128, tl.int8)"),
        ("min", "u8", "tl.full((), 255, tl.uint8)"),
        ("argmin", "fp32", 'tl.full((), float("inf"), tl.float32)'),
        ("prod", "fp32", "1.0"),
    ],
)
def test_identities(kind: str, dtype: str, text: str) -> None:
    assert scalars.identity(kind, dtype) == text


@pytest.mark.parametrize("path", [p for room in (printing, scheduling) for p in Path(room.__path__[0]).glob("*.py")],
                         ids=lambda p: f"{p.parent.name}/{p.stem}")  # fmt: skip
def test_nobody_reaches_into_another(path: Path) -> None:
    """Printers stand over a Body, launches over their arguments: what begins with an underscore is one's own."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not [
        ast.unparse(node) for node in found if node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]  # fmt: skip
