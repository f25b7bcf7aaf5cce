"""What is computed and then held against something of its own: the largest is one of them, in every variant.

Which elements tie depends on the rounding of what leads there, so nothing here is held against torch: what must hold,
holds for whatever the values come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import host
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tk.codegen.family import generate
from tk.generated import op

CHAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scaled": lambda x, a: x * 0.7,
    "contracted": lambda x, a: x * a + x,
    "softmax": lambda x, a: F.softmax(x * a, -1),
    "normalized": lambda x, a: F.layer_norm(x, [x.shape[-1]], a),
    "deviations of columns": lambda x, a: (x - x.mean(0)) / x.std(0),
    "softmax of columns": lambda x, a: F.softmax(x, 0).exp(),
    "scanned": lambda x, a: x.cumsum(-1) * 0.3,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def sorted_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    host.sort_by_numpy(monkeypatch)


def arguments(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, a = torch.randn(6, 144, generator=generator), torch.rand(144, generator=generator)
    return x.to(dtype), (a + 0.5).to(dtype)


def each(
    chain: str, dtype: str, fn: Callable[[Tensor], object], grad: bool = False
) -> Iterator[tuple[str, list[Tensor]]]:
    """(variant, results) of ``fn`` of the chain."""

    def chained(x, a):
        return fn(CHAINS[chain](x, a))

    made = generate(chained, op(x=f"{dtype}[M, N]", a=f"{dtype}[N]")(chained).signature, "chained", grad=grad)
    given = dict(zip(("x", "a"), arguments(DTYPES[dtype]), strict=True))
    if grad:
        made = made.backward
        given["grad_0"] = torch.ones((), dtype=host._torch_dtype(made.signature.params["grad_0"].dtype))
    count = 0
    for name, found in host.run_all(made, *(given[n] for n in made.signature.params)):
        count += 1
        yield name, found
    assert count >= 3


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_the_extremes_are_among_them(chain: str, dtype: str) -> None:
    def extremes(y):
        rows, columns = y.amax(-1, keepdim=True), y.amin(0)
        return y == rows, y <= columns, (y - y.amax()) == 0

    for name, (of_rows, of_columns, of_all) in each(chain, dtype, extremes):
        assert of_rows.any(-1).all(), name
        assert of_columns.any(0).all(), name
        assert of_all.any(), name


@pytest.mark.drawn
@pytest.mark.parametrize("chain", CHAINS)
def test_so_many_are_kept(chain: str) -> None:
    """As samplers keep the logits of the most likely tokens."""

    def kept(y):
        return y >= y.topk(5, -1).values[:, -1:], y > y.sort(-1).values[:, :1]

    for name, (of_topk, above_least) in each(chain, "bf16", kept):
        assert (of_topk.sum(-1) >= 5).all(), name
        assert (above_least.sum(-1) < 144).all(), name


@pytest.mark.drawn
@pytest.mark.parametrize("chain", CHAINS)
def test_every_element_is_found_among_the_sorted(chain: str) -> None:
    def places(y):
        ordered = y.sort(-1).values
        return torch.searchsorted(ordered, y), torch.searchsorted(ordered, y, right=True)

    for name, (first, past) in each(chain, "bf16", places):
        assert (first < past).all(), name


@pytest.mark.drawn
@pytest.mark.parametrize("chain", CHAINS)
def test_a_maximum_has_a_gradient(chain: str) -> None:
    """Which goes to the elements that equal it: all of it."""
    exact, a = (t.double().requires_grad_() for t in arguments(torch.float32))
    CHAINS[chain](exact, a).amax().backward()
    for name, found in each(chain, "fp32", lambda y: y.amax(), grad=True):
        assert torch.allclose(found[0].double(), exact.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.drawn
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_was_widened_is_compared_as_it_is_chosen(chain: str, wide: torch.dtype) -> None:
    """16-bit values that were converted to more bits, and what is chosen among them in other launches."""

    def extremes(y):
        y = y.to(wide)
        chosen = torch.where(y > 0.1, y, -y)
        return (y == y.amax(), y.amin(0) == y, -y.abs() >= (-y.abs()).amax(-1, keepdim=True),
                chosen <= chosen.amin(), y == torch.maximum(y, y.amax(0)))  # fmt: skip

    for name, (of_all, of_columns, of_rows, of_chosen, of_largest) in each(chain, "bf16", extremes):
        assert of_all.any() and of_chosen.any(), name
        assert of_columns.any(0).all() and of_rows.any(-1).all() and of_largest.any(0).all(), name


@pytest.mark.drawn
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_was_widened_has_a_gradient(chain: str, wide: torch.dtype) -> None:
    for name, found in each(chain, "bf16", lambda y: (y * y).sum(-1).to(wide).amin(-1), grad=True):
        assert found[0].isfinite().all() and found[0].any(), name
