"""kernels/mm/pointer.py and split_k.py: both kernels, at every combination of their axes, every config at least once.

fp32 and fp16 only: the interpreter's bf16 `tl.dot` is wrong.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tk.aot.grid import Variant, enumerate_grid
from tk.kernels.epilogue import ACTIVATIONS
from tk.kernels.gemm.problem import PRECISION_AXIS
from tk.kernels.mm.family import FAMILY
from tk.kernels.mm.op import OP

from .launcher import run

ARCH = 80  # where every combination is compiled that the pointer kernels have
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
ROUNDING = {torch.float16: 2.0**-11, torch.float32: 2.0**-24}
ACTIVATE = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def interpretable() -> list[Variant]:
    variants = enumerate_grid(FAMILY, ARCH).variants
    return [v for v in variants if v.kernel.name in ("mm_pointer", "mm_split_k") and v.point.dtype in DTYPES]


def a_config_for_each_point(variants: list[Variant]) -> list[Variant]:
    """Every combination of axes once; the configs take turns."""
    points: dict[tuple[object, ...], list[Variant]] = {}
    for v in variants:
        points.setdefault((v.kernel.name, *v.point.axes.items()), []).append(v)
    return [candidates[i % len(candidates)] for i, candidates in enumerate(points.values())]


VARIANTS = interpretable()
CHOSEN = a_config_for_each_point(VARIANTS)


def name(v: Variant) -> str:
    p = v.point
    axes = "-".join(f"{axis}={value}" for axis, value in p.axes.items())
    return f"{v.kernel.name}-{p.config.name}-{axes}"


# --- Operands ---


@dataclass
class Operands:
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    precision: str = "ieee"

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b in float64, as the products take them."""
        a, b = self.a.double(), self.b.double()
        return (rounded_to_tf32(a), rounded_to_tf32(b)) if self.precision == "tf32" else (a, b)


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """To 11 significant bits, ties away from zero."""
    mantissa, exponent = torch.frexp(x)  # |mantissa| in [1/2, 1)
    return torch.ldexp(mantissa.sign() * (mantissa.abs() * 2**11 + 0.5).floor() / 2**11, exponent)


def matrix(rows: int, cols: int, dtype: torch.dtype, letter: str, aligned: bool) -> torch.Tensor:
    """Normal random numbers; NaN in all memory around them. letter: n row-major, t column-major, s neither."""
    if letter == "t":
        return matrix(cols, rows, dtype, "n", aligned).t()
    step = 3 if letter == "s" else 1
    pitch = -(-cols * step // 16) * 16 + 16 if aligned else cols * step + 3
    offset = 0 if aligned else 1
    memory = torch.full((offset + rows * pitch,), math.nan, dtype=dtype)
    view = memory.as_strided((rows, cols), (pitch, step), offset)
    view.copy_(torch.randn(rows, cols))
    return view


def operands(v: Variant, m: int, n: int, k: int) -> Operands:
    p = v.point
    dtype = DTYPES[p.dtype]
    out = matrix(m, n, DTYPES["fp32"] if p.out == "fp32" else dtype, "s" if p.order == "ss" else "n", p.aligned)
    out.fill_(math.nan)
    a, b = matrix(m, k, dtype, p.order[0], p.aligned), matrix(k, n, dtype, p.order[1], p.aligned)
    return Operands(a, b, out, p.precision)


def sizes(v: Variant) -> tuple[int, int, int]:
    """A little more than a tile both ways, and as many blocks of K as the variant wants."""
    c, step = v.point.config, 16 if v.point.aligned else 5
    blocks = 9 if v.kernel.name == "mm_split_k" else 2
    k = blocks * c.block_k + (0 if v.point.even_k else step)
    return c.block_m + step, c.block_n + step, k


def multiply(
    v: Variant,
    x: Operands,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    alpha: float = 1,
    beta: float = 1,
) -> None:
    """x.out = activation(alpha a @ b + beta bias), by the variant's plan."""
    expanded = None if bias is None else bias.expand(x.out.shape)
    ints = (ACTIVATIONS.index(activation), PRECISION_AXIS.index(v.point.precision))
    run(OP, v.plan, (x.a, x.b, expanded, x.out), ints, (alpha, beta))


def check(x: Operands, bias: torch.Tensor | None = None, activation: str = "none", alpha: float = 1, beta: float = 1):
    a, b = x.read()
    z = alpha * (a @ b)
    if bias is not None:
        z = z + beta * bias.double()
    reference = ACTIVATE[activation](z)
    k = x.a.shape[1]
    summed = (8 + math.sqrt(k)) * 2.0**-24 * (abs(alpha) * math.sqrt(k) + 1)
    torch.testing.assert_close(x.out.double(), reference, rtol=2 * ROUNDING[x.out.dtype], atol=4 * summed)


# --- Tests ---


@pytest.mark.drawn
@pytest.mark.parametrize("v", CHOSEN, ids=name)
def test_every_combination_of_axes(v: Variant) -> None:
    m, n, k = sizes(v)
    x = operands(v, m, n, k)
    matrix_epilogue = v.point.axes.get("epilogue", "matrix") == "matrix"
    bias = torch.randn((m, n) if matrix_epilogue else (n,)).to(x.a.dtype)
    multiply(v, x, bias, "relu", alpha=0.5, beta=-2.0)
    check(x, bias, "relu", alpha=0.5, beta=-2.0)


def of_config(kernel: str, config: str, **axes: object) -> Variant:
    return next(
        v
        for v in VARIANTS
        if v.kernel.name == kernel
        and v.point.config.name == config
        and all(v.point.axes.get(axis, value) == value for axis, value in axes.items())
    )


CONFIGS = sorted({(v.kernel.name, v.point.config.name) for v in VARIANTS})


@pytest.mark.parametrize(("kernel", "config"), CONFIGS, ids="-".join)
def test_every_config(kernel: str, config: str) -> None:
    v = of_config(kernel, config, order="nt")
    x = operands(v, *sizes(v))
    multiply(v, x)
    check(x)


def general(kernel: str = "mm_pointer", **axes: object) -> Variant:
    """A small tile for any operands."""
    config = {"mm_pointer": "16x32x32_s3_w4_fma", "mm_split_k": "16x32x32_s3_w4_fma_split_k"}[kernel]
    return of_config(kernel, config, dtype="fp32", aligned=False, **axes)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 70), (40, 1, 33), (3, 5, 2), (330, 33, 31)], ids=str)
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt", "ss"])
def test_sizes(order: str, shape: tuple[int, int, int]) -> None:
    """Less than a tile; one row; more rows of tiles than a group has."""
    v = general(order=order, epilogue="matrix")
    x = operands(v, *shape)
    multiply(v, x)
    check(x)


