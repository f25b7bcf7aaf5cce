"""What is decided of a call, how often, and what a model skips."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from use_models import Count, calls

from tk.dropin import decisions
from tk.dropin.decisions import kind_of, remembered
from tk.dropin.functions.activations import GELU
from tk.dropin.functions.attention import _sdpa_us
from tk.dropin.functions.convolutions import CONV2D
from tk.dropin.functions.norms import LAYER_NORM
from tk.dropin.functions.products import ADDMM, LINEAR, MATMUL
from tk.dropin.replace import _use
from tk.dropin.replacement import Replacement
from tk.dropin.target import Target

H100 = Target("cpu", "sm_90", only_faster=True)


class Asked:
    """What decides, and how often it was asked."""

    def __init__(self, eagerly: bool = True, captured: bool = True):
        self.times, self.answers = 0, (eagerly, captured)

    def __call__(self, is_captured: bool, args: Any, kwargs: Any) -> bool:
        self.times += 1
        return self.answers[is_captured]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda value: monkeypatch.setattr(decisions, "is_captured", lambda: value)


def variants() -> dict[str, Callable[[], Any]]:
    """Calls of (a tensor, a number) that may each be decided otherwise."""
    x = torch.ones(4, 6)
    return {
        "as it is": lambda: ((x, 1), {}),
        "shape": lambda: ((x[:2].contiguous(), 1), {}),
        "strides": lambda: ((x.t().contiguous().t(), 1), {}),
        "dtype": lambda: ((x.half(), 1), {}),
        "device": lambda: ((x.to("meta"), 1), {}),
        "gradient": lambda: ((x.clone().requires_grad_(), 1), {}),
        "number": lambda: ((x, 2), {}),
        "keyword": lambda: ((x,), {"n": 1}),
        "another keyword": lambda: ((x,), {"m": 1}),
        "sizes": lambda: ((x, (1, 2)), {}),
        "none": lambda: ((x, None), {}),
    }


def test_a_kind_is_all_that_a_decision_follows_from() -> None:
    kinds = {name: kind_of(*make(), True) for name, make in variants().items()}
    assert None not in kinds.values() and len(set(kinds.values())) == len(kinds)
    assert kinds == {name: kind_of(*make(), True) for name, make in variants().items()}
    x = (torch.ones(4, 6), 1)
    states = {"as it is": nullcontext(), "no gradients": torch.no_grad(),
              "autocast": torch.autocast("cpu", torch.bfloat16)}  # fmt: skip
    found = {}
    for name, context in states.items():
        with context:
            found[name] = kind_of(x, {}, True)
    assert len({*found.values(), kind_of(x, {}, False)}) == 4


def test_what_is_not_remembered() -> None:
    """Subclasses, sparse tensors, functions and modules among the arguments, modes, forward mode, and a state that
    ends."""
    x, ask = torch.ones(4, 6), Asked()
    takes = remembered(ask, lambda: True)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for other in (x.to_sparse(), len, nn.Identity(), [x], x.as_subclass(type("Own", (Tensor,), {}))):
        assert kind_of((x, other), {}, True) is None
        for _ in range(2):
            assert takes(x, other)
    assert ask.times == 10
    for context in (Mode(), forward_ad.dual_level()):
        with context:
            assert kind_of((x,), {}, True) is None
    assert kind_of((x,), {}, None) is None


def test_it_is_asked_once(captured: Callable[[bool], None]) -> None:
    ask = Asked(eagerly=False, captured=True)
    takes = remembered(ask, lambda: True)
    x = torch.ones(3)
    assert [takes(x, 2) for _ in range(5)] == [False] * 5 and ask.times == 2  # eagerly, and in a graph
    captured(True)
    assert takes(x, 2) and ask.times == 2
    assert takes(x, 3) and ask.times == 4


def test_many_kinds_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_MOST_KINDS", 4)
    ask = Asked()
    takes = remembered(ask, lambda: True)
    for _ in range(2):
        assert all(takes(torch.ones(3), n) for n in range(5))
    assert ask.times == 2 * (5 + 5)


# --- Whether the GPU is busy longer than the host ---


def test_a_small_call_is_torchs_but_in_a_graph(captured: Callable[[bool], None]) -> None:
    model = nn.LayerNorm(1024)
    _use(model, H100)
    small, large = torch.randn(4, 1024), torch.randn(60_000, 1024)
    assert calls(model, small) == {} and calls(model, large) == {"layer_norm": 1}
    captured(True)
    assert calls(model, small) == {"layer_norm": 1}


def test_with_gradients_it_must_be_larger() -> None:
    """Forward and backward are three times as long on the device, and six times on the host."""
    rows = 26_000_000 // (1024 * 4)
    x = torch.empty(rows, 1024, device="meta")
    takes = LAYER_NORM.taken_on(H100)
    for size, with_gradients, without in ((6, False, False), (9, False, True), (18, True, True)):
        given = x.expand(size, rows, 1024).reshape(-1, 1024)
        assert takes(given, (1024,)) == without
        assert takes(given.requires_grad_(), (1024,)) == with_gradients, size


def test_what_stands_for_several_calls_is_served_at_every_size() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    pieces, whole = Norm().bfloat16(), nn.RMSNorm(64).bfloat16()
    for model in (pieces, whole):
        _use(model, H100)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert calls(pieces, x) == {"rms_norm": 1} and calls(whole, x) == {}


def test_the_device_takes_as_long_as_there_is_work() -> None:
    meta = torch.device("meta")
    x, w = torch.empty(8192, 4096, device=meta), torch.empty(2048, 4096, device=meta)
    linear = LINEAR.speed.device_us(x, w)
    assert linear == pytest.approx(8192 * 4096 * 2048 / 4e8)
    assert MATMUL.speed.device_us(x, w.t()) == ADDMM.speed.device_us(w, x, w.t()) == linear
    assert GELU.speed.device_us(x) == pytest.approx(8192 * 4096 * 4 * 2 / 4e6)
    q = torch.empty(2, 8, 4096, 128, device=meta)
    assert _sdpa_us(q, q, q) == pytest.approx(2 * 8 * 4096 * 4096 * 128 / 4e8)
    image, kernel = torch.empty(64, 256, 56, 56, device=meta), torch.empty(512, 256, 3, 3, device=meta)
    conv = CONV2D.speed.device_us
    assert conv(image, kernel) == pytest.approx(64 * 56 * 56 * kernel.numel() / 4e8)
    assert conv(image, kernel, None, 2) == conv(image, kernel, None, (2, 2)) == pytest.approx(conv(image, kernel) / 4)
    assert conv(image[0], kernel) == pytest.approx(conv(image, kernel) / 64)


# --- Modules that are skipped ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were looked at."""
    found: list[str] = []
    plain = decisions.kind_of

    def kind(args: Any, kwargs: Any, state: Any) -> Any:
        found.append(str(tuple(args[0].shape)))
        return plain(args, kwargs, state)

    monkeypatch.setattr(decisions, "kind_of", kind)
    return found


