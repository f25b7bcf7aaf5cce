"""What is printed, against the function itself: every variant that a call can get, over layouts and odd sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import host
import ops
import pytest
import torch

from tk.codegen.family import Generated, generate


@cache
def generated(name: str) -> Generated:
    declared = getattr(ops, name)
    return generate(declared.fn, declared.signature, name)


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-10}


def agree(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    tolerance = TOLERANCE.get(expected.dtype, 0)
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected), what
        return
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True,
                               msg=lambda m: f"{what}: {m}")  # fmt: skip


def check(name: str, *args: Any, at_least: int = 1) -> None:
    """Every variant, against the function on the same arguments in more precision."""
    op, fn = generated(name), getattr(ops, name).fn
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    wide = [a.clone() if isinstance(a, torch.Tensor) else a for a in wide]
    exact = fn(*wide)
    like = fn(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    exact, like = ([] if x is None else list(x) if isinstance(x, tuple) else [x] for x in (exact, like))
    changed = [i for i, n in enumerate(op.signature.params) if n in op.first.mutated]
    expected = [e.to(r.dtype) for e, r in zip(exact, like, strict=True)] + [wide[i].to(args[i].dtype) for i in changed]
    count = 0
    for variant, results in host.run_all(op, *args):
        count += 1
        for i, (a, e) in enumerate(zip(results, expected, strict=True)):
            agree(a, e, f"{name} {variant}, result {i}")
    assert count >= at_least, f"{count} variants of {name} could run"


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "dense") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if layout == "dense":
        return torch.randn(shape, generator=generator).to(dtype)
    if layout == "pitched":
        return torch.randn([*shape[:-1], shape[-1] + 8], generator=generator).to(dtype)[..., : shape[-1]]
    if layout == "transposed":
        return torch.randn(shape[::-1], generator=generator).to(dtype).permute(*reversed(range(len(shape))))
    if layout == "misaligned":
        return torch.randn(torch.Size(shape).numel() + 1, generator=generator).to(dtype)[1:].view(shape)
    assert layout == "stepped"
    return torch.randn([*shape[:-1], shape[-1] * 2], generator=generator).to(dtype)[..., ::2]


LAYOUTS = ("dense", "pitched", "transposed", "misaligned", "stepped")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 48), (2, 3, 17), (5,), (1, 1), (2, 2, 2, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_gelu(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    check("scaled_gelu", make(shape, dtype, layout), make(shape[-1:], dtype), 0.7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 48), (2, 70), (1, 1), (2, 1500)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_softmax(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    check("softmax", make(shape, dtype, layout), at_least=2 if layout in ("dense", "misaligned") else 1)


def test_softmax_of_infinities_and_nan() -> None:
    x = make((4, 32), torch.float32)
    x[0, 3], x[1], x[2, 5] = float("nan"), -float("inf"), float("inf")
    check("softmax", x, at_least=4)


@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = make(shape, dtype), make(shape[-1:], dtype)
    check("add_rms_norm", x, x * 2, weight, 1e-5, at_least=3)
    if dtype != torch.float16:
        check("layer_norm", x + 3, weight, weight + 1, 1e-5, at_least=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outer_reductions(layout: str) -> None:
    check("column_sum", make((37, 48), torch.float32, layout))
    check("middle", make((2, 5, 16), torch.float32, layout))


@pytest.mark.parametrize("shape", [(), (3,), (7, 65), (2, 3, 1000)])
def test_full_reductions(shape: tuple[int, ...]) -> None:
    check("total", make(shape or (1,), torch.float32).reshape(shape))
    check("total", torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape))


def variants(name: str, *args: Any) -> list[str]:
    return host.variants(generated(name), *args)


@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_split_reductions(layout: str) -> None:
    """Enough rows for several parts, the last of them cut short."""
    x = make((333, 16), torch.float32, layout)
    check("column_sum", x)
    assert any("split" in v for v in variants("column_sum", x))
    check("column_statistics", make((333, 16), torch.float32, layout) + 3)
    check("total", make((100, 333), torch.float32, layout))
    check("total", torch.arange(33300, dtype=torch.int32).reshape(100, 333))


def test_parts() -> None:
    """As many as fill the GPU, and never one without rows."""
    op = generated("column_sum")
    for rows, columns, expected in ((333, 16, 6), (64, 16, 1), (100_000, 16, 528), (100_000, 6400, 5), (1, 1, 1)):
        x = torch.empty(1).expand(rows, columns)
        problem = host.describe(op, [x], [])
        assert problem.locals[list(op.op.locals).index("parts0")] == expected


def test_two_launches() -> None:
    check("normalized", make((9, 33), torch.float32).abs() + 1)
    check("group_norm", make((2, 8, 6), torch.float32), make((8,), torch.float32), make((8,), torch.float32), 1e-5)


@pytest.mark.parametrize("layout", ["dense", "pitched", "transposed"])
def test_in_place(layout: str) -> None:
    check("add_in_place", make((5, 16), torch.float32, layout), make((16,), torch.float32))
    check("shift_in_place", make((5, 16), torch.float32, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_statistics(layout: str, dtype: torch.dtype) -> None:
    check("statistics", make((3, 100), dtype, layout) + 5, at_least=2 if layout in ("dense", "misaligned") else 1)
    ties = torch.tensor([[1.0, 3, 3, 0, 0], [float("nan"), 1, 2, float("nan"), -1]]).to(dtype)
    op = generated("statistics")
    for variant, results in host.run_all(op, ties):
        assert results[2].tolist() == [1, 0] and results[3].tolist() == [3, 0], variant


@pytest.mark.parametrize("at", [0, 50, 99])
def test_the_mean_of_a_row_with_an_infinity(at: int) -> None:
    """NaN, whichever setting runs, wherever it stands."""
    x = make((3, 100), torch.float32)
    x[1, at] = float("inf")
    for variant, results in host.run_all(generated("statistics"), x):
        assert results[1].isnan().tolist() == results[0].isnan().tolist() == [False, True, False], variant


@pytest.mark.parametrize("flag", [False, True])
def test_flags(flag: bool) -> None:
    check("maybe_scaled", make((4, 16), torch.float32), flag, at_least=3)


@pytest.mark.parametrize("shape", [(3, 32), (3, 34), (2, 2, 6)])
def test_halves(shape: tuple[int, ...]) -> None:
    check("swiglu", make(shape, torch.float32), at_least=2)
    check("swiglu", make(shape, torch.bfloat16), at_least=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout: str) -> None:
    check("views", make((5, 16), torch.float32, "dense" if layout == "stepped" else layout))
    check("scattered", make((5, 16), torch.float32, layout), make((5, 16), torch.float32))
    check("joined", make((5, 16), torch.float32, layout), make((5, 3), torch.float32, layout))


def test_indirect_reads() -> None:
    weight = make((11, 16), torch.float32)
    check("embedding", weight, torch.randint(0, 11, (3, 4)))
    check("gathered", weight, torch.randint(0, 11, (11, 5)))


def test_numbers_at_run_time() -> None:
    check("numbers", make((4, 16), torch.float32) * 5, 7, 0.1)
    check("numbers", make((4, 16), torch.float32) * 5, -3, 1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", [(), (3,), (2, 2)])
def test_broadcasting(leading: tuple[int, ...], layout: str) -> None:
    x, row = make((*leading, 5, 16), torch.float32, layout), make((*leading, 1, 16), torch.float32)
    check("broadcast", x, row, make((5, 1), torch.float32), torch.tensor(0.3))
    expanded = make((5, 16), torch.float32).expand(*leading, 5, 16)
    check("broadcast", expanded, row, make((5, 1), torch.float32), torch.tensor(0.3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scans(layout: str) -> None:
    for shape in ((3, 40), (70, 16)):
        check("scans", make(shape, torch.float32, layout))
    check("scan_and_reduction", make((3, 40), torch.float32, layout).abs() + 0.1)


def test_long_scans_carry() -> None:
    check("scan_and_reduction", make((2, 1100), torch.float32).abs() + 0.1)
    check("scans", make((3, 40), torch.bfloat16))
    check("scans", (make((70, 16), torch.float32) * 9).to(torch.int32))


def test_the_largest_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"M must not be 0: (amax|argmax) of no elements"):
        list(host.run_all(generated("middle"), torch.empty(2, 0, 16)))


def test_sums_of_nothing() -> None:
    check("total", torch.empty(0, 16))
    check("column_sum", torch.empty(0, 16))


def test_a_size_that_another_bounds_is_checked() -> None:
    """cos has to have half of x's columns; torch only said so of the sizes that it traced with."""
    x, cos = make((5, 16), torch.float32), make((5, 7), torch.float32)
    with pytest.raises(ValueError, match="must hold"):
        list(host.run_all(generated("rotated"), x, cos))
    check("rotated", x, make((5, 8), torch.float32))
    check("rotated", x, make((5, 20), torch.float32))


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="dimension -1 of bias must be as large as dimension -1 of x"):
        list(host.run_all(generated("scaled_gelu"), torch.ones(3, 16), torch.ones(15), 1.0))
    with pytest.raises(ValueError, match="bias must have the dtype of x"):
        list(host.run_all(generated("scaled_gelu"), torch.ones(3, 16), torch.ones(16).half(), 1.0))
    with pytest.raises(ValueError, match="x must be of dtype bfloat16 or float16 or float32"):
        list(host.run_all(generated("scaled_gelu"), torch.ones(3, 16).double(), torch.ones(16).double(), 1.0))
