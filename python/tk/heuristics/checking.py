"""``tk.check``: what would serve the calls of a program on a GPU, found out without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tk import capi, errors
from tk._dtypes import named
from tk._table import table
from tk.heuristics import described, problem

__all__ = ["CheckedCall", "Checks", "check"]

_MOST_SHOWN = 4  # tensors of a call: attention has lists of blocks behind its operands
_NOT_SERVED = (errors.Error, ValueError, TypeError, NotImplementedError)


@dataclass
class CheckedCall:
    """Calls of one op with tensors of the same dtypes, sizes and strides. count: how many there were. kernel: with its
    config, "" where none is launched. us: predicted, of all that one call launches. problem: why none fits, and the
    command for it; "" where one does. dtype: of the first tensor."""

    op: str
    tensors: str
    count: int = 1
    kernel: str = ""
    us: float = 0.0
    problem: str = ""
    dtype: str = ""


class Checks:
    """What :func:`check` found, in the order of first calls. It prints as a table; `missing` are the calls that no
    kernel serves."""

    def __init__(self, gpu: described.Gpu):
        self.gpu = gpu
        self.calls: list[CheckedCall] = []
        self._by_call: dict[Any, CheckedCall] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_by_call": {}}  # its keys have ops, which pickle refuses; a copy is added to no more

    @property
    def missing(self) -> list[CheckedCall]:
        return [call for call in self.calls if call.problem]

    def __str__(self) -> str:
        header = ("op", "dtype", "tensors", "calls", "kernel", "predicted us")
        rows = [(c.op, c.dtype, c.tensors, c.count, c.kernel or "-", c.us if c.kernel else None) for c in self.calls]
        lines = [f"On an {self.gpu.name} (sm_{self.gpu.arch}):", table(header, rows)] if rows else ["no op of tk's"]
        # What builds a kernel can be a whole file: it is told once for all calls that lack the same.
        lacking: dict[str, list[CheckedCall]] = {}
        for call in self.missing:
            lacking.setdefault(call.problem, []).append(call)
        return "\n".join([*lines, *(f"{_named(calls)}: {problem}" for problem, calls in lacking.items())])

    def add(self, op: Any, *args: Any, **kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        key = op, *((x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else str(x) for x in leaves)
        if (known := self._by_call.get(key)) is not None:
            known.count += 1
            return
        name = op._schema.name.removeprefix("tk::")
        shown = ["x".join(map(str, x.shape)) or "()" for x in tensors[:_MOST_SHOWN]]
        more = [f"and {len(tensors) - _MOST_SHOWN} more"] if len(tensors) > _MOST_SHOWN else []
        dtype = str(tensors[0].dtype) if tensors else ""
        found = CheckedCall(name, " ".join([*shown, *more]), dtype=named(dtype) or dtype)
        self._by_call[key] = found
        self.calls.append(found)
        try:
            launches = described.launches(self.gpu, op, *args, **kwargs)
            choices = [capi.choose(d.problem, d.config) for d in launches]
        except _NOT_SERVED as error:
            found.problem = str(error)
        except RuntimeError as error:
            found.problem = str(errors.typed(error))
        else:
            if (last := problem.last(launches)) is not None:
                chosen = choices[launches.index(last)]
                found.kernel = f"{chosen.kernel_name}/{chosen.config_name}"
            found.us = sum(c.cost for c in choices) * 1e-6


def _named(calls: Sequence[CheckedCall]) -> str:
    first = f"{calls[0].op} {calls[0].tensors}"
    return f"{first} and {len(calls) - 1} more" if len(calls) > 1 else first


@contextmanager
def check(arch: int | str = 90) -> Iterator[Checks]:
    """Lists every call of tk's ops within it, and what would serve each on a GPU, which this machine need not have.

        with tk.check() as found, torch.device("meta"):
            model(torch.empty(8, 1024, 4096, dtype=torch.bfloat16))
        print(found)
        assert not found.missing

    Calls with tensors of the device "meta" cost nothing; others run where their tensors are as well.

    Args:
        arch: 80 (as on an A100) or 90 (an H100).

    Raises:
        ValueError: another arch.
        TypeError: arch is neither an int nor a str.
    """
    found = Checks(described.gpu(arch, "check"))
    with described.Recording(found.add):
        yield found
