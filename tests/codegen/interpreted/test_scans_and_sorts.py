"""Scans and sorts: in a block, in a loop, and of rows that several programs share."""

from __future__ import annotations

from functools import cache

import host
import pytest
import torch
from test_ops import LAYOUTS, check, generated, make, variants

from tk.codegen import radix
from tk.codegen.family import Generated, generate
from tk.codegen.printing import scans
from tk.codegen.scheduling.sorts import COUNTS, FEW
from tk.generated import op
from tk.kernels.generated import scans as kernels
from tk.kernels.generated import sorts

SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0)


def negative_nan(dtype: torch.dtype) -> torch.Tensor:
    """One whose sign is set, which conversions do not keep."""
    found = torch.full((), float("nan"), dtype=dtype).copysign(torch.full((), -1.0, dtype=dtype))
    assert found.isnan() and found.signbit()
    return found


def special(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few values, so that many are equal, NaN, infinities and zeros of both signs among them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-3, 3, shape, generator=generator).to(dtype)
    at = torch.randint(0, 12, shape, generator=generator)
    for i, value in enumerate(SPECIAL):
        x[at == i] = value
    x[at == len(SPECIAL)] = negative_nan(dtype)
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scans_of_every_kind(layout: str) -> None:
    for shape in ((3, 48), (2, 3, 17), (5,)):
        check("running_extremes", make(shape, torch.float32, layout))
        check("running_logsumexp", make(shape, torch.bfloat16, layout))
        check("backward_cumsum", make(shape, torch.float32, layout))


@pytest.mark.parametrize(("name", "length", "rows"), [("extremes", 1, 3), ("extremes", 18, 140), ("logsumexp", 5, 3)])
def test_scans_along_columns(name: str, length: int, rows: int) -> None:
    """Where memory runs along what is kept: a block of columns at a time, over blocks with a carry."""
    x = special((1, length, rows)).transpose(1, 2)
    assert any(v.startswith("columns") for v, _ in host.run_all(generated(f"running_{name}"), x))
    check(f"running_{name}", x)


def test_sums_from_the_end_of_columns() -> None:
    check("backward_cumsum", make((2, 18, 3), torch.float32).transpose(1, 2))


def test_extremes_of_equal_ones_and_nan() -> None:
    check("running_extremes", special((6, 40)), at_least=3)
    check("running_extremes", torch.randint(-3, 3, (6, 40)), at_least=3)


def test_logcumsumexp_of_infinities() -> None:
    x = make((3, 33), torch.float32)
    x[0, :5], x[1, 7], x[2, 9] = -float("inf"), float("inf"), float("nan")
    check("running_logsumexp", x)


@pytest.mark.parametrize("length", [700, 9000])
def test_scans_of_rows_that_programs_share(length: int) -> None:
    x = make((2, length), torch.float32).abs() + 1
    for name in ("running_logsumexp", "backward_cumsum"):
        check(name, x)
        assert any("spread" in v for v in variants(name, x)), name
    values = generated("backward_cumsum")
    first, again = (next(r for v, r in host.run_all(values, x) if "spread" in v) for _ in range(2))
    assert torch.equal(first[0], again[0])


def log_sums(x: torch.Tensor, only: str) -> list[torch.Tensor]:
    """The package's op by each variant of that name."""
    op = generate(kernels.logcumsumexp.fn, kernels.logcumsumexp.signature, "logcumsumexp")
    return [found for _, (found,) in host.run_all(op, x, only=only)]


