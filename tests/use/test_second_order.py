"""Gradient penalties through what tk.use has put into a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from use_models import MODELS

import tk


def gradients_of_penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the squared norm of the first gradients, for every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model(x).float().square().mean()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    penalty = sum(g.square().sum() for g in first)
    return list(torch.autograd.grad(penalty, parameters, materialize_grads=True))


@pytest.mark.parametrize("name", ["resnet", "mixed"])
def test_gradient_penalty(name: str) -> None:
    make, inputs = MODELS[name]
    model, x = make().eval(), inputs()
    expected = gradients_of_penalty(model, x)
    with tk.use(model):
        found = gradients_of_penalty(model, x)
    largest = max(float(b.abs().max()) for b in expected)  # some are 0 but for the rounding of others
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-5 * largest)


def test_attention_refuses_the_gradient_of_its_gradient() -> None:
    make, inputs = MODELS["llama"]
    model, x = make().eval(), inputs()
    with tk.use(model), pytest.raises(NotImplementedError, match=r"tk\.sdpa has no gradient of its gradient"):
        gradients_of_penalty(model, x)
