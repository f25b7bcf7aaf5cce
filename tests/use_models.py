"""Small models that tk.use is tried on, on the CPU (use/) and on CUDA (gpu/test_use.py), in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Bottleneck(nn.Module):
    """ResNet's, https://arxiv.org/abs/1512.03385."""

    def __init__(self, channels: int, inner: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.downsample = nn.Conv2d(channels, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Bottleneck(width, 8), Bottleneck(width, 8, stride=2))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class RMSNorm(nn.Module):
    """As model code has it, op by op."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)
        self.epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.scale * hidden.to(dtype)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, heads_kv: int):
        super().__init__()
        self.size = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, heads_kv * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = apply_rotary(q, k, *tables)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width: int, activation: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads=4, heads_kv=2)
        self.mlp = MLP(width, 3 * width, activation)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), tables)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """https://arxiv.org/abs/2307.09288, without what only matters for long texts."""

    def __init__(self, width: int = 64, vocabulary: int = 50, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.rotary = Rotary(width // 4)
        self.layers = nn.ModuleList(Layer(width, nn.SiLU()) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        tables = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(self.norm(x))


class Mixed(nn.Module):
    """One of everything else: 1-D and 3-D convolutions, norms, softmax, products by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(6, 8, 3, padding="same", groups=2)
        self.conv3 = nn.Conv3d(1, 4, 2, padding=1, padding_mode="circular")
        self.group = nn.GroupNorm(2, 4)
        self.layer = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.gelu, self.silu = nn.GELU("tanh"), nn.SiLU()
        self.soft, self.log_soft = nn.Softmax(-1), nn.LogSoftmax(-1)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, 6, 8]."""
        x = self.layer(self.conv1(x))
        x = torch.matmul(self.soft(torch.bmm(x, x.transpose(1, 2))), x)
        x = x + self.group(self.conv3(x[:, None, None])).mean((1, 2))[:, :8, :8]
        x = self.silu(self.rms(x)) + torch.addmm(self.weight[0], self.gelu(x).flatten(0, 1), self.weight).view_as(x)
        return self.log_soft(torch.mm(x.flatten(0, 1), self.weight))


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 12))


def rows() -> Tensor:
    return torch.randn(3, 6, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet": (ResNet, images),
    "llama": (Llama, tokens),
    "mixed": (Mixed, rows),
}

# The ops that each runs through: every one that its code names.
OPS = {
    "resnet": {"conv2d": 8, "linear": 1},
    "llama": {"embedding": 1, "rms_norm": 5, "linear": 15, "rope": 4, "flex_attention": 2, "swiglu": 2},
    "mixed": {
        "conv1d": 1, "conv3d": 1, "layer_norm": 1, "softmax": 1, "log_softmax": 1, "group_norm": 1, "rms_norm": 1,
        "gelu": 1, "silu": 1, "mm": 1, "addmm": 1, "bmm": 2,
    },
}  # fmt: skip


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tk":
            self.ops[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, int]:
    """How often each op of tk is called in the forward pass."""
    with Count() as count, torch.no_grad():
        function(*args, **kwargs)
    return dict(count.ops)


def ops_of(program: torch.fx.GraphModule | torch.export.ExportedProgram) -> list[str]:
    """The ops of tk that a graph calls."""
    return [str(n.target) for n in program.graph.nodes if str(n.target).startswith("tk.")]
