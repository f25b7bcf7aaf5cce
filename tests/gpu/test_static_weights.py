"""In static_weights mode a product begins before those ahead of it have ended, and must still see what they wrote."""

import pytest
import torch

from tk import capi
from tk.config import STATIC_WEIGHTS
from tk.heuristics.problem import describe

from .device import DEVICE

SIZE = 1024
LENGTH = 12
SLEEP = 2_000_000  # cycles: so long that all launches wait in the queue


def step(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: int, mode: int) -> torch.Tensor:
    return torch.ops.tk.mm.out(a, b, None, 0, None, 0, config, mode, out=out)


def chain(x: torch.Tensor, weights: list[torch.Tensor], config: int, mode: int) -> torch.Tensor:
    """Each product reads what the one before wrote, into memory that that one reads."""
    buffers = [x.clone(), torch.empty_like(x)]
    torch.cuda._sleep(SLEEP)
    for i, weight in enumerate(weights):
        step(buffers[i % 2], weight, buffers[1 - i % 2], config, mode)
    return buffers[len(weights) % 2]


@pytest.mark.parametrize("order", ["nn", "nt"])
@pytest.mark.parametrize("rows", [5, 60, 200])
def test_a_chain_of_products(rows: int, order: str) -> None:
    x = torch.randn(rows, SIZE, device=DEVICE).bfloat16()
    weights = [(torch.randn(SIZE, SIZE, device=DEVICE) / SIZE**0.5).bfloat16() for _ in range(LENGTH)]
    weights = [w.t() for w in weights] if order == "nt" else weights
    described = describe(step, x, weights[0], torch.empty_like(x), -1, STATIC_WEIGHTS)
    assert described is not None
    configs = {c.config: c.config_name for c in capi.candidates(described.problem) if c.fits}
    assert len(configs) > 10
    for config, name in configs.items():
        expected = chain(x, weights, config, 0)
        for _ in range(3):
            assert torch.equal(chain(x, weights, config, STATIC_WEIGHTS), expected), name
