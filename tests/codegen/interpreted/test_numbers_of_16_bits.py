"""A number that 16-bit elements are compared with or leave a remainder of, or that competes with them in a choice, has
16 bits too, as in ATen.

Drawn: numbers that no 16-bit float is, and tensors of what they are rounded to and of its neighbours. Left out is what
ATen itself has otherwise on a CPU than on a GPU: arithmetic with the number before it is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import host
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tk.codegen.family import generate
from tk.generated import op

Fn = Callable[..., object]

# Of a tensor x and the number n, which is part of the function, or its argument.
FUNCTIONS: dict[str, Fn] = {
    "eq": lambda x, n: (x == n, x != n, n == x, torch.eq(x, n)),
    "ordered": lambda x, n: (x >= n, x > n, x <= n, x < n, n >= x, n < x),
    "where": lambda x, n: (torch.where(x > 0, x, n) == n, torch.where(x > 0, n, x).float(), torch.where(x == n, 1, 0)),
    "clamp": lambda x, n: (x.clamp(-n, n) == x, x.clamp(min=n).float(), torch.clip(x, max=n) == n),
    "masked_fill": lambda x, n: (x.masked_fill(x == n, 9.0), x.masked_fill(x > 0, n) == n),
    "isin": lambda x, n: (torch.isin(x, n), torch.isin(x, torch.full_like(x[0, :1], n))),
    "full": lambda x, n: (x == torch.full_like(x, n), torch.full_like(x, n).float(), x.new_full((1,), n) == x),
    "maximum": lambda x, n: (
        torch.maximum(x, torch.full((), n)) == x,
        torch.minimum(x, torch.full((), n)).float(),
        torch.fmax(x, torch.full((), n)) == n,
    ),
    "tensor without dimensions": lambda x, n: (x == torch.full((), n), x >= torch.full((), n, dtype=torch.float64)),
    "searchsorted": lambda x, n: (
        torch.searchsorted(x[0].sort().values, n),
        torch.searchsorted(x.sort(-1).values, torch.full_like(x[:, :1], n), right=True),
    ),
    "bucketize": lambda x, n: (torch.bucketize(n, x[0].sort().values), torch.bucketize(x, x.new_full((1,), n))),
    "remainder": lambda x, n: (x % n, torch.remainder(n, x), x.remainder(torch.full((), n))),
    "fmod": lambda x, n: (torch.fmod(x, n), torch.fmod(torch.full((), n), x), torch.fmod(x * 2, n) == 0),
    "hardshrink": lambda x, n: F.hardshrink(x, n),
    "threshold": lambda x, n: F.threshold(x, n, 9.0),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n) == x,
    "isclose": lambda x, n: torch.isclose(x, torch.full_like(x, n), rtol=0, atol=0),
    "reduced": lambda x, n: ((x == n).any(-1), torch.where(x <= n, x, -1).amax(-1)),
    "copied": lambda x, n: x.clone().fill_(n) == x,
}
GRADIENTS: dict[str, Fn] = {
    "clamp": lambda x, n: x.clamp(-n, n),
    "maximum": lambda x, n: torch.maximum(x, torch.full((), n)),
    "hardshrink": lambda x, n: F.hardshrink(x, n),
    "where": lambda x, n: torch.where(x >= n, x, n),
    "remainder": lambda x, n: torch.remainder(x.new_full((), n), x),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def sorted_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    host.sort_by_numpy(monkeypatch)


def drawn(dtype: str, seed: str) -> tuple[float, Tensor]:
    """A number that has too many digits, and what lies around it."""
    random = Random(f"{dtype}{seed}")
    n = random.choice([0.1, 0.7, 0.3, 3.14, random.uniform(0.001, 30.0)])
    held = torch.tensor([n, -n, n / 2, random.uniform(-9, 9)]).to(DTYPES[dtype])
    bits = held.view(torch.int16)
    around = [(bits + step).view(DTYPES[dtype]) for step in (-1, 0, 1)]
    return n, torch.cat(around).repeat(2, 1)


def found_by(fn: Fn, dtype: str, seed: str, is_given: bool, grad: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """(what eager torch has, what the kernel has)."""
    n, x = drawn(dtype, seed)

    def given(x, n):
        return fn(x, n)

    def own(x):
        return fn(x, n)

    function = given if is_given else own
    texts = {"x": f"{dtype}[M, N]", **({"n": "float"} if is_given else {})}
    made = generate(function, op(**texts)(function).signature, "f", grad=grad)
    named = {"x": x, "n": n, "grad_0": torch.ones_like(x)}
    if grad:
        leaf = x.clone().requires_grad_()
        fn(leaf, n).backward(named["grad_0"])
        expected = leaf.grad
        made = made.backward
    else:
        expected = fn(x, n)
    args = [named[name] for name in made.signature.params]
    _, results = next(iter(host.run_all(made, *args, only="strided")))
    return list(expected) if isinstance(expected, tuple) else [expected], results


@pytest.mark.drawn
@pytest.mark.parametrize("is_given", [False, True], ids=["constant", "argument"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(name: str, dtype: str, is_given: bool) -> None:
    expected, found = found_by(FUNCTIONS[name], dtype, name, is_given)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b), drawn(dtype, name)


@pytest.mark.drawn
@pytest.mark.parametrize("is_given", [False, True], ids=["constant", "argument"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, dtype: str, is_given: bool) -> None:
    expected, found = found_by(GRADIENTS[name], dtype, name, is_given, grad=True)
    assert torch.equal(expected[0], found[0]), drawn(dtype, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_worked_out_is_compared_as_16_bits(dtype: str) -> None:
    """x * 3 has more digits than the tensor that torch makes of it: halves of a step, and quarters."""
    x = torch.tensor([[0.5, 1.0, 1.5, 3.0]], dtype=DTYPES[dtype])
    step = torch.finfo(DTYPES[dtype]).eps

    def fn(x):
        return (x * (1 + step / 4)) == x, (x.float() * (1 + step / 4)) == x.float()

    made = generate(fn, op(x=f"{dtype}[M, N]")(fn).signature, "f")
    for name, found in host.run_all(made, x):
        assert found[0].all(), name
        assert not found[1].any(), name
