"""First and second derivatives in float64, and which tensors a formula keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tk

from .products import ACTIVATION_NAMES, FORMS, Form


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gradcheck(form: Form, activation: str) -> None:
    inputs = (leaf(3, 4), leaf(4, 2), leaf(2))

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return form.call(a, b, bias, activation=activation)

    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs)


@pytest.mark.parametrize("shape", ((), (1, 2), (3, 1), (3, 2)), ids=str)
def test_gradients_of_a_scaled_addmm_with_any_bias(shape: tuple[int, ...]) -> None:
    def call(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tk.addmm(bias, a, b, beta=0.7, alpha=-1.3, activation="silu")

    assert gradcheck(call, (leaf(*shape), leaf(3, 4), leaf(4, 2)))


@pytest.mark.parametrize("needs", ((True, False, False), (False, True, False), (False, False, True)))
@pytest.mark.parametrize("activation", ("none", "relu", "gelu"))
def test_gradients_of_one_input(needs: tuple[bool, ...], activation: str) -> None:
    a, b, bias = (leaf(*s).detach().requires_grad_(n) for s, n in zip(((3, 4), (4, 2), (2,)), needs, strict=True))
    tk.mm(a, b, bias, activation=activation).square().sum().backward()  # type: ignore[arg-type]
    for x, needed in zip((a, b, bias), needs, strict=True):
        assert (x.grad is not None) == needed
    assert gradcheck(lambda *x: tk.mm(*x, activation), (a, b, bias))


@pytest.mark.parametrize("leading", ((), (2,), (2, 3)), ids=str)
def test_gradients_of_linear_with_leading_dimensions(leading: tuple[int, ...]) -> None:
    assert gradcheck(lambda *x: tk.linear(*x, "gelu"), (leaf(*leading, 4), leaf(2, 4), leaf(2)))


def test_relu_keeps_its_result_and_not_its_inputs_product() -> None:
    a, b = leaf(3, 4), leaf(4, 2).detach()
    result = tk.mm(a, b, activation="relu")
    kept = [t for t in result.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    assert {t.data_ptr() for t in kept} == {b.data_ptr(), result.data_ptr()}


def test_no_gradient_needed_no_graph() -> None:
    result = tk.mm(torch.randn(3, 4), torch.randn(4, 2))
    assert result.grad_fn is None
    with torch.no_grad():
        assert tk.mm(leaf(3, 4), leaf(4, 2)).grad_fn is None


def test_gradients_come_in_the_inputs_dtype() -> None:
    a, b = torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(4, 2).bfloat16().requires_grad_()
    bias = torch.randn(2).bfloat16().requires_grad_()
    tk.mm(a, b, bias, "gelu", torch.float32).sum().backward()
    for x in (a, b, bias):
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
    a2, b2, bias2 = (x.detach().float().requires_grad_() for x in (a, b, bias))
    F.gelu(a2 @ b2 + bias2).sum().backward()
    assert a.grad is not None and a2.grad is not None
    torch.testing.assert_close(a.grad.float(), a2.grad, rtol=0.02, atol=0.02)


class Modes(TorchDispatchMode):
    """Notes the mode bits of every tk op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "tk":
            self.seen.append(args[-1])
        return func(*args, **(kwargs or {}))


def test_the_backward_keeps_the_modes_of_its_forward_but_static_weights() -> None:
    a, b = leaf(3, 4), leaf(4, 2)
    with tk.config.modes(batch_invariant=True, static_weights=True):
        result = tk.mm(a, b)
    with Modes() as modes:
        result.sum().backward()
    assert modes.seen == [tk.config.MODE_BITS["batch_invariant"]] * 2


