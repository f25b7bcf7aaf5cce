"""Functions that write at indices, with arguments in which places are written several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8,
         "bool": torch.bool, "fp64": torch.float64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """texts: the declaration."""

    name: str
    fn: Callable[..., Any]
    texts: dict[str, Any]

    def arguments(self) -> list[torch.Tensor]:
        """x of 6 rows and 32 columns, indices below 6."""
        generator = torch.Generator().manual_seed(0)
        sizes = {"M": 6, "N": 32, "K": 9, "V": 6}
        found = []
        for name in self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]:
            dtype, _, inside = self.texts[name].removesuffix("]").partition("[")
            shape = [sizes[s.strip()] for s in inside.split(",")]
            if name == "at":
                found.append(torch.randint(0, 6, shape, generator=generator))
            elif dtype == "bool":
                found.append(torch.rand(shape, generator=generator) > 0.5)
            else:
                found.append((torch.randn(shape, generator=generator) * 8).to(TORCH[dtype]))
        return found


def put_masked(x, y):
    x = x.clone()
    x[y > 0] = 3.0
    return x


def embedding_gradient(y, at):
    return torch.ops.aten.embedding_dense_backward(y, at, 6, 2, False)


def in_place(x, at, y):
    x.index_add_(0, at, y)
    return x.sum(-1)


def index_put(x, at, y):
    return x.index_put((at,), y, accumulate=True)


def columns(x, at, y):
    return x.index_add(1, at, y, alpha=0.5)


def softmax_scattered(x, at, y):
    return x.scatter_add(0, at, F.softmax(y, -1)) * 2


def _reduce(kind: str, include_self: bool = True) -> Callable[..., Any]:
    return lambda x, at, y: x.scatter_reduce(0, at, y, kind, include_self=include_self)


def _cases() -> list[Case]:
    def texts(dtype: str, x: str = "M, N", at: str = "K, N", y: str = "K, N") -> dict[str, str]:
        return {"x": f"{dtype}[{x}]", "at": f"i64[{at}]", "y": f"{dtype}[{y}]"}

    found = [Case(f"scatter_add_{d}", lambda x, at, y: x.scatter_add(0, at, y), texts(d))
             for d in ("fp32", "bf16", "i64", "i32", "u8", "fp64")]  # fmt: skip
    found += [Case(f"{k}_{d}", _reduce(k), texts(d)) for k in ("amax", "amin") for d in ("fp32", "bf16", "i64", "u8")]
    found += [Case(f"{k}_without_self", _reduce(k, False), texts("fp32")) for k in ("sum", "amax", "amin", "mean")]
    rows = dict(at="K", y="K, N")
    return [
        *found,
        Case("mean", _reduce("mean"), texts("fp32")),
        Case("index_put", index_put, texts("fp32", **rows)),
        Case("columns", columns, texts("fp32", at="K", y="M, K")),
        Case("index_copy", lambda x, at, y: x.index_copy(0, at, y), texts("fp32", **rows)),
        Case("scatter", lambda x, at, y: x.scatter(0, at, y), texts("bf16")),
        Case("scatter_value", lambda x, at: x.scatter(1, at, 5.0), {"x": "fp32[M, N]", "at": "i64[M, K]"}),
        Case("put_masked", put_masked, {"x": "fp32[M, N]", "y": "fp32[M, N]"}),
        Case("embedding_gradient", embedding_gradient, {"y": "bf16[K, N]", "at": "i64[K]"}),
        Case("in_place", in_place, texts("fp32", **rows)),
        Case("softmax_scattered", softmax_scattered, texts("fp32")),
        Case("gather_gradient", lambda x, at, y: torch.zeros_like(x).scatter_add(0, at, y), texts("bf16")),
    ]


CASES = _cases()
