"""A right call of every public function of tk, and what torch has of the same name: what ``tk bench`` times and
``tk verify`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tk
from tk.ops._register import RECORDS

__all__ = ["Call", "Maker", "calls"]


@dataclass(frozen=True)
class Call:
    """torchs: the same in torch's functions, of the same arguments; None where torch has nothing to compare with."""

    name: str
    args: tuple[Any, ...]
    torchs: Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(tk, self.name)
        return found


# What rows and columns are multiples of; and channels, heads and batches.
_SCALES = {"small": (1, 1), "medium": (32, 4), "large": (256, 16)}


def calls(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, scale: str = "small", seed: int = 0
) -> list[Call]:
    """One at least of each function. dtype: of floating-point tensors, where a function takes several. scale: "small",
    with ragged sizes; "medium", of whole tiles; "large", at which times mean something."""
    return list(Maker(torch.device(device), dtype, *_SCALES[scale], seed))


def written_by_hand(device: torch.device | str, dtype: torch.dtype, scale: str, seed: int = 0) -> list[Call]:
    """Those of ``calls`` whose kernels are not generated, and have the most configs."""
    maker = Maker(torch.device(device), dtype, *_SCALES[scale], seed)
    return [*maker.written_by_hand(), *maker.more_written_by_hand(), *maker.attention()]