def test_func_transforms() -> None:
    x, w = leaf(5, 3, 4).detach(), leaf(2, 4).detach()

    def loss(op):  # type: ignore[no-untyped-def]
        return lambda w, x: op(x, w).square().sum()

    ours = torch.func.vmap(torch.func.grad(loss(lambda x, w: tk.linear(x, w, None, "gelu"))), in_dims=(None, 0))(w, x)
    theirs = torch.func.vmap(torch.func.grad(loss(lambda x, w: F.gelu(F.linear(x, w)))), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.func.jacrev(torch.func.jacrev(lambda w: tk.linear(x[0], w, None, "silu").sum()))(w),
        torch.func.jacrev(torch.func.jacrev(lambda w: F.silu(F.linear(x[0], w)).sum()))(w),
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_forward_mode(form: Form, activation: str) -> None:
    inputs = (leaf(3, 4), leaf(4, 2), leaf(2))

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return form.call(a, b, bias, activation=activation)

    assert gradcheck(call, inputs, check_forward_ad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_forward_mode_is_refused_rather_than_dropped() -> None:
    a, b = leaf(3, 4).detach(), leaf(2, 4, 2).detach()
    ends = torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda a: tk.grouped_mm(a, b, offs=ends), (a,), (a,))
    with torch.autograd.forward_ad.dual_level():
        assert tk.grouped_mm(a, b, offs=ends).shape == (3, 2)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_forward_over_reverse_of_convolutions_with_more_padding_behind(spatial: int, batch: tuple[int, ...]) -> None:
    ours, torchs = (getattr(module, f"conv{spatial}d") for module in (tk, F))
    x, w = leaf(*batch, 4, *(3,) * spatial).detach(), leaf(2, 2, *(2,) * spatial).detach()

    def gradients_of(convolve):  # type: ignore[no-untyped-def]
        def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return convolve(x, w, padding="same", groups=2).sin().sum()

        return torch.func.grad(loss, argnums=(0, 1))

    tangents = (torch.ones_like(x), torch.linspace(-1, 1, w.numel(), dtype=w.dtype).view_as(w))
    for mine, exact in zip(
        *(torch.func.jvp(gradients_of(f), (x, w), tangents)[1] for f in (ours, torchs)), strict=True
    ):
        torch.testing.assert_close(mine, exact)


ZERO_OR_NOT = ((0, 3, 2), (2, 0, 3), (2, 3, 0), (0, 0, 2), (0, 2, 0), (2, 0, 0), (0, 0, 0), (1, 2, 3))


def gradients(call, *inputs: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The result, and the gradient of every input for one gradient of the result."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = call(*leaves)
    return [result, *torch.autograd.grad(result, leaves, torch.linspace(-1, 1, result.numel()).view_as(result))]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("activation", ("none", "relu", "gelu", "silu"))
@pytest.mark.parametrize(("m", "n", "k"), ZERO_OR_NOT)
def test_gradients_of_products_with_sizes_of_0(m: int, n: int, k: int, activation: str) -> None:
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    activate = tk.ops.product.ACTIVATE[activation]  # type: ignore[attr-defined]
    for form in FORMS:
        ours = gradients(lambda *x, f=form: f.call(*x, activation=activation), a, b, bias)
        assert_same(ours, gradients(lambda a, b, c: activate(a @ b + c), a, b, bias))
    matrix = torch.randn(m, n)
    ours = gradients(lambda c, a, b: tk.addmm(c, a, b, beta=0.5, alpha=2, activation=activation), matrix, a, b)  # type: ignore[arg-type]
    assert_same(ours, gradients(lambda c, a, b: activate(0.5 * c + 2 * (a @ b)), matrix, a, b))


@pytest.mark.parametrize("activation", ("none", "gelu"))
@pytest.mark.parametrize(("n", "k"), ((2, 3), (0, 3), (2, 0), (0, 0)))
@pytest.mark.parametrize("leading", ((), (0,), (2, 0), (0, 2), (2, 0, 3), (2, 3)), ids=str)
def test_gradients_of_linear_with_sizes_of_0(leading: tuple[int, ...], n: int, k: int, activation: str) -> None:
    x, weight, bias = torch.randn(*leading, k), torch.randn(n, k), torch.randn(n)
    activate = tk.ops.product.ACTIVATE[activation]  # type: ignore[attr-defined]
    ours = gradients(lambda *args: tk.linear(*args, activation), x, weight, bias)  # type: ignore[arg-type]
    assert_same(ours, gradients(lambda *args: activate(F.linear(*args)), x, weight, bias))
    ours = gradients(lambda *args: tk.linear(*args, None, activation), x, weight)  # type: ignore[arg-type]
    assert_same(ours, gradients(lambda *args: activate(F.linear(*args)), x, weight))
