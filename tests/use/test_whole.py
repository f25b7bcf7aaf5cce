"""The last word of ``tk.use(model, sample=…)``: a model that is slower than it was runs as it is written."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from use_models import Count, calls

import tk
from tk.dropin import decisions, measured, sample, whole
from tk.dropin.measured import Pass, Times
from tk.dropin.whole import Way

FAST, SLOW = Times(1.0, 1.0), Times(2.0, 2.0)
EVERYTHING = {"linear": 1, "layer_norm": 1, "gelu": 1}


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.first(x)))


@pytest.fixture
def calls_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a clock says of single calls."""
    monkeypatch.setattr(sample, "_times", lambda *_: Pass(FAST, SLOW))


Slower = Callable[[bool], bool]  # in grad mode or not


@pytest.fixture
def models_are(monkeypatch: pytest.MonkeyPatch, calls_win: None) -> Callable[[Slower], None]:
    """What a clock says of whole models."""

    def set_up(slower: Slower) -> None:
        def times(ours: Way, torchs: Way) -> tuple[float, float]:
            assert served(ours) and not served(torchs)
            return (2.0, 1.0) if slower(torch.is_grad_enabled()) else (1.0, 2.0)

        monkeypatch.setattr(whole, "_times", times)

    return set_up


def served(way: Way) -> bool:
    """Whether a pass runs through tk; its backward pass runs too."""
    run, holding = way
    with holding(), Count() as count:
        run()
    assert not count.ops or set(EVERYTHING) <= set(count.ops)
    return bool(count.ops)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_captured", lambda: True)


def test_a_slower_model_runs_as_it_is_written(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    model, x = Net().eval(), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert [(w.name, w.is_slower) for w in report.whole] == [("forward", True), ("forward and backward", True)]
    assert calls(model, x) == {}
    assert calls(model, torch.randn(5, 16)) == EVERYTHING, "another kind of input, of which nothing was measured"


def test_it_is_tks_in_a_graph(models_are: Callable[[Slower], None], captured: None) -> None:
    models_are(lambda _: True)
    model, x = Net(), torch.randn(4, 16)
    tk.use(model, sample=x)
    assert calls(model, x) == EVERYTHING


@pytest.mark.parametrize("slower_in_training", [False, True])
def test_each_pass_by_its_own_time(models_are: Callable[[Slower], None], slower_in_training: bool) -> None:
    models_are(lambda has_gradient: has_gradient is slower_in_training)
    model, x = Net().eval(), torch.randn(4, 16)
    tk.use(model, sample=x)
    assert calls(model, x) == ({} if not slower_in_training else EVERYTHING)
    node = type(model(x).grad_fn).__name__
    assert node == "GeluBackward0" if slower_in_training else node != "GeluBackward0"


def test_in_training_mode_the_backward_pass_belongs_to_it(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    (found,) = tk.use(Net(), sample=torch.randn(4, 16)).whole
    assert found.name == "forward and backward"


def test_later_models_of_the_kind_find_it(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    x = torch.randn(4, 16)
    tk.use(Net().eval(), sample=x)
    again, wider = Net().eval(), Net(64).eval()
    for model in (again, wider):
        tk.use(model)
    assert calls(again, x) == {} and calls(wider, x) == EVERYTHING
    models_are(lambda _: False)
    tk.use(anew := Net().eval(), sample=x)
    assert calls(anew, x) == EVERYTHING, "what is measured again replaces what was kept"


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(checkpoint(self.norm, self.first(x), use_reentrant=False))


def test_what_is_checkpointed_is_as_its_forward_was(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    model, x = Checkpointed(), torch.randn(4, 16)
    tk.use(model, sample=x)
    for _ in range(3):
        model(x).sum().backward()
    assert calls(model, x) == EVERYTHING, "without gradients nothing was measured in training mode"


class Fills(Net):
    """A cache that takes so many passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.left = [passes]

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise IndexError("the cache is full")
        return super().forward(x)


def test_what_fails_when_it_is_run_again_is_not_measured(calls_win: None) -> None:
    model, x = Fills(4), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert report.measured and not report.whole
    model.left[0] = 1
    assert "layer_norm" in calls(model, x)


def test_the_clock_sees_what_is_between_the_calls(
    calls_win: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Real times: what tk takes longer for is in no call that was timed by itself."""
    forward = tk.layer_norm

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(0.1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(tk, "layer_norm", slow)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of busy machines' threads some wait for milliseconds
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    model, x = Net().eval(), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert [w.is_slower for w in report.whole] == [True, True]
    assert all(p.grad is None for p in model.parameters())
    report.undo()
    assert not {"forward", "_replicate_for_data_parallel"} & {n for m in model.modules() for n in vars(m)}


def test_of_batches_each_kind_is_measured_once(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    sizes: Iterator[int] = iter((4, 4, 7))
    model = Net().eval()
    with torch.no_grad():
        report = tk.use(model, sample=lambda: torch.randn(next(sizes), 16))
    assert [w.example for w in report.whole] == ["float32[4, 16]", "float32[7, 16]"]


def test_processes_decide_alike(models_are: Callable[[Slower], None], group: None) -> None:
    models_are(lambda _: True)
    assert not tk.use(Net(), sample=torch.randn(4, 16)).whole


def test_what_is_compiled_is_not_timed(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    model = Net()
    model.norm.compile(backend="eager")
    assert not tk.use(model, sample=torch.randn(4, 16)).whole


def test_a_module_alone_has_no_more_than_its_call(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    assert not tk.use(nn.LayerNorm(16), sample=torch.randn(4, 16)).whole


def test_the_report(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda has_gradient: has_gradient)
    report = tk.use(Net().eval(), sample=torch.randn(4, 16))
    lines = str(report).splitlines()
    assert lines[1] == "the model, forward of float32[4, 16]: 2.00 times as fast"
    assert lines[2].startswith("the model, forward and backward of float32[4, 16]: 0.50 times as fast, so it runs as")
    first, second = str(report.whole).splitlines()[2:]
    assert first.endswith("tk") and second.endswith("torch, but in graphs") and "0.50" in second
    assert pickle.loads(pickle.dumps(report)).whole == report.whole == report[:1].whole == report.left.whole


def test_a_damaged_entry_is_not_used(models_are: Callable[[Slower], None]) -> None:
    models_are(lambda _: True)
    x = torch.randn(4, 16)
    tk.use(Net().eval(), sample=x)
    path = measured.path_of(torch.device("cpu"))
    path.write_text(path.read_text().replace('"is_slower"', '"x"').replace('"kind"', '"sort"'))
    with pytest.warns(UserWarning, match="it cannot be read"):
        tk.use(model := Net().eval())
    assert calls(model, x) == EVERYTHING


def test_as_written_takes_back_no_more_than_was_done() -> None:
    model = Net()
    swaps = list(tk.use(model, only_faster=False)._swaps)
    model.norm.forward = lambda x: x  # type: ignore[method-assign]  # the user's, since
    with whole._as_written(swaps):
        assert "forward" not in vars(model) and "forward" in vars(model.norm)
    assert "forward" in vars(model) and model.norm(3) == 3
