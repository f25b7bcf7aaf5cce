"""``tk.use(model, sample=…)``: what is measured decides, and the model is as it was."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from use_models import MODELS, Llama, ResNet, calls, tokens

import tk
from tk.dropin import decisions, measured, sample, whole
from tk.dropin.measured import Measurement, Pass, Times, class_of
from tk.dropin.replace import _use
from tk.dropin.target import Target

CPU = torch.device("cpu")
FAST, SLOW = Times(1.0, 1.0), Times(2.0, 2.0)
Faster = Mapping[str, bool | tuple[bool, bool]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Faster], None]:
    """What a clock would say: by op, whether tk is faster; of two, without and with gradients. Whole models are."""

    def set_up(faster: Faster) -> None:
        def times(of_calls: Mapping[str, Callable[[], object]], device: torch.device) -> Pass:
            (op,) = calls(of_calls["tk"])
            assert not calls(of_calls["torch"]), "torch's side runs through tk"
            is_training = isinstance(of_calls["torch"](), tuple) and op != "rope"
            found = faster.get(op, True)
            wins = found if isinstance(found, bool) else found[is_training]
            return Pass(FAST, SLOW) if wins else Pass(SLOW, FAST)

        monkeypatch.setattr(sample, "_times", times)
        monkeypatch.setattr(whole, "_times", lambda *_: (1.0, 2.0))

    return set_up


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


# --- What decides ---


def test_what_wins_is_served(timed: Callable[[Faster], None]) -> None:
    timed({"linear": False, "layer_norm": True, "gelu": True})
    model, x = Net(), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert calls(model, x) == {"layer_norm": 1, "gelu": 1}
    assert {r.path: r.replaced for r in report} == {"": True, "first": False, "norm": True, "last": False}
    assert "measured: torch is faster (its time over tk's is 0.50" in report[1].reason
    assert {m.op for m in report.measured} == {"linear", "layer_norm", "gelu"}


def test_with_gradients_another_time_decides(timed: Callable[[Faster], None]) -> None:
    timed({"layer_norm": (True, False)})
    model, x = nn.LayerNorm(16), torch.randn(4, 16)
    tk.use(model, sample=x)
    assert calls(model, x) == {"layer_norm": 1}
    assert "Tk" not in type(model(x).grad_fn).__name__


def test_later_calls_find_it(timed: Callable[[Faster], None]) -> None:
    timed({"linear": False})
    x = torch.randn(4, 16)
    tk.use(Net(), sample=x)
    model = Net()
    report = tk.use(model)
    assert calls(model, x) == {"layer_norm": 1, "gelu": 1}
    assert "as measured: tk is faster in 0 of 4 classes" in report[1].reason
    assert calls(model, torch.randn(400, 16))["linear"] == 2, "a class that was not measured goes by the rules"
    assert not report.measured
    everything = Net()
    tk.use(everything, only_faster=False)
    assert calls(everything, x)["linear"] == 2


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, timed: Callable[[Faster], None]) -> None:
    """Half of the ops, drawn, run through tk; results are torch's."""
    ops = ["linear", "conv2d", "rms_norm", "rope", "swiglu", "silu", "gelu", "layer_norm", "softmax", "mm", "bmm"]
    rng = random.Random(seeds.RUN)
    chosen = {op: rng.random() < 0.5 for op in ops}
    timed(chosen)
    make, inputs = MODELS[name]
    model = make().eval()
    x = inputs()
    expected = model(x)
    tk.use(model, sample=x)
    found = calls(model, x)
    assert not [op for op in found if not chosen.get(op, True)]
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


