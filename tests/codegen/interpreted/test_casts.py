"""Floats that are beyond an integer's range, or none, become what torch makes of them on CUDA.

The expected numbers are torch's own, read on an H100. A conversion there ends at the ends of its range, which NumPy's
do not, so here the interpreter is made to."""

from __future__ import annotations

import math
from typing import Any

import host
import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tk.codegen.family import generate
from tk.generated import op

SPECIAL = [math.inf, -math.inf, math.nan, 1e10, -1e10, 3e9, -3e9, 5e9, 1e19, -1e19, 300.7, -300.7, 70000.0, -70000.0,
           128.0, -129.0, 255.5, 256.0, -1.5, -0.5, 32768.0, 2147483648.0]  # fmt: skip
ON_CUDA = {
    torch.int8: [-1, 0, 0, -1, 0, -1, 0, -1, -1, 0, 44, -44, 112, -112, -128, 127, -1, 0, -1, 0, 0, -1],
    torch.int16: [-1, 0, 0, -1, 0, -1, 0, -1, -1, 0, 300, -300, 4464, -4464, 128, -129, 255, 256, -1, 0, -32768, -1],
    torch.uint8: [255, 0, 0, 0, 0, 0, 0, 0, 255, 0, 44, 212, 112, 144, 128, 127, 255, 0, 255, 0, 0, 0],
}
IN_BF16 = {  # where rounding first makes another number of it
    torch.int8: {70000.0: 0, -70000.0: 0, 255.5: 0}, torch.int16: {70000.0: 4608, -70000.0: -4608, 255.5: 256},
    torch.uint8: {70000.0: 0, -70000.0: 0, 255.5: 0},
}  # fmt: skip


def as_hardware(self: Any, x: Any, to: Any) -> Any:
    """PTX's cvt.rzi: to the nearest number that there is; NaN is 0, or of 64 bits the least."""
    info = np.iinfo(interpreter._get_np_dtype(to))
    found = np.trunc(x.data.astype(np.float64))
    is_wide = info.bits == 64 or x.data.dtype == np.float64
    ends = np.where(np.isnan(found), info.min if is_wide else 0, np.where(found > 0, info.max, info.min))
    inside = (found >= float(info.min)) & (found < -float(info.min))
    whole = np.where(inside, found, 0).astype(info.dtype)
    return interpreter.TensorHandle(np.where(inside, whole, ends).astype(info.dtype), to.scalar)


def casts(x):
    return x.to(torch.int8), x.to(torch.int16), x.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_integers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_si", as_hardware)
    declared = op(x="T[...]", T=("fp64", "fp32", "fp16", "bf16"))(casts)
    x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    count = 0
    for variant, results in host.run_all(generate(casts, declared.signature, "casts"), x):
        count += 1
        for found in results:
            expected = expected_of(x, found.dtype)
            assert found.tolist() == expected, (variant, found.dtype)
    assert count


def expected_of(x: torch.Tensor, dtype: torch.dtype) -> list[int]:
    numbers = dict(zip(SPECIAL, ON_CUDA[dtype], strict=True))
    if x.dtype == torch.bfloat16:
        numbers |= IN_BF16[dtype]
    if x.dtype == torch.float16:  # what it does not hold is infinite, or rounded to 255.5 and 300.75
        ends = {value: math.copysign(math.inf, value) for value in SPECIAL if abs(value) > 65504}
        numbers |= {value: ON_CUDA[dtype][SPECIAL.index(end)] for value, end in ends.items()}
    return [numbers[value] for value in SPECIAL]
