"""GPUs that this machine need not have: what tk's ops would run on one is found out with tensors of any device, whose
contents are never looked at."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import _library, _log, capi, errors
from tk.heuristics import problem
from tk.heuristics.problem import AtenCall, Described


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it. arch: 90 for 9.0. shared: the most shared memory of a block, bytes; l2:
    bytes."""

    name: str
    arch: int
    multiprocessors: int
    shared: int
    l2: int


# One of each architecture that packs are built for: its datacentre GPU.
GPUS: Mapping[int, Gpu] = {
    80: Gpu("A100", 80, 108, 166912, 40 << 20),
    90: Gpu("H100", 90, 132, 232448, 50 << 20),
}
_at_work = threading.local()


def gpu(arch: int | str, function: str = "explain") -> Gpu:
    """The GPU of an architecture, written 90, "90" or "sm_90". function: who asks, for the message. Raises ValueError
    for one that no GPU is described of, and TypeError for what is neither an int nor a str."""
    text = str(arch).removeprefix("sm_")
    is_name = isinstance(arch, str | Integral) and not isinstance(arch, bool)
    if is_name and text.isdecimal() and int(text) in GPUS:
        return GPUS[int(text)]
    there = f"GPUs are described of {', '.join(f'{a} ({g.name})' for a, g in GPUS.items())}"
    hint = "; ".join(filter(None, (runs_on(str(arch), tuple(GPUS)), there)))
    if not is_name:
        raise TypeError(f"tk.{function}: arch must be an int or a str, is {arch!r}; {hint}")
    raise ValueError(f"tk.{function}: no GPU is described of arch {arch!r}; {hint}")


def runs_on(text: str, archs: Sequence[int]) -> str:
    """Says of an architecture that is none of archs whose kernels its GPUs run; "" of what names no architecture."""
    found = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?|(\d{1,2}\.\d)", text.strip())
    if not found:
        return ""
    arch = int(found[1] or found[2].replace(".", ""))  # a compute capability has a point: 8.6
    # A cubin runs on later GPUs of its generation, but those of sm_90 on are for one alone.
    older = [a for a in archs if a // 10 == arch // 10 and a <= arch and (a < 90 or a == arch)]
    if older:
        return (
            f"write {older[-1]}" if older[-1] == arch else f"it runs the kernels for sm_{older[-1]}: write {older[-1]}"
        )
    if arch < min(archs):
        return f"tk needs sm_{min(archs)} or newer"
    return f"where no pack is for it, it runs PTX for sm_{min(archs)}"


@cache
def _number(gpu: Gpu) -> int:
    return capi.describe_device(gpu.multiprocessors, gpu.arch, gpu.shared, gpu.l2)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the GPU that is being described to, else of a real one."""
    described: Gpu | None = getattr(_at_work, "gpu", None)
    if described is not None:
        return described.multiprocessors
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def _standing_for(gpu: Gpu) -> Iterator[None]:
    before = getattr(_at_work, "gpu", None)
    _at_work.gpu = gpu
    _library.ops().tk_ops_capture_device(_number(gpu))
    try:
        yield
    finally:
        _at_work.gpu = before
        _library.ops().tk_ops_capture_device(-1 if before is None else _number(before))


def launches(gpu: Gpu, op: Any, *args: Any, **kwargs: Any) -> list[Described]:
    """What an op (``torch.ops.tk.mm.default``) launches for these arguments on such a GPU. Raises what the op
    raises."""
    return [step for step in _steps_of_op(gpu, op, *args, **kwargs) if isinstance(step, Described)]


def _steps_of_op(gpu: Gpu, op: Any, *args: Any, **kwargs: Any) -> list[Described | AtenCall]:
    """ATen's calls within the op as well."""
    found: list[Described | AtenCall] = []
    with _disable_current_modes(), _standing_for(gpu), torch.no_grad():
        args, kwargs = tree_map_only(torch.Tensor, _dense, (args, kwargs))
        with problem.describing_to(found.append), problem.Inside(found.append, lambda _: True):
            op(*args, **kwargs)
    return found


def _dense(x: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Uninitialised, of the same sizes and strides, as far from a 16-byte boundary. The CPU finds memory for what is
    touched alone, which is nothing. A sparse or nested tensor is left for the function to refuse."""
    if x.layout is not torch.strided or x.is_nested:
        return x
    offset = x.storage_offset() % 16
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.empty(offset + extent, dtype=x.dtype, device=device).as_strided(x.shape, x.stride(), offset)


class Recording(TorchDispatchMode):
    """Hands every call of an op of tk's to `take`, with the arguments that the op was called with, and those of ATen's
    that launch a kernel on CUDA to `take_aten`."""

    def __init__(self, take: Callable[..., None], take_aten: Callable[[AtenCall], None] = lambda _: None):
        super().__init__()
        self.take = take
        self.take_aten = take_aten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tk":
            self.take(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if (call := problem.aten_call(func)) and problem.is_on_cuda(tree_leaves((args, kwargs, out))):
            self.take_aten(call)
        return out


# What torch says of a fake tensor whose contents are wanted, and a torch without CUDA of one on CUDA.
_LOOKS_INSIDE = re.compile("DataDependent|not linked with support for cuda")


def describe(gpu: Gpu, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Described | None:
    """:func:`tk.heuristics.problem.describe` of a call whose tensors are taken for such a GPU's."""
    return problem.last(steps(gpu, function, *args, **kwargs))


def describe_all(gpu: Gpu, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described]:
    """:func:`tk.heuristics.problem.describe_all` likewise."""
    return [step for step in steps(gpu, function, *args, **kwargs) if isinstance(step, Described)]


def steps(gpu: Gpu, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Described | AtenCall]:
    """:func:`tk.heuristics.problem.steps` likewise."""
    from torch._subclasses import FakeTensorMode  # it takes a while to import

    name = getattr(function, "__name__", str(function))
    if any(isinstance(x, torch.Tensor) and x.is_quantized for x in tree_leaves((args, kwargs))):  # no fake is
        raise errors.UnsupportedError(f"tk.{name}: a tensor is quantized, must not be, as x.dequantize() makes one")
    found: list[Described | AtenCall] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _log.without_errors_of_fakes():
        args, kwargs = tree_map_only(torch.Tensor, lambda x: _dense(x, "cuda"), (args, kwargs))
        with Recording(lambda op, *a, **k: found.extend(_steps_of_op(gpu, op, *a, **k)), found.append):
            try:
                function(*args, **kwargs)
            except RuntimeError as error:
                if not _LOOKS_INSIDE.search(f"{type(error).__name__}: {error}"):
                    raise
                raise errors.UnsupportedError(
                    f"tk.{name}: looks into its arguments, of which a described GPU has none; ask without arch"
                ) from None
    return found
