"""The package's kernels of integers and of 64-bit floats, in every variant, to the bit or nearly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import host
import pytest
import torch

from tk.codegen.family import Generated, generate
from tk.generated import Declared, op
from tk.kernels.generated import integers, reductions, scans, softmax

DTYPES = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8}


@cache
def of(declared: Declared, **dtypes: tuple[str, ...]) -> Generated:
    """For these dtypes alone."""
    texts = {n: str(s) for n, s in declared.signature.params.items()}
    return generate(declared.fn, op(**texts, **dtypes)(declared.fn).signature, declared.name)


def numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    info = torch.iinfo(dtype)
    values = torch.tensor([info.min, info.min + 1, -1, 0, 1, info.max], dtype=dtype)
    return values[torch.randint(0, 6, shape)]


def check(found: Generated, expected: Any, *args: Any) -> None:
    expected = expected if isinstance(expected, tuple) else (expected,)
    ran = set()
    for name, results in host.run_all(found, *args):
        ran.add(name.split()[0])
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value, rtol=1e-13, atol=1e-13, equal_nan=True,
                                       msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip
    assert "strided" in ran


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 70), (2, 2, 16)])
def test_reductions(dtype: str, shape: tuple[int, ...]) -> None:
    x, only = numbers(DTYPES[dtype], shape), {"I": (dtype,)}
    check(of(integers.row_sum_int, **only), x.sum(-1), x, -1)
    if dtype == "i8":
        check(of(integers.row_sum_int, **only), x.view(torch.uint8).sum(-1), x, 255)
        unsigned = x.view(torch.uint8)
        check(of(integers.row_extreme_int, **only), unsigned.amax(-1).view(torch.int8), x, -128)
        check(of(integers.row_extreme_int, **only), unsigned.amin(-1).view(torch.int8), x, 127)
    check(of(integers.row_extreme_int, **only), x.amax(-1), x, 0)
    check(of(integers.row_extreme_int, **only), x.amin(-1), x, -1)
    if dtype in ("i64", "i32"):
        check(of(integers.row_place_int, **only), x.argmax(-1), x, 0)
        check(of(integers.row_place_int, **only), x.argmin(-1), x, -1)


def test_scans_and_products_of_integers() -> None:
    x = numbers(torch.int64, (3, 70))
    check(of(integers.cumsum_int), x.cumsum(-1), x)
    check(of(scans.cumprod, T=("i64",)), x.cumprod(-1), x)
    check(of(scans.cummax, T=("i64",)), tuple(torch.cummax(x, -1)), x)
    check(of(reductions.row_prod, T=("i64",)), x.prod(-1), x)


OF_64_BITS: dict[str, tuple[Declared, tuple[float, ...], Callable[[torch.Tensor], Any]]] = {
    "sum": (reductions.row_sum, (), lambda x: x.sum(-1)),
    "amin": (reductions.row_amax, (-1.0, 1.0), lambda x: x.amin(-1)),
    "argmax": (reductions.row_argmax, (1.0,), lambda x: x.argmax(-1)),
    "prod": (reductions.row_prod, (), lambda x: x.prod(-1)),
    "norm": (reductions.row_norm, (0.0, float("inf"), 0.5), lambda x: x.norm(dim=-1)),
    "var_mean": (reductions.row_var_mean, (1.0, 1.0), lambda x: torch.var_mean(x, -1, correction=0)),
    "logsumexp": (softmax.logsumexp, (), lambda x: x.logsumexp(-1)),
    "cumsum": (scans.cumsum, (), lambda x: x.cumsum(-1)),
    "cumprod": (scans.cumprod, (), lambda x: x.cumprod(-1)),
}


@pytest.mark.parametrize("name", OF_64_BITS)
def test_64_bit_floats(name: str) -> None:
    declared, args, torchs = OF_64_BITS[name]
    x = torch.randn(3, 70, dtype=torch.float64) * 3
    check(of(declared, T=("fp64",)), torchs(x), x, *args)
