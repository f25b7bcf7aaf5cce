"""What users write first, on a GPU: against the same op on the CPU, gradients too.

Built here where Triton is; TK_TEST_PACKS names a folder with worded_ops.tkpack built elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map_only

import tk

from .device import DEVICE, build

FILE = Path(__file__).with_name("worded_ops.py")
pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    if given := os.environ.get("TK_TEST_PACKS"):
        tk.load_pack(Path(given) / "worded_ops.tkpack")
        return
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("packs") / "worded_ops.tkpack"
    tk.load_pack(build(FILE, path))


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


SHAPES = ((3,), (64, 65), (), (4096,), (3, 5000), (0,))
CALLS: dict[str, Any] = {
    "gpu_power": (r(7, 129), 1.7),
    "gpu_norm": (r(33, 1000), 3.0),
    "gpu_huber": (r(65, 100), r(65, 100), 0.7),
    "gpu_smoothed": (r(40, 130), torch.randint(0, 130, (40,)), 0.1),
    "gpu_pooled": (r(2, 3, 17, 22),),
    "gpu_padded": (r(9, 70),),
    "gpu_cumprod": (r(9, 700).masked_fill(torch.rand(9, 700) < 0.01, 0.0),),
    "gpu_digamma": (r(5, 300) * 4,),
    "gpu_deviation": (r(70, 1).expand(70, 5000).contiguous(),),  # of equal numbers, whose products a compiler contracts
    "gpu_gcd": (torch.randint(-(10**12), 10**12, (500,)), torch.randint(0, 10**6, (500,))),
    "gpu_halves": (r(6, 130, dtype=torch.float16),),
    "gpu_filtered": (r(300, 3),),
    "gpu_six": (r(2, 3, 4, 5, 6, 7).transpose(0, 5).contiguous().transpose(0, 5),),
    "gpu_times": ([r(*s) for s in SHAPES], [r(*s) for s in SHAPES], torch.tensor(1.5), 2.0),
    "gpu_clip_": ([r(*s) for s in SHAPES], 1.0),
    "gpu_centred": ([r(*s) for s in SHAPES[:2]] + [r(70, 80).t(), r(3, 5000)],),
}


def moved(args: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().clone().to(device), args)


@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str) -> None:
    """Results, and what is written in place; the same bits again."""
    function = getattr(torch.ops.tk, name)
    here, there, again = (moved(CALLS[name], d) for d in ("cpu", DEVICE, DEVICE))
    expected, found, once_more = function(*here), function(*there), function(*again)
    for a, e in zip(tree_flatten([found, there])[0], tree_flatten([expected, here])[0], strict=True):
        if isinstance(a, Tensor):
            assert a.shape == e.shape and a.stride() == e.stride()
            assert_close(a.cpu(), e, rtol=2e-3, atol=2e-3, equal_nan=True)
    for a, b in zip(tree_flatten([found, there])[0], tree_flatten([once_more, again])[0], strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("shape", [(6, 144), (700, 1000), (3, 40000), (1, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_held_against_itself(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Ties depend on the rounding of what leads there, so nothing is held against torch."""
    x, a = r(*shape, dtype=dtype).to(DEVICE), (r(shape[1]).abs() + 0.5).to(DEVICE, dtype)
    kept, largest, first, past = torch.ops.tk.gpu_kept(x, a)
    assert (kept.sum(-1) >= 5).all()
    assert largest.any(0).all()
    assert (first < past).all()


@pytest.mark.parametrize("shape", [(6, 144), (700, 1000), (3, 40000)])
def test_a_maximum_has_a_gradient(shape: tuple[int, int]) -> None:
    x, a = r(*shape).to(DEVICE).requires_grad_(), r(shape[1]).to(DEVICE).requires_grad_()
    torch.ops.tk.gpu_peak(x, a).backward()
    exact, weight = (t.detach().double().requires_grad_() for t in (x, a))
    (exact * weight + exact).var(-1).amax().backward()
    assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert_close(a.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


def test_trigamma_beside_its_poles() -> None:
    """Where torch's own in fp32 is a hundredth off."""
    x = (r(5, 300) * 4).to(DEVICE).requires_grad_()
    torch.ops.tk.gpu_digamma(x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad.double(), torch.special.polygamma(1, x.detach().double()), rtol=1e-4, atol=1e-4)


ELSEWHERE = {"gpu_deviation", "gpu_gcd", "gpu_times", "gpu_clip_", "gpu_centred", "gpu_digamma"}


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ELSEWHERE])
def test_gradients(name: str) -> None:
    found = []
    for device in ("cpu", DEVICE):
        args = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in moved(CALLS[name], device)]  # fmt: skip
        results = [y for y in tree_flatten(getattr(torch.ops.tk, name)(*args))[0] if y.requires_grad]
        sources = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        weights = [torch.linspace(-1, 1, y.numel(), device=device).reshape(y.shape).to(y.dtype) for y in results]
        found.append(torch.autograd.grad(results, sources, weights))
    for a, e in zip(found[1], found[0], strict=True):
        assert_close(a.cpu(), e, rtol=3e-3, atol=3e-3, equal_nan=True)


def test_many_tensors_in_a_captured_graph() -> None:
    """More places than a block looks at, and two graphs over the same list."""
    xs = [torch.full((5,), 1.0, device=DEVICE) for _ in range(1500)]
    torch.ops.tk.gpu_clip_(xs, 1e9)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = torch.ops.tk.gpu_clip_(xs, 1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(total.cpu(), torch.tensor(7500.0).sqrt())
    assert_close(torch.stack(xs).norm().cpu(), torch.tensor(1.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_casts_of_what_no_integer_holds(dtype: torch.dtype) -> None:
    """Against eager on the same device: C leaves them open, and the CPU's differ."""
    powers = [
        sign * 2.0**e * f for e in (7, 8, 15, 16, 31, 32, 33, 62, 63, 64, 70) for f in (1, 1.2) for sign in (1, -1)
    ]
    special = [float("inf"), -float("inf"), float("nan"), 1e10, -1e10, 3e9, -3e9, 0.5, -0.5, 300.7, -300.7]
    x = torch.tensor([*powers, *special], dtype=torch.float64).to(dtype).to(DEVICE)
    for found in torch.ops.tk.gpu_casts(x):
        assert torch.equal(found, x.to(found.dtype)), found.dtype
