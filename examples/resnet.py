"""torchvision's ResNet-50 through tk: results compared; inference and a training step timed.

    python examples/resnet.py [--device cuda] [--batch 32] [--compile] [--all]

The weights are random: nothing is downloaded. On CUDA everything is bfloat16 and channels-last. Needs torchvision.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from compared import Step, compare, parser
from torch import Tensor, nn

import tk


def build(device: str) -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    return resnet50().to(device)


def as_timed(model: nn.Module, device: str) -> nn.Module:
    return model.to(dtype_of(device), memory_format=torch.channels_last)


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def images(device: str, batch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 3, size, size, generator=generator)
    return x.to(device, dtype_of(device), memory_format=torch.channels_last)


def inference(model: nn.Module, x: Tensor) -> Step:
    @torch.no_grad()
    def step() -> Tensor:
        return model(x)

    return step


def train(model: nn.Module, x: Tensor) -> Step:
    labels = torch.arange(len(x), device=x.device)

    def step() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x).float(), labels)
        loss.backward()
        return loss.detach()

    return step


def run(settings: argparse.Namespace, model: nn.Module | None = None) -> dict[str, dict[str, float]]:
    """model: by default ResNet-50."""
    model = as_timed(build(settings.device) if model is None else model, settings.device).eval()
    with tk.use(model, only_faster=not settings.all) as report:
        print(report)
    x = images(settings.device, settings.batch, settings.size)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):  # what torch is compared with: the best of cuDNN's
        found = {"inference": compare("inference", lambda m: inference(m, x), model, settings)}
        if settings.device.startswith("cuda"):  # the kernels alone: eagerly, the host takes longer than they do
            name = "inference as a CUDA graph"
            found[name] = compare(name, lambda m: inference(m, x), model, settings, as_graph=True)
        # Batch norms stay in eval mode.
        found["training step"] = compare("training step", lambda m: train(m, x), model, settings)
    return found


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--size", type=int, default=224)
    return options.parse_args(given)


if __name__ == "__main__":
    run(arguments())
