"""Generated ops on the CPU: numbers, shapes, in-place, gradients, transforms, and what is refused. The ops are declared
in generated_ops.py; nothing is compiled."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tk
from tk.aot.errors import BuildError
from tk.aot.expr import const, tensors
from tk.aot.spec import Op, Output, Param
from tk.generated import register

from . import generated_ops
from .generated_ops import ADD_, ROWS, SCALED_GELU, SHIFTED, TWICE, graph, meta, node, normalized, ref

Load = Callable[[Op], Op]
_numbers = itertools.count()


def ops(name: str) -> Any:
    return getattr(torch.ops.tk, name)


@pytest.fixture
def norm(tmp_path: Path) -> str:
    """An op with a gradient, and its backward."""
    name = f"norm{next(_numbers)}"
    tk.load_pack(generated_ops.write(tmp_path / f"{name}.tkpack", *normalized(name)))
    return name


def expected_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


# --- Tensors that may be left out ---


def test_a_tensor_that_may_be_left_out(load: Load) -> None:
    op = ops(load(SHIFTED).name)
    assert "(Tensor x, Tensor? bias=None, float alpha=1.5, int config=-1, int mode=0)" in str(op.default._schema)
    x, bias = torch.randn(2, 3, 8), torch.randn(8)
    torch.testing.assert_close(op(x), 1.5 * x)
    torch.testing.assert_close(op(x, None, 2.0), 2 * x)
    torch.testing.assert_close(op(x, bias), 1.5 * x + bias)
    with FakeTensorMode() as mode:
        fake_x, fake_bias = mode.from_tensor(x), mode.from_tensor(bias)
        assert op(fake_x).shape == op(fake_x, fake_bias).shape == x.shape
    for args in ((x,), (x, bias)):
        opcheck(op.default, args)
    torch.testing.assert_close(torch.vmap(op)(x), 1.5 * x)
    torch.testing.assert_close(torch.compile(op, backend="eager", fullgraph=True)(x, None, 2.0), 2 * x)


def test_what_is_refused_beside_it(load: Load) -> None:
    op = ops(load(SHIFTED).name)
    with pytest.raises(ValueError, match=r"x of another dtype; x is float64\[2\], bias is None$"):
        op(torch.randn(2).double())
    with pytest.raises(ValueError, match=r"N of x and bias must be equal; x is float32\[2\], bias is float32\[3\]$"):
        op(torch.randn(2), torch.randn(3))
    with pytest.raises(NotImplementedError, match="no gradient"):
        op(torch.randn(2), torch.randn(2, requires_grad=True))


@pytest.mark.parametrize(
    ("params", "message"),
    (
        ([Param("x", "optional_tensor", rank=1)], "one tensor that is always there"),
        ([Param("x", "tensor"), Param("y", "optional_tensor", leading=True)], "has no leading dimensions"),
        ([Param("x", "tensor"), Param("y", "optional_tensor", mutated=True)], "is not written"),
        ([Param("x", "tensors"), Param("y", "optional_tensor")], "beside lists"),
        ([Param("x", "tensor"), Param("y", "optional_tensor"), Param("n", "int")], "without a default follows"),
    ),
)
def test_no_op_has(tmp_path: Path, params: list[Param], message: str) -> None:
    xs = tensors(*(p.name for p in params if p.is_tensor))
    op = Op("wrong", xs, tuple(p.name for p in params if p.kind == "int"), (), {}, {}, (), params=tuple(params))
    with pytest.raises(BuildError, match=message):
        generated_ops.write(tmp_path / "wrong.tkpack", replace(op, meta=meta({p.name: "fp32" for p in params})))


# --- What is registered ---


def test_the_schema_is_that_of_the_arguments(load: Load) -> None:
    gelu, rows, add = load(SCALED_GELU), load(ROWS), load(ADD_)
    schemas = [str(ops(op.name).default._schema) for op in (gelu, rows, add)]
    assert schemas == [
        f"tk::{gelu.name}(Tensor x, Tensor bias, float alpha=1.5, int config=-1, int mode=0) -> Tensor",
        f"tk::{rows.name}(Tensor x, SymInt n, bool keep=True, int config=-1, int mode=0) -> (Tensor, Tensor)",
        f"tk::{add.name}(Tensor(a!) x, Tensor y, float alpha, int config=-1, int mode_bits=0) -> ()",
    ]


def test_a_gradients_twin_returns_what_is_saved(norm: str) -> None:
    assert str(ops(norm).default._schema).endswith("-> Tensor")
    assert str(ops(f"_{norm}").default._schema).endswith("-> (Tensor, Tensor)")


def test_loaded_by_the_environment(tmp_path: Path) -> None:
    """TK_PACK_PATH: the op is there, its fake and CPU path too, once tk is imported."""
    op = generated_ops.fresh(TWICE)
    path = generated_ops.write(tmp_path / "p.tkpack", op)
    code = f"import torch, tk; print(torch.ops.tk.{op.name}(torch.ones(3)).tolist())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TK_PACK_PATH": str(path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]", done.stderr


# --- Numbers and layouts ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_graph_of_the_dtype_runs(load: Load, dtype: torch.dtype) -> None:
    op = load(TWICE)
    x = torch.randn(3, 5).to(dtype)
    result = ops(op.name)(x)
    assert result.dtype == dtype
    assert torch.equal(result, x * 2)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (2, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2), (2,) * 12])
def test_any_leading_dimensions(load: Load, shape: tuple[int, ...]) -> None:
    op = load(SCALED_GELU)
    x, bias = torch.randn(*shape, 6), torch.randn(6)
    expected = F.gelu(x * 0.5 + bias, approximate="tanh")
    result = ops(op.name)(x, bias, 0.5)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one_channels_last": lambda: torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(4, 6).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "sliced": lambda: torch.randn(4, 6, 8)[:, ::2, 1:7],
    "sliced_transposed": lambda: torch.randn(4, 6)[:, 1:4].t(),
    "size_one": lambda: torch.randn(4, 1, 6).transpose(0, 2),
    "empty": lambda: torch.randn(0, 4).t(),
    "scalar": lambda: torch.randn(()),
}


def strides_that_count(x: Tensor) -> list[int]:
    """That of a dimension of size 1 says nothing."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_elementwise_output_lies_as_atens_does(load: Load, layout: str) -> None:
    op = load(TWICE)
    x = LAYOUTS[layout]()
    result = ops(op.name)(x)
    assert torch.equal(result, x * 2)
    assert strides_that_count(result) == strides_that_count(x * 2)


