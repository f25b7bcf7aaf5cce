"""What goes by an element's place: random numbers, the same in every config and layout; and copies of more than 2^31
elements, whose places do not fit in 32 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from benchmarks import ops
from tk.generated import register
from tk.generated.records import GeneratedOp

from .device import DEVICE
from .op_cases import candidates, place

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")


def find(name: str) -> GeneratedOp:
    op = register.find(name)
    assert op is not None
    return op


def seed(value: int, device: str = DEVICE) -> Tensor:
    return torch.tensor(value, device=device)


# --- Random numbers ---

SHAPES = ((33, 64), (1000, 16), (7, 5, 33), (3, 4096), (4097,), (2, 3, 5, 128))
# Any layout that arguments may have; a result of several programs' shares too.
LAYOUTS = ("contiguous", "transposed", "pitch", "odd_pitch", "gaps")


def drawing(name: str, x: Tensor, offset: int, device: str = DEVICE) -> list[Any]:
    """Arguments of one of the package's ops that draw; x is what it reads, or fills."""
    key = seed(0x1234_5678_9ABC_DEF0, device)
    return {
        "dropout": [x, key, 0.3, offset],
        "dropout_add": [x, x, key, 0.3, offset],
        "fill_uniform": [x, key, offset],
        "fill_normal": [x, key, offset],
        "fill_integers": [x, key, -5, 1 << 40, offset],
    }[name]


def on_cpu(name: str, x: Tensor, offset: int) -> Tensor:
    return ops.run_tk(find(name), drawing(name, x.cpu().contiguous(), offset, "cpu"))[0]


@pytest.mark.parametrize("offset", [0, 3, 4, 2**33 + 8])
@pytest.mark.parametrize("name", ["dropout", "dropout_add", "fill_uniform", "fill_normal", "fill_integers"])
def test_the_same_numbers_in_every_config(name: str, offset: int) -> None:
    """Of every dtype, shape and layout: those of the CPU, and to the bit those of every other config."""
    dtypes = (torch.int64,) if name == "fill_integers" else (torch.bfloat16, torch.float16, torch.float32)
    rng = random.Random(name)
    wrong, tried = [], set()
    for dtype in dtypes:
        for shape in SHAPES:
            values = torch.ones(shape, device=DEVICE, dtype=dtype)
            expected = on_cpu(name, values, offset)
            first = None
            for layout in LAYOUTS:
                args = drawing(name, place(values, layout, rng), offset)
                for config in sorted({c.config for c in candidates(find(name), args)}):
                    (found,) = ops.run_tk(find(name), args, config)
                    first = found if first is None else first
                    tried.add(config)
                    near = torch.allclose(found.cpu().double(), expected.double(), rtol=1e-2, atol=1e-5)
                    if not torch.equal(found, first) or not near:
                        wrong.append((dtype, shape, layout, config))
    assert not wrong, f"{len(wrong)} wrong: {wrong[:8]}"
    assert len(tried) >= 2, "one config alone says nothing"


# --- More than 2^31 elements ---

ROWS, COLUMNS = 262_400, 8_192
AT = [0, 1, 131_071, 131_072, 262_143, 262_144, ROWS - 1]  # elements past 2^31 begin in row 262,144
needs_memory = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40e9,
    reason="needs a GPU with 40 GB",
)


@pytest.fixture
def huge():
    yield torch.empty(ROWS, COLUMNS, device=DEVICE, dtype=torch.bfloat16).normal_()
    torch.cuda.empty_cache()


@needs_memory
@pytest.mark.parametrize(
    ("name", "more"), [("cumsum", ()), ("gelu", (False,)), ("log_softmax", ()), ("sort", (False,))]
)
def test_rows_of_a_huge_tensor(name: str, more: tuple[Any, ...], huge: Tensor) -> None:
    each = COLUMNS // 64 if name == "sort" else 1  # rows of 64 are what a block sorts
    x = huge.view(ROWS * each, -1)
    results = ops.run_tk(find(name), [x, *more])
    at = [row * each + i for row in AT for i in {0, each - 1}]
    ops.judge(find(name), [x[at], *more], [r[at] for r in results])


@needs_memory
def test_two_huge_tensors(huge: Tensor) -> None:
    results = ops.run_tk(find("swiglu"), [huge, huge])
    ops.judge(find("swiglu"), [huge[AT], huge[AT]], [results[0][AT]])


@needs_memory
@pytest.mark.parametrize("name", ["dropout", "fill_uniform"])
def test_random_numbers_of_a_huge_tensor(name: str, huge: Tensor) -> None:
    """Each row is what it would be alone, that far on in the sequence."""
    op = find(name)
    if name == "fill_uniform":
        torch.ops.tk.fill_uniform(*drawing(name, huge, 0))
        result = huge
    else:
        (result,) = ops.run_tk(op, drawing(name, huge, 0))
    for row in AT:
        x = torch.empty_like(huge[row]) if name == "fill_uniform" else huge[row]
        (alone,) = ops.run_tk(op, drawing(name, x, row * COLUMNS))
        assert torch.equal(result[row], alone), row


@needs_memory
def test_rows_of_a_huge_table(huge: Tensor) -> None:
    at = torch.tensor([AT, AT[::-1]], device=DEVICE)
    found = tk.embedding(at, huge)
    assert torch.equal(found, huge[at])


@needs_memory
def test_a_huge_result_of_a_small_table() -> None:
    table = torch.randn(11, COLUMNS, device=DEVICE).bfloat16()
    at = torch.randint(0, 11, (ROWS,), device=DEVICE)
    found = tk.embedding(at, table)
    rows = torch.tensor(AT, device=DEVICE)
    assert torch.equal(found[rows], table[at[rows]])
    del found
    torch.cuda.empty_cache()


@needs_memory
def test_expanded_to_more_than_two_to_the_31() -> None:
    """Places of few elements that are read often: 64-bit products of rows and strides, and of rows alone."""
    row = torch.randn(1, COLUMNS, device=DEVICE).bfloat16()
    (found,) = ops.run_tk(find("silu"), [row.expand(ROWS, COLUMNS)])
    (once,) = ops.run_tk(find("silu"), [row])
    assert all(torch.equal(found[r], once[0]) for r in AT)
    del found
    torch.cuda.empty_cache()
