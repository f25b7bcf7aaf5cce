"""kernels/int4: every kernel and config in fp16 (the interpreter's bf16 `tl.dot` is wrong) against exact weights."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch

from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import Family
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.int4 import few_rows, gemv
from tk.kernels.int4.family import FAMILIES
from tk.kernels.int4.op import DEQUANTIZE, OP

from . import without_layouts
from .launcher import describe, failed_constraint, run
from .test_mm import ACTIVATE, ROUNDING, name

# Those of few rows are Gluon's.
_FOLDER = tempfile.TemporaryDirectory()
GEMV, FEW_ROWS = (
    without_layouts.load(
        f"int4_{module.__name__.rpartition('.')[2]}_without_layouts", Path(module.__file__), Path(_FOLDER.name)
    )
    for module in (gemv, few_rows)
)
KERNELS = (
    *GEMV.KERNELS,
    *FEW_ROWS.KERNELS,
    *(k for f in FAMILIES for k in f.kernels if k not in (*gemv.KERNELS, *few_rows.KERNELS)),
)
VARIANTS = [
    v
    for op in (OP, DEQUANTIZE)
    for v in enumerate_grid(Family(op, tuple(k for k in KERNELS if k.op is op), lambda *_: True), 90).variants
    if v.point.dtype == "fp16"
]
PRODUCTS = [v for v in VARIANTS if v.kernel.op is OP]
EXTREMES = {"random": (0, 16), "lowest": (0, 1), "highest": (15, 16)}


def packed(k: int, n: int, values: str = "random") -> tuple[torch.Tensor, torch.Tensor]:
    """b, and the values that it holds."""
    q = torch.randint(*EXTREMES[values], (k, n), dtype=torch.uint8)
    return q[::2] | q[1::2] << 4, q


def scaling(group: int, k: int, n: int, zeros: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    scales = (torch.rand(k // group, n) + 0.5).half()
    return scales, (torch.rand(k // group, n) * 15).half() if zeros else None


def exact(q: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return q.double() - 8
    group = q.shape[0] // scales.shape[0]
    zero = 8.0 if zeros is None else zeros.double().repeat_interleave(group, 0)
    return (q.double() - zero) * scales.double().repeat_interleave(group, 0)


def on_words(variant: Variant) -> bool:
    return variant.kernel.name not in ("int4_general",) and variant.point.axes.get("aligned", True)


def columns_of(x: torch.Tensor, step: int) -> torch.Tensor:
    """The same numbers, `step` apart."""
    return x.repeat_interleave(step, 1)[:, ::step]


def check(v: Variant, m: int, n: int, k: int, group: int | None, zeros: bool = False, values: str = "random") -> None:
    """alpha 0.5, beta -2, gelu."""
    step = 1 if on_words(v) else 3
    a = columns_of(torch.randn(m, k).half(), step)
    b, q = packed(k, n, values)
    scales, zero = (None, None) if group is None else scaling(group, k, n, zeros)
    weight = exact(q, scales, zero)
    bias = torch.randn(n).half().expand(m, n)
    out = torch.full((m, n * step), math.nan, dtype=torch.float32 if v.point.out == "fp32" else torch.float16)[
        :, ::step
    ]
    b, scales, zero = (x if x is None else columns_of(x, step) for x in (b, scales, zero))
    without_layouts.gl.num_warps = lambda: v.point.config.num_warps
    run(OP, v.plan, (a, b, scales, zero, bias, out), (ACTIVATIONS.index("gelu"), 0), (0.5, -2.0))
    z = 0.5 * (a.double() @ weight) - 2 * bias.double()
    # A weight may be rounded to a's dtype, which the error of a sum of them shows.
    room = 2.0**-11 * (a.double().square() @ weight.square()).sqrt().max().item() * 4
    torch.testing.assert_close(out.double(), ACTIVATE["gelu"](z), rtol=2 * ROUNDING[out.dtype], atol=room + 1e-6)


def block_of(v: Variant) -> int:
    params = v.point.config.params
    return int(params.get("piece", params.get("block_k", 32)))


def rows_of(v: Variant) -> int:
    return v.point.axes.get("rows") or v.point.config.block_m + 5


@pytest.mark.drawn
@pytest.mark.parametrize("v", PRODUCTS, ids=name)
def test_every_product(v: Variant) -> None:
    """With a part of a tile at every end."""
    block = block_of(v)
    group = block if v.kernel.name == "int4_few_rows" else 2 * block  # no group of 256
    check(v, rows_of(v), 16 * 9 if on_words(v) else 70, 4 * block, group, True)


ONE_OF_EACH = {v.kernel.name: v for v in reversed(PRODUCTS)}


@pytest.mark.parametrize("v", ONE_OF_EACH.values(), ids=name)
@pytest.mark.parametrize("groups", (None, 1, 5))
def test_groups_and_no_zeros(v: Variant, groups: int | None) -> None:
    """5: not as many as a program has at a time."""
    k = 5 * block_of(v)
    check(v, rows_of(v), 48, k, groups and k // groups)


FEW = {v.point.rows: v for v in PRODUCTS if v.kernel.name == "int4_few_rows"}


@pytest.mark.parametrize("v", FEW.values(), ids=name)
def test_few_rows_of_more_than_a_step_of_k(v: Variant) -> None:
    """And as few rows as the kernel of so many takes, in columns that fill no tile."""
    c = v.point.config
    step = c.num_warps * c.cluster * c.pieces * c.piece
    check(v, v.point.rows // 2 + 1 if v.point.rows > 8 else 1, 80, step + 3 * c.piece, c.piece, True)


def test_few_rows_in_several_tiles() -> None:
    for m in (33, 70):
        check(FEW[32], m, 80, 3 * FEW[32].point.config.piece, FEW[32].point.config.piece, True)


@pytest.mark.parametrize("values", ("lowest", "highest"))
@pytest.mark.parametrize("kernel", ("int4_gemv", "int4_few_rows", "int4_tile", "int4_split_k", "int4_general"))
def test_the_least_and_the_largest_value(kernel: str, values: str) -> None:
    v = ONE_OF_EACH[kernel]
    check(v, rows_of(v), 32, 2 * block_of(v), block_of(v), True, values)


@pytest.mark.parametrize("size", ((1, 1, 2), (3, 5, 34), (70, 1, 66), (0 + 1, 130, 30)), ids=str)
@pytest.mark.parametrize("groups", (1, None))
def test_sizes_of_the_general_kernel(size: tuple[int, int, int], groups: int | None) -> None:
    m, n, k = size
    check(next(v for v in PRODUCTS if v.kernel.name == "int4_general"), m, n, k, groups and k, True)


@pytest.mark.parametrize("v", [v for v in VARIANTS if v.kernel.op is DEQUANTIZE], ids=name)
@pytest.mark.parametrize("zeros", (False, True))
def test_the_weight_is_rounded_once(v: Variant, zeros: bool) -> None:
    k, n, step = 192, 160 if v.point.aligned else 37, 1 if v.point.aligned else 3
    b, q = packed(k, n)
    scales, zero = scaling(64, k, n, zeros)
    out = torch.full((k, n), math.nan, dtype=torch.float16)
    tensors = (columns_of(b, step), columns_of(scales, step), zero if zero is None else columns_of(zero, step), out)
    run(DEQUANTIZE, v.plan, tensors, (), ())
    weight = exact(q, scales, zero)
    close = 2.0**-11 if v.point.aligned else 2.0**-23  # of a scale: what (2048 + value) scale may lose in float32
    torch.testing.assert_close(out.double(), weight, rtol=2.0**-11, atol=close)
    if not zeros:
        assert torch.equal(out, weight.half())


def test_what_words_need_is_asked_for() -> None:
    v = next(v for v in PRODUCTS if v.kernel.name == "int4_tile" and v.point.config.block_k == 128)
    a, b = torch.randn(16, 256).half(), packed(256, 48)[0]
    out = torch.empty(16, 48, dtype=torch.float16)
    scales = torch.ones(2, 48, dtype=torch.float16)

    def failed(a=a, b=b, scales=scales, zeros=None, out=out) -> str | None:  # type: ignore[no-untyped-def]
        return failed_constraint(v.plan, describe(OP, (a, b, scales, zeros, None, out), (0, 0)))

    assert failed() is None
    assert "a row-major" in str(failed(a=columns_of(a, 2)))
    assert "b row-major" in str(failed(b=columns_of(b, 2)))
    assert "scales row-major" in str(failed(scales=columns_of(scales, 2)))
    assert "zeros row-major" in str(failed(zeros=columns_of(scales, 2)))
    assert "groups" in str(failed(scales=torch.ones(4, 48, dtype=torch.float16)))
    assert "N a multiple of 16" in str(failed(b=b[:, :40], out=out[:, :40]))
