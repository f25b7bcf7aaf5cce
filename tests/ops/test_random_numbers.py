"""tk.rand, randn, randint, dropout and dropout_add: what is drawn, that it is the seed's, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import tk
from tk.generated import random

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rand(dtype: torch.dtype) -> None:
    x = tk.rand((100, 200), seed=3, dtype=dtype)
    assert x.shape == (100, 200) and x.dtype == dtype and x.min() >= 0 and x.max() < 1
    assert abs(x.double().mean() - 0.5) < 0.01 and len(x.unique()) > 200
    assert torch.equal(x, tk.rand([100, 200], seed=3, dtype=dtype))
    assert (x != tk.rand((100, 200), seed=4, dtype=dtype)).float().mean() > 0.9


def test_the_numbers_are_those_of_seed_and_place() -> None:
    words = random.bits(torch.tensor(9), 7, 0, (4, 5))
    expected = ((words >> 8) & 0xFFFFFF).float() * 2.0**-24
    assert torch.equal(tk.rand((4, 5), seed=9, offset=7), expected)
    assert torch.equal(tk.rand((4, 5), seed=9, offset=7).flatten(), tk.rand((27,), seed=9)[7:])
    assert torch.equal(tk.rand((3,), seed=torch.tensor(9)), tk.rand((3,), seed=9))
    assert torch.equal(tk.rand((3,), seed=2**64 - 1), tk.rand((3,), seed=-1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_randn(dtype: torch.dtype) -> None:
    x = tk.randn((20_000,), seed=0, dtype=dtype).double()
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.02
    assert abs((x.abs() < 1).double().mean() - 0.6827) < 0.02


def test_the_cosine_of_normal_numbers() -> None:
    turn = (
        torch.cat((torch.arange(0, 2**24, 13), torch.tensor([2**22, 2**23, 3 * 2**22, 2**24 - 1]))).float() * 2.0**-24
    )
    # The turn is exact in float64, where the cosine of a quarter turn is not quite 0.
    assert_close(random._cosine(turn).double(), torch.cos(2 * torch.pi * turn.double()), rtol=2.5e-7, atol=1e-15)
    assert torch.equal(random._cosine(turn.double()), torch.cos(2 * torch.pi * turn.double()))


def test_randint() -> None:
    x = tk.randint(-3, 5, (4000,), seed=1)
    assert x.dtype == torch.int64 and x.unique().tolist() == list(range(-3, 5))
    assert x.bincount(minlength=0).min() > 0 if x.min() >= 0 else (x + 3).bincount().min() > 400
    assert tk.randint(0, 9, (5,), seed=1, dtype=torch.int32).dtype == torch.int32
    wide = tk.randint(0, 2**62, (2000,), seed=1)
    assert wide.min() >= 0 and wide.max() > 2**61 and wide.max() < 2**62


@pytest.mark.parametrize("high", [1, 2, 1000, 2**31, 2**32 + 1, 2**62 + 12345, 2**63 - 1])
def test_randint_is_the_share_of_64_bits(high: int) -> None:
    low_words, high_words = (random.bits(torch.tensor(1), 0, stream, (500,)).tolist() for stream in (0, 1))
    words = [(h % 2**32 << 32) + low % 2**32 for low, h in zip(low_words, high_words, strict=True)]
    assert tk.randint(0, high, (500,), seed=1).tolist() == [word * high >> 64 for word in words]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(64, 128).add(3).to(dtype)
    y = tk.dropout(x, p, seed=5)
    kept = y != 0
    assert abs(kept.double().mean() - (1 - p)) < 0.02
    assert_close(y[kept], (x.double() / (1 - p)).to(dtype)[kept])
    residual = torch.randn(64, 128).to(dtype)
    total = tk.dropout_add(x, residual, p, seed=5)
    wide = torch.where(kept, x.double() / (1 - p), 0.0) + residual.double()
    assert_close(total.double(), wide, rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-2)


def test_what_does_not_drop() -> None:
    x = torch.randn(5, 8)
    assert tk.dropout(x, 0.5, training=False) is x and tk.dropout(x, 0.0) is x
    assert torch.equal(tk.dropout(x, 1.0), torch.zeros_like(x))
    assert torch.equal(tk.dropout_add(x, x, 0.5, False), x + x)


@pytest.mark.parametrize("p", [0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients(dtype: torch.dtype, p: float) -> None:
    x, residual, seeds = (torch.randn(6, 32, dtype=dtype) for _ in range(3))
    x.requires_grad_()
    residual.requires_grad_()
    mask = tk.dropout(torch.ones_like(x), p, seed=11)
    (grad,) = torch.autograd.grad(tk.dropout(x, p, seed=11), x, seeds)
    assert_close(grad, seeds * mask)
    found = torch.autograd.grad(tk.dropout_add(x, residual, p, seed=11), (x, residual), seeds)
    assert_close(found, (seeds * mask, seeds))


def test_torchs_seed_fixes_what_has_none() -> None:
    x = torch.ones(50, 50)
    torch.manual_seed(1)
    first, second = tk.dropout(x), tk.dropout(x)
    torch.manual_seed(1)
    assert torch.equal(tk.dropout(x), first) and not torch.equal(first, second)
    torch.manual_seed(1)
    a = tk.rand((9,))
    torch.manual_seed(1)
    assert torch.equal(tk.rand((9,)), a)


def test_any_layout_has_the_same_numbers() -> None:
    x = torch.ones(3, 4, 5)
    expected = tk.dropout(x, 0.5, seed=2)
    assert torch.equal(tk.dropout(torch.ones(4, 3, 5).transpose(0, 1), 0.5, seed=2), expected)
    assert torch.equal(tk.dropout(torch.ones(5, 4, 3).permute(2, 1, 0), 0.5, seed=2), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph(dynamic: bool) -> None:
    def fn(x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        noise = tk.rand(x.shape, seed=seed, offset=4) + tk.randn(x.shape, seed=seed) + tk.randint(0, 9, x.shape, seed=3)
        return [tk.dropout(x, 0.3, seed=seed), tk.dropout_add(x, x, 0.3, seed=7), noise]

    x, seed = torch.randn(4, 6, requires_grad=True), torch.tensor(123)
    compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, e in zip(compiled(x, seed), fn(x, seed), strict=True):
        assert torch.equal(a, e)
    (grad,) = torch.autograd.grad(compiled(x, seed)[0].sum(), x)
    assert torch.equal(grad, torch.autograd.grad(fn(x, seed)[0].sum(), x)[0])


x = torch.randn(2, 3)
WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "p": (ValueError, r"dropout: p is 1\.5, must be 0 to 1", lambda: tk.dropout(x, 1.5)),
    "seed": (ValueError, "seed is .*, must have 64 bits", lambda: tk.dropout(x, seed=2**64)),
    "seed_tensor": (ValueError, r"must be int64, of one element, on cpu; it is torch\.float32, \[2\]",
                    lambda: tk.dropout(x, seed=torch.zeros(2))),
    "offset": (ValueError, r"offset is -1, must be 0 to 2\*\*62 - 1", lambda: tk.rand((2,), seed=0, offset=-1)),
    "residual": (ValueError, "x and residual must have one shape", lambda: tk.dropout_add(x, x[:1])),
    "range": (ValueError, "low is 5 and high 5; high must be larger", lambda: tk.randint(5, 5, (2,))),
    "dtype": (ValueError, "tk.randint has integers", lambda: tk.rand((2,), dtype=torch.int32)),
    "no_tensor": (TypeError, "x must be a Tensor", lambda: tk.dropout([1.0])),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_nan_that_is_dropped() -> None:
    y = tk.dropout(torch.full((64,), float("nan")), 0.5, seed=1)
    assert 0 < y.isnan().sum() < 64 and (y[~y.isnan()] == 0).all()
    assert F.dropout(torch.full((64,), float("nan")), 0.5).isnan().all()  # ATen keeps them all


SEEDS = torch.tensor([7, 8, 9])
ROWS = torch.randn(3, 8)
BATCHED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "one seed": (lambda x: tk.dropout(x, 0.5, seed=7), (ROWS,)),
    "one seed, float64": (lambda x: tk.dropout(x, 0.5, seed=7), (ROWS.double(),)),
    "one seed, another tensor": (lambda x: tk.dropout_add(torch.ones(8), x, 0.5, seed=7), (ROWS,)),
    "a seed for each": (lambda x, seed: tk.dropout(x, 0.5, seed=seed), (ROWS, SEEDS)),
    "a gradient": (torch.func.grad(lambda x: tk.dropout(x, 0.5, seed=7).square().sum()), (ROWS,)),
    "a gradient, a seed for each": (torch.func.grad(lambda x, s: tk.dropout(x, 0.5, seed=s).sum()), (ROWS, SEEDS)),
    "a tangent": (lambda x: torch.func.jvp(lambda y: tk.dropout(y, 0.5, seed=7), (x,), (x,))[1], (ROWS,)),
    "uniform": (lambda seed: tk.rand((8,), seed=seed), (SEEDS,)),
    "uniform, float64": (lambda seed: tk.rand((8,), seed=seed, dtype=torch.float64), (SEEDS,)),
    "normal": (lambda seed: tk.randn((2, 4), seed=seed), (SEEDS,)),
    "integers": (lambda seed: tk.randint(0, 1000, (8,), seed=seed), (SEEDS,)),
    "beside a batch": (lambda x: x + tk.rand((8,), seed=3), (ROWS,)),
}


@pytest.mark.parametrize("randomness", ("error", "same", "different"))
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_draws_as_a_loop_does(name: str, randomness: str) -> None:
    """A seed says which numbers there are, so what vmap says of randomness is of no account."""
    function, given = BATCHED[name]
    found = torch.vmap(function, randomness=randomness)(*given)
    assert torch.equal(found, torch.stack([function(*row) for row in zip(*given, strict=True)]))


UNSEEDED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: tk.dropout(x, 0.5),
    "dropout_add": lambda x: tk.dropout_add(x, x, 0.5),
    "rand": lambda x: x + tk.rand((32,)),
    "randn": lambda x: x + tk.randn((32,)),
    "randint": lambda x: x + tk.randint(0, 1000, (32,)),
}


@pytest.mark.parametrize("name", UNSEEDED)
def test_without_a_seed_vmap_says_whether_numbers_differ(name: str) -> None:
    x = torch.ones(3, 32)
    same = torch.vmap(UNSEEDED[name], randomness="same")(x)
    assert torch.equal(same, same[:1].expand(3, 32))
    different = torch.vmap(UNSEEDED[name], randomness="different")(x)
    assert not any(torch.equal(different[i], different[i - 1]) for i in range(3))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(UNSEEDED[name])(x)
