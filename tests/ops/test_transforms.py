"""The ops under torch.compile, export, fake tensors, vmap and autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import tk

from .products import ACTIVATION_NAMES, FORMS, Form, assert_close, exact, overloads


def sample(name: str, requires_grad: bool) -> tuple[tuple[object, ...], dict[str, torch.Tensor]]:
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)
    for t in (a, b, bias):
        t.requires_grad_(requires_grad)
    operands: dict[str, tuple[object, ...]] = {
        "mm": (a, b, bias, 2),
        "addmm": (bias, a, b, 0.5, 2.0, 4),
        "linear": (a.detach().view(2, 2, 3).requires_grad_(requires_grad), b.detach().t().contiguous(), bias, 1),
    }
    stem = name.removesuffix(".out")
    shape = (2, 2, 5) if stem == "linear" else (4, 5)
    return operands[stem], {"out": torch.empty(shape)} if name.endswith(".out") else {}


@pytest.mark.parametrize(("name", "op"), list(overloads()))
def test_opcheck(name: str, op) -> None:  # type: ignore[no-untyped-def]
    args, kwargs = sample(name, requires_grad=not name.endswith(".out"))
    opcheck(op, args, kwargs)


@pytest.mark.parametrize("name", ("mm", "addmm", "linear"))
def test_opcheck_of_the_shortest_call(name: str) -> None:
    args, _ = sample(name, requires_grad=True)
    opcheck(getattr(torch.ops.tk, name).default, args[: 3 if name == "addmm" else 2])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile_with_dynamic_sizes_and_gradients(form: Form, backend: str) -> None:
    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return form.call(a * 2, b, bias, activation="gelu") + 1

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for m, n, k in ((4, 5, 3), (7, 2, 9)):
        a, b, bias = (torch.randn(s, requires_grad=True) for s in ((m, k), (k, n), (n,)))
        result = compiled(a, b, bias)
        result.sum().backward()
        a2, b2, bias2 = (x.detach().double().requires_grad_() for x in (a, b, bias))
        expected = F.gelu(2 * a2 @ b2 + bias2) + 1
        expected.sum().backward()
        for ours, theirs in ((result, expected), (a.grad, a2.grad), (b.grad, b2.grad), (bias.grad, bias2.grad)):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    torch._dynamo.reset()


def test_compile_of_an_out_form() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)

    def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        tk.mm(a, b, out=out)
        return out * 2

    out = torch.zeros(4, 5)
    result = torch.compile(call, fullgraph=True)(a, b, out)
    assert_close(out, exact(a, b), 3)
    assert torch.equal(result, out * 2)
    torch._dynamo.reset()


def test_a_graph_keeps_the_modes_it_was_traced_with() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    graphs = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append([n for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    with tk.config.modes(strict=True, deterministic=True):
        torch.compile(lambda a, b: tk.mm(a, b), backend=backend, fullgraph=True)(a, b)
    (call,) = graphs[0]
    assert call.target is torch.ops.tk.mm.default and call.args[-1] == 5
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 4))
        self.bias = torch.nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tk.linear(x, self.weight, self.bias, "silu")


@pytest.mark.parametrize("strict", (True, False))
def test_export_with_dynamic_sizes(strict: bool) -> None:
    layer = Layer()
    n = torch.export.Dim("n", min=1)
    program = torch.export.export(layer, (torch.randn(3, 2, 4),), dynamic_shapes=({0: n},), strict=strict)
    assert [x.target for x in program.graph.nodes if x.op == "call_function"] == [torch.ops.tk.linear.default]
    x = torch.randn(7, 2, 4)
    torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.slow
def test_aot_inductor_with_dynamic_sizes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    layer = Layer().eval()
    n = torch.export.Dim("n", min=2)
    program = torch.export.export(layer, (torch.randn(3, 4),), dynamic_shapes=({0: n},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    x = torch.randn(9, 4)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), layer(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fakes_have_the_shape_dtype_and_strides_of_the_real_thing(form: Form) -> None:
    cases = [(torch.randn(4, 3), torch.randn(3, 5)), (torch.randn(3, 4).t(), torch.randn(5, 3).t())]
    cases += [(torch.randn(0, 3), torch.randn(3, 5)), (torch.randn(4, 0), torch.randn(0, 5))]
    for a, b in cases:
        for dtype, out_dtype in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)):
            operands = a.to(dtype), b.to(dtype)
            real = form.call(*operands, None, out_dtype=out_dtype)
            with FakeTensorMode() as mode:
                fake = form.call(*map(mode.from_tensor, operands), None, out_dtype=out_dtype)
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_tensors_and_their_errors() -> None:
    a, b = torch.empty(4, 3, device="meta"), torch.empty(3, 5, device="meta")
    assert tk.mm(a, b).shape == (4, 5) and tk.linear(a[None], b.t()).shape == (1, 4, 5)
    for call in (lambda: tk.mm(a, a), lambda: tk.linear(a, b), lambda: tk.mm(a, b, out=torch.empty_like(a))):
        with pytest.raises(ValueError, match=r"tk\."):
            call()


@pytest.mark.parametrize(
    "in_dims", ((0, None, None), (None, 0, None), (0, 0, None), (0, 0, 0), (1, 2, 0), (0, None, 0))
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vmap(form: Form, in_dims: tuple[int | None, ...]) -> None:
    batch = 6
    shapes = ((4, 3), (3, 5), (5,))
    inputs = [torch.randn(s if d is None else (*s[:d], batch, *s[d:])) for s, d in zip(shapes, in_dims, strict=True)]
    for records in (True, False):
        with torch.set_grad_enabled(records):
            result = torch.vmap(lambda *x: form.call(*x, activation="gelu"), in_dims)(*inputs)
        expected = torch.vmap(lambda a, b, c: F.gelu(a @ b + c), in_dims)(*(x.double() for x in inputs))
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "n", "k"), ((0, 5, 3), (4, 0, 3), (4, 5, 0)))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_vmap_with_sizes_of_0(form: Form, m: int, n: int, k: int) -> None:
    a, b = torch.randn(6, m, k), torch.randn(k, n)
    result = torch.vmap(lambda a: form.call(a, b, None))(a)
    torch.testing.assert_close(result, a @ b)


def test_vmap_of_a_bias_that_differs_by_row() -> None:
    a, b, bias = torch.randn(6, 4, 3), torch.randn(3, 5), torch.randn(4, 1)
    result = torch.vmap(tk.mm, (0, None, None))(a, b, bias)
    torch.testing.assert_close(result, a @ b + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.vmap(tk.addmm, (0, None, None))(a @ b, a[0], b), a @ b + a[0] @ b, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_autocast_runs_in_its_dtype(form: Form) -> None:
    a, b, bias = torch.randn(4, 30), torch.randn(30, 5), torch.randn(5)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            result = form.call(a, b, bias)
            wide = form.call(a.double(), b.double(), bias.double())
        assert wide.dtype == torch.float64
        assert result.dtype == dtype
        assert torch.equal(result, form.call(a.to(dtype), b.to(dtype), bias.to(dtype)))
        with torch.autocast("cpu", dtype=dtype, enabled=False):
            assert form.call(a, b, bias).dtype == torch.float32


def test_autocast_with_gradients() -> None:
    a, b = torch.randn(4, 30, requires_grad=True), torch.randn(30, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tk.mm(a, b, activation="silu").sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32
    a2, b2 = (x.detach().double().requires_grad_() for x in (a, b))
    F.silu(a2 @ b2).sum().backward()
    torch.testing.assert_close(a.grad.double(), a2.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_the_op_takes_codes(activation: str) -> None:
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)
    code = ACTIVATION_NAMES.index(activation)
    assert torch.equal(torch.ops.tk.mm(a, b, bias, code), tk.mm(a, b, bias, activation))  # type: ignore[arg-type]
