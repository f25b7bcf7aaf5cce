"""tk.enable: ATen's own ops by tk's kernels, here at the CPU's key, where these compute with ATen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tk
from tk.dropin import beneath
from tk.dropin.target import Target

HALF = torch.bfloat16


@pytest.fixture
def handle() -> Iterator[tk.dropin.Enabled]:
    with tk.enable(device="cpu") as handle:
        yield handle


def served(handle: tk.dropin.Enabled, op: str) -> int:
    return handle.calls[op][0]


def left(handle: tk.dropin.Enabled, op: str) -> int:
    return handle.calls[op][1]


def draw(*sizes: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Tensor:
    return torch.randn(*sizes).to(dtype).requires_grad_(requires_grad)


def kernel_at(op: str) -> str:
    return next(x for x in torch._C._dispatch_dump(f"aten::{op}").splitlines() if x.startswith("CPU: "))


# --- What is served ---

aten = torch.ops.aten
Make = Callable[[torch.dtype], tuple[Tensor, ...]]


def rows(count: int) -> Make:
    return lambda dtype: tuple(draw(3, 1, 5, 7, dtype=dtype) for _ in range(count))


def out(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda a, b: function(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))


# A function that calls the op once, and its arguments.
CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "mm": (torch.mm, lambda dtype: (draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype))),
    "bmm": (torch.bmm, lambda dtype: (draw(2, 5, 7, dtype=dtype), draw(2, 7, 3, dtype=dtype))),
    "mm.out": (out(torch.mm), lambda dtype: (draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype))),
    "bmm.out": (out(torch.bmm), lambda dtype: (draw(2, 5, 7, dtype=dtype), draw(2, 7, 3, dtype=dtype))),
    "gelu": (lambda x: aten.gelu(x, approximate="tanh"), rows(1)),
    "silu": (aten.silu, rows(1)),
    "_softmax": (lambda x: x.softmax(-1), rows(1)),
    "_log_softmax": (lambda x: x.log_softmax(-1), rows(1)),
}


def test_every_op_has_a_case() -> None:
    """tk has no kernels for gradients of rows on the CPU; those are in tests/gpu."""
    assert list(beneath._OPS) == list(beneath._places())
    assert set(CASES) == {op for op, of in beneath._OPS.items() if not of.needs}


def test_gradients_of_rows_have_no_kernel_here() -> None:
    with pytest.raises(tk.UnsupportedError, match="gelu_backward has no kernel for the CPU"):
        tk.enable(["gelu_backward"], device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_served(op: str, dtype: torch.dtype) -> None:
    function, make = CASES[op]
    inputs = make(dtype)
    expected = function(*inputs)
    with tk.enable([op], device="cpu") as handle:
        found = function(*inputs)
        assert handle.calls == {op: (1, 0)}
    assert found.stride() == expected.stride()
    assert found.dtype is expected.dtype
    assert_close(found, expected)


FORWARD = [op for op in CASES if not op.endswith(".out")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", FORWARD)
def test_gradients(op: str, dtype: torch.dtype) -> None:
    function, make = CASES[op]
    inputs = [x.requires_grad_() for x in make(dtype)]
    expected = function(*inputs)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, grad)
    with tk.enable(device="cpu") as handle:
        found = function(*inputs)
        assert found.grad_fn is not None
        assert type(found.grad_fn) is type(expected.grad_fn)
        assert_close(torch.autograd.grad(found, inputs, grad), gradients)
        assert served(handle, op) == (3 if op in ("mm", "bmm") else 1)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
def test_gradients_of_gradients(op: str) -> None:
    """float64 would be left to ATen."""
    function, make = CASES[op]
    inputs = tuple(x.requires_grad_() for x in make(torch.float32))
    with tk.enable([op], device="cpu") as handle:
        assert torch.autograd.gradgradcheck(function, inputs, eps=1e-2, atol=5e-2, rtol=5e-2, nondet_tol=1e-5)
        assert served(handle, op) > 0


def test_strides(handle: tk.dropin.Enabled) -> None:
    a, b = draw(7, 5).T, draw(3, 14)[:, ::2].T
    expected = a.clone() @ b.clone()
    assert served(handle, "mm") == 1
    found = torch.mm(a, b)
    assert served(handle, "mm") == 2
    assert found.stride() == (3, 1)
    assert_close(found, expected)
    row = draw(1, 7).expand(5, 7)
    assert_close(row @ b, row.clone() @ b)


# --- What stands above ---


def test_autocast(handle: tk.dropin.Enabled) -> None:
    a, b = draw(5, 7, requires_grad=True), draw(7, 3, requires_grad=True)
    with torch.autocast("cpu", HALF):
        y = a @ b
    assert y.dtype is HALF
    y.sum().backward()
    assert a.grad is not None and a.grad.dtype is torch.float32
    assert handle.calls["mm"] == (3, 0)


def test_vmap(handle: tk.dropin.Enabled) -> None:
    a, b = draw(4, 5, 7), draw(4, 7, 3)
    found = torch.vmap(torch.mm)(a, b)
    assert served(handle, "bmm") == 1
    assert_close(found, torch.stack([x @ y for x, y in zip(a, b, strict=True)]))
    gradient = torch.func.grad(lambda a: (a @ b[0]).sum())(a[0])
    assert_close(gradient, b[0].sum(1).expand(5, 7))


def test_forward_mode(handle: tk.dropin.Enabled) -> None:
    a, b = draw(5, 7), draw(7, 3)
    _, tangent = torch.func.jvp(lambda a: a @ b, (a,), (torch.ones_like(a),))
    assert_close(tangent, torch.ones_like(a) @ b)
    assert served(handle, "mm") >= 3


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(handle: tk.dropin.Enabled, mode: Any) -> None:
    a, b = draw(5, 7, requires_grad=True), draw(7, 3)
    with mode():
        y = a @ b
        assert y.is_inference() is torch.is_inference_mode_enabled()
    assert not y.requires_grad
    assert served(handle, "mm") == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(handle: tk.dropin.Enabled, backend: str) -> None:
    """Its graphs have ATen's ops, which the kernels are beneath; inductor calls those of products with an out."""
    op = "mm.out" if backend == "inductor" else "mm"
    a, b = draw(5, 7, requires_grad=True), draw(7, 3, requires_grad=True)
    expected = torch.autograd.grad((a @ b).tanh().sum(), (a, b))
    before = served(handle, op)
    torch._dynamo.reset()
    y = torch.compile(lambda a, b: (a @ b).tanh(), backend=backend, fullgraph=True)(a, b)
    assert served(handle, op) == before + 1
    assert_close(torch.autograd.grad(y.sum(), (a, b)), expected)
    assert served(handle, op) == before + 3


