"""The plans of matrix products, as expressions: what they say of a problem, without a GPU."""

from dataclasses import replace

import pytest

from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Grid, bucket_expr, buckets, enumerate_grid
from tk.aot.spec import DTYPES
from tk.kernels.mm.family import FAMILY
from tk.kernels.mm.op import OP

DEVICES = {
    80: {"sm_count": 108, "arch": 80, "shared_optin": 166912, "l2_bytes": 40 << 20},
    90: {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 60 << 20},
}


def product(m: int, n: int, k: int, arch: int, mode: int = 0, b_along_k: bool = False) -> Problem:
    """Of bf16 matrices, a and out row-major."""
    strides = {"a": (k, 1), "b": (1, k) if b_along_k else (n, 1), "out": (n, 1)}
    sizes = {"a": (m, k), "b": (k, n), "out": (m, n)}
    a, b, out = (TensorValue(sizes[name], strides[name], DTYPES["bf16"]) for name in ("a", "b", "out"))
    bare = Problem((a, b, None, out), (0, 0), mode, DEVICES[arch])
    return replace(bare, locals=evaluate_locals(OP.locals.values(), bare))


def times(grid: Grid, problem: Problem) -> dict[str, int]:
    """Predicted for the variants of the problem's bucket that fit it."""
    candidates = buckets(OP, grid.variants)[bucket_expr(OP).evaluate(problem)]
    found = {}
    for variant in (grid.variants[i] for i in candidates):
        plan = variant.plan
        if all(c.holds.evaluate(problem) for c in plan.constraints):
            inner = replace(problem, locals=evaluate_locals(plan.locals, problem))
            found[variant.name] = plan.cost.evaluate(inner)
    return found


def dims(problem: Problem) -> list[int]:
    names = list(OP.locals)
    return [problem.locals[names.index(name)] for name in OP.dims]


@pytest.fixture(scope="module", params=[80, 90])
def grid(request: pytest.FixtureRequest) -> Grid:
    return enumerate_grid(FAMILY, request.param)


@pytest.mark.parametrize("b_along_k", [False, True])
@pytest.mark.parametrize("also", [0, MODE_BITS["static_weights"]])
def test_in_batch_invariant_mode_the_choice_does_not_depend_on_the_rows(grid: Grid, also: int, b_along_k: bool) -> None:
    mode = MODE_BITS["batch_invariant"] | also
    problems = [product(m, 4096, 4096, grid.arch, mode, b_along_k) for m in (2, 100, 513, 9000)]
    assert len({tuple(times(grid, p).items()) for p in problems}) == 1


def test_every_predicted_time_is_positive_and_grows_with_the_work(grid: Grid) -> None:
    little, much = (times(grid, product(200, 1024 * s, 1024 * s, grid.arch)) for s in (1, 8))
    both = little.keys() & much.keys()
    assert len(both) > 5
    assert all(0 < little[name] < much[name] for name in both)


@pytest.mark.parametrize(
    ("m", "n", "k", "early"),
    [
        (16, 4096, 4096, True),
        (64, 28672, 8192, True),
        (65, 28672, 8192, False),
        (512, 2048, 4096, True),
        (513, 2048, 4096, False),
    ],
)
def test_what_begins_early_with_static_weights_has_pins_of_its_own(m: int, n: int, k: int, early: bool) -> None:
    assert dims(product(m, n, k, 90)) == [m, n, k, 0]
    assert dims(product(m, n, k, 90, MODE_BITS["static_weights"])) == [m, n, k, early]