class Maker:
    """Makes tensors and calls. n: what rows and columns are multiples of. c: channels, heads and batches."""

    def __init__(self, device: torch.device, dtype: torch.dtype, n: int, c: int, seed: int = 0):
        self.device, self.dtype, self.n, self.c = device, dtype, n, c
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def __iter__(self) -> Iterator[Call]:
        yield from self.written_by_hand()
        yield from self.reductions()
        yield from self.rows()
        yield from self.indices()
        yield from self.attention()
        yield from self.random()
        yield from self.lists()

    def call(self, name: str, *args: Any, torchs: Callable[..., Any] | None = None, **kwargs: Any) -> Call:
        return Call(name, args, torchs, kwargs)

    def written_by_hand(self) -> Iterator[Call]:
        for record in RECORDS.values():
            if record.calls is not None:
                yield from record.calls(self)

    def more_written_by_hand(self) -> Iterator[Call]:
        for record in RECORDS.values():
            if record.more_calls is not None:
                yield from record.more_calls(self)

    def reductions(self) -> Iterator[Call]:
        names = ("amax", "amin", "sum", "mean", "std", "var", "var_mean", "std_mean", "logsumexp", "argmax",
                 "argmin", "max", "min", "prod", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort",
                 "argsort", "softmax", "log_softmax", "all", "any")  # fmt: skip
        for name in names:
            yield Call(name, (self.matrix(), -1), getattr(torch, name))
        yield Call("norm", (self.matrix(), 2, -1), torch.norm)
        yield Call("vector_norm", (self.matrix(),), torch.linalg.vector_norm)
        yield Call("topk", (self.matrix(), 2), torch.topk)

    def matrix(self) -> Tensor:
        return self(4 * self.n, 6 * self.n)

    def rows(self) -> Iterator[Call]:
        n, t = self.n, self
        width = 6 * n
        yield Call("layer_norm", (self.matrix(), (width,), t(width), t(width)), F.layer_norm)
        yield Call("rms_norm", (self.matrix(), (width,), t(width)), F.rms_norm)
        yield Call("group_norm", (t(2, 4 * self.c, 5 * n), 2, t(4 * self.c), t(4 * self.c)), F.group_norm)
        yield Call("add_layer_norm", (self.matrix(), self.matrix(), t(width), t(width)),
                   lambda x, r, w, b: (F.layer_norm(x + r, w.shape, w, b), x + r))  # fmt: skip
        yield Call("add_rms_norm", (self.matrix(), self.matrix(), t(width)),
                   lambda x, r, w: (F.rms_norm(x + r, w.shape, w), x + r))  # fmt: skip
        yield Call("gelu", (self.matrix(),), F.gelu)
        yield Call("silu", (self.matrix(),), F.silu)
        yield Call("swiglu", (self.matrix(), self.matrix()), lambda gate, up: F.silu(gate) * up)
        yield Call("geglu", (self.matrix(), self.matrix()), lambda gate, up: F.gelu(gate) * up)
        yield Call("quantize_fp8", (self.matrix(),))
        yield Call("rope", (t(2, 3 * n, 8), t(3 * n, 4), t(3 * n, 4)), _rotated)
        target = (torch.arange(4 * n, device=self.device) * 5) % width
        yield Call("cross_entropy", (self.matrix(), target), F.cross_entropy)
        yield Call("linear_cross_entropy", (self.matrix(), t(width, width), target), _linear_loss)

    def indices(self) -> Iterator[Call]:
        n, t = self.n, self
        rows = (torch.arange(4 * n, device=self.device) * 3 % (5 * n)).reshape(2, 2 * n)
        yield Call("embedding", (rows, t(5 * n, 6 * n)), F.embedding)
        at = (torch.arange(4 * n * 6 * n, device=self.device) * 7 % (4 * n)).reshape(4 * n, 6 * n)
        yield Call("gather", (self.matrix(), 0, at), torch.gather)
        yield Call("scatter_add", (self.matrix(), 0, at, self.matrix()), torch.scatter_add)
        yield Call("index_add", (t(5 * n, 6 * n), 0, rows[0], t(2 * n, 6 * n)), torch.index_add)
        yield Call("index_put", (t(5 * n, 6 * n), (rows[0],), t(2 * n, 6 * n)), torch.index_put)
        yield Call("bucketize", (self.matrix(), t(5 * n).sort()[0]), torch.bucketize)
        yield Call("searchsorted", (t(5 * n).sort()[0], self.matrix()), torch.searchsorted)

    def attention(self) -> Iterator[Call]:
        q, k, v = (self(1, 2 * self.c, 8 * self.n, 64 if self.n > 1 else 16) for _ in range(3))
        yield Call("sdpa", (q, k, v), F.scaled_dot_product_attention)
        yield Call("flex_attention", (q, k, v), F.scaled_dot_product_attention)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        n = len(q)
        starts = torch.tensor([0, n // 4, n], dtype=torch.int32, device=self.device)
        yield Call("varlen_attn", (q, k, v, starts, starts, n, n), _each_sequence)

    def random(self) -> Iterator[Call]:
        given: dict[str, Any] = {"seed": 1, "offset": 0}
        shape = (4 * self.n, 6 * self.n)
        yield Call("dropout", (self.matrix(), 0.5), kwargs=given)
        yield Call("dropout_add", (self.matrix(), self.matrix(), 0.5), kwargs=given)
        yield Call("rand", (shape,), kwargs={**given, "device": self.device})
        yield Call("randn", (shape,), kwargs={**given, "device": self.device})
        yield Call("randint", (0, 9, shape), kwargs={**given, "device": self.device})

    def lists(self) -> Iterator[Call]:
        params, grads, averages, squares = ([self(3 * self.n, 2).abs(), self(4 * self.n).abs()] for _ in range(4))
        steps = [torch.zeros((), device=self.device) for _ in range(2)]
        yield Call("adamw_", (params, grads, averages, squares, steps), kwargs={"lr": 0.1})


def _each_sequence(query: Tensor, key: Tensor, value: Tensor, *starts: Any) -> Tensor:
    """Attention of each sequence that tk.varlen_attn's arguments hold."""
    found = []
    for at in zip(*(pairwise(x.tolist()) for x in starts[:2]), strict=True):
        rows, columns = (slice(*ends) for ends in at)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[rows], key[columns], value[columns]))
        found.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(found)


def _linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss of a batch by rows: cross_entropy has classes second, linear has them last."""
    logits = F.linear(x, weight)
    is_batch = logits.dim() > 2 and logits.shape[:-1] == target.shape
    return F.cross_entropy(logits.flatten(0, -2), target.flatten()) if is_batch else F.cross_entropy(logits, target)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
