"""The gate at the ops' Autograd keys (csrc/ops/gate.h): who passes it, what the rest sees, and errors on both ways."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tk
from tk.ops import _register

from .products import FORMS, Form, overloads

MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3), torch.randn(3, 5)


def python_calls(call: Callable[[], object]) -> list[str]:
    """The Python functions that run during a call."""
    seen: list[str] = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name == _register.__file__]


@pytest.mark.parametrize("name", ("mm", "mm.out", "addmm", "addmm.out", "linear", "linear.out"))
def test_no_python_runs_where_no_gradient_is_at_stake(name: str) -> None:
    op = dict(overloads())[name]
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    args = {"mm": (a, b), "addmm": (torch.randn(5), a, b), "linear": (a, b.t(), torch.randn(5))}[name.split(".")[0]]
    kwargs = {"out": torch.empty(4, 5)} if name.endswith("out") else {}
    for mode in MODES:
        with mode():
            assert python_calls(lambda: op(*args, **kwargs)) == []  # type: ignore[operator]
    args = tuple(x.detach().requires_grad_() for x in args)
    with torch.no_grad():
        assert python_calls(lambda: op(*args, **kwargs)) == []  # type: ignore[operator]
    if not kwargs:
        assert python_calls(lambda: op(*args)) != [], "this test sees no Python calls"  # type: ignore[operator]


@pytest.mark.parametrize("which", (0, 1, 2))
def test_any_one_operand_that_needs_a_gradient_gets_it(which: int) -> None:
    args = [torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)]
    args[which].requires_grad_()
    assert torch.ops.tk.mm(*args).requires_grad
    with torch.no_grad():
        assert not torch.ops.tk.mm(*args).requires_grad
    assert not torch.ops.tk.mm(*(x.detach() for x in args)).requires_grad


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    seen: list[object] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(func)
        return func(*(x.inner if isinstance(x, Wrapped) else x for x in args), **(kwargs or {}))


@pytest.mark.parametrize("make", (operands, leaves))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_modes_and_subclasses_see_the_public_op(form: Form, mode: Callable[[], object], make) -> None:  # type: ignore[no-untyped-def]
    public = getattr(torch.ops.tk, form.name).default
    a, b = make()
    with mode():  # type: ignore[attr-defined]
        with Recorder() as recorder:
            form.call(a, b, None)
        assert [f for f in recorder.seen if "tk::" in str(f._schema)] == [public]  # type: ignore[attr-defined]
        Wrapped.seen.clear()
        bias = torch.randn(5)
        form.call(Wrapped(a), b, bias)
        assert public in Wrapped.seen and not any("tk::_" in str(f._schema) for f in Wrapped.seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", (operands, leaves))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_traced_graph_has_the_public_op(form: Form, make) -> None:  # type: ignore[no-untyped-def]
    for mode in MODES:
        with mode():
            graph = make_fx(lambda a, b, c: form.call(a, b, c), tracing_mode="fake")(*make(), torch.randn(5)).graph
            targets = [n.target for n in graph.nodes if "tk" in str(n.target)]
            assert targets == [getattr(torch.ops.tk, form.name).default]


def test_a_transform_over_what_a_transform_inside_does_not_track() -> None:
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)

    def gradient(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            # x * 2 is wrapped for the inner transform, which does not differentiate it; the outer one does.
            return torch.func.grad(lambda y: (product(x * 2, w) * y).sum())(torch.tensor(1.5, dtype=torch.float64))

        return torch.func.grad(outer)(x)

    for product in (tk.mm, torch.ops.tk.mm):
        torch.testing.assert_close(gradient(product), gradient(torch.mm))


@pytest.mark.parametrize("which", (0, 1, 2))
@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad))
def test_a_tangent_is_not_dropped(mode, which: int) -> None:  # type: ignore[no-untyped-def]
    args = [torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)]
    with mode(), forward_ad.dual_level():
        torch.ops.tk.mm(*args)
        args[which] = forward_ad.make_dual(args[which], torch.ones_like(args[which]))
        mine, exact = (forward_ad.unpack_dual(y).tangent for y in (torch.ops.tk.mm(*args), args[0] @ args[1] + args[2]))
        torch.testing.assert_close(mine, exact)


def test_no_gate_for_an_op_that_has_none() -> None:
    assert _register._gate().tk_ops_gate(b"no_such_op") == 0


def test_operands_that_are_negated_or_zero_by_a_bit() -> None:
    a, b = operands()
    negative = torch._neg_view(a)
    assert negative.is_neg()
    for mode in MODES:
        with mode():
            torch.testing.assert_close(torch.ops.tk.mm(negative, b), -(a @ b))
            zero = torch._efficientzerotensor((4, 3))
            assert torch.equal(torch.ops.tk.mm(zero, b), torch.zeros(4, 5))


def test_functionalization_sees_an_out_form() -> None:
    def call(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(4, 5)
        torch.ops.tk.mm.out(a, b, out=out)
        return out + 0

    a, b = operands()
    torch.testing.assert_close(torch.func.functionalize(call)(a, b), a @ b)


# --- Errors ---


class Stop(Exception):
    """As torch.utils.checkpoint has one to stop a recomputation."""


@pytest.mark.parametrize("error", (Stop("enough"), KeyboardInterrupt(), ValueError("no"), SystemExit(3)))
def test_an_exception_passes_as_the_object_it_is(error: BaseException) -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise error

    a, b = leaves()
    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x), pytest.raises(type(error)) as caught:
        torch.ops.tk.mm(a, b)
    assert caught.value is error
    assert any(entry.name == "refuse" for entry in caught.traceback)
    torch.ops.tk.mm(a, b).sum().backward()  # and nothing of it is left


def test_an_exception_is_not_kept() -> None:
    def refuse(tensor: Tensor) -> Tensor:
        raise Stop

    a, b = leaves()
    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x):
        try:
            torch.ops.tk.mm(a, b)
        except Stop as error:
            alive = weakref.ref(error)
    gc.collect()
    assert alive() is None


def test_checkpointing_stops_a_recomputation_early() -> None:
    a, b = leaves()
    calls = []

    def block(a: Tensor, b: Tensor) -> Tensor:
        result = torch.ops.tk.mm(a, b, activation=2)
        calls.append("after the product")
        return result

    checkpoint(block, a, b, use_reentrant=False).sum().backward()
    assert calls == ["after the product"], "the recomputation did not stop where the last tensor was saved"
    a2, b2 = (x.detach().requires_grad_() for x in (a, b))
    torch.nn.functional.gelu(a2 @ b2).sum().backward()
    torch.testing.assert_close(a.grad, a2.grad)
    torch.testing.assert_close(b.grad, b2.grad)


@pytest.mark.parametrize("make", (operands, leaves))
@pytest.mark.parametrize("mode", MODES)
def test_wrong_arguments_have_their_type_and_print_nothing(mode, make, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    a, b = make()
    with mode():
        with pytest.raises(ValueError, match="the inner sizes differ"):
            torch.ops.tk.mm(a, a)
        with pytest.raises(ValueError, match="the inner sizes differ"):
            torch.ops.tk.mm.out(a.detach(), a.detach(), out=torch.empty(4, 3))
        with pytest.raises(RuntimeError, match=r"\[tk:Unsupported\] tk\.mm: out_dtype is float64"):
            torch.ops.tk.mm(a, b, out_dtype=torch.float64)
    assert capfd.readouterr() == ("", "")


def test_an_op_called_by_a_hook_throws_as_usual() -> None:
    """The hook runs between the gate and the kernel."""
    caught = []

    def pack(tensor: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="the inner sizes differ"), torch.no_grad():
            torch.ops.tk.mm(tensor[:, :1], tensor[:, :1].detach().expand(-1, 2))
        caught.append(tensor)
        return tensor

    a, b = leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.ops.tk.mm(a, b).sum().backward()
    assert len(caught) == 2 and a.grad is not None


def test_threads_keep_their_errors_apart() -> None:
    a, b = leaves()
    wrong: list[object] = []

    def work(fails: bool, records: bool) -> None:
        with torch.set_grad_enabled(records):
            for _ in range(200):
                try:
                    result = torch.ops.tk.mm(a, a if fails else b)
                    if fails or result.requires_grad != records:
                        wrong.append(result)
                except ValueError as error:
                    if not fails or "inner sizes" not in str(error):
                        wrong.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0, i % 4 < 2)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


WITHOUT = """
import ctypes
real = ctypes.PyDLL
class Refusing:
    def __init__(self, path): self.library = real(path)
    def __getattr__(self, name):
        function = getattr(self.library, name)
        return Refused() if name == "tk_ops_gate" else function
class Refused:
    def __call__(self, name): return 0
ctypes.PyDLL = Refusing
import torch, tk
from tk.ops import _register
assert isinstance(_register._gate(), Refusing)
a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5)
torch.ops.tk.mm(a, b).sum().backward()
torch.testing.assert_close(a.grad, b.sum(1).expand(4, 3))
with torch.no_grad():
    torch.testing.assert_close(torch.ops.tk.mm(a, b), a @ b)
try:
    torch.ops.tk.mm(a, a)
except ValueError as error:
    print(error)
"""


def test_a_torch_that_tells_nothing_leaves_the_formula_at_the_op() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the inner sizes differ" in done.stdout


@pytest.fixture(autouse=True)
def _no_trace_left() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
