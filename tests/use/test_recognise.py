"""What is known by what it computes, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from use_models import MLP, Llama, RMSNorm, Rotary, calls, tokens

import tk
from tk.dropin import recognise


class Norm(nn.Module):
    """A norm with some computation."""

    def __init__(self, compute: Callable[..., Tensor]):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight)


def normalised(x: Tensor, eps: float = 1e-5) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


RMS_NORMS: dict[str, Callable[..., Tensor]] = {
    "rounded before": lambda x, w: w * normalised(x).to(x.dtype),
    "the other way round": lambda x, w: normalised(x).to(x.dtype) * w,
    "T5's": lambda x, w: w * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(w.dtype),
    "rounded after": lambda x, w: (w * normalised(x)).to(x.dtype),
    "another eps": lambda x, w: w * normalised(x, 0.1).type_as(x),
    "a product for the square": lambda x, w: w * (x.float() * (x.float() * x.float()).mean(-1, True).add(1e-5).rsqrt()).to(x.dtype),  # noqa: E501
}  # fmt: skip
OTHER_NORMS: dict[str, Callable[..., Tensor]] = {
    "one added to the weight": lambda x, w: (1 + w) * normalised(x).to(x.dtype),
    "a sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
    "another dimension": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype),  # noqa: E501
    "a layer norm": lambda x, w: w * normalised(x - x.mean(-1, keepdim=True)).to(x.dtype),
    "without eps": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))).to(x.dtype),
    "in 16 bits": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    "a cube": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype),
    "clamped": lambda x, w: w * normalised(x).clamp(-1, 1).to(x.dtype),
    "by its values": lambda x, w: w * normalised(x).to(x.dtype) if x.sum() > 0 else x,
    "twice": lambda x, w: w * normalised(normalised(x)).to(x.dtype),
    "nothing": lambda x, w: x,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RMS_NORMS)
def test_rms_norms(name: str, dtype: torch.dtype) -> None:
    model, x = Norm(RMS_NORMS[name]).to(dtype), torch.randn(3, 5, 8, dtype=dtype)
    expected = model(x)
    report = tk.use(model)
    assert report[0].op == "rms_norm"
    assert calls(model, x) == {"rms_norm": 1}
    assert_close(model(x), expected, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_no_rms_norms(name: str) -> None:
    model = Norm(OTHER_NORMS[name])
    assert recognise.rms_norm_eps(model) is None
    assert not tk.use(model)[0].replaced


def test_no_rms_norms_by_what_they_hold() -> None:
    with_buffer = RMSNorm(8)
    with_buffer.register_buffer("count", torch.zeros(1))
    with_bias = RMSNorm(8)
    with_bias.bias = nn.Parameter(torch.zeros(8))
    for model in (with_buffer, with_bias, nn.Linear(8, 8, bias=False), nn.Sequential(RMSNorm(8))):
        assert recognise.rms_norm_eps(model) is None


def test_calls_that_are_not_the_norms() -> None:
    """Weights in float32 and rows in 16 bits give float32, as the model's own code does."""
    model, x = RMSNorm(8), torch.randn(3, 8).bfloat16()
    expected = model(x)
    tk.use(model)
    assert calls(model, x) == {} and model(x).dtype is torch.float32
    assert torch.equal(model(x), expected)
    assert calls(model, torch.randn(3, 8)) == {"rms_norm": 1}
    assert model(hidden=x).dtype is torch.float32
    with pytest.raises(RuntimeError, match="must match the size"):
        model(torch.randn(3, 7))


def test_recognising_changes_nothing() -> None:
    model = RMSNorm(8)
    scale, before = model.scale, dict(vars(model))
    assert recognise.rms_norm_eps(model) == 1e-6
    assert model.scale is scale and dict(vars(model)) == before


# --- Activations ---


class Elementwise(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]):
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (F.gelu, "gelu"),
        (partial(F.gelu, approximate="tanh"), "gelu"),
        (lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))), "gelu"),
        (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
        (lambda x: torch.sigmoid(x) * x, "silu"),
    ],
)
def test_activations(compute: Callable[..., Tensor], op: str) -> None:
    model, x = Elementwise(compute), torch.linspace(-4, 4, 48).view(6, 8)
    expected = model(x)
    assert tk.use(model)[0].op == op
    assert calls(model, x) == {op: 1}
    assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(x.double()), compute(x.double()))
    assert_close(model(x=x), expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.0447 * x.pow(3)))),
        torch.relu,
        lambda x: F.gelu(x) + 0,
        lambda x: x,
    ],
)
def test_no_activations(compute: Callable[..., Tensor]) -> None:
    assert recognise.activation(Elementwise(compute)) is None


