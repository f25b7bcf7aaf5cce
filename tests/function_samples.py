"""tk's functions beside torch's, with torch's own samples: for the CPU (ops/test_functional.py) and for CUDA
(gpu/test_functions.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only
from torch_samples import op_db

import tk

TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
    torch.float16: dict(rtol=3e-3, atol=3e-3),
    torch.float64: dict(rtol=1e-12, atol=1e-12),
}


def wide(x: Any) -> Any:
    """Tensors in float64, and dtypes that are asked for: on CUDA torch adds up 16-bit numbers in 16 bits."""
    return tree_map_only((Tensor, torch.dtype), _wide, x)


def _wide(x: Tensor | torch.dtype) -> Tensor | torch.dtype:
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else x
    return x.double() if x.is_floating_point() else x


def agree(actual: Any, expected: Any, dtype: torch.dtype) -> None:
    """`expected` is worked out in fp64; shapes are those of torch, dtypes that of the argument."""
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) else [(actual, expected)]
    for a, e in pairs:
        assert a.shape == e.shape
        assert a.dtype == (dtype if e.is_floating_point() else e.dtype)
        assert_close(a, e.to(a.dtype), **TOLERANCE[dtype], equal_nan=True)


def stable_sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Where torch leaves open which of equal ones comes first, tk does not."""
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def stable_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = stable_sort(x, dim, largest)
    return (values, indices) if x.dim() == 0 else (values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


# By the name of torch's OpInfo: the function, and torch's.
MIRRORED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (tk.softmax, torch.softmax),
    "log_softmax": (tk.log_softmax, torch.log_softmax),
    "nn.functional.gelu": (tk.gelu, F.gelu),
    "nn.functional.silu": (tk.silu, F.silu),
    "nn.functional.layer_norm": (tk.layer_norm, F.layer_norm),
    "nn.functional.rms_norm": (tk.rms_norm, F.rms_norm),
    "nn.functional.group_norm": (tk.group_norm, F.group_norm),
    "nn.functional.cross_entropy": (tk.cross_entropy, F.cross_entropy),
    "nn.functional.embedding": (
        lambda w, i, **kw: tk.embedding(i, w, **kw),
        lambda w, i, **kw: F.embedding(i, w, **kw),
    ),
    "gather": (tk.gather, torch.gather),
    "scatter_add": (tk.scatter_add, torch.scatter_add),
    "index_add": (tk.index_add, torch.index_add),
    "index_put": (tk.index_put, torch.index_put),
    "sum": (tk.sum, torch.sum),
    "mean": (tk.mean, torch.mean),
    "prod": (tk.prod, torch.prod),
    "amax": (tk.amax, torch.amax),
    "amin": (tk.amin, torch.amin),
    "argmax": (tk.argmax, torch.argmax),
    "argmin": (tk.argmin, torch.argmin),
    "max": (tk.max, torch.max),
    "min": (tk.min, torch.min),
    "any": (tk.any, torch.any),
    "all": (tk.all, torch.all),
    "linalg.vector_norm": (tk.vector_norm, torch.linalg.vector_norm),
    "norm": (tk.norm, torch.norm),
    "var": (tk.var, torch.var),
    "std": (tk.std, torch.std),
    "var_mean": (tk.var_mean, torch.var_mean),
    "std_mean": (tk.std_mean, torch.std_mean),
    "logsumexp": (tk.logsumexp, torch.logsumexp),
    "cumsum": (tk.cumsum, torch.cumsum),
    "cumprod": (tk.cumprod, torch.cumprod),
    "cummax": (tk.cummax, torch.cummax),
    "cummin": (tk.cummin, torch.cummin),
    "logcumsumexp": (tk.logcumsumexp, torch.logcumsumexp),
    "sort": (tk.sort, stable_sort),
    "argsort": (tk.argsort, lambda *args, **kwargs: stable_sort(*args, **kwargs)[1]),
    "topk": (tk.topk, stable_topk),
}
INDICES = ("any", "all", "argmax", "argmin", "argsort")  # results without a gradient

VARIANTS = ("", "with_dtype", "unbiased", "reduction_no_dim", "reduction_with_dim", "fro", "inf", "nuc")


def samples(
    name: str, dtype: torch.dtype, requires_grad: bool = False, device: str = "cpu", supported_on: str = ""
) -> Iterator[Any]:
    """supported_on: a device whose dtypes they are, where it is not theirs."""
    found = [info for info in op_db if info.name == name and info.variant_test_name in VARIANTS]
    assert found, f"torch has no samples of {name}"
    for info in found:
        if dtype in info.supported_dtypes(supported_on or device):
            yield from info.sample_inputs(device, dtype, requires_grad)


def gradients(function: Callable[..., Any], args: Any, kwargs: Any = None) -> list[Tensor | None]:
    """Of every tensor that requires one, of a sum with fixed weights of the results."""
    kwargs = kwargs or {}
    sources = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
    results = function(*args, **kwargs)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    seeds = [torch.linspace(-1, 2, r.numel(), dtype=r.dtype, device=r.device).reshape(r.shape) for r in results]
    return list(torch.autograd.grad(results, sources, seeds, allow_unused=True))