def test_checkpoint(handle: tk.dropin.Enabled) -> None:
    from torch.utils.checkpoint import checkpoint

    a, b = draw(5, 7, requires_grad=True), draw(7, 3, requires_grad=True)
    checkpoint(lambda a: (a @ b).tanh(), a, use_reentrant=False).sum().backward()
    assert served(handle, "mm") == 4


def test_a_mode_sees_atens_op(handle: tk.dropin.Enabled) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        draw(5, 7) @ draw(7, 3)
    assert torch.ops.aten.mm.default in seen
    assert not any(str(f).startswith("tk.") for f in seen)
    assert served(handle, "mm") == 1


# --- What is left to ATen ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: (draw(5, 7).double(), draw(7, 3).double()),
        lambda: (torch.ones(5, 7, dtype=torch.int64), torch.ones(7, 3, dtype=torch.int64)),
        lambda: (draw(5, 7).to(torch.complex64), draw(7, 3).to(torch.complex64)),
        lambda: (draw(0, 7), draw(7, 3)),
        lambda: (draw(5, 0), draw(0, 3)),
        lambda: (draw(5, 7).to(torch.complex64).conj(), draw(7, 3).to(torch.complex64)),
    ],
)
def test_left(handle: tk.dropin.Enabled, make: Callable[[], tuple[Tensor, Tensor]]) -> None:
    a, b = make()
    found = a @ b
    assert handle.calls["mm"] == (0, 1)
    handle.undo()
    assert_close(found, a @ b, rtol=0, atol=0)


