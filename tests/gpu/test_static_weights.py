"""In static_weights mode a product begins before those ahead of it have ended, and must still see what they wrote."""

from collections.abc import Callable

import pytest
import torch

from tk import capi
from tk.config import STATIC_WEIGHTS
from tk.heuristics.problem import describe

from .device import DEVICE

SIZE = 1024
LENGTH = 12
SLEEP = 2_000_000  # cycles: so long that all launches wait in the queue


def step(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, config: int, mode: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.ops.tk.mm.out(a, b, bias, 0, None, 0, config, mode, out=out)


def chain(x: torch.Tensor, weights: list[torch.Tensor], config: int, mode: int) -> torch.Tensor:
    """Each product reads what the one before wrote, into memory that that one reads."""
    buffers = [x.clone(), torch.empty_like(x)]
    torch.cuda._sleep(SLEEP)
    for i, weight in enumerate(weights):
        step(buffers[i % 2], weight, buffers[1 - i % 2], config, mode)
    return buffers[len(weights) % 2]


def biases(x: torch.Tensor, weights: list[torch.Tensor], config: int, mode: int) -> torch.Tensor:
    """Each product's bias is a row of what the one before wrote."""
    outs = [x.clone(), *(torch.empty_like(x) for _ in weights)]
    torch.cuda._sleep(SLEEP)
    for weight, before, out in zip(weights, outs, outs[1:], strict=False):
        step(x, weight, out, config, mode, before[0])
    return outs[-1]


@pytest.mark.parametrize("run", [chain, biases])
@pytest.mark.parametrize("order", ["nn", "nt"])
@pytest.mark.parametrize("rows", [5, 60, 200])
def test_a_product_sees_what_those_before_it_wrote(rows: int, order: str, run: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(rows, SIZE, device=DEVICE).bfloat16()
    weights = [(torch.randn(SIZE, SIZE, device=DEVICE) / SIZE**0.5).bfloat16() for _ in range(LENGTH)]
    weights = [w.t() for w in weights] if order == "nt" else weights
    bias = x[0] if run is biases else None
    described = describe(step, x, weights[0], torch.empty_like(x), -1, STATIC_WEIGHTS, bias)
    assert described is not None
    configs = {c.config: c.config_name for c in capi.candidates(described.problem) if c.fits}
    assert len(configs) > 10
    for config, name in configs.items():
        expected = run(x, weights, config, 0)
        for _ in range(3):
            assert torch.equal(run(x, weights, config, STATIC_WEIGHTS), expected), name