# --- Gated feed-forward layers ---


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * x


class OwnSilu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


@pytest.mark.parametrize(
    ("activation", "op"),
    [(nn.SiLU(), "swiglu"), (OwnSilu(), "swiglu"), (nn.GELU(), "geglu"), (nn.GELU("tanh"), "geglu")],
    ids=str,
)
def test_gated(activation: nn.Module, op: str) -> None:
    model, x = MLP(8, 16, activation), torch.randn(3, 8)
    expected = model(x)
    report = tk.use(model)
    assert report[0].op == op
    assert calls(model, x) == {op: 1, "linear": 3}
    assert_close(model(x), expected)


def test_a_gated_layer_calls_its_layers() -> None:
    """So their hooks hold."""
    model, seen = MLP(8, 16, nn.SiLU()), []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    tk.use(model)
    x = torch.randn(3, 8)
    assert calls(model, x) == {"swiglu": 1}
    assert sorted(seen) == ["down_proj", "gate_proj", "up_proj"]


def test_a_hook_on_the_activation() -> None:
    model, seen = MLP(8, 16, nn.SiLU()), []
    model.act_fn.register_forward_hook(lambda *_: seen.append(1))
    tk.use(model)
    assert calls(model, torch.randn(3, 8)) == {"linear": 3}
    assert seen


@pytest.mark.parametrize("activation", [nn.ReLU(), Squared(), nn.SiLU(inplace=True), nn.PReLU()], ids=str)
def test_other_activations(activation: nn.Module) -> None:
    assert recognise.gated(MLP(8, 16, activation)) is None


class Variant(MLP):
    def __init__(self, compute: Callable[[Any, Tensor], Tensor]):
        super().__init__(8, 8, nn.SiLU())
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) + m.up_proj(x)),
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x)) + x,
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(2 * x)),
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * x),
        lambda m, x: m.down_proj(m.act_fn(m.up_proj(m.gate_proj(x)))),
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.gate_proj(x)),
        lambda m, x: m.down_proj(x) if x.sum() > 0 else x,
    ],
)
def test_other_layers(compute: Callable[[Any, Tensor], Tensor]) -> None:
    assert recognise.gated(Variant(compute)) is None


def test_the_other_order() -> None:
    model = Variant(lambda m, x: m.down_proj(m.up_proj(x) * m.act_fn(m.gate_proj(x))))
    assert recognise.gated(model) == recognise.Gated("swiglu", "gate_proj", "act_fn", "up_proj", "down_proj", "none")


# --- Rotary positions ---


def test_rotary_positions() -> None:
    model, x = Llama(), tokens()
    expected = model(x)
    tk.use(model)
    assert calls(model, x)["rope"] == 4
    assert_close(model(x), expected)


def test_a_table_for_each_sequence_is_torchs() -> None:
    model, x = Llama(), tokens()
    tables = model.rotary(torch.zeros(1), torch.stack([torch.arange(12), torch.arange(12).flip(0)]))
    hidden = torch.randn(2, 12, 64)
    expected = model.layers[0](hidden, tables)
    tk.use(model)
    assert "rope" not in calls(model.layers[0], hidden, tables)
    assert_close(model.layers[0](hidden, tables), expected)
    assert x.shape == (2, 12)


class OtherHalves(Rotary):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, 2 * angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def test_tables_with_other_halves() -> None:
    """The op reads the first half alone."""
    model, x = Llama(), tokens()
    model.rotary = OtherHalves(16)
    expected = model(x)
    tk.use(model)
    assert "rope" not in calls(model, x)
    assert_close(model(x), expected)


def test_a_model_without_tables() -> None:
    """Whose halves nothing is known of."""
    model = Llama().layers[0]
    tk.use(model)
    tables = Rotary(16)(torch.zeros(1), torch.arange(12)[None])
    assert "rope" not in calls(model, torch.randn(2, 12, 64), tables)