@pytest.mark.parametrize("k", [129, 300, 1000, 1024, 4097])
def test_split_leaves_nothing_out(k: int) -> None:
    """Parts of K of every length, the last one short."""
    v = general("mm_split_k", order="nn")
    x = operands(v, 5, 37, k)
    multiply(v, x)
    check(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", ["none", "row", "column", "scalar", "matrix"])
def test_epilogue(bias: str, activation: str) -> None:
    m, n = 18, 35
    made = {"none": None, "row": torch.randn(n), "column": torch.randn(m, 1), "scalar": torch.randn(())}
    z = made[bias] if bias in made else torch.randn(n, m).t()
    for v in (general(order="nn", epilogue="matrix"), general("mm_split_k", order="nn")):
        x = operands(v, m, n, 150)
        multiply(v, x, z, activation, alpha=-0.5, beta=3.0)
        check(x, z, activation, alpha=-0.5, beta=3.0)


def activated(values: torch.Tensor, activation: str) -> torch.Tensor:
    v = general(order="ss", epilogue="matrix")
    x = operands(v, len(values), 1, 1)
    x.a[:, 0], x.b[0, 0] = values, 1.0
    multiply(v, x, activation=activation)
    return x.out[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    """Against fp64; where ATen's own fp32 cancels (gelu of -5), the fp64 value is still what counts."""
    values = torch.cat([torch.linspace(-8, 8, 401), torch.logspace(-30, 0, 31), -torch.logspace(-30, 0, 31)])
    expected = ACTIVATE[activation](values.double()).float()
    torch.testing.assert_close(activated(values, activation), expected, rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_special_values(activation: str) -> None:
    out = activated(torch.tensor([-1e30, -90.0, 0.0, 90.0, 1e30, math.inf, math.nan, -math.inf]), activation)
    low = torch.tensor([-1e30, -90.0]) if activation == "none" else torch.zeros(2)
    torch.testing.assert_close(out[:6], torch.cat([low, torch.tensor([0.0, 90.0, 1e30, math.inf])]), atol=1e-37, rtol=0)
    assert out[6].isnan()
    assert out[7] == -math.inf if activation == "none" else out[7].isnan() or abs(out[7]) < 1e-37


@pytest.mark.parametrize(("a_strides", "b_strides"), [((0, 1), (1, 0)), ((0, 0), (7, 3)), ((1, 1), (2, 1))])
def test_operands_whose_elements_share_memory(a_strides: tuple[int, int], b_strides: tuple[int, int]) -> None:
    m, n, k = 20, 34, 40
    a = torch.randn(1000).as_strided((m, k), a_strides)
    b = torch.randn(1000).as_strided((k, n), b_strides)
    x = Operands(a, b, torch.full((m, n), math.nan))
    multiply(general(order="ss", epilogue="matrix"), x)
    check(x)


def test_every_axis_is_covered() -> None:
    """What is not run here would be run nowhere but on a GPU."""
    seen = {(axis, value) for v in CHOSEN for axis, value in v.point.axes.items()}
    axes = {"order": ("nn", "nt", "tn", "tt", "ss"), "aligned": (True, False), "even_k": (True, False),
            "epilogue": ("vector", "matrix"), "out": ("same", "fp32"), "precision": ("ieee", "tf32")}  # fmt: skip
    wanted = set(itertools.chain.from_iterable(((axis, v) for v in values) for axis, values in axes.items()))
    assert wanted <= seen
