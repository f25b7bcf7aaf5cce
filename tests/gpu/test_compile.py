"""torch.compile, export and opcheck with CUDA tensors."""

import pytest
import torch

import tk

from .device import DEVICE


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h = tk.linear(x, w1, bias, activation="gelu_tanh")
    return torch.relu(tk.mm(h, w2) * 0.5)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, ...]:
    return randn(40, 256), randn(512, 256) / 16, randn(512, 128) / 16, randn(512)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
def test_compiled_agrees_with_eager(tensors: tuple[torch.Tensor, ...], options: dict) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, **options)
    with torch.inference_mode():
        for rows in (40, 41, 300):
            x = randn(rows, 256)
            for _ in range(3):  # reduce-overhead captures on the second call
                torch.testing.assert_close(compiled(x, *tensors[1:]), block(x, *tensors[1:]), rtol=1e-2, atol=1e-2)


def test_compiled_gradients(tensors: tuple[torch.Tensor, ...]) -> None:
    torch._dynamo.reset()

    def gradients(function) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        return list(torch.autograd.grad(function(*leaves).sum(), leaves))

    compiled = gradients(torch.compile(block, fullgraph=True))
    for ours, eager in zip(compiled, gradients(block), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", ["mm", "addmm", "linear"])
def test_opcheck(op: str, tensors: tuple[torch.Tensor, ...]) -> None:
    x, w, _, bias = (t.float().requires_grad_() for t in tensors)
    arguments = {"mm": (x, w.t(), bias, 3), "addmm": (bias, x, w.t(), 0.5, 2.0, 2), "linear": (x, w, bias, 4)}[op]
    torch.library.opcheck(getattr(torch.ops.tk, op).default, arguments, rtol=1e-2, atol=1e-2)


def test_exported_program_runs(tensors: tuple[torch.Tensor, ...]) -> None:
    class Block(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            return block(*arguments)

    program = torch.export.export(Block(), tensors)
    assert torch.equal(program.module()(*tensors), block(*tensors))
