"""Functions that need several launches, whatever reads what: against torch, in every variant that takes the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backwards
import host
import pytest
import torch
import torch.nn.functional as F
from test_ops import agree, make

from tk.codegen.family import generate
from tk.codegen.tile import STRIDED
from tk.generated import op


def rows_and_columns(x):
    return x.softmax(0) + x.softmax(1)


def centred(x):
    return x - x.mean(0) - x.mean(1, keepdim=True) + x.mean()


def sinkhorn(x):
    for _ in range(2):
        x = x - x.logsumexp(1, keepdim=True)
        x = x - x.logsumexp(0, keepdim=True)
    return x


def total_beside_a_sort(x):
    return x.sum(-1), x.sort(-1)[0]


def everything_beside_a_sort(x):
    return torch.argsort(x, dim=-1, stable=True), x.square().mean(), torch.maximum(x, x * 2), x.cumsum(-1)


def scan_beside_a_softmax(x):
    return torch.softmax(x, 0) * x.cumsum(1)


def middle_column(x):
    return x[:, x.shape[1] // 2], x[x.shape[0] - 1] * 2, x[..., None, x.shape[1] // 2]


def written_at_the_middle(x):
    x = x.clone()
    x[:, x.shape[1] // 2] = 7
    return x


def scanned_rows_joined(x):
    """The rows that are stored are more than those that are scanned."""
    return torch.cat([x.cumsum(-1), torch.logcumsumexp(x, -1)])


def sorted_rows_joined(x):
    """Twice as long as what is sorted, and shorter."""
    y = x.sort(-1)[0]
    return torch.cat([y, y * 2], -1), F.pad(y, (3, 1)), torch.cat([y[:, :5], x[:, :2]], -1)


def normalized_rows_joined(x):
    return torch.cat([x - x.amax(-1, keepdim=True), x, torch.softmax(x[1:], -1)]), F.pad(x.sum(-1), (2, 1))


def sort_of_a_scan_from_the_end(x):
    return torch.sort(x.flip(-1).cumsum(-1), dim=-1)[0], torch.kthvalue(x, 1, -1)[0]


def sums_of_what_a_maximum_is_taken_from(x):
    """Not of their exponentials, which with the maximum come of one pass."""
    y = x - x.amax(-1, keepdim=True)
    return (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1), y.sum(-1), y.exp().sum(-1)


def elements_of_one_element(x):
    y, at = x.amax(), torch.arange(1, device=x.device)
    return y.index_select(0, at), y.index_select(-1, at[0]), y.gather(0, at) * 2, torch.take(y, at)


def reshaped_across_rows(x):
    """Sizes that divide nothing but their product."""
    return x.reshape(-1, x.shape[0]) * 2, x.reshape(x.shape[1], -1), x[:, :3].contiguous().view(3, -1) + 1


def reductions_of_one_element(x):
    """Along the dimension that torch lets a tensor without any have."""
    y = x.amax()
    found = y.sum(-1, keepdim=True), y.mean(0), y.var(-1, correction=0), y.logsumexp(-1), y.softmax(0), y.cumsum(-1)
    return *found, y.argmin(-1, keepdim=True), y.min(0)[1], (y > 0).any(-1), y.norm(dim=-1), y.prod(0), y.sort(-1)[0]


FUNCTIONS = (rows_and_columns, centred, sinkhorn, total_beside_a_sort, everything_beside_a_sort, scan_beside_a_softmax,
             middle_column, written_at_the_middle, scanned_rows_joined, sorted_rows_joined, normalized_rows_joined,
             sort_of_a_scan_from_the_end, sums_of_what_a_maximum_is_taken_from, elements_of_one_element,
             reshaped_across_rows, reductions_of_one_element)  # fmt: skip


def check(fn: Callable[..., Any], x: torch.Tensor, grad: bool = False) -> None:
    letters = ", ".join("MNK"[: x.dim()])
    made = generate(fn, op(x=f"fp32[{letters}]")(fn).signature, fn.__name__, grad)
    exact = fn(x.double())
    exact = exact if isinstance(exact, tuple) else (exact,)
    names = []
    for name, results in host.run_all(made, x):
        names.append(name)
        for result, wanted in zip(results, exact, strict=True):
            wanted = wanted.float() if wanted.is_floating_point() else wanted
            agree(result, wanted, f"{fn.__name__} {name}")
    assert names, fn.__name__
    assert any(made.choices(made.graphs[0], STRIDED, way) for way in ("whole", "split")), "nothing takes any strides"


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_functions_of_rows_and_columns(fn: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    check(fn, torch.randn(5, 33, generator=generator))


def test_a_scan_of_one_row_in_any_strides() -> None:
    def scanned(x):
        return x.cumsum(0), torch.cummax(x, 0)[0]

    check(scanned, torch.randn(70, generator=torch.Generator().manual_seed(0))[::2])


def test_sums_over_rows_beside_a_scan_of_each() -> None:
    """No walk: its programs cannot scan."""

    def both(x):
        y = torch.softmax(x, 1) * x.cumsum(1)
        return y - y.mean(1, keepdim=True) - y.mean(0, keepdim=True)

    check(both, torch.randn(6, 17, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("columns", [1, 3, 9])
def test_a_total_of_short_rows(columns: int) -> None:
    """The sums of exponentials beside it are in blocks of four columns, of which there are no groups of eight."""

    def total(x):
        return torch.softmax(x, -1).var(), torch.logsumexp(x, -1).sum()

    check(total, torch.randn(7, columns, generator=torch.Generator().manual_seed(0)))


def test_a_pointwise_result_beside_a_walk() -> None:
    def gradients(x):
        y = F.log_softmax(F.log_softmax(x, -1), -2)
        return y.sum(0), y, x * 2

    check(gradients, torch.randn(6, 17, generator=torch.Generator().manual_seed(0)))


def sums_over_rows(x):
    y = torch.sin(x)
    return y, y.sum(0), y.argmax(0)


def sums_of_rows(x):
    y = torch.sin(x)
    return y, y.sum(-1)


def turned_beside_sums(x):
    return torch.sin(x).t(), (x * x).sum(0), x * 3


def reversed_beside_sums(x):
    return x.flip(0), x.sum(0)


def sums_of_all_but_the_first_row(x):
    return x + 1, (x[1:] * 2).sum(0)


@pytest.mark.parametrize("shape", [(70, 37), (1, 5), (130, 2)])
@pytest.mark.parametrize("fn", [sums_over_rows, sums_of_rows, turned_beside_sums, reversed_beside_sums,
                                sums_of_all_but_the_first_row])  # fmt: skip
def test_a_pointwise_result_beside_a_reduction_of_it(fn: Callable[..., Any], shape: tuple[int, int]) -> None:
    check(fn, make(shape, torch.float32))
    check(fn, make(shape, torch.float32, "transposed"))


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
def test_a_pointwise_result_beside_a_reduction_of_some_dimensions(dims: tuple[int, ...]) -> None:
    def both(x):
        y = torch.sin(x)
        return y.permute(2, 0, 1), y.sum(dims)

    check(both, make((70, 3, 16), torch.float32))


@pytest.mark.parametrize("way", ["whole", "split"])
def test_the_gradient_of_a_bias_shares_the_launch_of_what_it_was_added_to(way: str) -> None:
    def biased(x, bias):
        return F.silu(x + bias)

    made = generate(biased, op(x="fp32[..., N]", bias="fp32[N]")(biased).signature, "biased", True).backward
    assert made is not None
    first = made.graphs[0].kernels_of(way)[0]
    assert {v.buffer for v in first.accesses} >= {"out0", "x", "grad_0"}
    assert sum(any(v.buffer == "x" for v in k.accesses) for k in made.graphs[0].kernels_of(way)) == 1
    assert {len(v.axes) for v in first.values if v.buffer == "bias"} == {1}


@pytest.mark.parametrize("fn", [lambda x: torch.softmax(x.add_(1), -1), lambda x: torch.logsumexp(x.mul_(2), 0)])
@pytest.mark.parametrize("shape", [(3, 40), (70, 37)])
def test_what_is_written_in_place_is_not_read_again(fn: Callable[..., Any], shape: tuple[int, int]) -> None:
    x = make(shape, torch.float32)
    changed = x.double()
    exact = fn(changed)
    made = generate(fn, op(x="fp32[M, N]")(fn).signature, "written")
    for name, results in host.run_all(made, x):
        for result, wanted in zip(results, (exact, changed), strict=True):
            agree(result, wanted.float(), name)


def test_results_of_several_sizes_share_a_launch() -> None:
    """Each has as many programs as its own size asks for, also none."""

    def results(x, y, z, i, w, s):
        put = torch.zeros_like(y).index_add_(0, i, w)
        return x.softmax(-1), y * s, z.float().sum(0), torch.tanh(y), z.float().cumsum(-1), put

    texts = dict(x="fp32[M, N]", y="fp32[K]", z="fp16[A, B]", i="i64[C]", w="fp32[C]", s="float")
    made = generate(results, op(**texts)(results).signature, "results")
    generator = torch.Generator().manual_seed(0)
    for (m, n), k, (a, b), c in (((5, 33), 200, (7, 9), 4), ((0, 8), 3, (2, 2), 2), ((40, 3), 1, (0, 5), 0)):
        x, y, z = (torch.randn(shape, generator=generator) for shape in ((m, n), (k,), (a, b)))
        i = torch.randint(0, max(k, 1), (c,), generator=generator)
        args = (x, y, z.half(), i, torch.randn(c, generator=generator), 0.5)
        exact = results(*args)
        count = 0
        for name, found in host.run_all(made, *args):
            count += 1
            for result, wanted in zip(found, exact, strict=True):
                agree(result, wanted, name)
        assert count


def columns_from_the_second_on(x):
    return x[:, 1:17] * 2


def columns_behind_others(x):
    return F.pad(x, (3, 13))


def one_of_three(x):
    return x.narrow(-1, 1, 16)[1] + 1


@pytest.mark.parametrize("fn", [columns_from_the_second_on, columns_behind_others, one_of_three],
                         ids=lambda fn: fn.__name__)  # fmt: skip
def test_rows_that_are_read_from_any_element_on(fn: Callable[..., Any]) -> None:
    """Also where all sizes are multiples of 16, so that only the first element is in the way of vectors."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    check(fn, x)
    backward = generate(fn, op(x="fp32[M, N]")(fn).signature, fn.__name__, grad=True).backward
    own = x.clone().requires_grad_()
    result = fn(own)
    (expected,) = torch.autograd.grad(result.sum(), own)
    given = {"x": x, **backwards.arguments([torch.ones_like(result)], [result])}
    ran = list(host.run_all(backward, *(given[n] for n in backward.signature.params)))
    assert ran
    for name, (found,) in ran:
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("shape", [(6, 1), (32, 1)])
def test_single_columns_side_by_side(shape: tuple[int, int]) -> None:
    """Of a dimension of size 1 the stride says nothing."""

    def beside(x):
        return torch.cat([x, x * 2], 1), F.pad(x, (2, 1))

    check(beside, torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def test_a_size_that_would_be_squeezed_is_refused() -> None:
    """The result of one op has as many dimensions whatever the sizes."""

    def squeezed(x):
        return x.squeeze() + 1, x.squeeze(1) * 2

    made = generate(squeezed, op(x="fp32[M, 1, N]")(squeezed).signature, "squeezed")
    for shape in ((4, 1, 3), (0, 1, 3)):
        x = torch.ones(shape)
        for name, (all_of_them, one) in host.run_all(made, x):
            assert torch.equal(all_of_them, squeezed(x)[0]) and torch.equal(one, squeezed(x)[1]), name
    with pytest.raises(ValueError, match="N must not be 1: squeeze"):
        list(host.run_all(made, torch.ones(4, 1, 1)))


def test_nothing_to_put_keeps_no_other_result_back() -> None:
    def puts(x, i, j, v, w):
        return torch.zeros_like(x).index_add_(0, i, v), torch.ones_like(x).index_add_(0, j, w)

    texts = dict(x="fp32[M]", i="i64[A]", j="i64[B]", v="fp32[A]", w="fp32[B]")
    made = generate(puts, op(**texts)(puts).signature, "puts")
    for a, b in ((0, 3), (3, 0), (2, 2)):
        args = (torch.ones(5), torch.arange(a), torch.arange(b), torch.ones(a), torch.full((b,), 2.0))
        ran = list(host.run_all(made, *args))
        assert ran
        for name, found in ran:
            for result, wanted in zip(found, puts(*args), strict=True):
                assert torch.equal(result, wanted), name