@torch.no_grad()
def test_a_module_that_serves_nothing_runs_as_it_is_written(decided: list[str]) -> None:
    model, x = Net(), torch.randn(3, 16)
    _use(model, H100)
    expected = F.gelu(F.layer_norm(x, (16,)))
    for _ in range(decisions._ASKED_AGAIN + 1):
        assert torch.equal(Net.forward(model, x), expected)  # not the model's, which asks for both at once
    assert decided == ["(3, 16)"] * 2  # once for each of two modules
    Net.forward(model, x)
    assert decided == ["(3, 16)"] * 4  # after some time again
    Net.forward(model, x[:2])
    assert decided[4:] == ["(2, 16)"] * 2


@torch.no_grad()
def test_what_served_once_is_not_skipped(decided: list[str], captured: Callable[[bool], None]) -> None:
    model, x = Net(), torch.randn(3, 16)
    _use(model, replace(H100, only_faster=False))
    for _ in range(3):
        assert calls(model, x) == {"layer_norm": 1, "gelu": 1}
    decided.clear()
    other = Net()
    _use(other, H100)
    assert calls(other, x) == calls(other, x) == {}
    captured(True)  # in a graph nothing is skipped
    assert calls(other, x) == {"layer_norm": 1, "gelu": 1}
    captured(False)
    assert calls(other, x) == {}


def test_with_gradients_it_is_skipped_for_good(decided: list[str]) -> None:
    """What is checkpointed runs twice, and has to be the same."""
    model, x = Net(), torch.randn(3, 16, requires_grad=True)
    _use(model, H100)
    for _ in range(2 * decisions._ASKED_AGAIN):
        Net.forward(model, x)
    assert len(decided) == 2, "a call of each module"


class Squares(nn.Module):
    """Of the same first argument, with another second one."""

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return F.layer_norm(x.repeat(rows, 1), (16,)) * F.gelu(x)[:1]