def test_an_expanded_tensor_gives_a_row_major_output(load: Load) -> None:
    op = load(TWICE)
    result = ops(op.name)(torch.randn(3, 1).expand(3, 4))
    assert result.stride() == (4, 1)


def test_eight_declared_dimensions(load: Load) -> None:
    x, out = tensors("x", "out")
    sizes = tuple(x.size(d) for d in range(8))
    strides = tuple(math.prod(sizes[d + 1 :], start=const(1)) for d in range(8))
    op = replace(TWICE, tensors=(x, out), locals={}, outputs=(Output(x.dtype, sizes, strides),),
                 params=(Param("x", "tensor", rank=8),))  # fmt: skip
    name = load(op).name
    value = torch.randn(1, 2, 3, 1, 2, 1, 2, 2).transpose(1, 2)
    result = ops(name)(value)
    assert torch.equal(result, value * 2) and result.is_contiguous()
    refused("x must have 8 dimensions", name, value[0])


def test_a_flag_has_a_graph_for_each_value(load: Load) -> None:
    graphs = [graph(["x"], [node("y", "aten.mul.Scalar", ref("x"), factor)], ["y"], T="fp32") | {"flags": {"up": up}}
              for up, factor in ((False, 0.5), (True, 2))]  # fmt: skip
    op = replace(TWICE, ints=("up",), params=(*TWICE.params, Param("up", "bool")),
                 meta=meta({"x": "T[...]", "up": "bool", "T": ["fp32"]}, *graphs))  # fmt: skip
    name = load(op).name
    value = torch.randn(3)
    assert torch.equal(ops(name)(value, True), value * 2)
    assert torch.equal(ops(name)(value, False), value * 0.5)