def test_left_where_torch_is_to_be_deterministic(handle: tk.dropin.Enabled) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        draw(5, 7) @ draw(7, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert handle.calls["mm"] == (0, 1)
    draw(5, 7) @ draw(7, 3)
    assert handle.calls["mm"] == (1, 1)


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("gelu", lambda x: torch.nn.functional.gelu(x.T)),
        ("silu", lambda x: torch.nn.functional.silu(x[:, ::2])),
        ("silu", lambda x: torch.nn.functional.silu(x[0, 0])),
        ("_softmax", lambda x: x.softmax(0)),
        ("_softmax", lambda x: x.T.softmax(-1)),
        ("_log_softmax", lambda x: x.log_softmax(0)),
        ("_log_softmax", lambda x: x.double().log_softmax(-1)),
    ],
)
def test_left_of_rows(handle: tk.dropin.Enabled, op: str, call: Callable[[Tensor], Tensor]) -> None:
    x = draw(5, 8)
    found = call(x)
    assert handle.calls[op] == (0, 1)
    handle.undo()
    expected = call(x)
    assert found.stride() == expected.stride()
    assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(Tensor, "refine_names"), reason="this torch has no names of dimensions")
def test_names_are_kept(handle: tk.dropin.Enabled) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = draw(5, 7).refine_names("N", "C"), draw(7, 3).refine_names("C", "D")
        assert torch.mm(a, b).names == ("N", "D")
    assert handle.calls["mm"] == (0, 1)


def test_negated_views_and_sparse(handle: tk.dropin.Enabled) -> None:
    b = draw(7, 3)
    a = torch.complex(draw(5, 7), draw(5, 7)).conj().imag
    assert a.is_neg()
    assert_close(a @ b, a.resolve_neg().clone() @ b)
    assert_close(draw(5, 7).to_sparse() @ b * 0, torch.zeros(5, 3))


def test_out(handle: tk.dropin.Enabled) -> None:
    """As ATen: a result of its own layout, or one that ATen resizes, or whose memory is the operands'."""
    a, b = draw(5, 5), draw(5, 5)
    expected = (a.double() @ b.double()).float()
    out = torch.empty(5, 5).T
    assert torch.mm(a, b, out=out) is out
    assert_close(out, expected)
    assert out.stride() == (1, 5)
    assert handle.calls["mm.out"] == (1, 0)
    empty = torch.empty(0)
    torch.mm(a, b, out=empty)
    assert_close(empty, expected)
    assert handle.calls["mm.out"] == (1, 1)
    with pytest.raises(RuntimeError, match=r"overlap|same memory|unsupported"):
        torch.mm(a, b, out=torch.empty(1, 5).expand(5, 5))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.mm(a.clone().requires_grad_(), b, out=torch.empty(5, 5))
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        torch.mm(a, b, out=torch.empty(5, 5, dtype=HALF))
    saved = a.clone().requires_grad_()
    y = saved * out
    torch.mm(a, b, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("inner sizes", lambda: torch.mm(draw(5, 7), draw(5, 7))),
    ("dtypes", lambda: torch.mm(draw(5, 7), draw(7, 3).half())),
    ("ranks", lambda: torch.mm(draw(5, 7, 2), draw(7, 3))),
    ("approximate", lambda: torch.nn.functional.gelu(draw(5, 7), approximate="tan")),
    ("integers", lambda: torch.nn.functional.silu(torch.ones(3, dtype=torch.int64))),
    ("dimension", lambda: draw(5, 7).softmax(2)),
    ("batches", lambda: torch.bmm(draw(2, 5, 7), draw(3, 7, 3))),
    ("no tensor", lambda: torch.mm(draw(5, 7), 3)),  # type: ignore[arg-type]
    ("memory", lambda: torch.mm(torch.ones(1, 1).expand(1 << 30, 1), torch.ones(1, 1).expand(1, 1 << 30))),
]


