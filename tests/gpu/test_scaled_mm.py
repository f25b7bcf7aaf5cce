"""scaled_mm: every config in every bucket, random problems, accuracy beside torch's, graphs, static weights."""

from __future__ import annotations

import random

import pytest
import torch

import tk
from tk.config import STATIC_WEIGHTS
from tk.ops.scaled import reference

from .device import DEVICE
from .float8 import BF16, E4M3, E5M2, FP16, FP32, MAX_K, PAIRS, powers, problem, scales, whole
from .other_products import LETTERS, draws, every_config, size

ACTIVATIONS = ("none", "relu")  # of which both are exact


def call(arguments, fast: bool, activation: int, out_dtype: torch.dtype, config: int = -1) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """arguments: a, b, their scales and a bias."""
    return torch.ops.tk.scaled_mm(*arguments, fast, activation, out_dtype, -1, config)


@pytest.mark.parametrize("fast", (False, True), ids=("slow", "fast"))
@pytest.mark.parametrize("out_dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_config(pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype, fast: bool) -> None:
    rng, wrong, seen = random.Random(0), [], set()
    for m, n, k in ((800, 400, 656), (257, 1040, 144), (33, 272, 2048), (5, 528, 1936), (130, 65, 33)):
        for odd in (False, True):
            a, b = whole(m, k, dtype=pair[0], odd=odd), whole(k, n, dtype=pair[1], letter="t", odd=odd)
            for bias, activation in ((None, 0), (whole(1, n)[0].to(out_dtype), 1)):
                arguments = (a, b, *scales(rng, m, n), bias)
                exact = reference(*arguments, ACTIVATIONS[activation])  # type: ignore[arg-type]

                def one(config: int, arguments=arguments, activation=activation) -> torch.Tensor:  # type: ignore[no-untyped-def]
                    return call(arguments, fast, activation, out_dtype, config)

                for name, result in every_config(one):
                    seen.add(name)
                    if said := problem(result, exact):
                        wrong.append(f"{m}x{n}x{k}{' odd' if odd else ''} {name}: {said}")
    assert not wrong, "\n".join(wrong[:20])
    assert DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0) or len(seen) > 3, seen


@pytest.mark.parametrize("chunk", range(4))
def test_random_problems(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"scaled {chunk}", 300):
        m, n, k = size(rng, 1024), size(rng, 1024), size(rng, MAX_K)
        pair, out_dtype, fast = rng.choice(PAIRS), rng.choice((BF16, FP16, FP32)), rng.random() < 0.5
        order = rng.choice(("nt", "nt", "nt", rng.choice(LETTERS) + rng.choice(LETTERS)))
        odd = rng.random() < 0.3
        a, b = (
            whole(*shape, dtype=dtype, letter=letter, odd=odd)
            for shape, dtype, letter in zip(((m, k), (k, n)), pair, order, strict=True)
        )
        bias = None if rng.random() < 0.5 else whole(1, n)[0].to(out_dtype)
        activation = rng.randrange(2)
        arguments = (a, b, *scales(rng, m, n), bias)
        result = call(arguments, fast, activation, out_dtype)
        if said := problem(result, reference(*arguments, ACTIVATIONS[activation])):  # type: ignore[arg-type]
            wrong.append(f"{pair} {out_dtype} {'fast' if fast else 'slow'} {m}x{n}x{k} {order} odd {odd}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize(
    "shape", ((1, 16, 16), (1, 4096, 32), (4096, 8, 16), (3, 1, 1), (16, 24, 1), (64, 40, 65536)), ids=str
)
@pytest.mark.parametrize("fast", (False, True), ids=("slow", "fast"))
def test_sizes_at_the_edges(shape: tuple[int, int, int], fast: bool) -> None:
    m, n, k = shape
    a, b = whole(m, k), whole(k, n, letter="t")
    if k > MAX_K:  # few enough that are not 0
        a = (a.float() * (torch.rand(k, device=DEVICE) < 0.02)).to(E4M3)
    arguments = (a, b, powers(m, 1), powers(1, n), None)
    assert not problem(call(arguments, fast, 0, FP32), reference(*arguments))


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
def test_activations(activation: str) -> None:
    arguments = (whole(200, 64), whole(64, 144, letter="t"), powers(200, 1) / 16, powers(1, 144), None)
    result = tk.scaled_mm(*arguments, out_dtype=FP32, activation=activation)  # type: ignore[arg-type]
    exact = reference(*arguments, activation)  # type: ignore[arg-type]
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