def test_in_a_graph_the_devices_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's does everywhere else."""
    found = Pass(tk=Times(host=30.0, device=5.0), torch=Times(host=10.0, device=8.0))
    monkeypatch.setattr(sample, "_times", lambda of_calls, device: found)
    model, x = nn.Linear(16, 32), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert "tk in CUDA graphs" in str(report.measured)
    assert calls(model, x) == {}
    monkeypatch.setattr(decisions, "is_captured", lambda: True)
    assert calls(model, x) == {"linear": 1}


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_keeps_the_branch(timed: Callable[[Faster], None], dynamic: bool) -> None:
    timed({"linear": False})
    model, x = Net(), torch.randn(4, 16)
    tk.use(model, sample=x)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x[:3]), model(x[:3]))
    assert any("gelu" in name and "tk" in name for name in seen), seen


def test_exported_it_goes_by_the_rules(timed: Callable[[Faster], None]) -> None:
    timed({"linear": False})
    model, x = nn.Linear(16, 8), torch.randn(4, 16)
    tk.use(model, sample=x)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(x[:3]), model(x[:3]))


def test_of_a_compiled_model_the_calls_are_measured(timed: Callable[[Faster], None]) -> None:
    timed({})
    model = torch.compile(Net(), backend="eager")
    assert {m.op for m in tk.use(model, sample=torch.randn(4, 16)).measured} == {"linear", "layer_norm", "gelu"}


def test_what_no_measurement_was_made_of_goes_by_the_rules(timed: Callable[[Faster], None]) -> None:
    """As on a GPU, where linear layers of 72 columns and many rows have no rule."""
    timed({})
    target = Target("cpu", "sm_90", only_faster=True)
    model, x = nn.Linear(72, 8, dtype=torch.bfloat16), torch.randn(700, 72, dtype=torch.bfloat16)
    _use(model, target)
    assert calls(model, x) == {}
    model = nn.Linear(72, 8, dtype=torch.bfloat16)
    table = measured.Table([_measured("linear", (x, model.weight, model.bias), Pass(FAST, SLOW))])
    _use(model, Target("cpu", "sm_90", only_faster=True, measured=table))
    assert calls(model, x) == {"linear": 1}
    assert calls(model, x[:300]) == {}


def _measured(op: str, args: tuple[Any, ...], forward: Pass) -> Measurement:
    key = measured.key_of(args, {})
    assert key is not None
    return Measurement(op, key, "", forward, None)


class ByLists(nn.Module):
    """Sizes in a list, and an argument by name."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(F.layer_norm(x, [16]), dim=-1)


def test_other_spellings_are_measured(timed: Callable[[Faster], None]) -> None:
    timed({"layer_norm": False})
    model, x = ByLists(), torch.randn(4, 16)
    report = tk.use(model, sample=x)
    assert {m.op for m in report.measured} == {"layer_norm", "softmax"}
    assert calls(model, x) == {"softmax": 1}


def test_what_is_no_plain_tensor_is_torchs(timed: Callable[[Faster], None]) -> None:
    timed({})
    model, x = nn.Linear(16, 8), torch.randn(4, 16)
    tk.use(model, sample=x)
    with torch.no_grad():
        torch.testing.assert_close(model(x.to_sparse()), model(x))
    jagged = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
    torch.testing.assert_close(model(jagged).unbind()[1], model(x[:2]))


# --- Samples ---


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "function"])
def test_kinds_of_samples(kind: str, timed: Callable[[Faster], None]) -> None:
    timed({})
    made: list[Tensor] = []

    def batch() -> tuple[Tensor]:
        made.append(torch.randn(len(made) * 40 + 4, 16))
        return (made[-1],)

    x = torch.randn(4, 16)
    given: Any = {"tensor": x, "tuple": (x,), "dict": {"x": x}, "function": batch}[kind]
    report = tk.use(Net(), sample=given)
    assert len(made) == (sample.BATCHES if kind == "function" else 0)
    assert len([m for m in report.measured if m.op == "gelu"]) == max(len(made), 1)


@pytest.mark.parametrize("given", [3, [torch.ones(4, 16)], "x", lambda: [torch.ones(4, 16)]])
def test_no_samples(given: Any) -> None:
    model = Net()
    with pytest.raises(TypeError, match="sample must be a tensor, a tuple of arguments, a dict"):
        tk.use(model, sample=given)
    assert not any("forward" in vars(m) for m in model.modules())


def test_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="leave only_faster out"):
        tk.use(Net(), sample=torch.ones(4, 16), only_faster=False)
    with pytest.raises(ValueError, match="weight is not initialised: run the model once"):
        tk.use(nn.LazyLinear(4), sample=torch.ones(4, 16))


# --- The model is as it was ---


class Changing(nn.Module):
    """Changes what a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(1))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.counter += 1
        self.last = x.detach().sum()[None]
        self.new = x
        self.eval()
        random.random()
        return F.dropout(self.norm(self.linear(x)), 0.5, training=True)


