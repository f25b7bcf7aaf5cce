"""tk.linear_cross_entropy on the CPU: values and gradients against float64, memory, modes of torch, what is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import seeds
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tk
from tk.heuristics import described
from tk.ops import linear_cross_entropy as blocks

SEED = seeds.seed("TK_LINEAR_CROSS_ENTROPY_SEED")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def torchs(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
           ignore_index: int | None = None, **kwargs: Any) -> Tensor:  # fmt: skip
    """torch's, which is there from 2.13 on."""
    matrix = linear_weight.flatten(0, -2)
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, matrix, bias).reshape(*input.shape[:-1], *linear_weight.shape[:-1])
    return F.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **kwargs)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 classes, and products of a row."""
    monkeypatch.setattr(blocks, "BUDGET_BYTES", 1)


class Problem:
    def __init__(self, rows: int, features: int, classes: int, dtype: torch.dtype, rng: Random) -> None:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        layout = (lambda x: x) if rng.random() < 0.5 else (lambda x: x.t().contiguous().t())
        self.x, self.w = layout(drawn(rows, features)), layout(drawn(classes, features) / max(1, features) ** 0.5)
        self.bias = drawn(classes) if rng.random() < 0.5 else None
        self.weight = drawn(classes).abs() if rng.random() < 0.5 else None
        self.target = torch.randint(classes, (rows,), generator=generator)
        self.kwargs: dict[str, Any] = {
            "reduction": rng.choice(("none", "mean", "sum")),
            "label_smoothing": rng.choice((0.0, 0.1, 1.0)),
            "ignore_index": rng.choice((None, -100, 0, classes - 1)),
        }
        if rows > 2 and self.kwargs["ignore_index"] in (None, -100):
            self.target[rng.randrange(rows)] = -100

    def found(self, f: Callable[..., Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The loss and its gradients, each row's weighed by another number."""
        leaves = [
            None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.x, self.w, self.bias)
        ]
        weight = None if self.weight is None else self.weight.to(dtype or self.weight.dtype)
        x, w, bias = leaves
        loss = f(x, w, self.target, linear_bias=bias, weight=weight, **self.kwargs)
        grad = torch.linspace(0.5, 2, max(1, loss.numel()))[: loss.numel()].to(loss.dtype).reshape(loss.shape)
        given = [y for y in leaves if y is not None]
        return [loss.detach(), *torch.autograd.grad(loss, given, grad)]


def check(problem: Problem) -> None:
    # A class alone has no gradient, but for what rounding leaves.
    slack = 1e-5 if problem.w.shape[0] == 1 else 0.0
    for results in zip(
        problem.found(tk.linear_cross_entropy), problem.found(torchs), problem.found(torchs, torch.float64), strict=True
    ):
        hold(*results, slack, problem.kwargs)


def hold(ours: Tensor, theirs: Tensor, exact: Tensor, slack: float = 0.0, what: object = "") -> None:
    """The error is at most twice torch's own, beside a rounding of the largest number and slack."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    if not ours.numel() or exact.isnan().any():
        assert_close(ours.double(), exact, equal_nan=True)
        return
    largest = exact.abs().max()
    slack += 4 * torch.finfo(ours.dtype).eps * float(largest)
    errors = [(y.double() - exact).abs().max() for y in (ours, theirs)]
    assert errors[0] <= 2 * errors[1] + slack, (what, errors, largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(12))
def test_drawn_problems_against_float64(number: int, dtype: torch.dtype, small_blocks: None) -> None:
    drawn_against_float64(number, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("number", range(12, 24))
def test_drawn_problems_in_one_block(number: int, dtype: torch.dtype) -> None:
    drawn_against_float64(number, dtype)


@pytest.mark.parametrize("number", range(24, 36))
def test_drawn_problems_in_blocks_of_rows(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BUDGET_BYTES", 10 * 513 * 3)
    monkeypatch.setattr(blocks, "LEAST_ROWS", 3)
    drawn_against_float64(number, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_parts_of_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bits a block of 512 classes has four."""
    monkeypatch.setattr(blocks, "BUDGET_BYTES", 16000 + 4 * 9 * 20)
    x, (block, *_) = torch.empty(9, 20, dtype=dtype), blocks._blocks_of_gradients(torch.empty(9, 20, dtype=dtype), 700)
    assert len(block[1]) == (1 if x.dtype == torch.float32 else 4)
    for seed in range(6):
        problem = Problem(9, 20, 700, dtype, Random(seed))
        problem.kwargs["reduction"] = "none"
        check(problem)