def test_every_number_of_both_formats() -> None:
    """Times 1, alone in its row: through the fast kernels and the general one."""
    for dtype, other in ((E4M3, E5M2), (E5M2, E4M3)):
        codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype)
        finite = torch.where(codes.float().isfinite(), codes.float(), 0).to(dtype)
        for width in (32, 33):
            a = torch.zeros(256, width, device=DEVICE).to(dtype)
            a[:, 0] = finite
            column = torch.zeros(width, 16, device=DEVICE)
            column[0] = 1
            one = torch.ones((), device=DEVICE)
            for fast in (False, True):
                result = tk.scaled_mm(a, column.t().contiguous().t().to(other), one, one, None, FP32, fast)
                assert torch.equal(result, finite.float()[:, None].expand(256, 16)), (dtype, width, fast)
        a[:, 0] = codes
        result = tk.scaled_mm(a, column.t().contiguous().t().to(other), one, one, None, FP32)
        assert torch.equal(result[:, 0].isfinite(), codes.float().isfinite())


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's kernels are the measure")
@pytest.mark.parametrize("rowwise", (False, True), ids=("tensor", "rows"))
@pytest.mark.parametrize("fast", (False, True), ids=("slow", "fast"))
def test_no_less_accurate_than_torch(fast: bool, rowwise: bool) -> None:
    torch.manual_seed(0)
    for m, n, k in ((512, 1024, 4096), (16, 2048, 4096), (1024, 512, 16384)):
        a, b = torch.randn(m, k, device=DEVICE).to(E4M3), torch.randn(n, k, device=DEVICE).to(E4M3).t()
        one = torch.ones((), device=DEVICE)
        both = (torch.rand(m, 1, device=DEVICE), torch.rand(1, n, device=DEVICE)) if rowwise else (one, one)
        exact = reference(a, b, *both)
        ours = tk.scaled_mm(a, b, *both, use_fast_accum=fast)
        theirs = torch._scaled_mm(a, b, *both, out_dtype=BF16, use_fast_accum=fast)
        errors = [(x.double() - exact).abs().mean().item() for x in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1], (m, n, k, errors)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_graphs_of_every_config() -> None:
    """Also of those whose programs make tensor maps in scratch memory."""
    a, b = whole(64, 256), whole(256, 272, letter="t")
    both = (powers(64, 1), powers(1, 272))

    def one(config: int) -> torch.Tensor:
        return call((a, b, *both, None), True, 0, BF16, config)

    exact = reference(a, b, *both)
    names = [name for name, _ in every_config(one)]
    assert torch.cuda.get_device_capability() != (9, 0) or any("device_maps" in name for name in names), names
    for name in names:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tk.scaled_mm(a, b, *both, use_fast_accum=True, config=None if name == "chosen" else name)
        for _ in range(2):
            out.zero_()
            graph.replay()
            assert not problem(out, exact), name


def test_static_weights_see_what_was_written_before() -> None:
    """Activations and their scales come from the kernels ahead; b alone is read early."""
    b = whole(1024, 1024, letter="t")
    one = torch.ones((), device=DEVICE)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    for rows in (4, 60, 200):
        a, rows_scale = whole(rows, 1024), powers(rows, 1)
        exact = reference(a, b, rows_scale, one)
        for _ in range(10):
            late_a, late_scale = a.view(torch.uint8).clone().view(E4M3), rows_scale.clone()
            result = torch.ops.tk.scaled_mm(late_a, b, late_scale, one, None, False, 0, FP32, -1, -1, STATIC_WEIGHTS)
            assert not problem(result, exact)


def test_batch_invariant() -> None:
    b = torch.randn(512, 1024, device=DEVICE).to(E4M3).t()
    a = torch.randn(300, 1024, device=DEVICE).to(E4M3)
    scale_a, scale_b = torch.rand(300, 1, device=DEVICE), torch.rand(1, 512, device=DEVICE)
    with tk.config.batch_invariant():
        whole_result = tk.scaled_mm(a, b, scale_a, scale_b)
        for rows in (1, 7, 64, 150):
            assert torch.equal(tk.scaled_mm(a[:rows], b, scale_a[:rows], scale_b), whole_result[:rows])


@pytest.mark.skipif(DEVICE == "cpu", reason="its tensors lie on two devices")
def test_devices_that_differ() -> None:
    a, b, one = whole(16, 16), whole(16, 16, letter="t"), torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="scale_a on cpu"):
        tk.scaled_mm(a, b, one.cpu(), one)
    with pytest.raises(ValueError, match="b on cpu"):
        tk.scaled_mm(a, b.cpu(), one, one)