def test_several_outputs_and_numbers(load: Load) -> None:
    op = load(ROWS)
    x = torch.randn(5, 8)
    sums, index = ops(op.name)(x, 3, keep=False)
    torch.testing.assert_close(sums, x[:, :3].sum(1))
    assert torch.equal(index, x[:, :3].argmax(1))


def test_a_result_that_is_a_view_of_an_argument_is_copied(load: Load) -> None:
    same = replace(
        TWICE,
        meta=meta(
            {"x": "T[...]", "T": ["fp32"]}, graph(["x"], [node("y", "aten.alias.default", ref("x"))], ["y"], T="fp32")
        ),
    )
    x = torch.randn(4)
    result = ops(load(same).name)(x)
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


# --- In place ---


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 0, 5)])
def test_in_place(load: Load, shape: tuple[int, ...]) -> None:
    op = load(ADD_)
    x, y = torch.randn(shape), torch.randn(shape)
    expected = x + 0.5 * y
    assert ops(op.name)(x, y, 0.5) is None
    torch.testing.assert_close(x, expected)


def test_in_place_where_the_leading_dimensions_are_no_single_one(load: Load) -> None:
    op = load(ADD_)
    base = torch.randn(4, 3, 2, 5)
    x, y = base.transpose(0, 2)[:, ::2], torch.randn(2, 2, 4, 5)
    expected = x + y
    ops(op.name)(x, y, 1.0)
    torch.testing.assert_close(x, expected)


def test_in_place_with_a_graph_that_returns_nothing(load: Load) -> None:
    """A function without a return statement is recorded with an output of null."""
    op = load(replace(ADD_, meta=ADD_.meta.replace('"args": [[]]', '"args": [null]')))
    assert "[null]" in op.meta
    x = torch.zeros(2, 3)
    assert ops(op.name)(x, torch.ones(2, 3), 2.0) is None
    assert torch.equal(x, torch.full((2, 3), 2.0))


def test_of_no_elements_no_graph_is_run(load: Load) -> None:
    """As no kernel is: what it is made of may not hold there."""
    nodes = [node("m", "aten.amax.default", ref("x")), node("y", "aten.mul.Tensor", ref("x"), ref("m"))]
    graphs = [graph(["x"], nodes, ["y"], T=t) for t in ("fp32", "fp64", "bf16")]
    op = load(replace(TWICE, meta=meta({"x": "T[...]", "T": ["fp32", "fp64", "bf16"]}, *graphs)))
    assert torch.equal(ops(op.name)(torch.tensor([2.0, 3.0])), torch.tensor([6.0, 9.0]))
    found = ops(op.name)(torch.ones(3, 0, dtype=torch.float64))
    assert found.shape == (3, 0) and found.dtype == torch.float64


def test_in_place_on_memory_that_is_shared_is_refused(load: Load) -> None:
    op = load(ADD_)
    base = torch.randn(9)
    with pytest.raises(ValueError, match="elements of x, which is written, share memory"):
        ops(op.name)(base[:4].expand(3, 4), torch.randn(3, 4), 1.0)
    with pytest.raises(ValueError, match="x, which is written, overlaps y in memory"):
        ops(op.name)(base[:8], base[1:], 1.0)
    with pytest.raises(ValueError, match="x, which is written, overlaps y in memory"):
        ops(op.name)(base, base, 1.0)


# --- What is refused ---


def refused(match: str, name: str, *args: Any, **kwargs: Any) -> None:
    """In the same words on real and on fake tensors."""
    with pytest.raises(ValueError, match=match):
        ops(name)(*args, **kwargs)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, pytest.raises(ValueError, match=match):
        ops(name)(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args), **kwargs)


def test_wrong_arguments_are_refused(load: Load) -> None:
    name = load(SCALED_GELU).name
    x, bias = torch.randn(2, 8), torch.randn(8)
    refused(
        rf"tk\.{name}: N of x and bias must be equal; x is float32\[2, 8\], bias is float32\[7\]", name, x, bias[:7]
    )
    refused("x and bias must have one dtype", name, x, bias.double())
    refused("x of another dtype", name, x.int(), bias.int())
    refused(r"x must have 1 or more dimension, is \[\]", name, x[0, 0], bias)
    refused(r"bias must have 1 dimension, is \[2, 8\]", name, x, x)
    refused("config is -2", name, x, bias, config=-2)
    refused("mode is 16", name, x, bias, mode=16)


