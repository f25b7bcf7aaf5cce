"""What is left to torch because it is faster, or because nothing was measured; here as if the CPU were that GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from use_models import Llama, calls, ops_of, tokens

import tk
from tk.dropin import decisions, speed
from tk.dropin.functions import REPLACEMENTS
from tk.dropin.functions.convolutions import CONV2D
from tk.dropin.replace import _use
from tk.dropin.report import Report
from tk.dropin.target import Target

H100 = Target("cpu", "sm_90", only_faster=True)
UNKNOWN = Target("cpu", "sm_80", only_faster=True)


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """As if a CUDA graph were recorded, where the device's time alone counts; or not."""
    monkeypatch.setattr(decisions, "is_captured", lambda: True)
    return lambda value: monkeypatch.setattr(decisions, "is_captured", lambda: value)


@pytest.mark.parametrize(
    ("k", "dtype", "served", "left"),
    [
        (128, torch.bfloat16, (1, 16, 64, 2049, 5000), (65, 2048)),
        (72, torch.float16, (1, 16), (17, 5000)),
        (128, torch.float32, (), (1, 5000)),  # nothing was measured without tf32
    ],
)
def test_rows(k: int, dtype: torch.dtype, served: tuple[int, ...], left: tuple[int, ...]) -> None:
    model = nn.Linear(k, 8, dtype=dtype)
    _use(model, H100)
    for rows in served:
        assert calls(model, torch.randn(rows, k, dtype=dtype)) == {"linear": 1}, rows
    for rows in left:
        assert calls(model, torch.randn(rows, k, dtype=dtype)) == {}, rows


def test_rows_of_all_leading_dimensions() -> None:
    model = nn.Linear(64, 8, dtype=torch.bfloat16)
    _use(model, H100)
    assert calls(model, torch.randn(8, 8, 64, dtype=torch.bfloat16)) == {"linear": 1}
    assert calls(model, torch.randn(8, 9, 64, dtype=torch.bfloat16)) == {}
    assert calls(model, torch.randn(64, dtype=torch.bfloat16)) == {"linear": 1}


def test_where_gradients_cost_more() -> None:
    """A product of few rows is faster than torch's, and its gradients slower."""
    model, x = nn.Linear(64, 8, dtype=torch.bfloat16), torch.randn(8, 64, dtype=torch.bfloat16)
    _use(model, H100)
    assert calls(model, x) == {"linear": 1}
    assert "Addmm" in type(model(x).grad_fn).__name__
    model.requires_grad_(False)
    assert model(x).grad_fn is None
    rms = nn.RMSNorm(64)
    _use(rms, H100)
    assert "TkRmsNorm" in type(rms(x.float()).grad_fn).__name__


@pytest.mark.parametrize(
    ("module", "size", "dtype", "served"),
    [
        (nn.Conv2d(3, 8, 3), (1, 3, 9, 9), torch.bfloat16, 1),
        (nn.Conv3d(8, 8, 3), (1, 8, 5, 5, 5), torch.float16, 1),
        (nn.Conv2d(64, 64, 3, groups=4), (1, 64, 9, 9), torch.bfloat16, 1),
        (nn.Conv2d(64, 64, 3, groups=16), (1, 64, 9, 9), torch.bfloat16, 0),
        (nn.Conv1d(8, 8, 3), (1, 8, 9), torch.bfloat16, 0),  # nothing was measured
        (nn.Conv2d(8, 8, 3), (1, 8, 9, 9), torch.float32, 0),
    ],
    ids=str,
)
def test_convolutions(module: nn.Module, size: tuple[int, ...], dtype: torch.dtype, served: int) -> None:
    module, x = module.to(dtype), torch.randn(size, dtype=dtype)
    _use(module, H100)
    name = f"conv{x.dim() - 2}d"
    assert calls(module, x).get(name, 0) == served
    assert "Convolution" in type(module(x).grad_fn).__name__  # torch's: gradients are slower than cuDNN's
    if dtype is torch.float32 and served == 0 and x.dim() == 4:
        with torch.autocast("cpu", torch.bfloat16):
            assert calls(module, x).get(name, 0) == 1


def test_convolutions_in_training_once_a_rule_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, rules = "16-bit", CONV2D.speed.rules["sm_90"]
    monkeypatch.setitem(rules, kind, replace(rules[kind], training=speed.ALL))  # type: ignore[arg-type]
    module, x = nn.Conv2d(8, 8, 3).bfloat16(), torch.randn(1, 8, 9, 9, dtype=torch.bfloat16)
    _use(module, H100)
    assert calls(module, x) == {"conv2d": 1} and "Convolution" not in type(module(x).grad_fn).__name__


def test_what_is_no_tensor_is_for_torch_to_refuse() -> None:
    model = nn.Conv2d(8, 8, 3).bfloat16()
    _use(model, H100)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), pytest.raises(TypeError, match="conv2d"):
            model([1.0])