def test_the_model_and_random_numbers_are_as_before() -> None:
    model, x = Changing(), torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    model.train()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    names, last, passes = set(vars(model)), model.last, model.passes
    torchs, pythons = torch.get_rng_state(), random.getstate()
    given = x.detach().clone()
    report = tk.use(model, sample=x)
    assert report.measured
    assert torch.equal(torch.get_rng_state(), torchs) and random.getstate() == pythons
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert all(m.training for m in model.modules()) and torch.equal(x, given)
    report.undo()
    assert set(vars(model)) == names and model.last is last and model.passes == passes


@pytest.mark.parametrize("wrong", [torch.ones(4, 17), (torch.ones(4, 8), 3), {"y": torch.ones(4, 8)}])
def test_a_model_that_raises_is_left_alone(wrong: Any) -> None:
    model = Changing()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    expected = Changing()
    args, kwargs = sample._arguments(wrong)
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        expected(*args, **kwargs)
    with pytest.raises(type(torchs.value)) as ours:
        tk.use(model, sample=wrong)
    assert str(ours.value) == str(torchs.value)
    assert not any("forward" in vars(m) for m in model.modules()) and model.passes == 0
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_real_times() -> None:
    model = Llama()
    report = tk.use(model, sample=(tokens(),))
    assert {m.op for m in report.measured} >= {"linear", "rms_norm", "embedding", "rope"}
    for m in report.measured:
        for _, one in m.passes:
            assert all(x > 0 for x in (one.tk.host, one.tk.device, one.torch.host, one.torch.device))