def test_numbers_out_of_range_are_refused(load: Load) -> None:
    refused("n must be 1 to the number of columns", load(ROWS).name, torch.randn(2, 4), 5)


def test_leading_dimensions_that_differ_are_refused(load: Load) -> None:
    name = load(ADD_).name
    refused(r"the leading dimensions of x and y must be the same, are \[2, 3\] and \[3\]", name, torch.randn(2, 3, 4),
            torch.randn(3, 4), 1.0)  # fmt: skip
    refused(r"are \[2\] and \[3\]", name, torch.randn(2, 4), torch.randn(3, 4), 1.0)


def test_devices_that_differ_are_refused(load: Load) -> None:
    name = load(SCALED_GELU).name
    with FakeTensorMode(), pytest.raises(ValueError, match="x is on cuda:0, bias on cpu; all tensors must be on one"):
        ops(name)(torch.empty(2, 8, device="cuda:0"), torch.empty(8))


def test_absent_arguments_are_refused(load: Load) -> None:
    with pytest.raises(RuntimeError, match="bias"):
        ops(load(SCALED_GELU).name)(torch.randn(2, 8))


def test_a_dtype_without_a_graph_is_refused(load: Load) -> None:
    """A pack whose checks let a dtype through for which it has nothing recorded."""
    name = load(replace(SCALED_GELU, checks=())).name
    with pytest.raises(ValueError, match="it is there for T fp32; T fp64, not for x of i32, bias of i32"):
        ops(name)(torch.ones(2, 8, dtype=torch.int32), torch.ones(8, dtype=torch.int32))


def test_graphs_that_are_none_are_refused(load: Load) -> None:
    def run(*nodes: Any, outputs: tuple[str, ...] = ("y",)) -> Tensor:
        text = meta({"x": "T[...]", "T": ["fp32"]}, graph(["x"], nodes, outputs, T="fp32"))
        return ops(load(replace(TWICE, meta=text)).name)(torch.ones(3))

    with pytest.raises(tk.UnsupportedError, match=r"aten\.no_such_op\.default"):
        run(node("y", "aten.no_such_op.default", ref("x")))
    with pytest.raises(tk.UnsupportedError, match=r"os\.system"):
        run(node("y", "os.system", "true"))
    with pytest.raises(tk.UnsupportedError, match=r"aten\.from_file\.default"):
        run(node("y", "aten.from_file.default", "/etc/passwd", False, 3))
    with pytest.raises(tk.PackError, match=r"makes torch.float32 \[1\]"):
        run(node("y", "aten.slice.Tensor", ref("x"), 0, 0, 1))
    with pytest.raises(tk.PackError, match="neither a value before it"):
        run(node("y", "aten.neg.default", ref("z")))
    with pytest.raises(tk.PackError, match="neither a value before it"):
        run(node("y", "aten.neg.default", {"file": "x"}))
    for text in ('{"graphs": []}', '{"signature": {"x": 1}}', '{"signature": {"x": "T[...]"}}', '{"signature": {}}'):
        with pytest.raises(tk.PackError, match="cannot be read"):
            ops(load(replace(TWICE, meta=text)).name)(torch.ones(3))
    with pytest.raises(tk.PackError, match="its graph has 0 outputs, its pack says 1"):
        run(outputs=())


# --- Clashes ---