def drawn_against_float64(number: int, dtype: torch.dtype) -> None:
    seed = SEED + number
    print(f"TK_LINEAR_CROSS_ENTROPY_SEED={seed}, number 0 repeats it")
    rng = Random(seed)
    check(Problem(rng.randint(1, 40), rng.randint(1, 70), rng.choice((1, 7, 128, 129, 300, 513)), dtype, rng))


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (2, 3, 1), (0, 0, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_nothing(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed in range(4):
        check(Problem(*shape, dtype, Random(seed)))


def test_one_block_is_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(9, 20, 700, torch.bfloat16, Random(1))
    whole = problem.found(tk.linear_cross_entropy)
    monkeypatch.setattr(blocks, "BUDGET_BYTES", 1)
    for a, b in zip(whole, problem.found(tk.linear_cross_entropy), strict=True):
        assert_close(a, b)


GENERATOR = torch.Generator().manual_seed(SEED)
X, W = torch.randn(6, 5, generator=GENERATOR), torch.randn(11, 5, generator=GENERATOR)
T = torch.tensor([0, 10, 3, -100, 5, 7])


def test_rows_that_are_ignored() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    assert tk.linear_cross_entropy(x, w, torch.full((6,), -100)).isnan()
    assert tk.linear_cross_entropy(x, w, torch.full((6,), -100), reduction="sum") == 0
    weight = torch.rand(11, generator=torch.Generator().manual_seed(0))
    for kwargs in ({}, {"weight": weight}, {"reduction": "sum"}):
        found, expected = (torch.autograd.grad(f(x, w, torch.full((6,), -100), **kwargs), (x, w))  # type: ignore[arg-type]
                           for f in (tk.linear_cross_entropy, torchs))  # fmt: skip
        assert_close(found, expected, equal_nan=True)
    tk.linear_cross_entropy(x, w, T, reduction="sum").backward()
    assert x.grad is not None and torch.equal(x.grad[3], torch.zeros(5))
    assert_close(
        tk.linear_cross_entropy(x, w, T.clamp(min=0), ignore_index=5), torchs(x, w, T.clamp(min=0), ignore_index=5)
    )


def test_batches_and_single_rows() -> None:
    x, t = torch.randn(2, 3, 5), T.clamp(min=0).reshape(2, 3)
    found = tk.linear_cross_entropy(x, W, t, reduction="none")
    assert_close(found, torchs(x.flatten(0, 1), W, t.flatten(), reduction="none").reshape(2, 3))
    assert_close(tk.linear_cross_entropy(X[0], W, T[0]), torchs(X[0], W, T[0]))
    assert_close(tk.linear_cross_entropy(X[1], W, T[1].byte()), torchs(X[1], W, T[1]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_probabilities_and_more_dimensions(reduction: str) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    for f in (tk.linear_cross_entropy, torchs):
        f(x, w, torch.rand(6, 11, generator=torch.Generator().manual_seed(0)), reduction=reduction).sum().backward()  # type: ignore[operator]
        if f is tk.linear_cross_entropy:
            found, x.grad, w.grad = (x.grad, w.grad), None, None
    assert_close(found, (x.grad, w.grad))
    kernel, bias, t = torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3), torch.randint(4, (6, 2, 3))
    for dtype in (torch.float32, torch.float64):
        given = [y.to(dtype) for y in (X, kernel)]
        kwargs = {"linear_bias": bias.to(dtype), "reduction": reduction}
        assert_close(tk.linear_cross_entropy(*given, t, **kwargs), torchs(*given, t, **kwargs))


@pytest.mark.parametrize("start", [0, 300])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_classes_without_probability(dtype: torch.dtype, start: int) -> None:
    """A vocabulary is padded with biases of -inf: a whole block of them."""
    bias = torch.where(torch.arange(400) < 100, 0.0, -torch.inf).roll(start)
    given = [y.to(dtype) for y in (X.clone(), torch.randn(400, 5), bias)]
    target = (torch.tensor([1, 2, 3, 0, 9, 8]) + start) % 400

    def found(f: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, w, bias = (y.to(dtype) for y in given)
        loss = f(x.requires_grad_(), w, target, linear_bias=bias)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    exact = found(torchs, torch.float64)
    for results in zip(found(tk.linear_cross_entropy, dtype), found(torchs, dtype), exact, strict=True):
        hold(*results)


# --- Memory ---


class Peak(TorchDispatchMode):
    """The most bytes that were there at once of what is made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def freed(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.now -= size


@pytest.mark.parametrize("features", [64, 1024, 4096])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_256_mib_do_for_8192_rows_of_131072_classes(dtype: torch.dtype, features: int) -> None:
    """Beside the weight and the gradients. On meta tensors, of which nothing is computed."""
    rows, classes = 8192, 131072
    x, w = (torch.empty(n, features, dtype=dtype, device="meta") for n in (rows, classes))
    given = (x, w, torch.empty(rows, dtype=torch.int64, device="meta"), None, None, -100, 0.0)
    of_rows = torch.empty(rows, device="meta")
    with Peak() as forward:
        blocks._forward(blocks._Given(*given))
    assert 32 << 20 < forward.most < 256 << 20
    with Peak() as backward:
        blocks._gradients(of_rows, of_rows, of_rows, blocks._Given(*given), [True, True, False])
    gradients = (rows + classes) * features * dtype.itemsize
    assert backward.most - gradients < 256 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_gradients_at_once(dtype: torch.dtype) -> None:
    """Of one block that the budget just holds, and of blocks of rows of float32."""
    sizes = [(192, 512, 131072), *([(8192, 1024, 65536)] if dtype == torch.float32 else [])]
    for rows, features, classes in sizes:
        x, w = (torch.empty(n, features, dtype=dtype, device="meta") for n in (rows, classes))
        assert blocks._rows_at_once(x, classes)
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        with Peak() as peak:
            blocks._loss_and_gradients(blocks._Given(x, w, target, None, None, -100, 0.0), True, [True, True, False])
        assert peak.most - (rows + classes) * features * dtype.itemsize < 256 << 20


def test_a_backward_makes_no_second_gradients() -> None:
    """Of those that are not saved."""
    x, w = (torch.empty(n, 8192, device="meta", requires_grad=True) for n in (1000, 500))
    loss = tk.linear_cross_entropy(x, w, torch.empty(1000, dtype=torch.int64, device="meta"))
    with Peak() as backward:
        torch.autograd.grad(loss, (x, w))
    assert backward.most < 1024


# --- Products ---


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products of this test's calls, by name."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Tensor]:
        op = getattr(blocks, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return op(*args, **kwargs)

        return call

    for name in ("_mm", "_mm_out", "_addmm_out"):
        monkeypatch.setattr(blocks, name, counted(name))
    return called


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradients_of_a_whole_problem_take_three_products(
    dtype: torch.dtype, reduction: str, products: list[str]
) -> None:
    x, w = X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()
    loss = tk.linear_cross_entropy(x, w, T, reduction=reduction)
    loss.sum().backward()
    assert len(products) == 3
    products.clear()
    with torch.no_grad():
        tk.linear_cross_entropy(x, w, T, reduction=reduction)
    tk.linear_cross_entropy(x.detach(), w.detach(), T, reduction=reduction)
    assert products == ["_mm", "_mm"]


@pytest.mark.parametrize("weight", [None, torch.rand(11)], ids=["", "weight"])
def test_rows_of_one_block_take_few_launches(weight: Tensor | None) -> None:
    """A kernel for the losses, one for the gradient of the logits: not a dozen for what blocks have in common."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with called() as forward:
        loss = tk.linear_cross_entropy(x, w, T, weight=weight, reduction="none", label_smoothing=0.1)
    with called() as backward:
        loss.sum().backward()
    name = "cross_entropy_rows" if weight is None else "cross_entropy_weighted"
    assert forward == ["mm", name]
    assert backward == [f"{name}_backward", "mm", "mm"]


@contextmanager
def called() -> Iterator[list[str]]:
    """The names of the kernels' ops, in order, when the block ends."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    found = [e.name.removeprefix("tk::") for e in profile.events() if e.name.startswith("tk::")]
    names += [name for name in found if "linear_cross_entropy" not in name]


def test_blocks_of_rows_take_three_products_each(products: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BUDGET_BYTES", 10 * 11 * 2)
    monkeypatch.setattr(blocks, "LEAST_ROWS", 2)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    tk.linear_cross_entropy(x, w, T).backward()
    assert len(products) == 9 and products.count("_addmm_out") == 2


@pytest.mark.parametrize("number", range(3))
def test_a_gradient_alone(number: int, products: list[str]) -> None:
    bias = torch.randn(11, generator=torch.Generator().manual_seed(0))

    def found(f: Callable[..., Tensor]) -> Tensor:
        given = [X.clone(), W.clone(), bias.clone()]
        leaf = given[number].requires_grad_()
        (grad,) = torch.autograd.grad(f(given[0], given[1], T, linear_bias=given[2]) * 3.7, leaf)
        return grad

    assert_close(found(tk.linear_cross_entropy), found(torchs))
    assert len(products) == (1 if number == 2 else 2)


def test_what_is_at_once() -> None:
    def rows(rows: int, classes: int, dtype: torch.dtype, size: int = 8) -> int:
        return blocks._rows_at_once(torch.empty(rows, 64, dtype=dtype, device="meta"), classes, size)

    for sizes in ((402, 11517), (428, 4211), (285, 23657), (1, 256000)):
        assert rows(*sizes, torch.bfloat16) == sizes[0]
    assert rows(8192, 128256, torch.bfloat16) == 0
    assert rows(8192, 128256, torch.float32) == 0  # of too few rows
    assert 256 <= rows(8192, 50257, torch.float32) < 8192
    assert rows(900, 50257, torch.bfloat16, 4) == 900


# --- Modes of torch ---


def test_autocast_is_torchs() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (f(X, W, T, weight=torch.rand(11, generator=torch.Generator().manual_seed(0)))
                           for f in (tk.linear_cross_entropy, torchs))  # fmt: skip
    assert found.dtype == expected.dtype == torch.float32
    assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_compile_export_and_fakes() -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return tk.linear_cross_entropy(x, w, T, linear_bias=b, label_smoothing=0.1)

    leaves = [x.requires_grad_() for x in (X.clone(), W.clone(), torch.randn(11))]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    assert_close(found, expected)
    meta = [x.detach().to("meta").requires_grad_() for x in leaves]
    result = tk.linear_cross_entropy(meta[0], meta[1], T.to("meta"), linear_bias=meta[2], reduction="none")
    assert result.shape == (6,) and result.is_meta
    given = (X.clone().requires_grad_(), W, T, None, torch.rand(11), -100, 0.1)
    opcheck(torch.ops.tk.linear_cross_entropy.default, given)
    opcheck(torch.ops.tk.linear_cross_entropy_reduced.default, (*given, True))
    needs = [True, True, False]
    for dtype in (torch.float32, torch.float16):
        x, w, *rest = given if dtype == torch.float32 else (X.half(), W.half(), T, None, None, -100, 0.1)
        opcheck(torch.ops.tk.linear_cross_entropy_at_once.default, (*map(detached, (x, w, *rest)), True, needs))
    plain = tuple(map(detached, given))
    loss, logits = torch.ops.tk.linear_cross_entropy_with_logits(*plain)
    opcheck(torch.ops.tk.linear_cross_entropy_with_logits.default, plain)
    opcheck(torch.ops.tk.linear_cross_entropy_from_logits.default, (torch.ones_like(loss), logits, *plain, needs))
    loss_of_fakes = tk.linear_cross_entropy(meta[0], meta[1], T.to("meta"), linear_bias=meta[2])
    assert [g.shape for g in torch.autograd.grad(loss_of_fakes, meta)] == [x.shape for x in leaves]


@pytest.mark.parametrize("is_trained", [False, True])
def test_export_with_any_number_of_rows(is_trained: bool) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(W.clone(), requires_grad=is_trained)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return tk.linear_cross_entropy(x, self.weight, t)

    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    exported = torch.export.export(Head(), (X, T), dynamic_shapes=({0: rows}, {0: rows}))
    assert_close(exported.module()(X[:4], T[:4]), torchs(X[:4], W, T[:4]))


def test_compiled_for_any_number_of_rows() -> None:
    def grads(f: Callable[..., Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        x, w = x.clone().requires_grad_(), W.clone().requires_grad_()
        return torch.autograd.grad(f(x, w, t) * 3, (x, w))

    compiled = torch.compile(lambda x, w, t: tk.linear_cross_entropy(x, w, t), backend="aot_eager", dynamic=True)
    for n in (6, 4):
        assert_close(grads(compiled, X[:n], T[:n]), grads(torchs, X[:n], T[:n]))


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", ["linear_weight", "target", "linear_bias", "weight"])
def test_an_argument_on_another_device_is_named(name: str) -> None:
    given = dict(input=X, linear_weight=W, target=T, linear_bias=torch.zeros(11), weight=torch.ones(11))
    with pytest.raises(ValueError, match=rf"input is on cpu, {name} on meta; all tensors must be on one device"):
        tk.linear_cross_entropy(**{**given, name: given[name].to("meta")})


def test_transforms() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return tk.linear_cross_entropy(x, w, T)

    expected = torch.func.grad(lambda x, w: torchs(x, w, T), argnums=(0, 1))(X, W)
    assert_close(torch.func.grad(loss, argnums=(0, 1))(X, W), expected)
    ws = torch.stack((W, -W))
    assert_close(torch.vmap(loss, (None, 0))(X, ws), torch.stack([torchs(X, w, T) for w in ws]))
    per_sample = torch.vmap(torch.func.grad(lambda x, t: tk.linear_cross_entropy(x, W, t)))(X, T.clamp(min=0))
    assert_close(per_sample, torch.vmap(torch.func.grad(lambda x, t: torchs(x, W, t)))(X, T.clamp(min=0)))


def test_a_graph_can_be_walked_twice() -> None:
    x = X.clone().requires_grad_()
    loss = tk.linear_cross_entropy(x, W, T)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True) for _ in range(2))
    assert_close(first, second)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_every_backward_finds_what_is_small(dtype: torch.dtype, reduction: str, products: list[str]) -> None:
    """The gradients, or of losses that are not reduced the logits."""
    x, w = X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()
    loss = tk.linear_cross_entropy(x, w, T, reduction=reduction)
    products.clear()
    first, second = (torch.autograd.grad(loss.sum(), (x, w), retain_graph=True) for _ in range(2))
    assert products == ["_mm_out"] * (4 if reduction == "none" else 0)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_small_gradients_of_float16(reduction: str) -> None:
    """Those of the logits of a mean over many rows are below float16's smallest number, until the loss is scaled."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 8, generator=generator).half().requires_grad_() for n in (4096, 6000))
    target, bias = torch.randint(6000, (4096,), generator=generator), torch.zeros(6000).half().requires_grad_()
    scale = 2.0**14 if reduction == "mean" else 1.0
    grad = torch.tensor(scale, dtype=torch.float16)
    leaves = (x, w, bias)
    found = torch.autograd.grad(
        tk.linear_cross_entropy(x, w, target, linear_bias=bias, reduction=reduction), leaves, grad
    )
    given = [y.detach().double().requires_grad_() for y in leaves]
    exact = torch.autograd.grad(torchs(given[0], given[1], target, linear_bias=given[2], reduction=reduction), given,
                                grad.double())  # fmt: skip
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == torch.float16
        error = (ours.double() - right).abs()
        assert (error <= 2.0**-9 * right.abs() + 2.0**-11 * right.pow(2).mean().sqrt()).all(), error.max()


@pytest.mark.parametrize("saved_bytes", [0, blocks.SAVED_BYTES])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_backwards_of_one_graph_with_other_gradients(
    dtype: torch.dtype, saved_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None sees another's factor, whether the gradients are saved, or the first backward takes them and others compute
    them again."""
    monkeypatch.setattr(blocks, "SAVED_BYTES", saved_bytes)
    x, w = X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()
    weight = torch.rand(11, generator=torch.Generator().manual_seed(0)).to(dtype)
    loss = tk.linear_cross_entropy(x, w, T, weight=weight, label_smoothing=0.2)
    given = [y.detach().double().requires_grad_() for y in (x, w)]
    exact = torch.autograd.grad(torchs(*given, T, weight=weight.double(), label_smoothing=0.2), given)
    scales = (-3.25, 1.0, 0.75)
    found = [torch.autograd.grad(loss, (x, w), loss.new_tensor(scale), retain_graph=True) for scale in scales]
    for of_scale, scale in zip(found, scales, strict=True):
        for ours, right in zip(of_scale, exact, strict=True):
            largest = float(right.abs().max()) * abs(scale)
            assert_close(ours.double(), right * scale, rtol=0, atol=4 * torch.finfo(dtype).eps * largest)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_another_backward_launches_what_has_run(
    dtype: torch.dtype, reduction: str, label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a CUDA graph is recorded no kernel can be loaded: what one forward and one backward have run must do for
    every further backward of the graph."""
    monkeypatch.setattr(blocks, "SAVED_BYTES", 0)  # of saved gradients a backward launches nothing of tk's
    x, w = (torch.zeros(n, 64, dtype=dtype, requires_grad=True) for n in (256, 1000))
    target, found = torch.zeros(256, dtype=torch.int64), list[described.Described]()
    gpu = described.gpu(90)
    recording = described.Recording(lambda op, *a, **k: found.extend(described.launches(gpu, op, *a, **k)))

    def launched() -> set[object]:
        """What the engine chooses by: the same has the same variant, in any pack."""
        chosen_by: set[object] = set()
        for d in found:
            tensors = (t and replace(t, address=t.address % 16) for t in d.problem.tensors)
            chosen_by.add((replace(d.problem, tensors=tuple(tensors)), d.config))
        found.clear()
        return chosen_by

    with torch.autograd.set_multithreading_enabled(False), recording:
        loss = tk.linear_cross_entropy(x, w, target, reduction=reduction, label_smoothing=label_smoothing)
        grad = torch.ones_like(loss)
        first = torch.autograd.grad(loss, (x, w), grad, retain_graph=True)
        has_run = launched()
        second = torch.autograd.grad(loss, (x, w), grad, retain_graph=True)
        again = launched()
    assert len(again) > 2 and again <= has_run
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("saved_bytes", [0, blocks.SAVED_BYTES])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_a_batch_of_gradients_of_the_loss(
    dtype: torch.dtype, saved_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SAVED_BYTES", saved_bytes)
    x, w = X.to(dtype, copy=True).requires_grad_(), W.to(dtype, copy=True).requires_grad_()
    loss, scales = tk.linear_cross_entropy(x, w, T), torch.tensor([-3.25, 1.0])
    one_by_one = [torch.autograd.grad(tk.linear_cross_entropy(x, w, T), (x, w), scale) for scale in scales]
    for _ in range(2):
        batch = torch.autograd.grad(loss, (x, w), scales, retain_graph=True, is_grads_batched=True)
        for found, wanted in zip(batch, zip(*one_by_one, strict=True), strict=True):
            assert torch.equal(found, torch.stack(wanted))


def test_a_batch_of_gradients_of_rows() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = tk.linear_cross_entropy(x, w, T, reduction="none")
    rows = torch.autograd.grad(loss, (x, w), torch.eye(6), retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(of_row, (x, w), retain_graph=True) for of_row in loss]
    for found, wanted in zip(rows, zip(*one_by_one, strict=True), strict=True):
        assert_close(found, torch.stack(wanted))


def test_a_weight_that_changes_before_the_backward() -> None:
    w = W.clone().requires_grad_()
    loss = tk.linear_cross_entropy(X, w, T)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_under_autocast_is_not_rounded_with_its_factor() -> None:
    """The loss is float32, and so is its gradient: 1 + 2**-10 is no number of bfloat16."""
    x = X.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = tk.linear_cross_entropy(x, W, T)
    (one,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tk.linear_cross_entropy(x, W, T)
    (found,) = torch.autograd.grad(loss, x, torch.tensor(1 + 0.75 * 2**-8))
    assert torch.equal(found, (one.float() * (1 + 0.75 * 2**-8)).bfloat16())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_gradients(reduction: str) -> None:
    for number in range(8):
        problem = Problem(5 * (number > 0), 20, 30, torch.float32, Random(number))
        problem.kwargs["reduction"] = reduction
        x, w = problem.x.requires_grad_(), problem.w
        kwargs = dict(linear_bias=problem.bias, weight=problem.weight, **problem.kwargs)
        with torch.no_grad():
            assert_close(tk.linear_cross_entropy(x, w, problem.target, **kwargs),
                         torchs(x, w, problem.target, **kwargs), equal_nan=True)  # fmt: skip


def test_a_config_reduces_rows_in_blocks(products: list[str]) -> None:
    x = X.clone().requires_grad_()
    found, expected = (f(x, W, T, **kwargs) for f, kwargs in ((tk.linear_cross_entropy, {"config": 0}), (torchs, {})))
    assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))
    assert len(products) == 3


def test_a_wrong_class_where_gradients_are_needed() -> None:
    with pytest.raises(IndexError, match="target is 11, must be 0 to 10"):
        tk.linear_cross_entropy(X.clone().requires_grad_(), W, torch.where(T > 9, 11, T))


def test_a_gradient_of_class_weights_is_torchs() -> None:
    """Of probabilities alone."""
    weight = torch.rand(11, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        tk.linear_cross_entropy(X, W, T, weight=weight)
    target = torch.rand(6, 11)
    found, expected = (torch.autograd.grad(f(X, W, target, weight=weight), weight)
                       for f in (tk.linear_cross_entropy, torchs))  # fmt: skip
    assert_close(found, expected)
    with torch.no_grad():
        assert_close(tk.linear_cross_entropy(X, W, T, weight=weight), torchs(X, W, T, weight=weight))


def test_no_gradient_of_the_gradient() -> None:
    x = X.clone().requires_grad_()
    for reduction in ("none", "mean"):
        loss = tk.linear_cross_entropy(x, W, T, reduction=reduction).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"tk\.linear_cross_entropy has no gradient of its gradient"):
            torch.autograd.grad(grad.sum(), x)
    with pytest.raises(NotImplementedError, match=r"tk\.linear_cross_entropy has no formula for forward-mode"):
        torch.func.jvp(lambda x: tk.linear_cross_entropy(x, W, T), (X,), (X,))


def test_torchs_own_agrees() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has it from 2.13 on")
    options = torch.nn.LinearCrossEntropyOptions()
    for kwargs in ({}, {"options": options}, {"ignore_index": 3, "reduction": "sum"}):
        assert_close(
            tk.linear_cross_entropy(X, W, T.clamp(min=0), **kwargs),
            F.linear_cross_entropy(X, W, T.clamp(min=0), **kwargs),
        )  # type: ignore[arg-type]


# --- What is refused ---

REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "input": (TypeError, "input must be a Tensor, is NoneType", lambda: tk.linear_cross_entropy(None, W, T)),
    "linear_weight": (TypeError, "linear_weight must be a Tensor", lambda: tk.linear_cross_entropy(X, 3, T)),
    "target": (TypeError, "target must be a Tensor, is list", lambda: tk.linear_cross_entropy(X, W, [1])),
    "weight": (TypeError, "weight must be a Tensor", lambda: tk.linear_cross_entropy(X, W, T, weight=3)),
    "sizes": (ValueError, "the last sizes differ: input is", lambda: tk.linear_cross_entropy(X[:, :3], W, T)),
    "vector": (ValueError, "linear_weight must have 2", lambda: tk.linear_cross_entropy(X, W[0], T)),
    "number": (ValueError, "input must have 1", lambda: tk.linear_cross_entropy(X[0, 0], W, T)),
    "bias": (ValueError, "linear_bias must be", lambda: tk.linear_cross_entropy(X, W, T, linear_bias=W[0])),
    "rows": (ValueError, r"target must be \[6\], or prob", lambda: tk.linear_cross_entropy(X, W, T[:5])),
    "classes": (ValueError, r"weight must be \[11\]", lambda: tk.linear_cross_entropy(X, W, T, weight=X[0])),
    "dtype": (ValueError, "target is torch.int32", lambda: tk.linear_cross_entropy(X, W, T.int())),
    "class": (IndexError, "target is 11, must be 0 to 10",
              lambda: tk.linear_cross_entropy(X, W, torch.where(T > 9, 11, T))),
    "reduction": (ValueError, "reduction is 'max'", lambda: tk.linear_cross_entropy(X, W, T, reduction="max")),
    "smoothing": (ValueError, "label_smoothing is 2", lambda: tk.linear_cross_entropy(X, W, T, label_smoothing=2)),
    "index": (TypeError, "ignore_index must be an int", lambda: tk.linear_cross_entropy(X, W, T, ignore_index=1.5)),
    "options": (TypeError, "options must be a torch", lambda: tk.linear_cross_entropy(X, W, T, options=3)),
    "ignored": (ValueError, "ignore_index is 2, must be None",
                lambda: tk.linear_cross_entropy(X, W, torch.rand(6, 11), ignore_index=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, text, call = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_where_no_row_counts_gradients_are_zeros(dtype: torch.dtype) -> None:
    """And a mean is nan, as in torch."""
    x, w = (torch.randn(n, 7, dtype=dtype, requires_grad=True) for n in (5, 3))
    loss = tk.linear_cross_entropy(x, w, torch.ones(5, dtype=torch.int64), ignore_index=1)
    assert loss.isnan()
    assert not any(g.count_nonzero() for g in torch.autograd.grad(loss, (x, w)))
