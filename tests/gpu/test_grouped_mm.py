"""grouped_mm: every config in every bucket, random groups, wrong ends, gradients, graphs."""

from __future__ import annotations

import random

import pytest
import torch

import tk

from .device import DEVICE
from .other_products import BF16, FP16, FP32, LETTERS, activated, draws, every_config, matrices, problem, size

KINDS = ((BF16, None), (BF16, FP32), (FP16, None))
ORDERS = ("nn", "nt", "tn", "tt", "ss")


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def groups(ends: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def part(kind: str, i: int, g: slice, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group i, which is `g` of the ragged dimension, of a, b and the result."""
    a, b, result = tensors
    if kind == "rows":
        return a[g], b[i], result[g]
    return (a[i], b[:, g], result[:, g]) if kind == "columns" else (a[:, g], b[g], result[i])


def check(kind: str, a, b, ends, bias, activation, out_dtype, result) -> str:  # type: ignore[no-untyped-def]
    """The first group that is wrong."""
    for i, g in enumerate(groups(ends)):
        x, y, found = part(kind, i, g, a, b, result)
        if found.numel() == 0:
            continue
        z = x.double() @ y.double()
        if bias is not None:
            z = z + (bias if bias.dim() == 1 else bias[i]).double()
        if said := problem(found, activated(z, activation), max(x.shape[1], 1), a, b, 2):
            return f"group {i} {g}: {said}"
    return ""


def by_config(a: torch.Tensor, b: torch.Tensor, ends: list[int]):  # type: ignore[no-untyped-def]
    """A plain call of a config."""
    return lambda config: torch.ops.tk.grouped_mm(a, b, offsets(ends), None, False, 0, None, -1, config)


def operands(kind: str, total: int, count: int, m: int, n: int, k: int, dtype: torch.dtype, order: str, odd: bool):  # type: ignore[no-untyped-def]
    shapes = {"rows": ((total, k), (count, k, n)), "columns": ((count, m, k), (k, total)),
              "inner": ((m, total), (total, n))}[kind]  # fmt: skip
    return tuple(matrices(*s, dtype=dtype, letter=letter, odd=odd) for s, letter in zip(shapes, order, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ragged", ("rows", "columns", "inner"))
def test_every_config(ragged: str, order: str, kind: tuple[torch.dtype, torch.dtype | None]) -> None:
    dtype, out_dtype = kind
    wrong = []
    for total, m, n, k in ((800, 144, 272, 208), (130, 65, 33, 7)):
        ends = [total // 8, total // 8, total // 2 + 3, total - 9]
        for odd in (False, True):
            a, b = operands(ragged, total, len(ends), m, n, k, dtype, order, odd)
            for bias, activation in ((None, 0), (matrices(len(ends), n, dtype=dtype), 4)):
                if ragged == "columns" and bias is not None:
                    continue

                def call(config: int, a=a, b=b, ends=ends, bias=bias, activation=activation):  # type: ignore[no-untyped-def]
                    return torch.ops.tk.grouped_mm(a, b, offsets(ends), bias, False, activation, out_dtype, -1, config)

                for name, result in every_config(call):
                    if said := check(ragged, a, b, ends, bias, activation, out_dtype, result):
                        wrong.append(f"{total} {m}x{n}x{k}{' odd' if odd else ''} {name}: {said}")
    assert not wrong, "\n".join(wrong[:20])


def ends_of(rng: random.Random, total: int, count: int) -> list[int]:
    """Balanced, skewed, or with groups of no length."""
    how = rng.choice(("balanced", "skewed", "empty"))
    if how == "balanced":
        return [total * (i + 1) // count for i in range(count)]
    if how == "empty":
        return sorted(rng.choice((0, total // 3, total)) for _ in range(count))
    return sorted(rng.randint(0, total) for _ in range(count))


@pytest.mark.parametrize("chunk", range(4))
def test_random_groups(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"grouped {chunk}", 260):
        ragged = rng.choice(("rows", "rows", "columns", "inner"))
        dtype, out_dtype = rng.choice(KINDS)
        total, count = size(rng, 2048), rng.choice((1, 2, 3, 8, 17, 40))
        m, n, k = size(rng, 512), size(rng, 512), size(rng, 1024)
        order = rng.choice(LETTERS + "nn") + rng.choice(LETTERS + "tt")
        a, b = operands(ragged, total, count, m, n, k, dtype, order, rng.random() < 0.3)
        ends = ends_of(rng, total, count)
        bias = None if ragged == "columns" or rng.random() < 0.5 else matrices(count, n, dtype=dtype)
        activation = rng.randrange(5)
        result = torch.ops.tk.grouped_mm(a, b, offsets(ends), bias, False, activation, out_dtype)
        if said := check(ragged, a, b, ends, bias, activation, out_dtype, result):
            wrong.append(f"{ragged} {dtype} {total}: {m}x{n}x{k} {order} {ends[:6]}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("ends", ([15, 4, 90], [-7, 3, 64], [2**31 - 1, 0, -(2**31)], [20, 21, 50]), ids=str)
def test_nothing_outside_is_touched(ends: list[int]) -> None:
    """Whatever the ends, and by every config: neither beside the result nor after the last end."""
    a, b = matrices(64, 128), matrices(3, 128, 64, letter="t")
    for name, _ in every_config(by_config(a, b, ends)):
        memory = torch.full((192, 64), float("nan"), device=DEVICE, dtype=BF16)
        tk.grouped_mm(a, b, offs=offsets(ends), out=memory[64:128], config=None if name == "chosen" else name)
        last = max(min(max(end, 0), 64) for end in ends)
        assert memory[:64].isnan().all() and memory[64 + last :].isnan().all(), name


@pytest.mark.parametrize("ragged", ("rows", "columns", "inner"))
def test_gradients(ragged: str) -> None:
    ends = [40, 40, 111]
    a, b = (x.requires_grad_() for x in operands(ragged, 128, 3, 72, 80, 136, BF16, "nt", False))
    wide = [x.detach().double().requires_grad_() for x in (a, b)]
    result = tk.grouped_mm(a, b, offs=offsets(ends), activation="silu")
    seed = torch.randn(result.shape, device=DEVICE).to(BF16)
    result.backward(seed)
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for i, g in enumerate(groups(ends)):
        x, y, weight = part(ragged, i, g, *wide, seed)
        total = total + (torch.nn.functional.silu(x @ y) * weight.double()).sum()
    total.backward()
    for ours, exact in zip((a, b), wide, strict=True):
        assert ours.grad is not None and exact.grad is not None
        assert (ours.grad.double() - exact.grad).norm() / exact.grad.norm() < 1e-2


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_a_graph_reads_the_ends_anew() -> None:
    a, b = matrices(256, 128), matrices(4, 128, 64, letter="t")
    offs = offsets([64, 128, 192, 256])
    tk.grouped_mm(a, b, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tk.grouped_mm(a, b, offs=offs)
    ends = [0, 100, 101, 256]
    offs.copy_(offsets(ends))
    graph.replay()
    assert not check("rows", a, b, ends, None, 0, None, out)
