"""kernels/b2b: every variant of f by name and of printed functions, in fp16, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tk.aot.grid import Variant, enumerate_grid
from tk.b2b import family, function
from tk.kernels.b2b.family import FAMILY
from tk.kernels.epilogue import ACTIVATIONS

from .launcher import run
from .test_mm import ACTIVATE, matrix, name

VARIANTS = [v for v in enumerate_grid(FAMILY, 90).variants if v.point.dtype == "fp16"]


def operands(v: Variant, m: int, n: int, k: int, p: int) -> list[torch.Tensor]:
    aligned = v.point.layout != "strided"
    letter = {"left": "n", "right": "t", "strided": "s"}[v.point.layout]
    shapes = ((m, k), (k, p), (p, n), (m, n))
    found = [matrix(*shape, torch.float16, letter, aligned) for shape in shapes]
    found[0] /= math.sqrt(k)
    found[2] /= math.sqrt(p)
    found[3].fill_(math.nan)
    return found


def check(found: list[torch.Tensor], f) -> None:  # type: ignore[no-untyped-def]
    a, b, c, out = found
    expected = f(a.double() @ b.double()).half().double() @ c.double()
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-9, atol=2.0**-9)


@pytest.mark.parametrize("v", VARIANTS, ids=name)
def test_every_variant(v: Variant) -> None:
    k, block_n = v.point.size
    step = 16 if v.point.layout != "strided" else 5
    for m, n, inner, p in ((step, step, k - step, 16), (80 - step, block_n + step, k, 2 * v.point.config.block_p + 16)):
        if v.point.layout == "strided":
            p -= 3
        found = operands(v, m, n, inner, p)
        run(FAMILY.op, v.plan, found, (int(v.point.layout == "right"), ACTIVATIONS.index("gelu")), ())
        check(found, ACTIVATE["gelu"])


def affine_exp(scale: float, shift: int):  # type: ignore[no-untyped-def]
    """Of 0 it is not 0, and past what is there it would overflow."""
    return lambda x: torch.exp(x * scale) + shift


@pytest.mark.parametrize("f", (affine_exp(0.5, 2), torch.log, torch.ones_like, lambda x: x), ids=lambda f: f.__name__)
def test_printed_functions(f) -> None:  # type: ignore[no-untyped-def]
    traced, values = function.traced_function(f, "test")
    registered = function.Registered("f", traced, (torch.float16,), "")
    found = family.registered_family(registered)
    v = next(v for v in enumerate_grid(found, 90).variants if v.point.layout == "strided")
    tensors = operands(v, 30, 21, 19, 37)
    if f is torch.log:  # of 0 it is -inf, which no column of c makes 0
        tensors[0].abs_()
        tensors[1].abs_().add_(0.1)
    kinds = [c.kind for c in traced.captures]
    floats = [x for x, kind in zip(values, kinds, strict=True) if kind == "float"]
    ints = [x for x, kind in zip(values, kinds, strict=True) if kind == "int"]
    run(found.op, v.plan, tensors, (0, *ints), floats)
    check(tensors, f)
