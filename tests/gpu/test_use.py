"""tk.use on CUDA: models through the kernels, their gradients, CUDA graphs, compiled and exported."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from use_models import MODELS, OPS, Llama, calls, ops_of, tokens

import tk
from benchmarks.convolutions import allow_tf32
from tk.dropin.functions import stand_ins
from tk.dropin.replace import _target

from .device import DEVICE

pytestmark = pytest.mark.usefixtures("own_cache")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-3}


def to_device(x: Any, dtype: torch.dtype) -> Any:
    return x.to(DEVICE, dtype if x.is_floating_point() else x.dtype)


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, the same in float64, and an input."""
    make, inputs = MODELS[name]
    model = make().to(DEVICE, dtype).eval()
    return model, copy.deepcopy(model).double(), to_device(inputs(), dtype)


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    """Of convolutions, for which it is the default: cuDNN's choice for small ones may be an algorithm without it."""
    with allow_tf32(False):
        yield


def is_as_close(found: Tensor, torchs: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """No farther from float64 than twice as far as torch is, or than what the dtype makes likely."""
    scale = expected.abs().max()
    error, of_torch = ((x.double() - expected).abs().max() / scale for x in (found, torchs))
    assert error <= max(2 * float(of_torch), TOLERANCE[dtype])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_measured_on_a_sample(name: str, training: bool) -> None:
    """Both sides of every class have times of the host and of the device, and the model is as it was."""
    model, reference, x = made(name, torch.bfloat16)
    model.train(training)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(3)
    numbers = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    report = tk.use(model, sample=x)
    assert torch.equal(torch.rand(4, device=DEVICE), numbers)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert {m.op for m in report.measured} >= set(OPS[name]) - {"flex_attention"}
    for m in report.measured:
        assert m.training is not None
        for _, one in m.passes:
            assert min(one.tk.device, one.torch.device) > 0
    if not training:
        torchs = made(name, torch.bfloat16)[0]
        torchs.load_state_dict(state)
        is_as_close(model(x), torchs(x), reference(wide(x)), torch.bfloat16)
    again = made(name, torch.bfloat16)[0]
    tk.use(again)
    assert calls(again, x) == calls(model.eval(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dtype: torch.dtype) -> None:
    model, reference, x = made(name, dtype)
    with torch.no_grad():
        torchs, expected = model(x), reference(wide(x))
        with tk.use(model, only_faster=False):
            assert calls(model, x) == OPS[name]
            is_as_close(model(x), torchs, expected, dtype)
        assert torch.equal(model(x), torchs)


@pytest.mark.parametrize("name", MODELS)
def test_only_what_is_faster(name: str) -> None:
    """Agrees whatever is left to torch."""
    model, reference, x = made(name, torch.bfloat16)
    with torch.no_grad():
        torchs, expected = model(x), reference(wide(x))
        with tk.use(model):
            found = calls(model, x)
            assert all(count <= OPS[name][op] for op, count in found.items())
            is_as_close(model(x), torchs, expected, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    model, reference, x = made(name, torch.float32)

    def gradients(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        m.zero_grad()
        m(x).square().mean().backward()
        return {key: p.grad.clone() for key, p in m.named_parameters() if p.grad is not None}

    torchs, expected = gradients(model, x), gradients(reference, wide(x))
    with tk.use(model, only_faster=False):
        found = gradients(model, x)
    assert found.keys() == torchs.keys()
    for key, gradient in expected.items():
        is_as_close(found[key], torchs[key], gradient + 1e-12, torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    model, reference, x = made(name, torch.float32)
    with torch.no_grad():
        expected = reference(wide(x))
        with torch.autocast(DEVICE, torch.bfloat16):
            torchs = model(x)
            with tk.use(model, only_faster=False):
                assert calls(model, x)
                found = model(x)
        assert found.dtype == torchs.dtype
        is_as_close(found, torchs, expected, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_and_exported(name: str) -> None:
    model, _, x = made(name, torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad(), tk.use(model, only_faster=False):
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x), expected, rtol=5e-2, atol=5e-2)
        program = torch.export.export(model, (x,))
        assert_close(program.module()(x), expected, rtol=5e-2, atol=5e-2)
        assert len(ops_of(program)) == sum(OPS[name].values())


def test_llama_compiled_by_inductor() -> None:
    model, x = Llama().to(DEVICE, torch.bfloat16), tokens().to(DEVICE)
    torch._dynamo.reset()
    with torch.no_grad(), tk.use(model, only_faster=False):
        expected = model(x)
        assert_close(torch.compile(model, fullgraph=True)(x), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA graphs")
@pytest.mark.parametrize("only_faster", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs(name: str, only_faster: bool) -> None:
    model, _, x = made(name, torch.bfloat16)
    with torch.no_grad(), tk.use(model, only_faster=only_faster):
        expected = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        for _ in range(100):
            graph.replay()
        assert_close(out, expected, rtol=5e-2, atol=5e-2)  # small calls are torch's but in the graph
        if x.is_floating_point():
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert_close(out, model(x), rtol=5e-2, atol=5e-2)


def random_call(rng: random.Random) -> tuple[Any, tuple[Any, ...]]:
    """A function of torch, and arguments: odd sizes, strides, empty ones."""
    rows, k, n = (rng.choice([0, 1, 3, 8, 17, 64, 65, 130]) for _ in range(3))
    dtype = rng.choice(DTYPES)

    def randn(*shape: int) -> Tensor:
        spread = [s * rng.choice([1, 1, 2]) for s in shape]
        return torch.randn(spread, device=DEVICE, dtype=dtype)[tuple(slice(None, s) for s in shape)]

    k1 = max(k, 1)
    return rng.choice(
        [
            (F.linear, (randn(2, rows, k1), randn(n, k1), rng.choice([None, randn(n)]))),
            (torch.matmul, (randn(3, rows, k1), randn(3, k1, n))),
            (torch.addmm, (randn(n), randn(rows, k1), randn(k1, n))),
            (F.layer_norm, (randn(rows, k1), (k1,), randn(k1), randn(k1))),
            (F.rms_norm, (randn(rows, k1), (k1,), randn(k1))),
            (F.group_norm, (randn(rows, 8, k1), 4, randn(8), randn(8))),
            (F.gelu, (randn(rows, k1),)),
            (F.silu, (randn(rows, k1),)),
            (F.softmax, (randn(rows, k1, 5), rng.choice([0, 1, 2]))),
            (F.conv2d, (randn(2, 8, 9, 9), randn(16, 8, 3, 3), None, 1, rng.choice([0, 1]))),
            (F.scaled_dot_product_attention, (randn(1, 2, max(rows, 1), 64), *(randn(1, 2, 40, 64) for _ in range(2)))),
        ]
    )


def test_random_calls() -> None:
    """A thousand calls of the stand-ins: torch's shape and dtype, and as close to float64."""
    rng = random.Random(0)
    functions = stand_ins(_target(nn.Linear(1, 1, device=DEVICE), only_faster=False))
    through_tk = 0
    with torch.no_grad():
        for i in range(1000):
            original, args = random_call(rng)
            torchs = original(*args)
            found = functions[original].function(*args)
            assert found.shape == torchs.shape and found.dtype == torchs.dtype, (i, original)
            through_tk += i % 10 == 0 and bool(calls(functions[original].function, *args))
            if found.numel():
                exact = original(*(a.double() if isinstance(a, Tensor) else a for a in args))
                is_as_close(found, torchs, exact, found.dtype)
    assert through_tk > 60


def test_the_report_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double(), nn.GELU()).to(DEVICE)
    report = {r.path: r for r in tk.use(model, only_faster=False)}
    assert report["0"].replaced and report["2"].replaced
    assert report["1"].reason.startswith("weight is float64")


def test_moved_after_use() -> None:
    model = nn.Linear(64, 64).to(DEVICE)
    tk.use(model, only_faster=False)
    if DEVICE == "cuda":
        model.cpu()
        assert calls(model, torch.randn(3, 64)) == {}