@pytest.mark.parametrize("call", [call for _, call in BAD], ids=[name for name, _ in BAD])
def test_errors_are_atens(call: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as expected:
        call()
    with tk.enable(device="cpu"), pytest.raises(Exception) as found:
        call()
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)


def test_what_tk_refuses_is_left(handle: tk.dropin.Enabled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a decision that is wrong makes a call fail: tk takes no three dimensions for a matrix."""
    monkeypatch.setattr(beneath, "_is_served", lambda *_: True)
    with pytest.raises(RuntimeError, match=r"must be a matrix|2D"):
        torch.mm(draw(2, 5, 7), draw(7, 3))
    assert handle.calls["mm"] == (0, 1)


def test_an_error_in_the_decision_is_a_warning(handle: tk.dropin.Enabled, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise ZeroDivisionError("why")

    monkeypatch.setattr(beneath, "_is_served", fail)
    monkeypatch.setattr(beneath, "_warned", set())
    with pytest.warns(UserWarning, match="aten::mm is left to ATen: ZeroDivisionError: why"):
        draw(5, 7) @ draw(7, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(6, 7) @ draw(7, 3)
    assert handle.calls["mm"] == (0, 2)


# --- Where it is faster ---


def test_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tk.use, for a product by itself: as if the CPU were that GPU."""
    asked = []

    def target(device: str, index: int, only_faster: bool) -> Target:
        asked.append((device, only_faster))
        return Target("cpu", "sm_90", only_faster)

    monkeypatch.setattr(beneath, "_target", target)
    b = draw(64, 64, dtype=HALF)
    for only_faster, rows in ((True, 16), (True, 100), (False, 100)):
        with tk.enable(device="cpu", only_faster=only_faster) as handle:
            for _ in range(3):
                draw(rows, 64, dtype=HALF) @ b
            assert handle.calls["mm"] == ((3, 0) if rows == 16 or not only_faster else (0, 3))
    assert asked == [("cpu", True), ("cpu", True), ("cpu", False)]


def test_decided_once(handle: tk.dropin.Enabled, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = beneath._is_served
    monkeypatch.setattr(beneath, "_is_served", lambda *args: asked.append(args) or real(*args))
    for rows in (5, 5, 6, 5, 6):
        draw(rows, 7) @ draw(7, 3)
    assert len(asked) == 2
    draw(7, 5).T @ draw(7, 3)  # other strides
    draw(5, 7).bfloat16() @ draw(7, 3).bfloat16()
    assert len(asked) == 4


def test_measured_calls_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from tk.dropin.measured import Measurement, Pass, Table, Times, key_of

    a, b = draw(5, 7), draw(7, 3)
    call = key_of((a, b), {})
    assert call is not None
    for of_tk, calls in ((1.0, (1, 0)), (3.0, (0, 1))):
        times = Pass(Times(50, of_tk), Times(5, 2.0))  # the host's decide nothing here
        measured = Table([Measurement("mm", call, "", times, None)])
        target = replace(Target("cpu", "sm_90", True), measured=measured)
        monkeypatch.setattr(beneath, "_target", lambda *_, target=target: target)
        with tk.enable(["mm"], device="cpu") as handle:
            a @ b
            assert handle.calls == {"mm": calls}


# --- The switch ---


def test_undo_restores() -> None:
    before = {op: kernel_at(op) for op in CASES}
    handle = tk.enable(device="cpu")
    assert handle.is_on
    assert all(kernel_at(op) != before[op] for op in CASES)
    draw(5, 7) @ draw(7, 3)
    handle.undo()
    handle.undo()
    assert {op: kernel_at(op) for op in CASES} == before
    draw(5, 7) @ draw(7, 3)
    assert handle.calls["mm"] == (1, 0)
    assert not handle.is_on


def test_only_what_is_named() -> None:
    with tk.enable(["bmm"], device="cpu") as handle:
        assert handle.ops == ("bmm",)
        assert list(handle.calls) == ["bmm"]
        assert "RegisterCPU" in kernel_at("mm")


def test_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), tk.enable(device="cpu"):
        raise KeyError
    assert "RegisterCPU" in kernel_at("mm")


def test_twice() -> None:
    with tk.enable(["mm"], device="cpu") as handle:
        with pytest.raises(tk.Error, match=r"holds already, for mm: undo\(\) that first"):
            tk.enable(device="cpu")
        assert handle.is_on
    with tk.enable(["mm"], device="cpu") as again:
        handle.undo()  # has nothing to say any more
        assert again.is_on


def test_printed(handle: tk.dropin.Enabled) -> None:
    draw(5, 7) @ draw(7, 3)
    lines = str(handle).splitlines()
    assert lines[0] == "tk serves ATen's ops on cpu"
    assert lines[3].split() == ["aten::mm", "1", "0"]
    handle.undo()
    assert str(handle).startswith("undone")


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "'bm' is not served; did you mean .* there are mm, mm.out, ", {"ops": ["bm"]}),
        (ValueError, "'conv2d' is not served; there are", {"ops": ["mm", "conv2d"]}),
        (ValueError, "ops is empty", {"ops": []}),
        (TypeError, "must be a list of names, is 'mm'", {"ops": "mm"}),
        (TypeError, "has 3", {"ops": [3]}),
        (TypeError, "only_faster must be a bool", {"only_faster": "no"}),
        (ValueError, "device must be 'cuda' or 'cpu', is 'xpu'", {"device": "xpu"}),
    ],
)
def test_wrong_arguments(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        tk.enable(**{"device": "cpu", **arguments})


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
def test_without_cuda() -> None:
    with pytest.raises(tk.UnsupportedError, match="without CUDA"):
        tk.enable()


def test_another_librarys_kernel() -> None:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("bmm", lambda a, b: a.new_zeros(1), "CPU")
    try:
        with pytest.raises(tk.UnsupportedError, match="bmm cannot be served: another library's kernel"):
            tk.enable(["bmm"], device="cpu")
        with tk.enable(device="cpu") as handle:
            assert "bmm" not in handle.ops
            assert torch.bmm(draw(1, 2, 2), draw(1, 2, 2)).shape == (1,)
    finally:
        library._destroy()


# --- Threads and processes ---


def test_beside_tk_use(handle: tk.dropin.Enabled) -> None:
    """tk's own functions compute on the CPU with ATen, whose ops then are tk's: that ends."""
    model = torch.nn.Sequential(torch.nn.Linear(7, 5, bias=False), torch.nn.GELU(), torch.nn.Softmax(-1))
    x = draw(3, 7)
    expected = model(x)
    with tk.use(model):
        assert_close(model(x), expected)


def test_threads(handle: tk.dropin.Enabled) -> None:
    errors = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(50):
            a, b = (torch.randn(n, 6, generator=generator) for n in (i % 7 + 1, seed + 1))
            a.requires_grad_()
            (y := a @ b.T).sum().backward()
            if not torch.allclose(y, (a[:, None] * b).sum(-1), atol=1e-4):
                errors.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert handle.calls["mm"] == (400, 0)


def run(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(tk.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]  # of a fork beside threads
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_process_of_its_own() -> None:
    """No warning, a fork, and an exit while it holds."""
    done = run(
        """
import os, torch, tk
torch.set_num_threads(1)
handle = tk.enable(device="cpu")
a = torch.randn(5, 7, requires_grad=True)
(a @ torch.ones(7, 3)).sum().backward()
assert handle.calls["mm"] == (2, 0), handle
child = os.fork()
if child == 0:
    torch.randn(6, 7) @ torch.ones(7, 3)
    os._exit(0 if handle.calls["mm"] == (3, 0) else 1)
assert os.waitpid(child, 0)[1] == 0
assert handle.calls["mm"] == (2, 0), handle
print("done")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