def test_with_gradients_the_first_call_decides(large: None) -> None:
    """Else what is checkpointed would find another answer than its forward, which came before both."""
    x = torch.randn(3, 16, requires_grad=True)
    first, other = Squares(), Squares()
    for model in (first, other):
        _use(model, H100)
    for result in [torch.utils.checkpoint.checkpoint(first, x, n, use_reentrant=False) for n in (40, 2, 40)]:
        result.sum().backward()
    other(x, 2)
    for model, expected in ((first, {"layer_norm": 1}), (other, {})):
        with Count() as count:
            model(x, 40)
        assert count.ops == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("only_faster", [False, True])
def test_checkpointed(use_reentrant: bool, only_faster: bool) -> None:
    model, x = Net(), torch.randn(3, 16, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    _use(model, replace(H100, only_faster=only_faster))
    for _ in range(3):
        found = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
        found.sum().backward()
        assert_close(x.grad, expected[0])
        x.grad = None


@torch.no_grad()
def test_an_error_is_the_models_and_nothing_is_remembered_of_it(decided: list[str]) -> None:
    model, x = Net(), torch.randn(3, 8)
    _use(model, H100)
    for n in range(1, 3):
        with pytest.raises(RuntimeError, match="normalized_shape"):
            model(x)
        assert len(decided) == n


def test_a_used_module_has_the_signature_that_it_had() -> None:
    model = Net()
    before = inspect.signature(model.norm.forward)
    _use(model, H100)
    assert "forward" in vars(model.norm) and inspect.signature(model.norm.forward) == before


# --- A whole model that is left ---


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of more than 100 rows are served."""
    monkeypatch.setattr(Replacement, "_hides_the_host", lambda self, args, kwargs: args[0].shape[0] > 100)
    monkeypatch.setattr(Target, "is_fast", lambda *_: True)


def used(model: nn.Module) -> nn.Module:
    _use(model, H100)
    return model


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_model_that_serves_nothing_asks_nothing(mode: Callable[[], Any], decided: list[str]) -> None:
    model, x = used(Net()), torch.randn(3, 16)
    expected = F.gelu(F.layer_norm(x, (16,)))
    with mode():
        model(x)
        model(x)
        decided.clear()
        for _ in range(decisions._ASKED_AGAIN):
            assert torch.equal(model(x), expected)
        assert decided == []
        model(x[:2])
        assert decided and set(decided) == {"(2, 16)"}


class Picks(nn.Module):
    """As many rows as the first element says: what a module is given does not follow from the shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.norm, x[: int(x[0, 0])], use_reentrant=False)


def rows(n: int) -> Tensor:
    x = torch.randn(300, 16)
    x[0, 0] = n
    return x.requires_grad_()


@torch.no_grad()
def test_a_model_that_is_left_is_looked_at_again(large: None) -> None:
    model = used(Picks())
    for _ in range(2):
        assert calls(model, rows(3)) == {}
    served = [bool(calls(model, rows(200))) for _ in range(decisions._ASKED_AGAIN + 3)]
    assert served == [False] * decisions._ASKED_AGAIN + [True] * 3


def test_what_is_checkpointed_is_left_where_the_forward_was(large: None) -> None:
    """Else its second run would save other tensors than its first."""
    model = used(Picks())
    for n in (3, 3, 200):
        x = rows(n)
        model(x).sum().backward()
        expected = torch.autograd.grad(F.layer_norm(x[:n], (16,)).sum(), x)[0]
        assert_close(x.grad, expected)


def test_a_module_alone_is_served_while_its_model_is_left(large: None) -> None:
    model = used(Net())
    x = torch.randn(200, 16)
    assert calls(model.norm, x) == {"layer_norm": 1}
    for _ in range(3):
        assert calls(model, x[:3]) == {}
    assert calls(model.norm, x) == {"layer_norm": 1}
    with torch.no_grad():
        assert calls(model.norm, x[:150]) == {"layer_norm": 1}


def test_a_model_that_serves_something_is_not_left(large: None, captured: Callable[[bool], None]) -> None:
    model, x = used(Net()), torch.randn(200, 16)
    for _ in range(4):
        assert calls(model, x) == {"layer_norm": 1, "gelu": 1}
        assert calls(model, x[:3]) == {}
    captured(True)
    assert calls(model, x[:3]) == {"layer_norm": 1, "gelu": 1}


