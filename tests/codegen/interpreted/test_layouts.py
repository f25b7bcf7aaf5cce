"""Layouts that are drawn: dimensions in any order in memory, with gaps, steps and offsets, for every variant that a
call can get.

TK_LAYOUTS_SEED repeats a run; every failure names its own seed."""

from __future__ import annotations

from random import Random

import host
import pytest
import torch
import triton
import triton.language as tl
from drawn_layouts import SEED, placed
from test_ops import check, generated

from tk.codegen import device
from tk.codegen.tile import LAYOUTS, is_for


@pytest.fixture(autouse=True)
def _seed_is_printed() -> None:
    print(f"TK_LAYOUTS_SEED={SEED}")


def drawn_shape(random: Random, rank: int) -> tuple[int, ...]:
    sizes = [random.choice([1, 2, 3, 5, 7, 16, 33]) for _ in range(rank - 1)]
    last = random.choice([1, 3, 16, 48, 64, 130])
    while len(sizes) and torch.Size(sizes).numel() > 120:
        sizes[sizes.index(max(sizes))] = 2
    shape = [*sizes, last]
    random.shuffle(shape)
    return tuple(shape)


@pytest.mark.parametrize(
    "name", ["scaled_gelu", "softmax", "add_rms_norm", "layer_norm", "column_sum", "middle", "total"]
)
@pytest.mark.parametrize("number", range(3))
def test_any_layout(name: str, number: int) -> None:
    random = Random(f"{SEED} {name} {number}")
    # More than three leading dimensions may have to be copied before the kernel, and all of total's lead.
    rank = {"column_sum": 2, "middle": 3}.get(name) or random.choice([2, 3] if name == "total" else [2, 3, 4])
    shape = drawn_shape(random, rank)
    dtype = (
        random.choice([torch.float32, torch.bfloat16])
        if name not in ("column_sum", "middle", "total")
        else torch.float32
    )
    x = placed(random, shape, dtype)
    of_row = [placed(random, shape[-1:], dtype) for _ in range(2)]
    more = {
        "scaled_gelu": (of_row[0], 0.7), "add_rms_norm": (placed(random, shape, dtype), of_row[0], 1e-5),
        "layer_norm": (*of_row, 1e-5),
    }.get(name, ())  # fmt: skip
    print(f"{name} of {shape} with strides {x.stride()}, {dtype}")
    check(name, x, *more)


def variants(name: str, x: torch.Tensor, *more: object) -> set[str]:
    return {variant.split()[0] for variant, _ in host.run_all(generated(name), x, *more)}


@pytest.mark.parametrize(
    ("layout", "name", "x"),
    [
        ("pitched", "softmax", torch.randn(4, 2, 80)[..., :64].transpose(0, 1)[:, ::2]),
        ("gathered", "softmax", torch.randn(4, 5, 80)[:3, ::2, 1:62]),
        ("columns", "softmax", torch.randn(3, 40, 5).transpose(1, 2)),
        ("columns", "column_sum", torch.randn(40, 33).t()),
    ],
)
def test_no_layout_is_left_to_the_general_kernel(layout: str, name: str, x: torch.Tensor) -> None:
    assert layout in variants(name, x)
    check(name, x)


def test_a_layout_is_there_where_it_says_something() -> None:
    (total,), (softmax,) = (generated(n).graphs[0].kernels for n in ("total", "softmax"))
    assert [x.name for x in LAYOUTS if is_for(softmax, x)] == [x.name for x in LAYOUTS]
    assert [x.name for x in LAYOUTS if is_for(total, x)] == ["aligned", "rows", "strided"]


@triton.jit
def _divide(x, out, n, magic, count):
    at = tl.arange(0, 64)
    tl.store(out + at, device.divided(tl.load(x + at, mask=at < count, other=0), n, magic), mask=at < count)


@pytest.mark.parametrize("bits", [32, 64])
def test_division_by_multiplication(bits: int) -> None:
    """At the ends of what it takes, and around multiples."""
    most = 2**31 - 1 if bits == 32 else 2**54 - 1
    random = Random(f"{SEED} {bits}")
    drawn = [random.randrange(1, 1 << random.randrange(1, bits - 10)) for _ in range(40)]
    for n in [1, 2, 3, 7, 2**15 - 1, 2**16, 2**30 + 1, 2**31 - 1, *drawn]:
        if n > most:
            continue
        magic = ((1 << (31 if bits == 32 else 55)) - 1) // n
        multiples = [k * n + d for k in (1, 2, most // n, random.randrange(most // n + 1)) for d in (-1, 0, 1)]
        numbers = [x for x in [0, 1, most - 1, most, *multiples] if 0 <= x <= most]
        x = torch.tensor(numbers, dtype=torch.int32 if bits == 32 else torch.int64)
        out = torch.empty_like(x)
        _divide[1,](x, out, n, magic, len(numbers))
        assert out.tolist() == [v // n for v in numbers], n
