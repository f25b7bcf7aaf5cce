"""Copies of a model's functions: by which names they reach tk, and that they are the same otherwise."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.functional import silu as renamed
from use_models import calls

import tk

X = torch.linspace(-1, 1, 32).view(4, 8)
UNCHANGED = object()


def helper(x: Tensor) -> Tensor:
    return F.gelu(x)


def calls_a_helper(x: Tensor, n: int = 2) -> Tensor:
    return helper(x) if n == 0 else calls_a_helper(x, n - 1)


def with_defaults(x: Tensor, scale: float = 2.0, *, shift: float = 1.0, marker: Any = UNCHANGED) -> Tensor:
    assert marker is UNCHANGED
    return F.gelu(x) * scale + shift


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * function(*args, **kwargs)

    return wrapper


class ByModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class ByFullName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)


class ByHalfOfIt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x)


class ByItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class Renamed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return renamed(x)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return calls_a_helper(x)


class ByMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)

    def first(self, x: Tensor) -> Tensor:
        return self.second(x)

    def second(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Inherited(ByMethod):
    def second(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Decorated(nn.Module):
    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class WithDefaults(nn.Module):
    def forward(self, x: Tensor, scale: float = 3.0, *, shift: float = 4.0) -> Tensor:
        return with_defaults(x) + F.gelu(x) * scale + shift


class InALambda(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda t: F.gelu(t))(x) + sum(F.gelu(x) for _ in range(2))


class OwnLinear(nn.Linear):
    """A subclass whose forward is its own: that stays as it is, but for what it calls."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias) + 1


class ByOperation(nn.Module):
    """Also what torch itself has under several names."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1) + F.softmax(x, -1) + torch.log_softmax(x, -1)


def closure() -> type[nn.Module]:
    def inner(x: Tensor) -> Tensor:
        return F.gelu(x)

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            super().__init__  # noqa: B018  # a cell that is no function
            return inner(x)

    return Closed


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (ByModule, {"gelu": 1}),
        (ByFullName, {"gelu": 1}),
        (ByHalfOfIt, {"gelu": 1}),
        (ByItself, {"gelu": 1}),
        (Renamed, {"silu": 1}),
        (ByHelper, {"gelu": 1}),
        (ByMethod, {"gelu": 1}),
        (Inherited, {"silu": 1}),
        (Decorated, {"gelu": 1}),
        (WithDefaults, {"gelu": 2}),
        (InALambda, {"gelu": 3}),
        (lambda: OwnLinear(8, 8), {"linear": 1}),
        (ByOperation, {"softmax": 2, "log_softmax": 1}),
        (lambda: closure()(), {"gelu": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),  # the same in every process
)
def test_names(make: Callable[[], nn.Module], expected: dict[str, int]) -> None:
    model = make()
    before = model(X)
    assert calls(model, X) == {}
    report = tk.use(model)
    assert calls(model, X) == expected
    assert set(report[0].op.split(", ")) == set(expected)
    torch.testing.assert_close(model(X), before)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(X), before)
    report.undo()
    assert torch.equal(model(X), before)
    assert calls(calls_a_helper, X) == calls(helper, X) == {}  # for all others


def test_signatures_stay() -> None:
    model = nn.ModuleList([WithDefaults(), nn.Linear(8, 8), nn.Conv2d(3, 3, 1)])
    before = [inspect.signature(m.forward) for m in model]
    documented = [m.forward.__qualname__ for m in model]
    tk.use(model)
    assert [inspect.signature(m.forward) for m in model] == before
    assert [m.forward.__qualname__ for m in model] == documented
    torch.testing.assert_close(model[0](X, shift=0.0), with_defaults(X) + F.gelu(X) * 3)


def test_each_instance_has_its_own() -> None:
    model = nn.Sequential(OwnLinear(8, 8), OwnLinear(8, 8))
    before = model(X)
    tk.use(model)
    copies = {inspect.unwrap(m.forward.__func__) for m in model}
    assert len(copies) == 1 and OwnLinear.forward not in copies  # one copy of the function
    torch.testing.assert_close(model(X), before)


class Changing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) + _offset


_offset = 1.0


def test_globals_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Changing()
    with tk.use(model):
        torch.testing.assert_close(model(X), F.gelu(X) + 1)
        monkeypatch.setattr(f"{__name__}._offset", 2.0)
        torch.testing.assert_close(model(X), F.gelu(X) + 2)
    torch.testing.assert_close(model(X), F.gelu(X) + 2)


def many_names(count: int) -> Callable[[Tensor], Tensor]:
    """A function that reads so many globals, the one that is replaced last."""
    sums = " + ".join(f"name_{i}" for i in range(count))
    names = {f"name_{i}": 0.0 for i in range(count)} | {"F": F}
    exec(f"def forward(self, x):\n    return self.F * x + {sums} + F.gelu(x) + F.relu(x)", names)
    return names["forward"]


@pytest.mark.parametrize("count", [3, 100, 126, 127, 200, 300])
def test_how_many_names_there_are(count: int) -> None:
    """An instruction has a byte for the number of a name, and more where another instruction stands before it."""
    cls = type("ManyNames", (nn.Module,), {"forward": many_names(count), "F": 2.0})
    model = cls()
    report = tk.use(model)
    torch.testing.assert_close(model(X), 2 * X + F.gelu(X) + F.relu(X))
    assert report[0].replaced or report[0].reason == "forward reads too many names"
    assert report[0].replaced or count >= 120
