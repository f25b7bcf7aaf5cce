"""Gradients of gradients: every public function beside ATen, in reverse and forward mode, under torch.func; of
functions that are declared with @tk.op; and what has none, which says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from second_order import CASES, REFUSED, WITHOUT_GRADIENT, Case, hessian_product
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tk
from tk import functional
from tk.generated import register

CPU = torch.device("cpu")
GENERATED = [case for case in CASES if case.function in functional.FUNCTIONS]
ids = str


def test_every_public_function_is_in_one_of_the_lists() -> None:
    ops = {name for name in tk.__all__ if hasattr(torch.ops.tk, name) and f"tk::{name}" in _schemas()}
    public = {*functional.FUNCTIONS, *ops, "flex_attention", "sdpa"}
    listed = [{case.function for case in CASES}, set(WITHOUT_GRADIENT), set(REFUSED)]
    assert set().union(*listed) == public
    assert sum(map(len, listed)) == len(public), "a function is in two lists"


def _schemas() -> set[str]:
    return {schema.name for schema in torch._C._jit_get_all_schemas()}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_hessian_vector_products(case: Case) -> None:
    mine = hessian_product(case.ours, case.leaves(torch.float32, CPU))
    exact = hessian_product(case.torchs, case.leaves(torch.float64, CPU))
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 + 2e-5 * float(b.abs().max()))


def _results(f: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    found = f(*leaves)
    return [x for x in (found if isinstance(found, tuple) else (found,)) if x.is_floating_point()]


def _assert_alike(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_checkpoint_makes_again_what_the_gradient_reads(case: Case) -> None:
    """It makes each saved tensor once."""

    def gradients(is_kept: bool) -> list[Tensor]:
        leaves = case.leaves(torch.float32, CPU)
        run = partial(_results, case.ours)
        found = run(*leaves) if is_kept else checkpoint(run, *leaves, use_reentrant=False)
        return list(torch.autograd.grad([x.square().sum() for x in found], leaves))

    _assert_alike(gradients(False), gradients(True))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_batch_of_gradients(case: Case) -> None:
    def gradients(f: Callable[..., Any]) -> list[Tensor]:
        leaves = case.leaves(torch.float32, CPU)
        found = _results(f, *leaves)
        given = [torch.stack([torch.ones_like(x), torch.linspace(0.1, 2, x.numel()).reshape(x.shape)]) for x in found]
        return list(torch.autograd.grad(found, leaves, given, is_grads_batched=True))

    _assert_alike(gradients(case.ours), gradients(case.torchs))


@pytest.mark.parametrize("case", [case for case in CASES if case.function != "grouped_mm"], ids=ids)
def test_a_tangent_has_the_dtype_of_its_result(case: Case) -> None:
    leaves = tuple(x.detach() for x in case.leaves(torch.float32, CPU))
    found, tangents = torch.func.jvp(lambda *xs: tuple(_results(case.ours, *xs)), leaves, leaves)
    assert [x.dtype for x in tangents] == [x.dtype for x in found]


@pytest.mark.parametrize("case", [case for case in CASES if case.function != "grouped_mm"], ids=ids)
def test_forward_mode(case: Case) -> None:
    """The tangent of the results, and, forward over reverse, that of the gradients."""
    leaves = [x.detach() for x in case.leaves(torch.float32, CPU)]
    tangents = [torch.linspace(-1, 1, x.numel()).reshape(x.shape) for x in leaves]

    def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*xs: Tensor) -> tuple[Tensor, ...]:
            def loss(*ys: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                found = f(*ys)
                outputs = tuple(y for y in (found if isinstance(found, tuple) else (found,)))
                return sum((y.sin() * (1 + i)).sum() for i, y in enumerate(outputs)), outputs

            grads, outputs = torch.func.grad(loss, argnums=tuple(range(len(xs))), has_aux=True)(*xs)
            return (*outputs, *grads)

        return call

    mine = torch.func.jvp(with_gradients(case.ours), tuple(leaves), tuple(tangents))
    wide = [tuple(x.double() for x in xs) for xs in (leaves, tangents)]
    exact = torch.func.jvp(with_gradients(case.torchs), *wide)
    for a, b in zip((*mine[0], *mine[1]), (*exact[0], *exact[1]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 + 2e-5 * float(b.abs().max()))


@pytest.mark.parametrize(
    "f",
    [
        pytest.param((lambda t: (tk.softmax(t, -1) ** 2).sum(), lambda t: (t.softmax(-1) ** 2).sum()), id="softmax"),
        pytest.param((lambda t: (tk.silu(t) ** 3).sum(), lambda t: (F.silu(t) ** 3).sum()), id="silu"),
        pytest.param(
            (lambda t: tk.rms_norm(t, (4,)).sin().sum(), lambda t: F.rms_norm(t, (4,), eps=2**-23).sin().sum()),
            id="rms_norm",
        ),
    ],
)
def test_transforms(f: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    ours, torchs = f
    x, batch = torch.randn(2, 4), torch.randn(3, 2, 4)
    func = torch.func
    for transform, at in (
        (func.hessian, x),
        (lambda g: func.jacrev(func.jacrev(g)), x),
        (lambda g: func.jacfwd(func.jacfwd(g)), x),
        (lambda g: func.jacrev(func.jacfwd(g)), x),
        (lambda g: func.vmap(func.grad(g)), batch),
        (lambda g: func.vmap(func.hessian(g)), batch),
        (lambda g: func.grad(lambda t: func.vmap(func.grad(g))(t).sin().sum()), batch),
        (lambda g: func.grad(lambda t: func.grad(lambda u: func.grad(g)(u).sin().sum())(t).sin().sum()), x),
        (lambda g: lambda t: torch.autograd.functional.hessian(g, t), x),
        (lambda g: lambda t: torch.autograd.functional.hvp(g, t, torch.ones_like(t))[1], x),
        (lambda g: lambda t: torch.autograd.functional.jacobian(g, t), x),
    ):
        torch.testing.assert_close(transform(ours)(at), transform(torchs)(at), rtol=1e-4, atol=1e-5)


def test_the_kernel_works_out_the_first_gradient() -> None:
    """ATen is asked for nothing as long as no second derivative is: neither by create_graph nor by torch.func."""
    x = torch.randn(3, 5, requires_grad=True)
    with Calls() as calls:
        tk.softmax(x, -1).square().sum().backward()
        torch.autograd.grad(tk.softmax(x, -1).square().sum(), x, create_graph=True)
        torch.func.grad(lambda x: tk.softmax(x, -1).square().sum())(x.detach())
    assert calls.of_tk == 3 * ["tk::softmax", "tk::softmax_backward"]
    assert not [name for name in calls.others if "softmax" in name]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_tk: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.of_tk if func.namespace == "tk" else self.others).append(func._schema.name)
        return func(*args, **(kwargs or {}))


# --- Declared functions ---


def curved(x: Tensor, w: Tensor, a: float) -> Any:
    y = torch.tanh(x * w + a)
    return y * x.sum(-1, keepdim=True), (y * y).mean(-1)


def looked_up(x: Tensor, at: Tensor, n: int) -> Tensor:
    return torch.gather(x.exp(), -1, at) * n


def with_detach(x: Tensor) -> Tensor:
    return x * x.detach() * x


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        largest = x.exp()
    return x * largest * x


def hard(x: Tensor) -> Tensor:
    y = x.softmax(-1)
    return F.silu(y - y.data) * x + F.mish(x)


def in_place(x: Tensor) -> Tensor:
    y = x * x
    y.mul_(x)
    return y.sin_()


WIDE = {"x": "fp64[..., N]"}
DECLARED: list[tuple[Callable[..., Any], dict[str, str], tuple[Any, ...]]] = [
    (curved, {**WIDE, "w": "fp64[N]", "a": "float"}, ((2, 3, 5), (5,), 0.3)),
    (looked_up, {"x": "fp64[M, N]", "at": "i64[M, K]", "n": "int"}, ((2, 4), torch.tensor([[0, 3, 3], [1, 1, 2]]), 3)),
    (with_detach, WIDE, ((2, 3),)),
    (without_grad, WIDE, ((2, 3),)),
    (hard, WIDE, ((2, 2, 4),)),
    (in_place, WIDE, ((2, 3),)),
    (lambda x: x.cumsum(-1).logsumexp(-1).sum(), {"x": "fp64[M, N]"}, ((3, 4),)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "texts", "given"), DECLARED, ids=lambda x: getattr(x, "__name__", ""))
def test_declared_functions(declare: Callable[..., Any], fn: Any, texts: Any, given: Any) -> None:
    fn.__name__ = fn.__name__.replace("<lambda>", "summed")
    op = declare(fn, **texts)
    args = [torch.randn(x, dtype=torch.float64) if isinstance(x, tuple) else x for x in given]
    floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*leaves: Tensor) -> Any:
            values = list(args)
            for i, leaf in zip(floats, leaves, strict=True):
                values[i] = leaf
            return f(*values)

        return call

    leaves = [args[i].requires_grad_() for i in floats]
    for a, b in zip(hessian_product(of(op), leaves), hessian_product(of(fn), leaves), strict=True):
        torch.testing.assert_close(a, b)
    if fn not in (with_detach, without_grad, hard):  # of what is detached differences know nothing
        assert gradcheck(of(op), leaves, check_forward_ad=True)
        assert gradgradcheck(of(op), leaves, check_fwd_over_rev=True)
    if len(leaves) == 1 and fn is not hard:  # torch.func sees through .data
        torch.testing.assert_close(*(_third(of(f))(leaves[0].detach()) for f in (op, fn)))


def _third(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def grad(g: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: torch.func.grad(g)(x).sin().sum()

    return torch.func.grad(grad(grad(lambda x: f(x).sin().sum())))


class Straight(torch.autograd.Function):
    """Rounds; the gradient is that of x²."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def straight(x: Tensor) -> Tensor:
    return Straight.apply(x)