class Halves(Net):
    """All rows through one module, and as many as the first element says through the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sum() + self.act(x[: int(x[0, 0])]).sum()


def test_modules_that_serve_nothing_beside_one_that_does_ask_nothing(large: None, decided: list[str]) -> None:
    model = used(Halves())
    with torch.no_grad():
        for _ in range(2):
            model(rows(3))
        decided.clear()
        for _ in range(decisions._ASKED_AGAIN):
            model(rows(150))
        assert set(decided) == {"(300, 16)"}
        model(rows(150))
        assert calls(model, rows(150)) == {"layer_norm": 1, "gelu": 1}
    with Count() as count:
        model(rows(150))
    assert count.ops == {"layer_norm": 1, "gelu": 1}, "with gradients each is asked"


def test_a_graph_is_looked_for_once_a_forward(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(decisions, "is_captured", lambda: bool(asked.append(None)))
    model, x = used(nn.Sequential(Net(), Net(), nn.LayerNorm(16))), torch.randn(3, 16)
    for mode in (torch.no_grad, nullcontext):
        for _ in range(3):
            asked.clear()
            with mode():
                model(x)
            assert len(asked) == 1


def test_another_thread_asks_for_itself(large: None) -> None:
    class Waits(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3 and waits:
                with ThreadPoolExecutor(1) as other:
                    served.append(other.submit(lambda: calls(model, torch.ones(200, 16))).result())
            return super().forward(x)

    waits, served = False, []
    model = used(Waits())
    for _ in range(2):
        model(torch.ones(3, 16))
    waits = True
    assert calls(model, torch.ones(3, 16)) == {} and served == [{"layer_norm": 1, "gelu": 1}]


def test_after_an_error_a_left_model_is_as_it_was(large: None) -> None:
    class Fails(Net):
        def forward(self, x: Tensor, fail: bool = False) -> Tensor:
            if fails:
                raise KeyError("mine")
            return super().forward(x)

    fails = False
    model, x = used(Fails()), torch.randn(3, 16)
    for _ in range(2):
        model(x)
    fails = True
    with pytest.raises(KeyError, match="mine"):
        model(x)
    fails = False
    assert calls(model, torch.randn(200, 16)) == {"layer_norm": 1, "gelu": 1}


def test_a_models_own_forward(large: None) -> None:
    """It has the signature that it had, is undone with the rest, and stays as it is where a model has a hook."""
    model = Net()
    signature = inspect.signature(model.forward)
    report = _use(model, H100)
    assert "forward" in vars(model) and inspect.signature(model.forward) == signature
    twin = copy.deepcopy(model)
    report.undo()
    assert "forward" not in vars(model)
    for _ in range(2):
        twin(torch.ones(3, 16))
    assert calls(twin, torch.ones(200, 16)) == {"layer_norm": 1, "gelu": 1}
    hooked = Net()
    hooked.register_forward_hook(lambda *_: None)
    assert "forward" not in vars(used(hooked))


def test_a_forward_that_is_no_plain_method_stays_as_it_is() -> None:
    class Static(Net):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x + 1

    class Bound(Net):
        @classmethod
        def forward(cls, x: Tensor) -> Tensor:
            return x + 1

    class Named(Net):
        forward = partialmethod(Net.forward)

    x = torch.ones(3, 16)
    for cls in (Static, Bound, Named):
        model, expected = cls(), cls()(x)
        assert "forward" not in vars(used(model))
        for _ in range(3):
            assert_close(model(x), expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_inputs_without_plain_sizes(layout: torch.layout) -> None:
    """Nested tensors and those of a symbolic trace have sizes that have no hash, or none."""

    class Takes(Net):
        def forward(self, x: Tensor, *others: Any) -> Tensor:
            return super().forward(x)

    model, linear, x = used(Takes()), used(nn.Linear(16, 4)), torch.randn(3, 16)
    nested = torch.nested.nested_tensor([x, x[:2]], layout=layout)
    for _ in range(3):
        assert torch.equal(model(x, nested, [nested]), model(x))
        with torch.no_grad():
            expected = F.linear(nested, linear.weight, linear.bias)
            assert_close([*linear(nested).unbind()], [*expected.unbind()])
        program = make_fx(
            lambda x, y: model(x, y, y.shape), tracing_mode="symbolic", _allow_non_fake_inputs=True
        )(x, x)  # fmt: skip
        assert torch.equal(program(x[:2], x[:2]), model(x[:2]))


@pytest.mark.parametrize("grown", ["mask", "cache"])
@torch.no_grad()
def test_an_input_that_grows_with_every_token_is_of_one_kind(grown: str, decided: list[str]) -> None:
    class Decodes(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
            return super().forward(x)

    model, x = used(Decodes()), torch.randn(1, 16)
    for n in range(600, 603):
        model(x, **{grown: torch.ones(1, n) if grown == "mask" else [torch.ones(2, n), torch.ones(2, n)]})
    decided.clear()
    for n in range(603, 650):
        model(x, **{grown: torch.ones(1, n) if grown == "mask" else [torch.ones(2, n), torch.ones(2, n)]})
    assert decided == []
