"""Expressions: what folds is what the core would compute, and the words say the same as the tree."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tk import expr
from tk.aot.spec import Config, Point
from tk.expr import (
    Expr,
    Problem,
    TensorValue,
    ceil_div,
    const,
    device,
    divisor,
    evaluate_locals,
    int_arg,
    local,
    maximum,
    minimum,
    mode,
    select,
    shared,
    tensors,
)

A, B, MISSING = tensors("a", "b", "missing")
PROBLEM = Problem(
    tensors=(TensorValue((6, 40), (40, 1), 15, 16), TensorValue((3,), (-(2**40),), 6), None),
    ints=(-7, 0, 2**62),
    mode=5,
    device={"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 50 << 20},
    locals=(1000, -1),
)
LEAVES = [
    A.size(0), A.size(1), A.stride(0), A.dtype, A.ndim, A.alignment, B.size(0), B.size(1), B.stride(0), B.alignment,
    MISSING.size(0), MISSING.dtype, MISSING.ndim, MISSING.alignment, int_arg(0), int_arg(1), int_arg(2), Expr("mode"),
    device.sm_count, device.arch, local(0), local(1),
]  # fmt: skip
OPS = [op for op in expr.OPCODES if op in expr._FOLD]


@st.composite
def trees(draw: st.DrawFn, depth: int = 4):
    """An expression twice: over symbols alone, and with some of them replaced by their numbers (and so folded)."""
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(LEAVES) | st.integers(-70, 70).map(const))
        return leaf, const(leaf.evaluate(PROBLEM)) if draw(st.booleans()) and _fits(leaf) else leaf
    op = draw(st.sampled_from(OPS))
    pairs = [draw(trees(depth=depth - 1)) for _ in range(expr._ARITY[op])]
    return Expr(op, 0, tuple(p[0] for p in pairs)), expr._make(op, *(p[1] for p in pairs))


def _fits(leaf: Expr) -> bool:
    return -(2**55) <= leaf.evaluate(PROBLEM) < 2**55


def _value(e: Expr, problem: Problem = PROBLEM) -> int | None:
    try:
        return e.evaluate(problem)
    except OverflowError:
        return None


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(trees())
def test_folded_is_evaluated(tree):
    plain, folded = tree
    value = _value(plain)
    # An overflow may fold away (0 * x), but no other number may take its place.
    assert _value(folded) == value or value is None


@given(trees())
def test_words_say_what_the_tree_says(tree):
    _, folded = tree
    words = folded.encode()
    assert all(-(2**63) <= w < 2**63 for w in words)
    again = Expr.decode(words)
    assert again.same(folded)
    assert _value(again) == _value(folded)


@given(trees())
def test_divisor_divides(tree):
    _, folded = tree
    value, known = _value(folded), divisor(folded)
    assert value is None or (value % known == 0 if known else value == 0)


def test_every_leaf():
    assert [e.evaluate(PROBLEM) for e in LEAVES] == [
        6, 40, 40, 15, 2, 16, 3, 0, -(2**40), 256, 0, -1, -1, 256, -7, 0, 2**62, 5, 132, 90, 1000, -1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("made", "value"),
    [
        (A.size(0) + 0, 6),
        (0 + A.size(0), 6),
        (A.size(0) * 1, 6),
        (A.size(0) * 0, 0),
        (A.size(0) // 4, 1),
        (int_arg(0) // 4, -2),
        (int_arg(0) % 4, 1),
        (int_arg(0) % -4, -3),
        (ceil_div(int_arg(0), 4), -1),
        (A.size(0) // int_arg(1), 0),
        (A.size(0) % int_arg(1), 0),
        (ceil_div(A.size(0), int_arg(1)), 0),
        (minimum(A.size(0), 4, 9), 4),
        (maximum(A.size(0), 4, 9), 9),
        (select(A.size(0) > 5, 10, 20), 10),
        (-A.size(0), -6),
        (~(A.size(0) == 6), 0),
        ((A.size(0) == 6) & (A.size(1) != 40), 0),
        ((A.size(0) == 6) | (A.size(1) != 40), 1),
        (A.size(1) >> 2 << 1, 20),
        (int_arg(0) >> 1, -4),
        (mode("deterministic"), 1),
        (mode("batch_invariant"), 0),
        (mode("strict"), 1),
        (A.present, 1),
        (MISSING.present, 0),
    ],
)
def test_operators(made, value):
    assert made.evaluate(PROBLEM) == value


@pytest.mark.parametrize(
    "made",
    [int_arg(2) + int_arg(2), int_arg(2) * 4, -(int_arg(2) * -2), A.size(0) << 63, A.size(0) << 64, int_arg(1) >> -1],
)
def test_overflow_is_reported(made):
    with pytest.raises(OverflowError):
        made.evaluate(PROBLEM)


def test_constants_past_56_bits_are_left_to_the_core():
    big = const(2**40) * const(2**20)
    assert big.value is None
    assert big.evaluate(PROBLEM) == 2**60
    with pytest.raises(ValueError, match="56 bits"):
        const(2**55)


def test_an_expression_has_no_truth_value():
    with pytest.raises(TypeError, match=r"use & \| ~"):
        bool(A.size(0) == 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([len(expr.OPCODES)], "no opcode"),
        ([expr._NUMBER["add"]], "lacks operands"),
        ([0, 0], "leaves 2 values"),
        ([0] * 65, "places of stack"),
        ([0, expr._NUMBER["neg"] | 1 << 8], "no immediate operand"),
    ],
)
def test_decode_refuses(words, message):
    with pytest.raises(ValueError, match=message):
        Expr.decode(words)


def test_locals_read_those_before_them():
    assert evaluate_locals([local(0) + 1, local(2) * 2], PROBLEM) == [1000, -1, 1001, 2002]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees(), trees(), st.integers(0, 3))
def test_what_is_shared_says_the_same(first, second, most):
    (a, _), (b, _) = first, second
    whole = maximum(a + b, b * 3) + minimum(a, a + b)
    exprs, rest = shared(whole, len(PROBLEM.locals), most)
    assert len(exprs) <= most
    assert sum(1 + len(e.encode()) for e in exprs) + len(rest.encode()) <= len(whole.encode())
    try:
        again = _value(rest, replace(PROBLEM, locals=evaluate_locals(exprs, PROBLEM)))
    except OverflowError:
        again = None
    assert again == _value(whole)


def test_what_stands_often_becomes_a_local():
    row = A.size(0) * A.stride(0) + 1
    most = maximum(row, 5)
    locals_, rest = shared(most + row // most * most, 4, 60)
    assert [x.encode() for x in locals_] == [row.encode(), maximum(local(4), 5).encode()]
    assert rest.same(local(5) + local(4) // local(5) * local(5))
    assert shared(row, 4, 60)[0] == []


def test_records_survive_copy_and_pickle():
    config = Config("c", {"block": 64})
    point = Point(90, {"dtype": "bf16"}, config)
    for again in (copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert (again.dtype, again.config.block) == ("bf16", 64)
    with pytest.raises(AttributeError, match="config c has no warps"):
        _ = config.warps
    with pytest.raises(AttributeError, match="no axis order"):
        _ = point.order