def test_a_gradient_of_its_own_is_no_derivative_of_the_recorded_graph(declare: Callable[..., Any]) -> None:
    """Its first order is what was traced; of more nothing is known."""
    op = declare(straight, x="fp64[...]")
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    torch.testing.assert_close(found, 2 * x)
    torch.testing.assert_close(torch.func.grad(lambda x: op(x).sum())(x.detach()), 2 * x.detach())
    with pytest.raises(NotImplementedError, match=r"_backward has no gradient: its function is not differentiated as"):
        found.sum().backward()
    with pytest.raises(NotImplementedError, match="no formula for forward-mode"):
        torch.func.jvp(op, (x.detach(),), (x.detach(),))


# --- What has no gradient ---


def scaled(x: Tensor, a: float) -> Tensor:
    return x * a


def scaled_(x: Tensor, a: float) -> None:
    x.mul_(a)


def scaled_lists_(xs: list[Tensor], a: float) -> None:
    for x in xs:
        x.mul_(a)


def places(x: Tensor) -> Tensor:
    return (x * 2).argmax(-1)


def counted_(bins: Tensor, x: Tensor) -> None:
    bins.add_((x > 0).sum(-1))


def refused(call: Callable[[], Any], advice: str = r"grad=True.*torch\.no_grad\(\).*detach") -> None:
    with pytest.raises(NotImplementedError, match=rf"has no gradient: .*{advice}"):
        call()


