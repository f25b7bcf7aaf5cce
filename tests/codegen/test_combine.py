"""Scans by a function of one's own: what is recorded, what is refused; and how much of a row may be taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ops
import pytest
import torch
from torch._higher_order_ops import associative_scan

from tk.codegen.along import can_be_spread
from tk.codegen.errors import TraceError
from tk.codegen.family import Generated, generate
from tk.generated import interpret, op


def generated(fn: Callable[..., Any], grad: bool = False, **params: str) -> Generated:
    return generate(fn, op(**params)(fn).signature, "f", grad)


def test_the_recorded_graph_scans_with_the_function() -> None:
    trace = generate(ops.recurrence.fn, ops.recurrence.signature, "recurrence").first
    nodes = json.loads(json.dumps(trace.recorded))
    assert any(n["op"] == "tk.associative_scan" for n in nodes)
    a, b = torch.randn(3, 11), torch.randn(3, 11)
    (found,) = interpret.evaluate(nodes, {"a": a, "b": b}, "recurrence")
    h, expected = torch.zeros(3), []
    for t in range(11):
        h = torch.sigmoid(a[:, t]) * h + b[:, t]
        expected.append(h * 2)
    torch.testing.assert_close(found, torch.stack(expected, -1))


def test_the_users_name_is_torchs_again() -> None:
    before = ops.associative_scan
    generate(ops.last_positive.fn, ops.last_positive.signature, "last_positive")
    assert ops.associative_scan is before is associative_scan


def test_combine_functions_that_are_refused() -> None:
    with pytest.raises(TraceError, match="combine function of fp32 returns i64"):
        generated(lambda x: associative_scan(lambda a, b: (a + b).long(), x, 0), x="fp32[N]")
    with pytest.raises(TraceError, match="combine function of 1 elements must return as many"):
        generated(lambda x: associative_scan(lambda a, b: (a, b), x, 0), x="fp32[N]")
    with pytest.raises(TraceError, match="tensors of one shape"):
        generated(lambda x: associative_scan(lambda a, b: a, (x, x[0]), 0), x="fp32[M, N]")


def test_a_scan_by_a_function_has_no_gradient() -> None:
    with pytest.raises(TraceError, match="associative_scan has no gradient; leave out grad=True"):
        generated(lambda x: associative_scan(lambda a, b: a + b, x, 0), grad=True, x="fp32[N]")


def test_two_different_functions_of_one_name() -> None:
    def both(x: torch.Tensor) -> Any:
        return associative_scan(lambda a, b: a + b, x, 1), associative_scan(lambda a, b: a * b, x, 1)

    kernel = generated(both, x="fp32[M, N]").graphs[0].kernels[0]
    names = {v.data.combine.name for v in kernel.values if v.op == "scan"}
    assert len(names) == 2
    assert not can_be_spread(kernel)


def test_a_whole_row_is_needed_beside_a_reduction() -> None:
    kernel = generated(lambda x: x.cumsum(-1) / x.sum(-1, keepdim=True), x="fp32[M, N]").graphs[0].kernels[0]
    assert not can_be_spread(kernel)


def test_no_more_is_taken_than_there_is() -> None:
    checks = generated(lambda x, k: torch.topk(x, k), x="fp32[M, N]", k="int").op.checks
    assert "k must be 0 to N: topk along a dimension of size N" in {c.message for c in checks}
    checks = generated(lambda x, k: torch.kthvalue(x, k), x="fp32[M, N]", k="int").op.checks
    assert "k must be 1 to N: kthvalue along a dimension of size N" in {c.message for c in checks}