def test_another_op_of_that_name_is_refused(load: Load, tmp_path: Path) -> None:
    op = load(TWICE)
    other = replace(SCALED_GELU, name=op.name)
    with pytest.raises(tk.PackError, match=rf'op "{op.name}" .* another one'):
        tk.load_pack(generated_ops.write(tmp_path / "other.tkpack", other, arch=80))
    tk.load_pack(generated_ops.write(tmp_path / "sm80.tkpack", op, arch=80))
    assert torch.equal(ops(op.name)(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("name", ["mm", "addmm", "linear"])
def test_names_of_tks_own_ops_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(tk.PackError, match=f'op "{name}", which is one of tk\'s own'):
        tk.load_pack(generated_ops.write(tmp_path / "p.tkpack", replace(TWICE, name=name), arch=70))


def test_every_hand_written_op_has_its_name_reserved(tmp_path: Path) -> None:
    """In a process that has loaded nothing else: of torch.ops.tk, all that the package's own packs do not define."""
    code = (
        "import torch, tk; from tk.generated.register import attention_names, names; "
        "own = {f'tk::{name}' for name in (*names(), *attention_names())}; "
        "print(*{s.name for s in torch._C._jit_get_all_schemas()} - own)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {name.removeprefix("tk::") for name in done.stdout.split() if re.match("tk::[^_]", name)}
    assert {"mm", "addmm", "linear"} <= names
    for name in names:
        with pytest.raises(tk.PackError, match="tk's own"):
            tk.load_pack(generated_ops.write(tmp_path / f"{name}.tkpack", replace(TWICE, name=name), arch=70))


# --- Building ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(name="two words"), "name begins with a letter"),
        (dict(name="class"), "name begins with a letter"),
        (dict(params=(Param("mode", "tensor", leading=True),)), "cannot have this name"),
        (dict(params=(Param("x", "tensors", leading=True), Param("y", "tensor", rank=1))), "beside lists of tensors"),
        (dict(params=(Param("x", "tensors", leading=True), Param("y", "tensor", mutated=True))), "is not written"),
        (dict(params=(Param("x", "tensors", leading=True, rank=1),)), "list have no declared dimensions"),
        (dict(params=(Param("x", "tensors", leading=True),), outputs=(Output(6, (2, 3), (3, 1), leading=0),)),
         "output of lists has dimensions of its own"),
        (dict(params=(Param("x", "complex"),)), "kind is one of"),
        (dict(params=(Param("x", "tensor", leading=True, rank=6),)), "6 declared dimensions, there may be 5"),
        (dict(params=(Param("x", "tensor"), Param("x", "float"))), "two arguments have one name"),
        (dict(params=(Param("n", "int"),)), "at least one tensor"),
        (dict(params=(Param("x", "tensor", leading=True), Param("a", "float"))), "make 1 \\+ 1 tensors"),
        (dict(params=(Param("x", "tensor"),)), "which has no leading dimensions"),
        (dict(params=(Param("x", "tensor"), Param("a", "float", default=1)), floats=("a",)), "finite float"),
        (dict(params=(Param("x", "tensor", leading=True), Param("a", "int", rank=1)), ints=("a",)), "no dimensions"),
        (dict(outputs=(Output(6, (1,) * 6, (1,) * 6, leading=0),)), "output of 6 dimensions"),
        (dict(meta="{"), "no JSON"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_when_a_pack_is_built(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=message):
        generated_ops.write(tmp_path / "p.tkpack", replace(TWICE, **change))


# --- Gradients ---


def test_gradients(norm: str) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    result = ops(norm)(x)
    torch.testing.assert_close(result, expected_norm(x))
    assert torch.autograd.gradcheck(ops(norm), (x,))
    (mine,) = torch.autograd.grad(result.sum() + (result**2).sum(), x)
    other = expected_norm(x)
    (theirs,) = torch.autograd.grad(other.sum() + (other**2).sum(), x)
    torch.testing.assert_close(mine, theirs)


def test_a_gradient_whose_op_is_missing_says_so(load: Load) -> None:
    forward, _ = normalized("lonely")
    x = torch.randn(2, 5, requires_grad=True)
    result = ops(load(forward).name)(x)
    with pytest.raises(tk.PackError, match="no loaded pack has lonely_backward"):
        result.sum().backward()


def test_a_backward_that_takes_something_else_says_so(tmp_path: Path) -> None:
    forward, backward = normalized("odd")
    params = (*backward.params[:2], replace(backward.params[2], name="grad_1"))
    text = backward.meta.replace("grad_0", "grad_1")
    tk.load_pack(generated_ops.write(tmp_path / "odd.tkpack", forward, replace(backward, params=params, meta=text)))
    with pytest.raises(tk.PackError, match="odd_backward takes grad_1; there are grad_0, x, result_1, eps"):
        ops("odd")(torch.randn(2, 5, requires_grad=True)).sum().backward()


def test_nothing_is_saved_where_nothing_needs_a_gradient(norm: str) -> None:
    x = torch.randn(2, 5)
    assert ops(norm)(x).grad_fn is None
    with torch.no_grad():
        assert ops(norm)(x.requires_grad_()).grad_fn is None
    assert type(ops(norm)(x).grad_fn).__name__.startswith("TkNorm")


def test_torch_func_gradients(norm: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    mine = torch.func.vmap(torch.func.grad(lambda row: (ops(norm)(row) ** 3).sum()))(x)
    theirs = torch.func.vmap(torch.func.grad(lambda row: (expected_norm(row) ** 3).sum()))(x)
    torch.testing.assert_close(mine, theirs)


def test_further_derivatives_go_through_what_was_only_saved(norm: str) -> None:
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops(norm), (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ops(norm), (x,), check_fwd_over_rev=True)
    third = [torch.func.hessian(torch.func.grad(lambda x, f=f: f(x)[0, 0, 0]))(x.detach()[:1, :1])
             for f in (ops(norm), expected_norm)]  # fmt: skip
    torch.testing.assert_close(*third)


def test_packs_that_do_not_say_that_their_graphs_may_be_differentiated(tmp_path: Path) -> None:
    forward, backward = (
        replace(op, meta=op.meta.replace('"differentiable": true', '"differentiable": false'))
        for op in normalized("older")
    )
    tk.load_pack(generated_ops.write(tmp_path / "older.tkpack", forward, backward))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(ops("older"), (torch.randn(2, 5),), (torch.randn(2, 5),))
    x = torch.randn(2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(ops("older")(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="older_backward has no gradient"):
        grad.sum().backward()


# --- Transforms ---


def samples(load: Load, norm: str) -> dict[str, tuple[Any, ...]]:
    x = torch.randn(2, 3, 8)
    return {
        load(TWICE).name: (x.to(memory_format=torch.contiguous_format),),
        load(SCALED_GELU).name: (x, torch.randn(8), 0.5),
        load(ROWS).name: (x[0], 3),
        load(ADD_).name: (x.clone(), x, 2.0),
        norm: (x.clone().requires_grad_(),),
        f"{norm}_backward": (x, x[..., 0].contiguous(), x),
    }


def test_opcheck(load: Load, norm: str) -> None:
    for name, args in samples(load, norm).items():
        opcheck(ops(name).default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_sizes(load: Load, norm: str, backend: str) -> None:
    gelu, add = load(SCALED_GELU).name, load(ADD_).name

    def call(x: Tensor, bias: Tensor) -> Tensor:
        y = ops(gelu)(ops(norm)(x * 2), bias, 0.5) + 1
        z = torch.zeros_like(y)
        ops(add)(z, y, 3.0)
        return z

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for shape in ((2, 3, 8), (4, 5, 6)):
            x, bias = torch.randn(shape), torch.randn(shape[-1])
            expected = 3 * (F.gelu(expected_norm(2 * x) * 0.5 + bias, approximate="tanh") + 1)
            torch.testing.assert_close(compiled(x, bias), expected)
    torch._dynamo.reset()


def test_compile_with_a_dynamic_number(load: Load) -> None:
    """A number that a check and the graph read is a symbol too: one graph serves all values."""
    name = load(ROWS).name
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, n: ops(name)(x, n)[0] + 1, fullgraph=True, dynamic=True, backend=counter)
    for rows, n in ((4, 3), (5, 6), (6, 2), (7, 7)):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, n), x[:, :n].sum(1) + 1)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compile_with_gradients(norm: str) -> None:
    compiled = torch.compile(lambda x: ops(norm)(x * 2), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        (mine,) = torch.autograd.grad((compiled(x) ** 3).sum(), x)
        (theirs,) = torch.autograd.grad((expected_norm(2 * x) ** 3).sum(), x)
        torch.testing.assert_close(mine, theirs)
    torch._dynamo.reset()


def test_export_keeps_the_op(load: Load) -> None:
    name = load(SCALED_GELU).name

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return ops(name)(x, bias, 0.5)

    x, bias = torch.randn(2, 8), torch.randn(8)
    program = torch.export.export(
        Module(), (x, bias), dynamic_shapes={"x": {0: torch.export.Dim("rows")}, "bias": None}
    )
    assert any(node.target is ops(name).default for node in program.graph.nodes)
    longer = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(longer, bias), ops(name)(longer, bias, 0.5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_outputs_are_the_real_ones(load: Load, layout: str) -> None:
    name = load(TWICE).name
    x = LAYOUTS[layout]()
    with FakeTensorMode() as mode:
        fake = ops(name)(mode.from_tensor(x))
    real = ops(name)(x)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_fake_outputs_on_cuda(load: Load) -> None:
    with FakeTensorMode():
        sums, index = ops(load(ROWS).name)(torch.empty(5, 8, device="cuda"), 3)
    assert (sums.device.type, sums.dtype, tuple(index.shape), index.dtype) == ("cuda", torch.float32, (5,), torch.int64)


def test_vmap_over_a_leading_dimension(load: Load) -> None:
    name = load(SCALED_GELU).name
    x, bias = torch.randn(3, 8, 4), torch.randn(8)
    result = torch.func.vmap(lambda x: ops(name)(x, bias, 0.5), in_dims=2)(x)
    torch.testing.assert_close(result, ops(name)(x.movedim(2, 0), bias, 0.5))


def test_vmap_over_a_tensor_without_leading_dimensions_is_a_loop(load: Load) -> None:
    name, rows = load(SCALED_GELU).name, load(ROWS).name
    x, bias = torch.randn(3, 8), torch.randn(4, 8)
    result = torch.func.vmap(lambda bias: ops(name)(x, bias, 0.5))(bias)
    torch.testing.assert_close(result, torch.stack([ops(name)(x, b, 0.5) for b in bias]))
    many = torch.randn(6, 5, 8)
    sums, index = torch.func.vmap(lambda x: ops(rows)(x, 3))(many)
    torch.testing.assert_close(sums, many[..., :3].sum(-1))
    assert torch.equal(index, many[..., :3].argmax(-1))


def test_vmap_in_place(load: Load) -> None:
    name = load(ADD_).name
    x, y = torch.randn(3, 4, 5), torch.randn(4, 5)
    expected = x + y
    torch.func.vmap(lambda x: ops(name)(x, y, 1.0), out_dims=None)(x)
    torch.testing.assert_close(x, expected)
    with pytest.raises(RuntimeError, match="writes x, which has no batch dimension"):
        torch.func.vmap(lambda y: ops(name)(x[0], y, 1.0), out_dims=None)(x)


# --- What tk.config says ---


class Recorder(TorchDispatchMode):
    """The calls of generated ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tk":
            self.calls.append((args, kwargs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [TWICE, ADD_], ids=lambda op: op.name)
def test_the_wrapper_passes_modes_on(load: Load, op: Op) -> None:
    name = load(op).name
    args = (torch.ones(2, 3),) if op is TWICE else (torch.ones(2, 3), torch.ones(2, 3), 1.0)
    call = register.wrapper(name)
    with Recorder() as recorder, tk.config.strict():
        call(*args, config=1)
    ((passed, kwargs),) = recorder.calls
    assert (*passed, *kwargs.values())[-2:] == (1, tk.config.MODE_BITS["strict"])
    with pytest.raises(TypeError, match="argument 'x' is missing"):
        call()


# --- Looking at them ---


def test_explain_supports_and_coverage(load: Load) -> None:
    op = load(SCALED_GELU)
    x, bias = torch.randn(2, 8), torch.randn(8)
    assert tk.explain(op.name, x, bias).problem is None
    assert tk.supports(op.name, x, bias)
    answer = tk.supports(op.name, x, bias[:7])
    assert not answer and "N of x and bias" in answer.reason
    assert [row.config for row in tk.coverage().only(op=op.name)] == ["flat", "general"]
    with pytest.raises(ValueError, match=f"there are adamw_, .*addmm, .*linear, .*mm, .*{op.name}"):
        tk.explain("no_such_op", x)