@pytest.mark.parametrize(
    ("head_dim", "rows", "is_causal", "dtype", "served"),
    [
        (128, 1024, True, torch.bfloat16, True),
        (128, 1023, True, torch.bfloat16, False),
        (128, 1024, False, torch.bfloat16, False),
        (64, 1024, True, torch.float16, False),
        (128, 1024, True, torch.float32, False),
    ],
)
def test_attention(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, rows: int, is_causal: bool, dtype: torch.dtype, served: bool
) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=dtype))  # says what the model's dtype is

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=is_causal)

    model = Attention()
    _use(model, H100)
    ran: list[bool] = []
    sdpa = tk.sdpa
    monkeypatch.setattr(tk, "sdpa", lambda *args: ran.append(True) or sdpa(*args))
    x = torch.randn(1, 1, rows, head_dim, dtype=dtype)
    assert model(x).shape == x.shape and bool(ran) == served
    model(x.requires_grad_())
    assert len(ran) == served  # gradients are torch's


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32(tf32: None) -> None:
    model = nn.Linear(64, 8)
    assert _use(model, H100)[0].replaced
    assert calls(model, torch.randn(8, 64)) == {"linear": 1}


def test_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.bfloat16))
    report = _use(model, H100)
    with torch.autocast("cpu", torch.bfloat16):
        for rows, expected in ((8, {"linear": 2}), (100, {})):
            assert calls(model, torch.randn(rows, 64)) == expected
    assert report[0].reason == "under autocast alone; rows ≤ 64 or ≥ 2049; with gradients rows ≥ 2049; eagerly if large"
    assert calls(model[0], torch.randn(8, 64)) == {}


def test_reasons() -> None:
    model = nn.ModuleDict(
        {
            "aligned": nn.Linear(64, 8, dtype=torch.bfloat16),
            "other": nn.Linear(72, 8, dtype=torch.bfloat16),
            "norm": nn.LayerNorm(8, dtype=torch.bfloat16),
            "rms": nn.RMSNorm(8, dtype=torch.bfloat16),
            "group": nn.GroupNorm(2, 8, dtype=torch.bfloat16),
        }
    )
    report = {r.path: r for r in _use(model, H100)}
    assert {path: (r.replaced, r.reason) for path, r in report.items()} == {
        "aligned": (True, "rows ≤ 64 or ≥ 2049; with gradients rows ≥ 2049; eagerly if large"),
        "other": (True, "rows ≤ 16; with gradients never; eagerly if large"),
        "norm": (True, "eagerly if large"),
        "rms": (True, "eagerly if large"),
        "group": (False, "group_norm: nothing measured says that it is as fast (bfloat16, sm_90)"),
    }


def test_another_architecture() -> None:
    model = Llama().bfloat16()
    assert not _use(model, UNKNOWN).replaced
    report = _use(model, Target("cpu", "sm_80", only_faster=False))
    assert {r.op for r in report.replaced} >= {"linear", "rms_norm", "swiglu"}
    assert calls(model, tokens())["linear"] == 15


def test_a_module_with_several_ops() -> None:
    model = Llama().bfloat16()
    report: Report = _use(model, H100)
    attention = next(r for r in report if r.type == "Attention")
    assert attention.op == "rope, sdpa" and attention.replaced
    assert attention.reason == (
        "rope: left to torch; sdpa: causal, head size 128; rows ≥ 1024; with gradients never; eagerly if large"
    )
    assert next(r for r in report if r.type == "MLP").replaced


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """A graph has the branch of its sizes."""
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        ops = len(ops_of(graph))

        def run(*args: Any) -> Any:
            ran.append(ops)
            return graph(*args)

        return run

    torch._dynamo.reset()
    model = nn.Linear(64, 8, dtype=torch.bfloat16)
    _use(model, H100)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for rows, expected in ((8, 1), (100, 0), (64, 1), (3000, 1), (65, 0)):
            x = torch.randn(rows, 64, dtype=torch.bfloat16)
            assert_close(compiled(x), nn.functional.linear(x, model.weight, model.bias), rtol=0.02, atol=0.02)
            assert ran[-1] == expected, rows


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "ops"), [(2, 64, 1), (2, 65, 0), (2, None, 0), (3000, None, 1), (100, 2000, 0)]
)
def test_exported_for_a_range(strict: bool, low: int, high: int | None, ops: int) -> None:
    """A program has no guards: it calls tk where that holds for all that its rows can be."""
    model = nn.Linear(64, 8, dtype=torch.bfloat16).requires_grad_(False)
    _use(model, H100)
    x = torch.randn(low + 1, 64, dtype=torch.bfloat16)
    rows = torch.export.Dim("rows", min=low, max=high)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
    assert len(ops_of(program)) == ops


def test_only_faster_is_of_cuda() -> None:
    """On the CPU nothing was measured, and all is served."""
    model = nn.GroupNorm(2, 8)
    for only_faster in (True, False):
        with tk.use(model, only_faster=only_faster) as report:
            assert report[0].replaced and report[0].reason == ""


def test_the_tables() -> None:
    """Bands ascend; training is never served where forward is not."""
    for line, rule in measured():
        for bands in (rule.forward, rule.training):
            edges = [e for low, high in bands for e in (low, high if high is not None else 1 << 62)]
            assert edges == sorted(edges), line
        for low, high in rule.training:
            probes = [low, high if high is not None else 1 << 40]
            assert all(any(a <= p and (b is None or p <= b) for a, b in rule.forward) for p in probes), line


def measured() -> Iterator[tuple[str, speed.Rule]]:
    for replacement in REPLACEMENTS:
        for arch, rules in replacement.speed.rules.items():
            for kind, rule in rules.items():
                yield f"{replacement.op} {arch} {kind}", rule
