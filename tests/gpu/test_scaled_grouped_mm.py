"""scaled_grouped_mm: every config, random groups, wrong ends, graphs."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

import tk
from tk.ops.scaled import reference

from .device import DEVICE
from .float8 import BF16, E4M3, FP16, FP32, MAX_K, PAIRS, powers, problem, whole
from .other_products import LETTERS, draws, every_config, size
from .test_grouped_mm import ends_of, groups, offsets

ACTIVATIONS = ("none", "relu")


def call(arguments, ends: list[int], bias, fast: bool, activation: int, out_dtype, config: int = -1) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """arguments: a, b and their scales."""
    return torch.ops.tk.scaled_grouped_mm(*arguments, offsets(ends), bias, fast, activation, out_dtype, -1, config)


def check(arguments, ends: list[int], bias, activation: int, result: torch.Tensor) -> str:  # type: ignore[no-untyped-def]
    """The first group that is wrong."""
    a, b, scale_a, scale_b = arguments
    for i, g in enumerate(groups(ends)):
        of_group = bias[i] if bias is not None and bias.dim() == 2 else bias
        exact = reference(a[g], b[i], scale_a[g, None], scale_b[i], of_group, ACTIVATIONS[activation])  # type: ignore[arg-type]
        if said := problem(result[g], exact):
            return f"group {i} {g}: {said}"
    return ""


def operands(total: int, count: int, n: int, k: int, pair=(E4M3, E4M3), order: str = "nt", odd: bool = False):  # type: ignore[no-untyped-def]
    a = whole(total, k, dtype=pair[0], letter=order[0], odd=odd)
    b = whole(count, k, n, dtype=pair[1], letter=order[1], odd=odd)
    return a, b, powers(total), powers(count, n)


@pytest.mark.parametrize("fast", (False, True), ids=("slow", "fast"))
@pytest.mark.parametrize("out_dtype", (BF16, FP16, FP32), ids=str)
def test_every_config(out_dtype: torch.dtype, fast: bool) -> None:
    wrong, seen = [], set()
    for total, n, k in ((800, 272, 208), (1500, 400, 1936), (130, 33, 7)):
        ends = [total // 8, total // 8, total // 2 + 3, total - 9]
        for odd in (False, True):
            arguments = operands(total, len(ends), n, k, odd=odd)
            for bias, activation in ((None, 0), (whole(len(ends), n).to(out_dtype), 1)):
                one = partial(call, arguments, ends, bias, fast, activation, out_dtype)
                for name, result in every_config(one):
                    seen.add(name)
                    if said := check(arguments, ends, bias, activation, result):
                        wrong.append(f"{total} {n}x{k}{' odd' if odd else ''} {name}: {said}")
    assert not wrong, "\n".join(wrong[:20])
    assert DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0) or len(seen) > 2, seen


@pytest.mark.parametrize("chunk", range(4))
def test_random_groups(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"scaled grouped {chunk}", 260):
        total, count = size(rng, 1024), rng.choice((1, 2, 3, 8, 17, 40))
        n, k = size(rng, 512), size(rng, MAX_K // 2)
        order = rng.choice(("nt", "nt", "nt", rng.choice(LETTERS) + rng.choice(LETTERS)))
        pair = rng.choice((*PAIRS, (E4M3, E4M3), (E4M3, E4M3)))
        arguments = operands(total, count, n, k, pair, order, rng.random() < 0.3)
        ends, out_dtype, fast = ends_of(rng, total, count), rng.choice((BF16, BF16, FP16, FP32)), rng.random() < 0.5
        bias = rng.choice((None, whole(count, n).to(out_dtype), whole(1, n)[0].to(out_dtype)))
        activation = rng.randrange(2)
        result = call(arguments, ends, bias, fast, activation, out_dtype)
        if said := check(arguments, ends, bias, activation, result):
            wrong.append(f"{pair} {out_dtype} {total}: {n}x{k} {order} {ends[:6]}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("ends", ([15, 4, 90], [-7, 3, 64], [2**31 - 1, 0, -(2**31)], [20, 21, 50]), ids=str)
def test_nothing_outside_is_touched(ends: list[int]) -> None:
    arguments = operands(64, 3, 64, 128)
    for name, _ in every_config(partial(call, arguments, ends, None, False, 0, BF16)):
        memory = torch.full((192, 64), float("nan"), device=DEVICE, dtype=BF16)
        config = None if name == "chosen" else name
        tk.scaled_grouped_mm(*arguments, offs=offsets(ends), out=memory[64:128], config=config)
        last = max(min(max(end, 0), 64) for end in ends)
        assert memory[:64].isnan().all() and memory[64 + last :].isnan().all(), name


@pytest.mark.skipif(DEVICE == "cpu", reason="torch has it on CUDA alone")
def test_as_torchs() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has it on Hopper alone")
    ends = [128, 128, 300, 512]
    a, b = torch.randn(512, 1024, device=DEVICE).to(E4M3), torch.randn(4, 256, 1024, device=DEVICE).to(E4M3).mT
    scale_a, scale_b = torch.rand(512, device=DEVICE), torch.rand(4, 256, device=DEVICE)
    for fast in (False, True):
        theirs = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offsets(ends), out_dtype=BF16, use_fast_accum=fast)
        ours = tk.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offsets(ends), use_fast_accum=fast)
        assert (ours.float() - theirs.float()).norm() / theirs.float().norm() < 3e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_a_graph_reads_the_ends_anew() -> None:
    arguments = operands(256, 4, 64, 128)
    offs = offsets([64, 128, 192, 256])
    tk.scaled_grouped_mm(*arguments, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.scaled_grouped_mm(*arguments, offs=offs)
    ends = sorted(random.Random(0).randint(0, 256) for _ in range(4))
    offs.copy_(offsets(ends))
    graph.replay()
    assert not check(arguments, ends, None, 0, out)