def test_what_fails_while_it_is_measured_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model does not: it goes on, and its calls by the rules."""

    def times(of_calls: Mapping[str, Callable[[], object]], device: torch.device) -> Pass:
        of_calls["tk"]()
        raise torch.OutOfMemoryError("no memory for both")

    monkeypatch.setattr(sample, "_times", times)
    model, x = Net(), torch.randn(4, 16)
    assert not tk.use(model, sample=x).measured
    assert calls(model, x)["linear"] == 2


def test_without_gradients_none_are_measured() -> None:
    model = nn.Linear(16, 8)
    with torch.no_grad():
        (found,) = tk.use(model, sample=torch.randn(4, 16)).measured
    assert found.training is None


# --- Classes of calls ---


def drawn(rng: random.Random) -> Tensor:
    x = torch.empty(rng.choice([1, 7, 16, 100, 3000]), rng.choice([5, 64, 1000]), rng.choice([8, 33]), device="meta")
    return x.permute(*rng.sample(range(3), 3)) if rng.random() < 0.5 else x


def test_classes() -> None:
    rng = random.Random(seeds.RUN)
    for _ in range(50):
        x = drawn(rng)
        same = class_of((x, 2, None, (3, 3)), {"scale": 0.5})
        assert same == class_of((x, 2, None, [3, 3]), {"scale": 0.7})
        others = [(x.bfloat16(), 2), (x, 3), (x,), (x.expand(2, *x.shape), 2), (x[..., : x.shape[-1] // 2], 2)]
        assert len({class_of((x, 2), {}), *(class_of(other, {}) for other in others)}) == 6
        assert measured._tuples(json.loads(json.dumps(same))) == same


def test_sizes_of_a_class_are_near_each_other() -> None:
    for n in range(1, 5000):
        found = measured._size(n)
        low = found if isinstance(found, int) else found[0]
        assert low <= n < max(low * 1.51, low + 1)
    assert measured._size(1024) == measured._size(1088) != measured._size(1025)


def test_a_function_among_the_arguments_is_of_no_class() -> None:
    assert class_of((torch.ones(3), len), {}) is None
    assert class_of((torch.ones(3),), {"mod": [len]}) is None


# --- The file ---


def _file() -> Path:
    return measured.path_of(CPU)


@pytest.mark.parametrize("damage", ["{", "[]", "3", "{\"format\": 1}", "{\"measured\": []}", "\x00", "tk", "torch",
                                    "device", "format", "entry"])  # fmt: skip
def test_a_file_that_cannot_be_used(damage: str, timed: Callable[[Faster], None]) -> None:
    timed({"linear": False})
    x = torch.randn(4, 16)
    tk.use(Net(), sample=x)
    table = json.loads(_file().read_text())
    if damage in table:
        _file().write_text(json.dumps({**table, damage: "0.0.1"}))
    elif damage == "entry":
        _file().write_text(json.dumps({**table, "measured": [*table["measured"], {"op": "linear"}]}))
    else:
        _file().write_text(damage)
    model = Net()
    with pytest.warns(UserWarning, match=r"is not used: .*sample=…\) makes it anew"):
        tk.use(model)
    assert calls(model, x)["linear"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tk.use(Net())  # said once
        tk.use(Net(), sample=x)
        assert calls(_used(), x) == {"layer_norm": 1, "gelu": 1}


def _used() -> nn.Module:
    model = Net()
    tk.use(model)
    return model


@pytest.mark.parametrize("cache", ["file", "~no_such_user/cache"])
def test_a_cache_that_cannot_be_written(
    cache: str, timed: Callable[[Faster], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed({"linear": False})
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TK_CACHE_DIR", cache)
    model, x = Net(), torch.randn(4, 16)
    with pytest.warns(UserWarning, match="what was measured is not kept"):
        tk.use(model, sample=x)
    assert calls(model, x) == {"layer_norm": 1, "gelu": 1}


def test_two_processes_write_it() -> None:
    program = (
        "import sys, torch\n"
        "from tk.dropin.measured import *\n"
        "one = Pass(Times(1.0, 1.0), Times(2.0, 2.0))\n"
        "for i in range(60): save(torch.device('cpu'), [Measurement(sys.argv[1], (i,), '', one, None)])\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, op]) for op in ("linear", "gelu")]
    assert [p.wait(timeout=120) for p in running] == [0, 0]
    assert {(m.op, *m.call) for m in measured.load(CPU).calls.values()} == {
        (op, i) for op in ("linear", "gelu") for i in range(60)
    }


# --- The report ---


def test_the_report(timed: Callable[[Faster], None]) -> None:
    timed({"linear": False})
    report = tk.use(Net(), sample=torch.randn(4, 16))
    text = str(report)
    assert text.splitlines()[0] == "tk is faster in 4 of 8 classes of calls; report.measured has the times"
    lines = str(report.measured).splitlines()
    assert lines[0].split()[:3] == ["op", "call", "passes"] and len(lines) == 2 + 8
    assert "float32[4, 16], float32[32, 16], float32[32]" in lines[2] and lines[2].endswith("torch")
    won = [line for line in lines[2:] if not line.endswith("torch")]
    assert all("2.00  =====|=====" in line for line in won) and "0.50  ==   |" in lines[2]
    assert pickle.loads(pickle.dumps(report)).measured == report.measured == report[:1].measured
    assert "measured" not in str(tk.use(nn.Sequential(nn.Linear(3, 4)), only_faster=False))


def test_the_models_own_resnet_is_measured_in_training() -> None:
    report = tk.use(ResNet(), sample=torch.randn(2, 3, 32, 32))
    assert all(m.training is not None for m in report.measured)
