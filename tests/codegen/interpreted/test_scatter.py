"""Writes at indices, by every variant, against torch: sums in fp64, and bit by bit where no order is left to chance."""

from __future__ import annotations

import backwards
import host
import pytest
import scatter_cases
import torch

from tk.codegen.family import Generated, generate
from tk.generated import op


def build(case: scatter_cases.Case) -> Generated:
    return generate(case.fn, op(**case.texts)(case.fn).signature, "f")


def listed(x) -> list[torch.Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def expected_of(case: scatter_cases.Case, args: list[torch.Tensor]) -> list[torch.Tensor]:
    wide = [a.double() if a.is_floating_point() else a.clone() for a in args]
    like = [r.dtype for r in listed(case.fn(*[a.clone() for a in args]))]
    found = [r.to(d) for r, d in zip(listed(case.fn(*wide)), like, strict=True)]
    return found + ([wide[0].to(args[0].dtype)] if case.name == "in_place" else [])


def is_a_choice(case: scatter_cases.Case) -> bool:
    return case.name in ("scatter", "index_copy")


@pytest.mark.parametrize("case", scatter_cases.CASES, ids=lambda c: c.name)
def test_scatter(case: scatter_cases.Case) -> None:
    found, args = build(case), case.arguments()
    expected = expected_of(case, args)
    ways = set()
    for name, results in host.run_all(found, *args):
        ways.add("deterministic" in name)
        if is_a_choice(case) and "deterministic" not in name:  # torch on the CPU takes the last, as the deterministic
            continue
        for result, value in zip(results, expected, strict=True):
            tolerance = 1e-2 if value.dtype == torch.bfloat16 else 3e-6
            tolerance *= 10 if "rounded" in name else 1  # of what cancels, each addition has been rounded
            torch.testing.assert_close(result, value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    sums_floats = any("deterministic" in c.name for c, _, _ in found.ways())
    assert ways == ({False, True} if sums_floats else {False})


# Sums at indices that another launch reads, or casts, on their way to the result.
THROUGH_SCRATCH = {
    "with what is gathered": lambda x, at: x.scatter_add(-1, at, torch.gather(x, -1, at)),
    "in another shape": lambda x, at: x.scatter_add(-1, at, torch.gather(x, -1, at)).unflatten(0, (1, -1)),
    "beside another sum": lambda x, at: (x.scatter_add(-1, at, torch.gather(x, -1, at)), x.sum(-1)),
}


@pytest.mark.parametrize("shape", [(2, 64), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", THROUGH_SCRATCH)
def test_sums_of_16_bits_in_scratch_memory(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    fn = THROUGH_SCRATCH[name]
    texts = {"x": f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}[M, N]", "at": "i64[M, K]"}
    made = generate(fn, op(**texts)(fn).signature, "f", True)
    x, at = torch.randn(shape, dtype=dtype), torch.randint(0, shape[1], (shape[0], 6))
    wide = x.double().requires_grad_()
    expected = fn(wide, at)
    grads = [torch.randn(r.shape, dtype=dtype) for r in listed(expected)]
    of_x = torch.autograd.grad(listed(expected), wide, [g.double() for g in grads])
    given = {"x": x, "at": at, **backwards.arguments(grads, [r.to(dtype) for r in listed(expected)])}
    assert made.backward is not None
    for one, values in ((made, listed(expected)), (made.backward, of_x)):
        count = 0
        for variant, found in host.run_all(one, *(given[n] for n in one.signature.params)):
            count += 1
            for result, value in zip(found, values, strict=True):
                torch.testing.assert_close(
                    result.double(), value.detach(), rtol=0.02, atol=0.1, msg=lambda m, v=variant: f"{v}: {m}"
                )
        assert count


def test_sums_without_regard_to_order() -> None:
    """Twice the same numbers in another order: the same bits, and those of the exact sum, rounded once."""
    case = next(c for c in scatter_cases.CASES if c.name == "scatter_add_fp32")
    found = build(case)
    x, n = torch.zeros(3, 16), 40
    y = torch.randn(n, 16) * 10.0 ** torch.randint(-6, 6, (n, 1))
    at = torch.randint(0, 3, (n, 1)).expand(n, 16).contiguous()
    order = torch.randperm(n)
    runs = [dict(host.run_all(found, x, a, b, only="deterministic")) for a, b in ((at, y), (at[order], y[order]))]
    exact = torch.zeros(3, 16, dtype=torch.float64).scatter_add(0, at, y.double()).float()
    for name, (first,) in runs[0].items():
        assert torch.equal(first, runs[1][name][0]), name
        torch.testing.assert_close(first, exact, rtol=2e-7, atol=0)


def test_infinities_and_nan_are_added_up() -> None:
    found = build(next(c for c in scatter_cases.CASES if c.name == "scatter_add_fp32"))
    inf, nan = float("inf"), float("nan")
    rows = [[inf, 1.0], [-inf, 1.0], [inf, -inf], [nan, 1.0], [nan, inf], [3.0e38, 3.0e38], [1e-45, 1e-45]]
    y = torch.tensor(rows).T.contiguous()
    x, at = torch.zeros(1, 7), torch.zeros(2, 7, dtype=torch.int64)
    for name, (result,) in host.run_all(found, x, at, y):
        expected = torch.tensor([[inf, -inf, nan, nan, nan, inf, 3e-45]])
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("kind", ["amax_fp32", "amin_fp32"])
def test_nan_is_an_extreme(kind: str) -> None:
    found = build(next(c for c in scatter_cases.CASES if c.name == kind))
    y = torch.tensor([[float("nan"), -0.0, 5.0, -float("inf")], [-float("nan"), 2.0, -7.0, 1.0]])
    x, at = torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.int64)
    expected = x.scatter_reduce(0, at, y, kind[:4])
    for name, (result,) in host.run_all(found, x, at, y):
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=0, atol=0, msg=name)


def test_nothing_to_put() -> None:
    found = build(next(c for c in scatter_cases.CASES if c.name == "scatter_add_fp32"))
    x = torch.randn(3, 16)
    for name, (result,) in host.run_all(found, x, torch.empty(0, 16, dtype=torch.int64), torch.empty(0, 16)):
        assert torch.equal(result, x), name