def at_odd_places(values: torch.Tensor, start: int) -> torch.Tensor:
    """The same elements, from `start` elements behind an address of 16 bytes on."""
    return torch.cat([values.new_zeros(start), values.reshape(-1)])[start:].view(values.shape)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize(("start", "count"), [(0, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_log_sums_that_programs_share(dtype: torch.dtype, start: int, count: int, offset: float) -> None:
    """Of rows that are realigned, and of those that cannot be. A number as large as an offset keeps few digits."""
    x = at_odd_places((make((2, 8201), torch.float32) + offset).to(dtype), start)
    found, again = log_sums(x, "spread"), log_sums(x, "spread")
    assert len(found) == count
    exact = x.double().logcumsumexp(-1)
    last_place = torch.finfo(dtype).eps * exact.abs().clamp(min=1)
    for result, repeated in zip(found, again, strict=True):
        assert torch.equal(result, repeated)
        assert ((result.double() - exact).abs() <= last_place * (4 if dtype == torch.float32 else 0.51)).all()


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sums_of_infinities_that_programs_share(dtype: torch.dtype, start: int) -> None:
    """Each in one of a row's blocks, which those behind it learn; rows of -inf, and blocks of nothing else."""
    infinity = float("inf")
    x = make((6, 8201), dtype)
    x[0], x[1, :4500], x[2, :] = -infinity, -infinity, infinity
    x[3, 4200], x[4, 17], x[4, 5000] = infinity, infinity, float("nan")
    x[5, 4000:4300] = -infinity
    x = at_odd_places(x, start)
    expected, found = x.double().logcumsumexp(-1).to(dtype), log_sums(x, "spread")
    assert found
    for result in found:
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("start", [0, 3])
def test_log_sums_over_windows_of_blocks(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "WINDOW", 2)
    x = at_odd_places(make((2, 4096 * 6 + 5), torch.float32), start)
    x[1, :9000] = -float("inf")
    found = log_sums(x, "spread")
    assert found
    for result in found:
        torch.testing.assert_close(result.double(), x.double().logcumsumexp(-1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("columns", [1, 2041, 4089, 4103])
@pytest.mark.parametrize("name", ["running_extremes", "running_logsumexp", "backward_cumsum"])
def test_rows_that_begin_anywhere(name: str, columns: int) -> None:
    """In vectors from the 16 bytes in which each row begins: once, in a loop, and by programs that share it."""
    x = special((5, columns)) if "extremes" in name else make((9, columns), torch.bfloat16)
    check(name, x)
    found = [v for v in variants(name, x) if "realigned" in v]
    longest = {2041: "1x2048_w4", 4089: "1x4096_w8"}
    assert columns not in longest or any(f"realigned_{longest[columns]}" in v for v in found)
    assert any("realigned_loop" in v for v in found) and any("realigned_spread" in v for v in found) == (
        name != "running_extremes"
    )


def test_products_of_numbers_near_1() -> None:
    """Of two that differ from 1 by the root of what float32 keeps, it always drops the same side of the product."""
    x = 1 + 3e-4 * torch.rand(1, 9000)
    cumprod = generate(kernels.cumprod.fn, op(x="fp32[..., N]")(kernels.cumprod.fn).signature, "cumprod")
    for variant, (result,) in host.run_all(cumprod, x):
        torch.testing.assert_close(
            result.double(), x.double().cumprod(-1), rtol=2e-7, atol=0, msg=lambda m, v=variant: f"{v}: {m}"
        )


def test_rows_that_begin_each_elsewhere() -> None:
    """Where one tensor's rows stand otherwise towards 16 bytes than another's, none are read in vectors."""
    whole = make((5, 120), torch.bfloat16)
    for x, is_realigned in ((whole[:, :101], False), (whole[:, :112], True), (whole[:, 1:113], False)):
        check("backward_cumsum", x)
        assert any("realigned" in v for v in variants("backward_cumsum", x)) == is_realigned, x.shape


def test_scans_from_the_end_read_forwards() -> None:
    """The whole kernel turned round: so its rows are vectors."""
    for graph in generated("backward_cumsum").graphs:
        (kernel,) = graph.kernels
        assert [v.data.backwards for v in kernel.values if v.op == "scan"] == [True]
        assert all(str(v.index[-1]) == "r0" for v in kernel.accesses)
    x = make((2, 4096 * 2), torch.float32).abs() + 1  # what is added up is the sum of magnitudes
    check("backward_cumsum", x)
    assert any("aligned loop" in v for v in variants("backward_cumsum", x))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
def test_sort(dtype: torch.dtype, descending: bool) -> None:
    x = special((3, 50), dtype) if dtype.is_floating_point else torch.randint(0, 5, (3, 50)).to(dtype)
    expected = torch.sort(x, dim=-1, stable=True, descending=descending)
    count = 0
    for variant, (values, indices) in host.run_all(generated("sorted_rows"), x, descending):
        count += 1
        assert torch.equal(indices, expected.indices), variant
        if dtype.is_floating_point:
            assert torch.equal(values.signbit() & ~values.isnan(), expected.values.signbit() & ~expected.values.isnan())
            torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(values, expected.values), variant
    assert count >= 2


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 5000), (torch.bfloat16, 2047), (torch.float64, 2047)])
def test_sort_of_long_rows(dtype: torch.dtype, length: int) -> None:
    """Runs, merged once and twice, the last of them cut short."""
    x = special((2, length), dtype)
    check("sorted_rows", x, False)
    assert any("spread" in v for v in variants("sorted_rows", x, False))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sorts_in_any_layout(layout: str) -> None:
    check("sorted_columns", make((4, 3), torch.float32, layout))
    check("three_smallest", make((2, 40), torch.float32, layout))
    check("largest", make((2, 1, 40), torch.float32, layout), 7)


def test_largest_of_long_rows() -> None:
    """Kept while the row is run through; more than a block holds are sorted in runs."""
    x = make((1, 2500), torch.float32)
    check("largest", x, 5)
    assert any("loop" in v for v in variants("largest", x, 5))
    assert all("spread" in v or "digits" in v or "radix" in v for v in variants("largest", x, 100))


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_nan_is_the_largest_in_every_algorithm(dtype: torch.dtype, largest: bool) -> None:
    """By a loop, by runs and by digits: whatever the signs of NaN, and where nothing else is there."""
    x = special((3, 5000), dtype)
    x[0], x[1] = negative_nan(dtype), SPECIAL[0]
    x[1, ::3] = negative_nan(dtype)
    expected = torch.sort(x, dim=-1, stable=True, descending=largest)
    seen = []
    for variant, (values, indices) in host.run_all(topk(), x, 40, largest):
        assert torch.equal(indices, expected.indices[:, :40]), variant
        torch.testing.assert_close(values, expected.values[:, :40], rtol=0, atol=0, equal_nan=True, msg=variant)
        seen.append(variant)
    kinds = ["loop", "split_spread", "digits", "radix"] + ["narrow"] * (dtype == torch.bfloat16)
    assert all(any(kind in variant for variant in seen) for kind in kinds)


@cache
def topk() -> Generated:
    """The package's own."""
    return generate(sorts.topk.fn, sorts.topk.signature, "topk")


@pytest.mark.parametrize("k", [1, 16, 17, 64])
def test_largest_in_32_bits(k: int) -> None:
    """Key and place of a 16-bit element: as many of the first as a block holds."""
    x = special((3, 200), torch.bfloat16)
    expected = torch.sort(x, dim=-1, stable=True, descending=True)
    found = dict(host.run_all(generated("largest"), x, k, only="narrow"))
    assert {v.split("narrow_")[1] for v in found} == {"loop_4x64_w1"}
    for variant, (values, indices) in found.items():
        assert torch.equal(indices, expected.indices[:, :k]), variant
        torch.testing.assert_close(values, expected.values[:, :k], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("columns", [1, 700, 4097])
def test_sort_by_digits(dtype: torch.dtype, descending: bool, columns: int) -> None:
    """Stable, of equal ones, zeros of both signs and NaN, in all blocks that hold a row. 64 bits leave no room for the
    place, and of numbers of 64 bits shared memory has no room for 16,384."""
    x = special((2, columns), dtype) if dtype.is_floating_point else torch.randint(-3, 3, (2, columns)).to(dtype)
    expected = torch.sort(x, dim=-1, stable=True, descending=descending)
    seen = []
    for variant, (values, indices) in host.run_all(generated("sorted_rows"), x, descending, only="digits"):
        seen.append(int(variant.split("x")[1].split("_")[0]))
        assert torch.equal(indices, expected.indices), variant
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            assert torch.equal(values.signbit() & ~values.isnan(), expected.values.signbit() & ~expected.values.isnan())
    largest = {1: 16384, 2: 16384, 4: 8192, 8: 0}[dtype.itemsize]
    assert seen == [n for n in (2048, 4096, 8192, 16384) if columns <= n <= largest]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(2, 2049), (1, 4096), (3, 8193), (2, 2, 4099)])
def test_sort_by_digits_of_many_programs(dtype: torch.dtype, descending: bool, shape: tuple[int, ...]) -> None:
    """As by one program, in blocks of which the last is full or not: of as many passes as a key has bytes, from either
    half of the memory. 64 bits leave no room for the place, and short rows are sorted otherwise."""
    x = torch.randint(-(2**31), 2**31, shape).to(dtype)
    if dtype.is_floating_point:  # of any bits, beside many that are equal
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
        x = torch.where(torch.rand(shape) < 0.5, bits, special(shape, dtype))
    x = x.transpose(0, 1) if len(shape) == 3 else x
    expected = torch.sort(x, dim=-1, stable=True, descending=descending)
    seen = []
    for variant, (values, indices) in host.run_all(generated("sorted_rows"), x, descending, only="radix"):
        seen.append(variant)
        assert torch.equal(indices, expected.indices), variant
        torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            assert torch.equal(values.signbit() & ~values.isnan(), expected.values.signbit() & ~expected.values.isnan())
    assert len(seen) == (dtype.itemsize < 8)
    assert not list(host.run_all(generated("sorted_rows"), x[..., :2048], descending, only="radix"))


@pytest.mark.parametrize(("blocks", "block"), [(1, FEW), (FEW, FEW), (FEW + 1, COUNTS), (2 * COUNTS + 5, COUNTS)])
def test_counts_of_blocks_are_added_up(blocks: int, block: int) -> None:
    """Of each digit those of the blocks before, and behind them all."""
    counts = torch.randint(0, 4096, (16, blocks + 1), dtype=torch.int32)
    expected = torch.cat([torch.zeros(16, 1, dtype=torch.int32), counts[:, :-1].cumsum(1)], 1)
    radix.scan_counts[(16 * block // COUNTS,)](counts, blocks, COUNTS // block, block)
    assert torch.equal(counts, expected.int())


def scanned_beside_bytes(x):
    return torch.logcumsumexp(x, -1), torch.signbit(x)


def test_rows_in_vectors_of_two_widths() -> None:
    """Nothing is read but the 16 bytes of which some are a row's."""
    x = make((17, 2), torch.bfloat16)
    found = generate(scanned_beside_bytes, op(x="bf16[M, N]")(scanned_beside_bytes).signature, "scanned_beside_bytes")
    ran = list(host.run_all(found, x, only="realigned"))
    assert ran
    for variant, (values, signs) in ran:
        torch.testing.assert_close(values, scanned_beside_bytes(x)[0], msg=variant)
        assert torch.equal(signs, x.signbit()), variant


def by_share(x):
    return torch.sort(x / x.abs().sum(-1, keepdim=True), dim=-1)[0]


def test_long_rows_of_what_rows_are_reduced_for() -> None:
    """A launch that sorts parts of rows reduces none: that is done before."""
    found, x = generate(by_share, op(x="fp32[M, N]")(by_share).signature, "by_share"), make((2, 2100), torch.float32)
    seen = []
    for variant, (values,) in host.run_all(found, x, only="spread"):
        torch.testing.assert_close(values, by_share(x))
        seen.append(variant)
    assert seen


def recurred(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(b[..., 0])
    steps = []
    for t in range(b.shape[-1]):
        h = torch.sigmoid(a[..., t]) * h + b[..., t]
        steps.append(h)
    return torch.stack(steps, -1) * 2


@pytest.mark.parametrize("shape", [(3, 40), (2, 9000)])
def test_scans_by_a_function_of_ones_own(shape: tuple[int, ...]) -> None:
    """Whose order matters: in a block, with a carry, and over programs."""
    a, b = make(shape, torch.float32), make(shape, torch.float32) + 1
    expected, seen = recurred(a.double(), b.double()), []
    for variant, (found,) in host.run_all(generated("recurrence"), a, b):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4, msg=lambda m, v=variant: f"{v}: {m}")
        seen.append(variant)
    assert any("loop" in v for v in seen) and any("spread" in v for v in seen)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scans_of_columns_and_from_the_end(layout: str) -> None:
    x = (make((6, 17), torch.float32, layout) * 2).to(torch.int32)

    def kept(x: torch.Tensor) -> torch.Tensor:
        rows = list(x)
        for i in range(1, len(rows)):
            rows[i] = torch.where(rows[i] > 0, rows[i], rows[i - 1])
        return torch.stack(rows)

    for variant, (columns, rows) in host.run_all(generated("last_positive"), x):
        assert torch.equal(columns, kept(x.flip(0)).flip(0)), variant
        assert torch.equal(rows, kept(x.T).T), variant


def test_windows_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two blocks, so that a row has several: each waits for the one before it."""
    monkeypatch.setattr(scans, "WINDOW", 2)
    a, b = make((2, 4096 * 6 + 5), torch.float32), make((2, 4096 * 6 + 5), torch.float32) + 1
    expected = recurred(a.double(), b.double())
    results = [found for _, (found,) in host.run_all(generated("recurrence"), a, b, only="rows spread")]
    assert results
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-4)
