"""Indices out of bounds: every way to read or write at one ends in a trap, and touches nothing before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import host
import pytest
import torch
import torch.nn.functional as F

from tk.codegen.family import Generated, generate
from tk.generated import op

ROWS, COLUMNS = 5, 16


def build(fn: Callable[..., Any], **texts: Any) -> Generated:
    return generate(fn, op(**texts)(fn).signature, "f")


# name: (the function of x [5, 16] and of `at`, the declaration of `at`, its shape, whether it counts from the end)
READS: dict[str, tuple[Callable[..., Any], str, tuple[int, ...], bool]] = {
    "embedding": (lambda x, at: F.embedding(at, x), "i64[K]", (3,), False),
    "embedding_of_32_bits": (lambda x, at: F.embedding(at, x), "i32[K]", (3,), False),
    "gather": (lambda x, at: x.gather(0, at), "i64[K, N]", (3, COLUMNS), False),
    "index_select": (lambda x, at: x.index_select(0, at), "i64[K]", (3,), False),
    "index": (lambda x, at: x[at], "i64[K]", (3,), True),
    "index_of_columns": (lambda x, at: x.t()[:, at], "i64[K]", (3,), True),
    "reduced": (lambda x, at: x[at].sum(-1), "i64[K]", (3,), True),
    "softmax": (lambda x, at: F.softmax(x[at], -1), "i64[K]", (3,), True),
    "summed_over_indices": (lambda x, at: x[at].sum(0), "i64[K]", (3,), True),
    "scanned": (lambda x, at: x[at].cumsum(-1), "i64[K]", (3,), True),
}  # fmt: skip
WRITES: dict[str, tuple[Callable[..., Any], str, tuple[int, ...], bool]] = {
    "scatter": (lambda x, at, y: x.scatter(0, at, y), "i64[K, N]", (3, COLUMNS), False),
    "scatter_add": (lambda x, at, y: x.scatter_add(0, at, y), "i64[K, N]", (3, COLUMNS), False),
    "scatter_amax": (lambda x, at, y: x.scatter_reduce(0, at, y, "amax"), "i64[K, N]", (3, COLUMNS), False),
    "index_add": (lambda x, at, y: x.index_add(0, at, y), "i64[K]", (3,), False),
    "index_add_scaled": (lambda x, at, y: x.index_add(0, at, y, alpha=0.5), "i64[K]", (3,), False),
    "index_copy": (lambda x, at, y: x.index_copy(0, at, y), "i64[K]", (3,), False),
    "index_put": (lambda x, at, y: x.index_put((at,), y), "i64[K]", (3,), True),
    "index_put_add": (lambda x, at, y: x.index_put((at,), y, accumulate=True), "i64[K]", (3,), True),
    "embedding_gradient": (
        lambda x, at, y: torch.ops.aten.embedding_dense_backward(y, at, x.shape[0], 2, False), "i64[K]", (3,), False,
    ),
}  # fmt: skip


def made(name: str) -> tuple[Generated, list[torch.Tensor], torch.Tensor, bool]:
    """(op, arguments, the indices among them, whether they count from the end). Beside x lies other memory."""
    fn, declared, shape, from_end = (READS | WRITES)[name]
    x = torch.randn(ROWS + 4, COLUMNS)[2:-2]
    at = torch.randint(0, ROWS, shape, dtype=torch.int32 if "i32" in declared else torch.int64)
    texts = {"x": "fp32[M, N]", "at": declared}
    args = [x, at]
    if name in WRITES:
        texts["y"] = "fp32[K, N]"
        args.append(torch.randn(3, COLUMNS))
    return build(fn, **texts), args, at, from_end


def of_torch(name: str, args: list[torch.Tensor]) -> torch.Tensor:
    return (READS | WRITES)[name][0](*args)


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_within_bounds(name: str) -> None:
    found, args, at, from_end = made(name)
    if from_end:
        at[0] = -ROWS
    ran = 0
    for variant, (result, *_) in host.run_all(found, *args):
        ran += 1
        torch.testing.assert_close(result, of_torch(name, args), msg=lambda m, v=variant: f"{v}: {m}")
    assert ran


@pytest.mark.parametrize("name", [*READS, *WRITES])
@pytest.mark.parametrize("beyond", [0, -1])
def test_out_of_bounds(name: str, beyond: int) -> None:
    """In every variant, and with the trap left out nothing foreign comes in."""
    found, args, at, from_end = made(name)
    bad = ROWS if beyond == 0 else -ROWS - 1 if from_end else -1
    at.view(-1)[-1] = bad
    for layout, (config, _setting, _way) in [(x, w) for x in host.LAYOUTS for w in found.ways()]:
        only = f"{layout.name} {config.name}"
        try:
            ran = list(host.run_all(found, *args, only=only))
        except Exception as error:
            assert "a trap" in str(error), only
            continue
        assert not ran, f"{only} went on"


def test_nothing_foreign_is_touched_before_the_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the trap took its time."""
    monkeypatch.setattr(host, "TRAPS", [False])
    read, args, at, _ = made("embedding")
    at[-1] = ROWS
    for name, (result,) in host.run_all(read, *args):
        assert torch.equal(result[:-1], args[0][at[:-1]]), name
        behind = args[0].as_strided((COLUMNS,), (1,), args[0].storage_offset() + ROWS * COLUMNS)
        assert not (result[-1] == behind).any(), name
    put, args, at, _ = made("index_add")
    at[-1] = -1
    whole = args[0].as_strided((ROWS + 4, COLUMNS), (COLUMNS, 1), 0)
    before = whole.clone()
    for _ in host.run_all(put, *args):
        assert torch.equal(whole, before)


@pytest.mark.parametrize(
    ("fn", "tests"),
    [
        (lambda x: x[torch.arange(x.shape[0], device=x.device)], 1),  # it may count from the end
        (lambda x: x.index_select(0, torch.arange(x.shape[0], device=x.device)), 0),
        (lambda x: x.gather(1, x.argmax(1, keepdim=True)), 0),
        (lambda x: x.gather(0, x.argmax(1, keepdim=True)), 1),
    ],
)  # fmt: skip
def test_what_is_known_is_not_tested(fn: Callable[..., Any], tests: int) -> None:
    found = build(fn, x="fp32[M, N]")
    (graph,) = found.graphs
    plan = found.plan(graph, host.LAYOUTS[-1], found.settings()[-1])
    assert plan is not None
    assert sum(inspect.getsource(one.fn.fn).count("trap_where") for one in plan.launches) == tests
