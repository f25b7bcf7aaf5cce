"""Views and what is written into them at sizes 0 to 3: as eager torch has it, or refused with a size that must be
more. What torch's internals ask of contiguity is no condition."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import backwards
import host
import ops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tk.codegen.family import generate
from tk.generated import op
from tk.generated.declare import Declared
from tk.generated.signature import DTYPES, NumberSpec, Signature

WRITING: dict[str, Callable[[Tensor], object]] = {
    "rest of the columns": lambda x: x[:, 1:].add_(1),
    "rest of the rows": lambda x: x[1:].mul_(2),
    "rest of both": lambda x: x[1:, 1:].add_(1),
    "of the transposed": lambda x: x.t()[1:].add_(1),
    "all but the last": lambda x: x[:, :-1].zero_(),
    "every other": lambda x: x[:, ::2].add_(1),
    "a copy": lambda x: x[1:].copy_(x[:-1].clone()),
    "two to five": lambda x: x[:, 2:5].add_(1),
    "the last three": lambda x: x[:, -3:].mul_(2),
    "before the last": lambda x: x[:, -3:-1].mul_(2),
    "the first": lambda x: x[:, :1].add_(1),
    "some of both": lambda x: x[1:3, -2:].zero_(),
    "every other of some": lambda x: x[:, 1:6:2].add_(1),
    "of the transposed, some": lambda x: x.t()[1:4].add_(1),
    "from another": lambda x: x[:, -2:].copy_(x[:, -2:].flip(-1)),
    "halves": lambda x: [piece.add_(n) for n, piece in enumerate(x.chunk(2, -1))] and None,
}
# Those for which torch has a result at every size.
CLAMPED: dict[str, Callable[[Tensor], object]] = {
    "one column": lambda x: x[:, 1:2] + 1,
    "the first column": lambda x: x[:, :1] * 2,
    "two columns": lambda x: x[:, :2].sum(-1),
    "the last two": lambda x: x[-2:] * 2,
    "five": lambda x: x[:, 2:5] + 1,
    "of a slice": lambda x: x[:, 1:4][:, -2:] + 1,
    "of the middle": lambda x: x[:, 1:-1] * 2,
    "before the last": lambda x: x[:, -3:-1] * 2,
    "across": lambda x: x[:, -3:2] * 2,
    "with steps": lambda x: x[:, 1:8:3] + 1,
    "the mean of the rest": lambda x: x[:, 1:].mean(-1),
    "beside others": lambda x: torch.cat([x[:, 2:], x], 1),
    "all in a row": lambda x: x[:, 2:].reshape(-1) + 1,
    "turned round": lambda x: x[:, -3:].flip(-1),
    "a running sum": lambda x: x[:, -3:].cumsum(-1),
    "neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "of a wider one": lambda x: torch.cat([x, x], 1)[:, 1:4] * 2,
    "the first two and the last two": lambda x: x[:2] + x[-2:],
    "the first three and the last three": lambda x: x[:, :3] * x[:, -3:],
}
CUT: dict[str, Callable[[Tensor], object]] = {
    "a place": lambda x: x[:, 1] + 1,
    "the first": lambda x: x[0] * 2,
    "the last but one": lambda x: x[:, -2] * x[:, -1],
    "three": lambda x: x[:, -3:].amax(-1),
    "broadcast": lambda x: x - x[:, :1],
    "in one": lambda x: x[:, 1:2].squeeze(1),
    "unpacked": lambda x: torch.stack(x[:, 1:4].unbind(1)),
    "seen as a number": lambda x: x[:, :2].reshape(2, -1) if x[:, :2].shape[1] == 2 else x,
    "a place written": lambda x: x[:, 1].add_(2),
    "pieces": lambda x: x.chunk(2, -1),
    "differences": lambda x: x.diff(),
}


def built(fn: Callable[[Tensor], object], changes: bool):
    def whole(x):
        found = fn(x)
        return None if changes else found

    return generate(whole, op(x="fp32[M, N]")(whole).signature, "small")


def results(fn: Callable[[Tensor], object], x: Tensor, changes: bool) -> list[Tensor]:
    found = fn(x)
    return [x] if changes else list(found) if isinstance(found, tuple) else [found]


SIZES = list(product(range(4), repeat=2))


@pytest.mark.drawn
@pytest.mark.parametrize("name", WRITING)
def test_what_is_written(name: str) -> None:
    made = built(WRITING[name], True)
    for shape in SIZES:
        if name == "halves" and len(torch.empty(shape).chunk(2, -1)) < 2:
            continue  # eager torch has only one piece here
        x = torch.randn(shape)
        expected = results(WRITING[name], x.clone(), True)
        for variant, found in host.run_all(made, x):
            assert torch.equal(found[0], expected[0]), (shape, variant)


@pytest.mark.drawn
@pytest.mark.parametrize("name", CLAMPED)
def test_what_torch_clamps(name: str) -> None:
    made = built(CLAMPED[name], False)
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape)
        expected = results(CLAMPED[name], x.clone(), False)
        for variant, found in host.run_all(made, x):
            torch.testing.assert_close(found[0], expected[0], equal_nan=True, msg=f"{shape}, {variant}")


@pytest.mark.drawn
@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_out(name: str) -> None:
    """Right, or refused."""
    changes = name == "a place written"
    made = built(CUT[name], changes)
    n_right = 0
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape)
        try:
            expected = results(CUT[name], x.clone(), changes)
        except (IndexError, RuntimeError):
            expected = []
        try:
            for variant, found in host.run_all(made, x):
                assert len(found) == len(expected), (shape, variant)
                assert all(map(torch.equal, found, expected)), (shape, variant)
                n_right += 1
        except ValueError as error:
            assert "must" in str(error) or "would have a size" in str(error), shape
    assert n_right


def half(x: Tensor) -> int:
    return x.shape[-1] // 2


# Where torch raises, at some sizes, tk refuses them.
BY_SIZES: dict[str, Callable[[Tensor], object]] = {
    "the first half": lambda x: x[:, : half(x)] * 2,
    "the second half": lambda x: x[:, half(x) :] * 2,
    "the last half": lambda x: x[:, -half(x) :] * 2,
    "turned": lambda x: torch.cat([-x[:, half(x) :], x[:, : half(x)]], -1),
    "all but the last": lambda x: x[:, : x.shape[-1] - 1] + 1,
    "all but two": lambda x: x[:, : x.shape[-1] - 2] + 1,
    "the last two": lambda x: x[:, x.shape[-1] - 2 : x.shape[-1]] + 1,
    "the last three": lambda x: x[:, x.shape[-1] - 3 :].sum(-1),
    "before the last": lambda x: x[:, x.shape[-1] - 4 : x.shape[-1] - 1] * 2,
    "by the other size": lambda x: x[:, x.shape[0] - 3 : x.shape[0] + 1] + 1,
    "in steps": lambda x: x[:, half(x) - 1 :: 2] + 1,
    "a third": lambda x: x[:, x.shape[-1] // 3 : 2 * x.shape[-1] // 3] + 1,
    "neighbours": lambda x: x[:, 1:] - x[:, : x.shape[-1] - 1],
    "narrow": lambda x: x.narrow(1, 1, x.shape[1] - 1) + 1,
    "pieces of half": lambda x: torch.cat(x.split([half(x), x.shape[-1] - half(x)], -1)[::-1], -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1),
    "tensor_split of rows": lambda x: x.tensor_split(2),
    "hsplit": lambda x: torch.hsplit(x, 2),
    "four rows": lambda x: x.reshape(4, -1) + 1,
    "rows of four": lambda x: x.reshape(-1, 4) * 2,
    "in two": lambda x: x.view(x.shape[0], 2, x.shape[1] // 2).sum(1),
    "in pairs": lambda x: x.view(x.shape[0], -1, 2).sum(-1),
    "all in two": lambda x: x.flatten().reshape(2, -1) + 1,
    "unflatten": lambda x: x.unflatten(-1, (2, -1)).amax(-2),
    "unflatten by sizes": lambda x: x.unflatten(-1, (2, half(x))) + 1,
    "three rows of the transposed": lambda x: x.t().reshape(3, -1) + 1,
    "rows of three of the transposed": lambda x: x.t().reshape(-1, 3) + 1,
    "the transposed in the other's rows": lambda x: x.t().reshape(x.shape) - x,
    "the transposed as the other": lambda x: (x.t() * 2).reshape_as(x) - x,
    "the transposed in two": lambda x: x.t().reshape(2 * x.shape[0], x.shape[1] // 2) + 1,
    "some of the transposed, flat": lambda x: torch.flatten(x.t()[:, :, None], 1) + 1,
    "the rest in two": lambda x: x[:, 1:].reshape(2, -1) + 1,
    "two to five in two": lambda x: x[:, 2:5].reshape(2, -1) * 2,
    "every other in two": lambda x: x[:, ::2].reshape(2, -1) + 1,
    "the first half in two": lambda x: x[:, : half(x)].reshape(-1, 2) + 1,
    "each twice, in three": lambda x: x[:, None].expand(-1, 2, -1).reshape(3, -1) + 1,
    "repeated": lambda x: x.reshape(x.shape[0], -1, 1).expand(-1, -1, 2).flatten(1) + 1,
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", BY_SIZES)
def test_what_sizes_cut(name: str) -> None:
    fn = BY_SIZES[name]
    made = built(fn, False)
    n_right = 0
    for shape in [*SIZES, (4, 6), (2, 5), (8, 4)]:
        x = torch.randn(shape)
        try:
            expected = results(fn, x, False)
        except (IndexError, RuntimeError, ValueError):
            with pytest.raises(ValueError, match="must"):
                list(host.run_all(made, x))
            continue
        for variant, found in host.run_all(made, x):
            n_right += 1
            for one, value in zip(found, expected, strict=True):
                torch.testing.assert_close(one, value, equal_nan=True, msg=f"{shape}, {variant}")
    assert n_right


# Whether a reshape is a view or a copy is seen where it is written, and goes by the sizes.
WRITTEN: dict[str, Callable[[Tensor], object]] = {
    "the reshaped": lambda x: x.t().reshape(3, -1).add_(1),
    "what is reshaped": lambda x: [x.t().reshape(2, -1), x.add_(1)][0] * 1,
    "something else": lambda x: x.t().reshape(2, -1) + torch.zeros_like(x).add_(1).sum(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_of_a_reshaped_one(name: str) -> None:
    """Right, or refused."""
    fn = WRITTEN[name]

    def whole(x):
        return fn(x)

    made = generate(whole, op(x="fp32[M, N]")(whole).signature, "small")
    n_right = 0
    for shape in [*SIZES, (4, 6), (6, 4), (3, 12), (12, 3)]:
        x = torch.randn(shape)
        try:
            same = x.clone()
            expected = [fn(same), *([same] if made.op.params[0].mutated else [])]
        except RuntimeError:
            continue
        try:
            for variant, found in host.run_all(made, x):
                for one, value in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, value, msg=f"{shape}, {variant}")
                n_right += 1
        except ValueError as error:
            assert name != "something else" and "must" in str(error), shape
    assert n_right


def test_halves_by_split() -> None:
    """Torch has one piece of no columns, where the function unpacks two."""

    def fn(x):
        a, b = x.split(half(x), -1)
        return a + b

    made = built(fn, False)
    for shape in ((3, 0), (3, 1), (3, 3)):
        with pytest.raises(ValueError, match="must be"):
            list(host.run_all(made, torch.randn(shape)))
    x = torch.randn(3, 4)
    found = [found for _, found in host.run_all(made, x)]
    assert found and all(torch.equal(one, fn(x)) for (one,) in found)


# Halves of an odd dimension, which torch broadcasts where one of them has size 1.
HALVES: dict[str, Callable[[Tensor], object]] = {
    "gated": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "the product": lambda x: x[:, : half(x)] * x[:, half(x) :],
    "the difference": lambda x: x[:, half(x) :] - x[:, : half(x)],
    "one or the other": lambda x: torch.where(x[:, : half(x)] > 0, x[:, half(x) :], 0.0),
    "of the transposed": lambda x: x.t()[: half(x)] * x.t()[half(x) :],
    "between them": lambda x: torch.lerp(x[:, : half(x)], x[:, half(x) :], 0.25),
}


@pytest.mark.parametrize("name", HALVES)
def test_halves_that_torch_broadcasts(name: str) -> None:
    """Refused with these words where torch computes, and without them where it does not."""
    fn = HALVES[name]
    made = built(fn, False)
    seen = set()
    for shape in [*SIZES, (2, 4), (2, 5)]:
        x = torch.randn(shape)
        try:
            expected = results(fn, x, False)
        except (IndexError, RuntimeError, ValueError):
            with pytest.raises(ValueError, match="must") as caught:
                list(host.run_all(made, x))
            assert "broadcast" not in str(caught.value), shape
            seen.add("torch refuses")
            continue
        if shape[1] % 2:
            with pytest.raises(ValueError, match=r"must be equal to .*: torch would broadcast the one of size 1"):
                list(host.run_all(made, x))
            seen.add("torch broadcasts")
            continue
        for variant, found in host.run_all(made, x):
            torch.testing.assert_close(found, expected, msg=f"{shape}, {variant}")
            seen.add("equal")
    assert seen == {"torch refuses", "torch broadcasts", "equal"}


@pytest.mark.parametrize("name", ["gated", "the product"])
def test_the_broadcast_of_a_declared_size(name: str) -> None:
    """As the refusal says."""
    fn = HALVES[name]

    def whole(x):
        return fn(x)

    made = generate(whole, op(x="fp32[M, 3]")(whole).signature, "small")
    x = torch.randn(4, 3)
    found = [found for _, (found,) in host.run_all(made, x)]
    assert found
    for one in found:
        torch.testing.assert_close(one, fn(x))


DIFFERENTIATED: dict[str, Callable[[Tensor], Tensor]] = {
    "the last three": lambda x: x[:, -3:].sin(),
    "two to five": lambda x: x[:, 2:5] * x[:, 2:5],
    "the rest": lambda x: x[:, 1:].sum(-1),
    "neighbours": lambda x: x[:, 1:] * x[:, :-1],
    "beside others": lambda x: torch.cat([x[:, 2:] * x[:, :-2], x], 1),
    "by sizes": lambda x: x[:, x.shape[-1] - 3 :].sin(),
    "half": lambda x: x[:, half(x) :] * 2,
    "the transposed in the other's rows": lambda x: x.t().reshape(x.shape) * x,
    "the rest in a row": lambda x: x[:, 1:].reshape(-1).sin(),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_what_torch_clamps(name: str) -> None:
    fn = DIFFERENTIATED[name]

    def whole(x):
        return fn(x)

    made = generate(whole, op(x="fp32[M, N]")(whole).signature, "small", True).backward
    assert made is not None
    for shape in [*SIZES, (4, 6)]:
        x = torch.randn(shape, requires_grad=True)
        y = fn(x)
        grad = torch.randn_like(y)
        (expected,) = torch.autograd.grad(y, x, grad)
        named = {"x": x.detach(), **backwards.arguments([grad], [y])}
        count = 0
        for variant, found in host.run_all(made, *(named[n] for n in made.signature.params)):
            torch.testing.assert_close(found[0], expected, msg=f"{shape}, {variant}")
            count += 1
        assert count


# --- Every function of the tests ---

DECLARED = {name: x for name, x in vars(ops).items() if isinstance(x, Declared)}
# Torch has associative_scan on the CPU where it is compiled alone, and `dropped` draws.
WITHOUT_EAGER = {"recurrence", "last_positive", "dropped"}
IN_PLACE = {"add_in_place", "shift_in_place"}
# Two halves of an odd row differ in size: where one has a single element, torch broadcasts it, and tk says so.
BROADCAST = {"swiglu": {(1,), (3,)}}
WITHOUT_GRADIENT = {"total", "add_in_place", "shift_in_place", "scans", "running_extremes", "backward_cumsum",
                    "sorted_rows", "searched"}  # fmt: skip


def drawn_sizes(signature: Signature, name: str) -> list[tuple[int, ...]]:
    """Each size for all letters, and three draws of one for each."""
    n, draw = len(signature.letters), random.Random(name)
    found = [(k,) * n for k in range(4)] + [tuple(draw.randrange(4) for _ in range(n)) for _ in range(3)]
    return list(dict.fromkeys(found))


def drawn(signature: Signature, sizes: tuple[int, ...]) -> dict[str, Any]:
    values = dict(zip(signature.letters, sizes, strict=True))
    found: dict[str, Any] = {}
    for name, spec in signature.params.items():
        if isinstance(spec, NumberSpec):
            found[name] = {"int": 1, "float": 0.5, "bool": True}[spec.kind]
            continue
        dtype = DTYPES["fp32" if "fp32" in signature.variables.get(spec.dtype, ()) else spec.dtype]
        shape = [*([2] if spec.leading else []), *spec.shape(values)]
        found[name] = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    return found


def eager(declared: Declared, args: dict[str, Any]) -> list[Tensor] | None:
    """None where torch raises."""
    try:
        return [x for x in tree_flatten(declared.fn(**args))[0] if x is not None]
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted(DECLARED.keys() - WITHOUT_EAGER - IN_PLACE))
def test_every_function(name: str) -> None:
    """Forward: as torch has it, wherever torch has a result."""
    declared = DECLARED[name]
    made = generate(declared.fn, declared.signature, name)
    for sizes in drawn_sizes(declared.signature, name):
        args = drawn(declared.signature, sizes)
        expected = eager(declared, args)
        if expected is None:
            continue
        if sizes in BROADCAST.get(name, ()):
            with pytest.raises(ValueError, match="torch would broadcast"):
                list(host.run_all(made, *args.values()))
            continue
        count = 0
        for variant, found in host.run_all(made, *args.values()):
            count += 1
            for one, value in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    one, value, equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m, v=variant, s=sizes: f"{s}, {v}: {m}"
                )
        assert count, sizes


@pytest.mark.drawn
@pytest.mark.parametrize("name", sorted(DECLARED.keys() - WITHOUT_EAGER - WITHOUT_GRADIENT))
def test_every_gradient(name: str) -> None:
    """The backward serves what the forward does."""
    declared = DECLARED[name]
    made = generate(declared.fn, declared.signature, name, True).backward
    assert made is not None
    for sizes in drawn_sizes(declared.signature, name):
        args = drawn(declared.signature, sizes)
        own = [x.requires_grad_() for x in args.values() if isinstance(x, Tensor) and x.is_floating_point()]
        results = eager(declared, args)
        if results is None or sizes in BROADCAST.get(name, ()):
            continue
        floats = [r for r in results if r.is_floating_point()]
        grads = [torch.randn_like(r) for r in floats]
        pairs = [(r, g) for r, g in zip(floats, grads, strict=True) if r.requires_grad]
        try:
            wanted = torch.autograd.grad([r for r, _ in pairs], own, [g for _, g in pairs], allow_unused=True)
        except RuntimeError:  # torch's own gradient has no such size: index_select of no rows
            continue
        given = {**{n: x.detach() if isinstance(x, Tensor) else x for n, x in args.items()},
                 **backwards.arguments(grads, results)}  # fmt: skip
        count = 0
        for variant, found in host.run_all(made, *(given[n] for n in made.signature.params)):
            count += 1
            for one, x, value in zip(found, own, wanted, strict=True):
                torch.testing.assert_close(
                    one, torch.zeros_like(x) if value is None else value, equal_nan=True, rtol=1e-3, atol=1e-4,
                    msg=lambda m, v=variant, s=sizes: f"{s}, {v}: {m}",
                )  # fmt: skip
        assert count, sizes


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (0, 1), (7, 1)])
def test_layer_norm_over_one_element(shape: tuple[int, int]) -> None:
    """Its result does not depend on x, so that x has a gradient of exactly 0."""
    fn = lambda x, w, b, eps: F.layer_norm(x, (x.shape[-1],), w, b, eps)  # noqa: E731
    texts = {"x": "fp32[M, N]", "w": "fp32[N]", "b": "fp32[N]", "eps": "float"}
    made = generate(fn, op(**texts)(fn).signature, "one", True).backward
    assert made is not None
    x, w, grad = torch.randn(shape) * 100, torch.randn(1), torch.randn(shape)
    given = {"x": x, "w": w, "b": torch.randn(1), "eps": 1e-5, "grad_0": grad}
    count = 0
    for variant, (of_x, of_w, of_b) in host.run_all(made, *(given[n] for n in made.signature.params)):
        assert not of_x.any() and not of_w.any(), variant
        torch.testing.assert_close(of_b, grad.sum(0))
        count += 1
    assert count
