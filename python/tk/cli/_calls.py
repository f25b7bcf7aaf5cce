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

__all__ = ["Call", "calls"]


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
    return list(_Maker(torch.device(device), dtype, *_SCALES[scale], seed))


def written_by_hand(device: torch.device | str, dtype: torch.dtype, scale: str, seed: int = 0) -> list[Call]:
    """Those of ``calls`` whose kernels are not generated, and have the most configs."""
    maker = _Maker(torch.device(device), dtype, *_SCALES[scale], seed)
    return [*maker.products(), *maker.quantized(), *maker.few_rows(), *maker.convolutions(), *maker.attention()]


class _Maker:
    def __init__(self, device: torch.device, dtype: torch.dtype, n: int, c: int, seed: int = 0):
        self.device, self.dtype, self.n, self.c = device, dtype, n, c
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def __iter__(self) -> Iterator[Call]:
        yield from self.products()
        yield from self.quantized()
        yield from self.convolutions()
        yield from self.reductions()
        yield from self.rows()
        yield from self.indices()
        yield from self.attention()
        yield from self.random()
        yield from self.lists()

    def products(self) -> Iterator[Call]:
        n, c, t = self.n, self.c, self
        yield Call("mm", (t(4 * n, 8 * n), t(8 * n, 5 * n)), torch.mm)
        yield Call("addmm", (t(5 * n), t(4 * n, 8 * n), t(8 * n, 5 * n)), torch.addmm)
        yield Call("linear", (t(2, 4 * n, 8 * n), t(5 * n, 8 * n), t(5 * n)), F.linear)
        yield Call("bmm", (t(3, 4 * n, 8 * n), t(3, 8 * n, 5 * n)), torch.bmm)
        yield Call("baddbmm", (t(3, 4 * n, 5 * n), t(3, 4 * n, 8 * n), t(3, 8 * n, 5 * n)), torch.baddbmm)
        yield Call("mm_plus_mm", (t(4 * n, 8 * n), t(8 * n, 5 * n), t(4 * n, 6 * n), t(6 * n, 5 * n)),
                   lambda a, b, c, d: a @ b + c @ d)  # fmt: skip
        yield Call("b2b_gemm", (t(16 * n, 8 * c), t(8 * c, 16 * c), t(16 * c, 8 * c)), lambda a, b, c: a @ b @ c)
        ends = torch.tensor([3 * n, 8 * n], dtype=torch.int32, device=self.device)
        bf16 = torch.bfloat16
        yield Call("grouped_mm", (t(8 * n, 16 * n, dtype=bf16), t(2, 16 * n, 8 * n, dtype=bf16)), kwargs={"offs": ends})

    def quantized(self) -> Iterator[Call]:
        n, t, device = self.n, self, self.device
        fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
        a8, b8 = t(16 * n, 32 * n, dtype=fp8), t(16 * n, 32 * n, dtype=fp8).t()
        one, row, column = (torch.ones(s, device=device) for s in ((), (16 * n, 1), (1, 16 * n)))
        yield Call("scaled_mm", (a8, b8, one, one), kwargs={"out_dtype": bf16})
        yield Call("scaled_mm", (a8, b8, row, column), kwargs={"out_dtype": bf16})
        ends = torch.tensor([3 * n, 8 * n], dtype=torch.int32, device=device)
        weights = t(2, 16 * n, 16 * n, dtype=fp8).mT
        scales = torch.ones(8 * n, device=device), torch.ones(2, 16 * n, device=device)
        yield Call("scaled_grouped_mm", (t(8 * n, 16 * n, dtype=fp8), weights, *scales), kwargs={"offs": ends})
        q = (torch.arange(32 * n * 16 * n, device=device) % 16).to(torch.uint8).reshape(32 * n, 16 * n)
        packed, a = tk.pack_int4(q), t(4 * n, 32 * n, dtype=bf16)
        yield Call("uint4x2_mixed_mm", (a, packed))
        yield Call("int4_mm", (a, packed, t(n, 16 * n, dtype=bf16), None, 32))
        yield Call("pack_int4", (q,))
        yield Call("unpack_int4", (packed,))
        of_torch = torch.zeros(1, 4, 32, 1, dtype=torch.int32, device=device)
        yield Call("int4_from_torch", (of_torch, torch.ones(4, 8, 2, device=device), 32))
        yield Call("quantize_fp8", (t(4 * n, 6 * n),))

    def few_rows(self) -> Iterator[Call]:
        """Of packed weights, for which there are kernels by the number of rows."""
        q = (torch.arange(32 * self.n * 16 * self.n, device=self.device) % 16).to(torch.uint8)
        packed = tk.pack_int4(q.reshape(32 * self.n, 16 * self.n))
        for rows in (1, 2, 12, 100):
            a, scales = (
                self(*shape, dtype=torch.bfloat16) for shape in ((rows, 32 * self.n), (self.n // 4, 16 * self.n))
            )
            yield Call("int4_mm", (a, packed, scales, None, 128))

    def convolutions(self) -> Iterator[Call]:
        c, t = self.c, self
        yield Call("conv1d", (t(2, 4 * c, 9 * c), t(6 * c, 4 * c, 3), t(6 * c)), F.conv1d)
        yield Call("conv2d", (t(2, 4 * c, 9 * c, 7 * c), t(6 * c, 2 * c, 3, 3), t(6 * c), 1, 1, 1, 2), F.conv2d)
        yield Call("conv3d", (t(1, 4 * c, 5, 6, 7), t(6 * c, 4 * c, 2, 2, 2)), F.conv3d)

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
    """Of tk.varlen_attn's arguments."""
    found = []
    for at in zip(*(pairwise(x.tolist()) for x in starts[:2]), strict=True):
        rows, columns = (slice(*ends) for ends in at)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[rows], key[columns], value[columns]))
        found.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(found)


def _linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Of a batch by rows: cross_entropy has classes second, linear has them last."""
    logits = F.linear(x, weight)
    is_batch = logits.dim() > 2 and logits.shape[:-1] == target.shape
    return F.cross_entropy(logits.flatten(0, -2), target.flatten()) if is_batch else F.cross_entropy(logits, target)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