def test_an_op_without_grad_refuses_where_a_gradient_is_at_stake(declare: Callable[..., Any]) -> None:
    op, op_ = (declare(f, grad=False, x="fp32[...]", a="float") for f in (scaled, scaled_))
    x = torch.randn(3, requires_grad=True)
    refused(lambda: op(x, 2.0))
    refused(lambda: op_(x * 1, 2.0))
    with pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad .* which writes x"):
        op_(x, 2.0)
    refused(lambda: torch.func.grad(lambda x: op(x, 2.0).sum())(x.detach()))
    refused(lambda: torch.func.jvp(lambda x: op(x, 2.0), (x.detach(),), (x.detach(),)))
    with forward_ad.dual_level():
        refused(lambda: op_(forward_ad.make_dual(x.detach(), x.detach()), 2.0))
    y = x.detach().clone()
    with torch.no_grad():
        assert torch.equal(op(x, 2.0), y * 2)
        op_(x, 3.0)
    assert torch.equal(x, y * 3) and torch.equal(op(y, 2.0), y * 2)
    op_(y, 2.0)
    torch.testing.assert_close(torch.vmap(lambda y: op(y, 2.0))(y), y * 2)


def test_an_op_of_lists_refuses(declare: Callable[..., Any]) -> None:
    op = declare(scaled_lists_, grad=False, xs="fp32[...]*", a="float")
    xs = [torch.ones(3), torch.ones(2, requires_grad=True)]
    refused(lambda: op(xs, 2.0), "detach")
    with torch.no_grad():
        op(xs, 2.0)
    assert xs[1].tolist() == [2, 2]
    op(xs[:1], 2.0)
    assert xs[0].tolist() == [4, 4, 4]


