"""One layer of a mixture of experts: tk.grouped_mm against torch's own.

    python examples/moe.py [--tokens 4096] [--experts 64] [--device cuda]

Each token goes to the `top_k` experts that the router likes best. The rows are brought into the order of their
experts, so that an expert's are a group; where the groups end stays on the device, and nothing waits for it. Two
grouped products with a gated activation between them are the experts; then the rows go back to their tokens. On a GPU
both layers are timed, forward and with the backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from compared import milliseconds
from torch import Tensor, nn

import tk

GroupedMm = Callable[..., Tensor]


class MixtureOfExperts(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]. grouped_mm: tk's, or torch's."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, grouped_mm: GroupedMm = tk.grouped_mm):
        super().__init__()
        self.top_k = top_k
        self.grouped_mm = grouped_mm
        self.router = nn.Linear(hidden, experts, bias=False)
        # As nn.Linear has weights: rows of outputs, along which the products read.
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1, dtype=torch.float32).topk(self.top_k)
        order, offs = by_expert(experts, len(self.down))
        rows = x[order // self.top_k]
        gate, up = self.grouped_mm(rows, self.gate_up.mT, offs=offs).chunk(2, -1)
        rows = self.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)
        back = rows[order.argsort()].view(len(x), self.top_k, -1)
        return (back * weights.to(x.dtype)[..., None]).sum(1)


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order that brings rows of one expert together, and where each expert's end, int32."""
    in_order, order = experts.flatten().sort(stable=True)
    offs = torch.searchsorted(in_order, torch.arange(count, device=experts.device), right=True)
    return order, offs.int()


def layers(hidden: int, inner: int, experts: int, top_k: int) -> tuple[MixtureOfExperts, MixtureOfExperts]:
    """tk's and torch's, with the same weights."""
    ours = MixtureOfExperts(hidden, inner, experts, top_k)
    theirs = MixtureOfExperts(hidden, inner, experts, top_k, F.grouped_mm)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def run(layer: MixtureOfExperts, x: Tensor) -> list[Tensor]:
    """The result and all gradients of its sum of squares."""
    x = x.detach().requires_grad_()
    result = layer(x)
    return [result, *torch.autograd.grad(result.float().square().mean(), (x, *layer.parameters()))]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative, of the whole."""
    return ((ours - theirs).double().norm() / theirs.double().norm()).item()


def compare(tokens: int, experts: int, hidden: int, inner: int, top_k: int = 2, device: str = "cpu",
            dtype: torch.dtype = torch.bfloat16) -> float:  # fmt: skip
    """The largest difference, relative, of results and gradients."""
    torch.manual_seed(0)
    pair = [layer.to(device, dtype) for layer in layers(hidden, inner, experts, top_k)]
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    worst = max(difference(a, b) for a, b in zip(*(run(layer, x) for layer in pair), strict=True))
    if device == "cuda":
        for name, layer in zip(("tk", "torch"), pair, strict=True):
            say_times(name, layer, x)
    return worst


def say_times(name: str, layer: MixtureOfExperts, x: Tensor) -> None:
    with torch.no_grad():
        forward = milliseconds(lambda: layer(x), "cuda", rounds=20)
    both = milliseconds(lambda: run(layer, x), "cuda", rounds=20)
    print(f"{name:6} forward {forward:7.3f} ms, with backward {both:7.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    tokens, experts = arguments.tokens or (4096 if on_gpu else 64), arguments.experts or (64 if on_gpu else 8)
    hidden, inner = (2048, 1408) if on_gpu else (64, 48)
    worst = compare(tokens, experts, hidden, inner, device=arguments.device)
    print(f"{tokens} tokens, {experts} experts: results and gradients differ from torch's by {worst:.2g} at most")


if __name__ == "__main__":
    main()
