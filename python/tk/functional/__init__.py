"""The package's generated ops as functions, with the arguments that torch.nn.functional and torch have.

A file per family. Of every function holds:

- It takes bfloat16, float16 and float32, any strides, and all floating-point tensors of one dtype. Work is done in
  float32 and rounded once. Reductions, scans, sorts and searches take float64, integers and bool too
  (docs/supported.md).
- On the CPU, what the op does not take (other dtypes, an argument that no kernel has) goes to ATen. On CUDA it is a
  ``tk.UnsupportedError``.
- A result of rows lies in memory row by row, the rows in the order in which those of its input lie. Along another
  dimension than the last it is a permuted view of that, where ATen's is contiguous: ``.view`` may refuse it, and
  ``.reshape`` does not.
- Under autocast those that ATen's lists have in float32 work and answer in float32.
- Shapes that do not go together are a ``ValueError``, what is no tensor a ``TypeError``.
- ``config``: a config's name or number, for this call; by default the predicted fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tk.functional import (
    activations,
    indexing,
    linear_losses,
    losses,
    norms,
    optimizers,
    quantization,
    random,
    reductions,
    scans,
    searches,
    softmaxes,
    sorts,
    tables,
)
from tk.functional._call import bind

__all__ = ["FUNCTIONS", "available", "find"]


def _functions(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for module in modules for name in module.__all__}


FUNCTIONS: Mapping[str, Callable[..., Any]] = _functions(
    activations,
    indexing,
    linear_losses,
    losses,
    norms,
    optimizers,
    quantization,
    random,
    reductions,
    scans,
    searches,
    softmaxes,
    sorts,
    tables,
)


def find(name: str) -> Callable[..., Any] | None:
    """A function whose ops are all registered."""
    function = FUNCTIONS.get(name)
    return function if function is not None and bind(function) else None


def available() -> list[str]:
    return sorted(name for name in FUNCTIONS if find(name))