def test_results_that_are_integers_have_no_gradient_and_say_so(declare: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    op = declare(places, grad=False, x="fp32[..., N]")
    assert torch.equal(op(x), x.argmax(-1)) and not op(x).requires_grad
    bins = torch.zeros(3, dtype=torch.int64)
    declare(counted_, grad=False, bins="i64[...]", x="fp32[..., N]")(bins, x)
    assert torch.equal(bins, (x > 0).sum(-1))
    for found in (
        tk.argmax(x, -1),
        tk.any(x),
        tk.argsort(x),
        tk.searchsorted(x.detach().sort()[0], x),
        *tk.quantize_fp8(x),
    ):
        assert not found.requires_grad
    found = torch.func.grad(lambda x: (x * (tk.argmax(x, -1, keepdim=True) + 1)).sum())(x.detach())
    torch.testing.assert_close(found, (x.argmax(-1, keepdim=True) + 1.0).expand(3, 4))


def test_optimizers_write_parameters_as_torchs_do() -> None:
    x, others = torch.ones(3, requires_grad=True), [torch.zeros(3) for _ in range(3)]
    tk.adamw_([x], [others[0]], [others[1]], [others[2]], [torch.zeros(())], lr=0.1)
    assert x.is_leaf and x.grad_fn is None


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """With a gradient, or with the gradient of a gradient."""
    x = torch.randn(16, 16).bfloat16().requires_grad_()
    y = torch.randn(1, 2, 16, 16, requires_grad=True)
    q = torch.randint(0, 256, (8, 16), dtype=torch.uint8)
    fp8, one = torch.randn(16, 16).to(torch.float8_e4m3fn), torch.ones((), requires_grad=True)
    rows = torch.ones(16, requires_grad=True)
    calls: dict[str, Callable[[], Any]] = {
        "b2b_gemm": lambda: tk.b2b_gemm(x, x, x),
        "flex_attention": lambda: _second(tk.flex_attention(y, y, y), y),
        "int4_mm": lambda: tk.int4_mm(x, q, torch.ones(1, 16).bfloat16(), group_size=16),
        "uint4x2_mixed_mm": lambda: tk.uint4x2_mixed_mm(x, q),
        "linear_cross_entropy": lambda: _second(
            tk.linear_cross_entropy(x, x.detach(), torch.arange(16), reduction="sum"), x
        ),
        "scaled_mm": lambda: _second(tk.scaled_mm(fp8, fp8.t(), one, one.detach()), one),
        "scaled_grouped_mm": lambda: _second(
            tk.scaled_grouped_mm(
                fp8, fp8.t().expand(2, 16, 16), rows, torch.ones(2, 16),
                offs=torch.tensor([8, 16], dtype=torch.int32),
            ),
            rows,
        ),
        "sdpa": lambda: _second(tk.sdpa(y, y, y), y),
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"tk\."):
        calls[name]()


def _second(result: Tensor, x: Tensor) -> Any:
    (grad,) = torch.autograd.grad(result.float().square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)


# --- Saved tensors ---


@pytest.mark.parametrize("name", ["softmax", "rms_norm", "sort", "norm", "rope"])
def test_a_saved_tensor_that_is_changed_is_noticed(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    leaves = case.leaves(torch.float32, CPU)
    moved = [x * 1 for x in leaves]
    found = case.ours(*moved)
    with torch.no_grad():
        moved[0].mul_(2)
    if name in ("softmax", "sort", "rope"):  # which read nothing of it again
        torch.autograd.grad(found[0].sum(), leaves)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found.sum(), leaves)


@pytest.mark.parametrize("function", [tk.softmax, tk.log_softmax, tk.logsumexp])
def test_a_saved_result_that_is_changed_is_noticed(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = function(x, -1)
    total = y.sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, x)


def test_what_an_op_writes_in_place_is_noticed(declare: Callable[..., Any]) -> None:
    op_ = declare(scaled_, grad=False, x="fp32[...]", a="float")
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)
    loss = (w * x).sum()
    op_(x, 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    w, out = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    loss = (w * out).sum()
    torch.ops.tk.mm.out(torch.ones(3, 3), torch.ones(3, 3), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_is_run_through_twice_and_a_tensor_used_twice() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = tk.softmax(x, -1)
    loss = (y * tk.softmax(x, -1) * y).sum()
    first = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True)[0]
    again = torch.autograd.grad(loss, x, retain_graph=True)[0]
    exact = torch.func.grad(lambda x: (x.softmax(-1) ** 3).sum())(x.detach())
    torch.testing.assert_close(first, exact)
    torch.testing.assert_close(again, exact)
    for _ in range(2):
        (second,) = torch.autograd.grad(first.sin().sum(), x, retain_graph=True)
    expected = torch.func.grad(lambda x: torch.func.grad(lambda x: (x.softmax(-1) ** 3).sum())(x).sin().sum())
    torch.testing.assert_close(second, expected(x.detach()))


# --- Around ---


def test_autocast_leaves_recorded_graphs_alone() -> None:
    """On the CPU it would have a product in float32, which the op does not return."""
    x = torch.randn(3, 4).bfloat16().requires_grad_()
    with torch.autocast("cpu"):
        y = torch.ops.tk.row_prod(x)
        assert y.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(tk.softmax(x, -1).float().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    assert grad.dtype == second.dtype == torch.bfloat16


def test_a_compiled_training_step() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (tk.softmax(tk.rms_norm(x, (8,), w), -1) * tk.silu(x)).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(loss(x, w), (x, w)), strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_the_ops_of_gradients_pass_opcheck() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.tk.softmax_backward.default, (torch.randn(3, 4, requires_grad=True), x))
    assert register.find("softmax_backward") is not None
