"""What is patched wins: in torch, in the model's own module, before tk.use, after it and for a while."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.overrides import TorchFunctionMode
from use_models import calls

import tk

X = torch.randn(2, 3, 8)


class ByModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ByFullName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class ByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sdpa(x, x, x)


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x)


class InItself(nn.Module):
    """Changed and unchanged names, in one function and in those within it."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled(F.relu((lambda t: F.gelu(t))(x))) + torch.zeros(1)


def scaled(x: Tensor) -> Tensor:
    return 2 * x


def other(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    assert None not in args, "called with more than the model wrote"
    return torch.full_like(x, 7.0)


@contextmanager
def patched(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Not monkeypatch, so that it works in a ``with`` of its own."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


HERE = sys.modules[__name__]
CASES = [
    (ByModule, F, "scaled_dot_product_attention"),
    (ByFullName, F, "scaled_dot_product_attention"),
    (ByItself, HERE, "sdpa"),
    (ByHelper, HERE, "attend"),
    (ByHelper, F, "scaled_dot_product_attention"),
    (ByModule, HERE, "F"),
    (lambda: nn.Linear(8, 8), F, "linear"),
    (lambda: nn.LayerNorm(8), F, "layer_norm"),
    (lambda: nn.Conv1d(3, 3, 3), F, "conv1d"),
    (nn.GELU, F, "gelu"),
    (nn.SiLU, F, "silu"),
    (lambda: nn.Softmax(-1), F, "softmax"),
]


def replacement(name: str) -> Any:
    if name != "F":
        return other
    return types.SimpleNamespace(scaled_dot_product_attention=other)


@pytest.mark.parametrize(("make", "owner", "name"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_patched_after(make: Callable[[], nn.Module], owner: Any, name: str) -> None:
    model = make()
    before = model(X)
    report = tk.use(model)
    assert sum(calls(model, X).values()) == 1
    with patched(owner, name, replacement(name)):
        assert torch.equal(model(X), other(X)) and not calls(model, X)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), other(X))
    assert sum(calls(model, X).values()) == 1
    torch.testing.assert_close(model(X), before)
    with patched(owner, name, replacement(name)):
        report.undo()
        assert torch.equal(model(X), other(X))
    assert torch.equal(model(X), before)


@pytest.mark.parametrize(("make", "owner", "name"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_patched_before(make: Callable[[], nn.Module], owner: Any, name: str) -> None:
    model = make()
    before = model(X)
    with patched(owner, name, replacement(name)):
        with tk.use(model):
            assert torch.equal(model(X), other(X)) and not calls(model, X)
        report = tk.use(model)
        assert torch.equal(model(X), other(X))
    torch.testing.assert_close(model(X), before)
    report.undo()
    with tk.use(make()) as report:
        assert any(r.replaced for r in report), "what is torch's own again is served again"


def test_a_graph_sees_what_is_patched_later() -> None:
    model = ByModule()
    tk.use(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), attend(X))
    with patched(F, "scaled_dot_product_attention", other):
        assert torch.equal(compiled(X), other(X))
    torch.testing.assert_close(compiled(X), attend(X))


def test_what_is_not_replaced_is_looked_up_as_before() -> None:
    model = InItself()
    tk.use(model)
    torch.testing.assert_close(model(X), 2 * F.relu(F.gelu(X)))
    for owner, name in ((F, "relu"), (HERE, "scaled"), (torch, "zeros")):
        with patched(owner, name, other if owner is not torch else lambda n: torch.ones(n)):
            found = model(X)
        with patched(owner, name, other if owner is not torch else lambda n: torch.ones(n)):
            expected = InItself()(X)
        torch.testing.assert_close(found, expected)


class Scaled(TorchFunctionMode):
    """Three times what attention is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 3 * result if func is F.scaled_dot_product_attention else result


def test_a_mode_sees_torchs_functions() -> None:
    model = ByModule()
    tk.use(model)
    with Scaled():
        found, expected = model(X), attend(X)
        assert not calls(model, X)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, 3 * attend(X))
    with torch.device("cpu"):
        assert sum(calls(model, X).values()) == 1, "a default device is no patch"


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_chosen_backend_is_torchs(backend: SDPBackend) -> None:
    model = ByModule()
    tk.use(model)
    x = torch.randn(1, 2, 3, 8)
    with sdpa_kernel(backend):
        assert not calls(model, x)
    assert sum(calls(model, x).values()) == 1


def test_names_go_with_the_model() -> None:
    def ours() -> list[str]:
        modules = (HERE, sys.modules["torch.nn.modules.linear"])
        return [name for module in modules for name in vars(module) if name.startswith("__tk_")]

    gc.collect()
    before = ours()
    model = nn.Sequential(nn.Linear(8, 8), ByHelper())
    tk.use(model)
    assert len(ours()) > len(before)
    del model
    gc.collect()
    assert ours() == before


_counted = 0


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global _counted
        _counted += 1
        assert __name__ == HERE.__name__
        return F.gelu(x)


def test_globals_that_are_written() -> None:
    model = Counting()
    before = _counted
    tk.use(model)
    assert calls(model, X) == {"gelu": 1}
    assert _counted == before + 1


def test_as_context_parallel_does() -> None:
    """torch.distributed.tensor.experimental.context_parallel's own way to patch attention, without processes."""
    attention = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    distribute, restore = attention._distribute_function, attention._restore_function
    seen = []

    def on_inputs(module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
        seen.append(len(args))
        return args, kwargs

    model = ByModule()
    tk.use(model)
    distribute(F.scaled_dot_product_attention, F, None, on_inputs, lambda module, inputs, out, mesh: out)
    try:
        torch.testing.assert_close(model(X), sdpa(X, X, X))
        assert seen == [3]
    finally:
        restore(F.scaled_dot_product_attention, F)
    assert sum(calls(model, X).values()) == 1 and seen == [3]
