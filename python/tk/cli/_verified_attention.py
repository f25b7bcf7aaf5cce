"""The pairs of mods of all loaded packs, forward and backward, each with every config that fits, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from tk.cli._verified import DTYPES, NOT_RUN, Case, Checked, every_config
from tk.cli._wrong import ONCE, Asked, given
from tk.flex.tracing import trace
from tk.flex.tracing.evaluate import evaluate, indices, read
from tk.flex.tracing.trace import Capture, Traced
from tk.generated import register
from tk.ops import flex
from tk.ops.product import allows_tf32

HEADS, HEAD_SIZES = 2, (64, 128)
QUERIES, KEYS = (1, 256), 256  # decoding, and whole tiles of the largest configs
_EVERYWHERE = 1 << 30


def mods(device: str, queries: Sequence[int] = QUERIES, asked: Asked = ONCE) -> Iterator[Checked]:
    """Checks mods, with what they capture made up. The gradients are of query, key, value and of what is captured."""
    for name in register.attention_names():
        op = register.find(name)
        text = op.meta.get("flex") if op is not None else None
        if not isinstance(text, str):
            yield Checked(name, "", problem=f"{NOT_RUN}no call is made up for it")
            continue
        for dtype in DTYPES:
            for size in HEAD_SIZES:
                for rows in queries:
                    pair = _Pair(name, trace.parse(text), dtype, size, rows, asked.seed)
                    yield from pair.checked(device, asked)


class _Pair:
    """The call of one shape of a pair's forward or backward op."""

    def __init__(self, name: str, traced: Traced, dtype: torch.dtype, size: int, rows: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def made(n: int, *last: int) -> Tensor:
            return torch.randn(1, HEADS, n, *last, generator=generator)

        self.name, self.traced, self.dtype, self.size = name, traced, dtype, size
        self.operands = [made(n, size).to(dtype) for n in (rows, KEYS, KEYS)]
        self.grads = made(rows, size).to(dtype), made(rows)
        self.values = [_captured(c) for c in traced.captures]

    def checked(self, device: str, asked: Asked = ONCE) -> Iterator[Checked]:
        what = f"{self.dtype}, heads of {self.size}, {self.operands[0].shape[2]} queries"
        try:
            with torch.no_grad():
                results = flex.forward(*self.request("cpu", torch.float64))
        except (IndexError, RuntimeError, ValueError) as error:  # what was made up does not go together
            yield Checked(self.name, what, problem=f"{NOT_RUN}{error}")
            return
        arguments = given((*self.operands, *self.values))
        if not self.name.endswith("_backward"):
            run = partial(self.forward, device)
            case = Case(self.name, what, run, lambda: results[0], allows_tf32(), given=arguments)
        else:
            exact = partial(self.backward, "cpu", torch.float64, results)
            of_grads = partial(self.backward, device, self.dtype, results)
            magnitudes = partial(self.magnitudes, results[1]) if self.traced.differentiable else None
            case = Case(self.name, what, of_grads, exact, allows_tf32(), magnitudes, arguments)
        yield from every_config(case, device, asked=asked)

    def request(self, device: str, dtype: torch.dtype) -> flex.Request:
        there = [x.to(device) if isinstance(x, Tensor) else x for x in self.values]
        operands: list[Any] = [x.to(device, dtype) for x in self.operands]
        captured: Any = self.traced.by_kind(there)
        absent = [None] * len(flex.OPTIONAL)
        numbers = self.size**-0.5, _EVERYWHERE, _EVERYWHERE
        return flex.Request(*(*operands, self.traced.text, *captured, *absent, *numbers))

    def forward(self, device: str) -> Tensor:
        out, _ = flex.forward(*self.request(device, self.dtype))
        return out

    def backward(self, device: str, dtype: torch.dtype, results: Sequence[Tensor]) -> Any:
        """results: out and the log-sum-exps in float64. Both sides are given them rounded, so that it is the backward
        alone that is judged."""
        sums = torch.float64 if dtype is torch.float64 else torch.float32
        (grad_out, grad_lse), (out, lse) = self.grads, (results[0].to(self.dtype), results[1].float())
        given = grad_out.to(device, dtype), grad_lse.to(device, sums), out.to(device, dtype), lse.to(device, sums)
        return flex.backward(*given, *self.request(device, dtype).for_gradient, True)

    def magnitudes(self, lse: Tensor, exact: Sequence[Tensor]) -> list[Tensor]:
        """What errors are held against: the sum of its terms' magnitudes for a captured tensor's gradient; for the
        others the gradients themselves.

        A captured value is read by many scores, and its gradient is the sum of all their gradients. Those of a row sum
        to grad_lse alone, whatever grad_out is, because a softmax does not change when a number is added to a row. So
        the sum is a small part of its terms (about a hundredth for one slope a head, 64 columns and 256 queries), while
        each of them is rounded as if nothing cancelled: it is a part of the terms that a right kernel may be off by.
        """
        terms = _magnitudes_of_terms(self.request("cpu", torch.float64), self.traced, lse, *self.grads)
        return [*exact[: len(exact) - len(terms)], *terms]


def _magnitudes_of_terms(
    request: flex.Request, traced: Traced, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> list[Tensor]:
    """For each captured tensor with a gradient, and each element of it, what the gradients of all scores that read it
    add up to without their signs. In float64, with all scores at once."""
    query, key, value = request.operands
    place = indices([0], range(HEADS), (0, query.shape[2]), (0, KEYS), "cpu")
    values = traced.values_of(request.tensors, request.floats, request.ints)
    captured = [values[i].detach().double().requires_grad_() for i in traced.differentiable]
    for i, x in zip(traced.differentiable, captured, strict=True):
        values[i] = x
    allowed = torch.ones(()).bool() if traced.mask is None else evaluate(traced.mask, place, values)
    scores = query @ key.mT * request.scale
    reads: list[tuple[Tensor, Tensor]] = []  # what was read, and the same with an element for each score

    def gather(_: fx.Node, source: Tensor, at: list[Any]) -> Tensor:
        found = read(source, at)
        if not found.requires_grad:
            return found
        reads.append((found, found.detach().expand(scores.shape).clone().requires_grad_()))
        return reads[-1][1]

    assert traced.score is not None  # it reads what has a gradient
    with torch.enable_grad():
        result = evaluate(traced.score, (scores, *place), values, allowed, gather).expand(scores.shape)
    weights = torch.where(allowed, (result.detach() - lse.unsqueeze(-1)).exp(), 0)
    product = grad_out.double() @ value.mT
    mean = (weights * product).sum(-1, keepdim=True)
    terms = torch.autograd.grad(
        result, [spread for _, spread in reads], weights * (product - mean + grad_lse[..., None])
    )
    sizes = [
        torch.where(allowed, x.abs(), 0).sum_to_size(found.shape) for (found, _), x in zip(reads, terms, strict=True)
    ]
    return list(torch.autograd.grad([found for found, _ in reads], captured, sizes))


def _captured(c: Capture) -> Any:
    """Slopes and biases are small, so that scores are no larger than what float32 has digits for. Ids are for one
    position more than there are: an offset is 1."""
    if c.kind != "tensor":
        return 1 if c.kind == "int" else 1.0
    sizes = [KEYS + 1] * c.rank if c.rank <= 3 else [*[HEADS] * (c.rank - 2), KEYS, KEYS]  # batch and heads first
    return torch.full(sizes, 2.0**-4 if c.dtype.is_floating_point else 1, dtype=c.dtype)
