"""What cannot become a kernel is refused, with its line; what can is recorded."""

from __future__ import annotations

import json

import ops
import pytest
import torch
import torch.nn.functional as F

from tk.codegen.errors import TraceError
from tk.codegen.family import generate
from tk.codegen.lowering.rules import RULED
from tk.codegen.tracing.trace import trace_all
from tk.generated import op


def refuse(fn, message: str, **texts) -> None:
    declared = op(**texts)(fn)
    with pytest.raises(TraceError) as caught:
        generate(fn, declared.signature, "f")
    assert message in str(caught.value), str(caught.value)


CONTROL_FLOW = "control flow that depends on the contents of a tensor or on a number"


def test_control_flow() -> None:
    refuse(lambda x: x if x.sum() > 0 else -x, CONTROL_FLOW, x="fp32[M]")
    refuse(lambda x, a: x if a > 0 else -x, CONTROL_FLOW, x="fp32[M]", a="float")
    refuse(lambda x: x * float(x[0]), CONTROL_FLOW, x="fp32[M]")
    refuse(lambda x: x if x.shape[0] > 5 else -x, "control flow that depends on a size (M > 5)", x="fp32[M]")


def test_the_line_is_named() -> None:
    def fn(x):
        y = x + 1
        return y.cholesky_inverse()

    line = fn.__code__.co_firstlineno + 2
    refuse(fn, f"line {line}: aten.cholesky_inverse cannot be generated", x="fp32[M, M]")
    refuse(fn, f"fn ({__file__}:{fn.__code__.co_firstlineno}): line", x="fp32[M, M]")

    def mixed(x, y):
        return x + y

    refuse(
        mixed, f"test_trace.py:{mixed.__code__.co_firstlineno + 1}): The size of tensor a (M)", x="fp32[M]", y="fp32[N]"
    )


def test_results() -> None:
    refuse(lambda x: 3, "the function returns 3", x="fp32[M]")
    refuse(lambda x: {"a": x + 1}, "the function returns a dict", x="fp32[M]")
    refuse(lambda x: None, "returns no tensor and changes none", x="fp32[M]")
    refuse(lambda x: x.nonzero(), "the size of a result depends on a tensor's contents", x="fp32[M]")
    refuse(lambda x: x[x > 0], "depends on", x="fp32[M]")


@pytest.mark.parametrize("fn", [lambda x: x.sum(0), lambda x: x.flip(0), lambda x: x.transpose(0, 1)])
def test_counting_from_the_front(fn) -> None:
    refuse(fn, "depends on how many dimensions '...' stands for", x="fp32[..., N]")


@pytest.mark.parametrize("fn", [lambda x: x.split(4, 1), lambda x: torch.split(x.t(), split_size_or_sections=4),
                                lambda x: torch.unsafe_split(x, 4, dim=-1)])  # fmt: skip
def test_pieces_whose_number_depends_on_a_size(fn) -> None:
    refuse(fn, "size N into pieces of 4: how many there are depends on N", x="fp32[M, N]")
    refuse(lambda x: x.reshape(-1).split(7), "M*N into pieces of 7", x="fp32[M, N]")


def test_pieces_that_can_be_counted() -> None:
    def pieces(x, y):
        found = *x.split(4, 1), *torch.unsafe_split(x, 5, 1), *y.unsafe_chunk(3, 1), *y.split(y.shape[1] // 2, 1)
        return tuple(piece * 2 for piece in found)

    (found,) = trace_all(pieces, op(x="fp32[M, 12]", y="fp32[M, N]")(pieces).signature, RULED)
    assert found.structure == 3 + 3 + 3 + 2


def test_a_view_that_is_always_legal_asks_for_no_multiples() -> None:
    def turned(x):
        return x.reshape(8, -1), x.reshape(-1, x.shape[0])

    (found,) = trace_all(turned, op(x="fp32[M, 8]")(turned).signature, RULED)
    # Of no rows torch refuses the second.
    assert [c.message for c in found.checks] == ["M must not be 0: a view with a -1, which any number would do for"]


def test_dtypes_that_torch_refuses() -> None:
    refuse(lambda x, i: F.embedding(x, i), "Expected tensor for argument", x="fp32[M]", i="fp32[N, D]")


def test_divisibility_becomes_a_check() -> None:
    def halves(x):
        return x.view(x.shape[0], -1, 2).sum(-1)

    (found,) = trace_all(halves, op(x="fp32[M, N]")(halves).signature, RULED)
    assert any("multiple of 2" in c.message for c in found.checks)


def test_a_reshape_asks_for_as_many_elements() -> None:
    """Not for what decides whether torch has a view of it or a copy."""

    def in_three(x):
        return x.t().reshape(3, -1) + 1, x[:, 1:].reshape(2, -1) * 2, x.t().reshape(x.shape)

    (found,) = trace_all(in_three, op(x="fp32[M, N]")(in_three).signature, RULED)
    assert [c.message for c in found.checks] == [
        "M*N must be a multiple of 3", "M*Max(0, N - 1) must be a multiple of 2",
    ]  # fmt: skip


def test_the_recorded_graph_is_that_of_the_call() -> None:
    declared = ops.scaled_gelu
    meta = json.loads(generate(declared.fn, declared.signature, "scaled_gelu").op.meta)
    assert meta["signature"] == {"x": "T[..., N]", "bias": "T[N]", "alpha": "float"}
    assert [g["dtypes"]["T"] for g in meta["graphs"]] == ["bf16", "fp16", "fp32"]
    nodes = meta["graphs"][0]["nodes"]
    assert [n["op"] for n in nodes] == [
        "input", "input", "input", "aten.mul.Tensor", "aten.add.Tensor", "aten.gelu.default", "output",
    ]  # fmt: skip
    assert nodes[3]["args"] == [{"ref": nodes[0]["name"]}, {"ref": nodes[2]["name"]}]


def test_a_write_is_recorded() -> None:
    generated = generate(ops.add_in_place.fn, ops.add_in_place.signature, "add_in_place")
    assert [p.mutated for p in generated.op.params] == [True, False]
    assert "aten.add_.Tensor" in generated.op.meta


def test_outputs() -> None:
    generated = generate(ops.add_rms_norm.fn, ops.add_rms_norm.signature, "add_rms_norm")
    assert [o.leading for o in generated.op.outputs] == [0, 0]
    assert [len(o.sizes) for o in generated.op.outputs] == [1, 1]
    assert generated.op.floats == ("eps",)


def test_norms_over_one_element_have_the_shapes_of_torchs() -> None:
    """Where torch 2.11 works out shapes, it keeps a dimension of size 1 that is counted from the end."""

    def norms(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends = torch.norm(z, "fro", -2), torch.linalg.vector_norm(z, ord=2, dim=(-2,)), z.norm(2, -2, True)
        all_ = torch.linalg.vector_norm(z, 2, [-1, -2], keepdim=True), z.norm()
        return z.norm(dim=-2), *ends, *all_, torch.linalg.norm(z, dim=-2), torch.linalg.norm(z, 3, -2)

    found = generate(norms, op(z="fp32[..., 1, N]", grad=True)(norms).signature, "norms", True)
    (backward,) = (f.op for f in found.families if f.op.name == "norms_backward")
    assert [(p.leading, p.rank) for p in backward.params if p.name.startswith("grad_")] == [
        (True, 1), (True, 1), (True, 1), (True, 2), (True, 2), (False, 0), (True, 1), (True, 1),
    ]  # fmt: skip
