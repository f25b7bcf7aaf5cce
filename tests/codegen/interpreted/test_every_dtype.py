"""Every pointwise op in every dtype that ATen takes, beyond those that test_pointwise.py has: generated and run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pointwise
import pytest
import torch
from test_pointwise import test_pointwise as check

from tk.codegen.errors import TraceError
from tk.codegen.family import Generated, generate
from tk.generated import op
from tk.generated.signature import DTYPES

# What ATen takes on the CPU and the generator refuses, with what it says. Reviewed.
ONE_SIZE = "only dtypes of one size can be viewed as each other"  # ATen makes it more elements, or fewer
REFUSED = {
    **dict.fromkeys(("bits_of_fp32", "bits_of_bf16", "bits_to_bf16", "bits_of_i64"), ONE_SIZE),
    "addcmul": "of integers its value must be one, too",  # ATen's CPU kernel cuts a fraction off
}
# Where the function itself cannot be compared: the kernel does not round to 16 bits between ops, and the interpreter
# loses the carry when it rounds to fp8. What is compared in its place, beside that it can be generated.
INSTEAD = {
    ("frexp_exponent", "bf16"): lambda x: torch.frexp(x)[1],
    ("frexp_exponent", "fp16"): lambda x: torch.frexp(x)[1],
    ("mul", "fp8e4m3fn"): lambda x, y: x.float() * y.float(),
    ("mul", "fp8e5m2"): lambda x, y: x.float() * y.float(),
}
# ATen refuses to divide integers by zero.
DIVIDES = ("fmod", "remainder", "floor_divide", "div", "div_trunc", "div_floor")


def of_dtype(case: pointwise.Case, dtype: str) -> pointwise.Case:
    """With arguments that this dtype can have: Triton's interpreter has no infinities and NaN of fp8."""
    torchs = DTYPES[dtype]
    is_small = torchs.itemsize == 1 and torchs.is_floating_point
    low = 1 if case.name in DIVIDES and not torchs.is_floating_point else case.low
    return replace(case, low=low, special=case.special and not is_small)


def takes(case: pointwise.Case, dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.fn(*[torch.ones(32).to(dtype)] * case.arity)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def cases() -> Iterator[object]:
    tested = {(c.name, d) for c in pointwise.CASES for d in c.dtypes}
    for case in {c.name: c for c in pointwise.CASES}.values():
        for dtype in DTYPES:
            if (case.name, dtype) not in tested and takes(case, DTYPES[dtype]):
                yield pytest.param(of_dtype(case, dtype), dtype, id=f"{case.name}-{dtype}")


@pytest.mark.drawn
@pytest.mark.parametrize(("case", "dtype"), cases())
def test_every_dtype(case: pointwise.Case, dtype: str) -> None:
    if case.name in REFUSED:
        return refuse(case, dtype)
    if instead := INSTEAD.get((case.name, dtype)):
        generated(case, dtype)
        case = replace(case, fn=instead)
    check(case, dtype)


def generated(case: pointwise.Case, dtype: str) -> Generated:
    names = case.fn.__code__.co_varnames[: case.arity]
    return generate(case.fn, op(**dict.fromkeys(names, f"{dtype}[N]"))(case.fn).signature, "f")


def refuse(case: pointwise.Case, dtype: str) -> None:
    """With the line of the function that asked. A view as a dtype of the same size is none of it."""
    x = torch.ones(32).to(DTYPES[dtype])
    if case.fn(*[x] * case.arity).shape == x.shape and REFUSED[case.name] == ONE_SIZE:
        generated(case, dtype)
        return
    if case.name == "addcmul" and DTYPES[dtype].is_floating_point:
        return check(case, dtype)
    with pytest.raises(TraceError) as caught:
        generated(case, dtype)
    assert REFUSED[case.name] in str(caught.value)
    assert f"pointwise.py:{case.fn.__code__.co_firstlineno})" in str(caught.value)


def test_there_are_many() -> None:
    """An op that ATen no longer takes would leave without a word."""
    found = list(cases())
    assert len(found) > 600, len(found)
