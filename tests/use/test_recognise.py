"""What is known by what it computes, and what only looks like it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from use_models import MLP, Llama, RMSNorm, Rotary, calls, tokens

import tk
from tk.dropin import recognise
from tk.dropin.functions.activations import SWIGLU
from tk.dropin.graph import graph_of


class Computing(nn.Module):
    """Some computation of an input and its parameters."""

    def __init__(self, compute: Callable[..., Tensor], **parameters: Tensor):
        super().__init__()
        self.compute = compute
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, *self._parameters.values())


def norm(compute: Callable[..., Tensor]) -> Computing:
    return Computing(compute, weight=torch.rand(8) + 0.5)


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
    model, x = norm(RMS_NORMS[name]).to(dtype), torch.randn(3, 5, 8, dtype=dtype)
    expected = model(x)
    report = tk.use(model)
    assert report[0].op == "rms_norm"
    assert calls(model, x) == {"rms_norm": 1}
    assert_close(model(x), expected, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_no_rms_norms(name: str) -> None:
    model = norm(OTHER_NORMS[name])
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


def test_what_refuses_the_examples_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs an error with a traceback where an op refuses tensors without values."""
    caplog.set_level(logging.WARNING, "torch._subclasses.fake_tensor")

    def errors() -> list[str]:
        return [r.name for r in caplog.records if r.levelno >= logging.WARNING]

    def averages(x: Tensor) -> Tensor:
        return x.mean((5, 6))

    assert graph_of(averages, (torch.ones(2, 3),)) is None
    assert not errors()
    with FakeTensorMode() as mode, pytest.raises(IndexError):
        averages(mode.from_tensor(torch.ones(2, 3)))
    assert errors()  # others' are, as before


def test_recognising_changes_nothing() -> None:
    model = RMSNorm(8)
    scale, before = model.scale, dict(vars(model))
    assert recognise.rms_norm_eps(model) == 1e-6
    assert model.scale is scale and dict(vars(model)) == before


# --- Activations ---


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
    model, x = Computing(compute), torch.linspace(-4, 4, 48).view(6, 8)
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
    assert recognise.activation(Computing(compute)) is None


# --- Gated feed-forward layers ---


@pytest.mark.parametrize(
    ("activation", "op"),
    [(nn.SiLU(), "swiglu"), (Computing(F.silu), "swiglu"), (nn.GELU(), "geglu"), (nn.GELU("tanh"), "geglu")],
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


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), Computing(lambda x: F.silu(x) * x), nn.SiLU(inplace=True), nn.PReLU()], ids=str
)
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
    assert recognise.gated(model) == recognise.Gated(SWIGLU, "gate_proj", "act_fn", "up_proj", "down_proj")


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


# --- Rotary positions of neighbours ---


class SideBySide(Rotary):
    """Tables with each value twice, side by side."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.repeat_interleave(position_ids[..., None].float() * self.inv_freq, 2, dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def rotate_as_cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed, k_embed = (q * cos) + (neighbours(q) * sin), (k * cos) + (neighbours(k) * sin)
    return q_embed.to(dtype=dtype), k_embed.to(dtype=dtype)


def rotate_as_glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of tables with equal halves the first, a part of each head."""
    cos, sin = (t.unsqueeze(1)[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    size = cos.shape[-1]
    q, q_pass, k, k_pass = q[..., :size], q[..., size:], k[..., :size], k[..., size:]
    q, k = (q * cos) + (neighbours(q) * sin), (k * cos) + (neighbours(k) * sin)
    return torch.cat([q, q_pass], dim=-1), torch.cat([k, k_pass], dim=-1)


def rotate_as_complex(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's first form; the tables are of pairs."""
    turn = torch.complex(cos[..., ::2].float(), sin[..., ::2].float())[:, None]
    pairs = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn for x in (q, k))
    q, k = (torch.view_as_real(x).flatten(-2).to(q.dtype) for x in pairs)
    return q, k


def rotate_by_halves_of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-J's slices, put together otherwise."""
    cos, sin = (t.unsqueeze(1)[..., ::2] for t in (cos, sin))
    found = []
    for x in (q, k):
        a, b = x[..., ::2], x[..., 1::2]
        found.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
    return found[0], found[1]


class Heads(nn.Module):
    def __init__(self, rotary: nn.Module, head: int = 16):
        super().__init__()
        self.rotary, self.head = rotary, head
        self.q, self.k = nn.Linear(32, 4 * head), nn.Linear(32, 2 * head)

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k))
        return q, k, *self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])


class Cohere(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_as_cohere(*self.operands(x))


class Glm(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_as_glm(*self.operands(x))


class Complex(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_as_complex(*self.operands(x))


class Halves(Heads):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_by_halves_of_pairs(*self.operands(x))


INTERLEAVED: dict[str, tuple[Heads, int]] = {
    "Cohere": (Cohere(SideBySide(16)), 2),
    "Cohere with tables of halves": (Cohere(Rotary(16)), 0),
    "GLM": (Glm(Rotary(16)), 0),
    "GLM with half of each head": (Glm(Rotary(8)), 0),
    "complex": (Complex(SideBySide(16)), 0),
    "other halves": (Halves(SideBySide(16)), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INTERLEAVED)
def test_neighbours_are_rotated_or_left_alone(name: str, dtype: torch.dtype) -> None:
    """How many calls of tk.rope there are, and that what comes out is the same."""
    model, count = INTERLEAVED[name]
    model, x = copy.deepcopy(model).to(dtype), torch.randn(2, 6, 32, dtype=dtype)
    expected = model(x)
    report = tk.use(model)
    seen = calls(model, x)
    assert (seen.get("rope_interleaved", 0), seen.get("rope", 0)) == (count, 0)
    for found, e in zip(model(x), expected, strict=True):
        assert_close(found, e, **(dict(rtol=1e-2, atol=1e-2) if dtype is torch.bfloat16 else {}))
    report.undo()
    assert all(torch.equal(found, e) for found, e in zip(model(x), expected, strict=True))
