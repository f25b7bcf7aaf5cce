"""Makes of a function's arguments a call of its op: what is taken, where it runs, and with which config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tk import config, errors, parallel
from tk._arguments import whole
from tk.generated import register
from tk.heuristics import overrides

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WIDE_FLOATS = (*FLOATS, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NUMBERS = (*WIDE_FLOATS, *INTEGERS)
Config = str | int | None

# What ATen's autocast computes in float32; all others of this package's functions keep the dtypes that they are given.
AUTOCAST_TO_FLOAT32 = {
    "cpu": frozenset({"cross_entropy", "prod"}),
    "cuda": frozenset(
        {
            "cross_entropy", "cumprod", "cumsum", "group_norm", "layer_norm", "log_softmax", "logsumexp", "norm",
            "prod", "rms_norm", "softmax", "sum", "vector_norm",
        }
    ),
}  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])

_wanted: set[str] = set()
_ops: dict[str, Callable[..., Any]] = {}  # with the modes and pins of tk.config
_plain: dict[str, Callable[..., Any]] = {}  # without


def needs(*ops: str) -> Callable[[Function], Function]:
    """Declares which ops a function calls."""
    _wanted.update(ops)

    def declare(function: Function) -> Function:
        function.ops = ops  # type: ignore[attr-defined]
        return function

    return declare


def bind(function: Callable[..., Any]) -> bool:
    """Makes the ops callable by :func:`run`; False where one of them is in no loaded pack.

    Those of all functions at once: Dynamo looks a function up while it traces, after which it would not see what is
    added to a dict that it has read."""
    for name in _wanted - _ops.keys():
        if register.find(name) is not None:
            _plain[name] = register.plain(name)
            _ops[name] = register.wrapper(name)
    return all(name in _ops for name in function.ops)  # type: ignore[attr-defined]


def run(op: str, *args: Any, config: Config = None) -> Any:
    """Calls ``torch.ops.tk.<op>`` with the modes and pins of ``tk.config``: at once where none is on, as in most
    calls."""
    if config is None and not overrides.are_on():
        try:
            return _plain[op](*args)
        except RuntimeError as error:
            raise errors.typed(error) from None
    return _ops[op](*args, config=config)


def autocast(function: str, x: Any) -> Any:
    """A 16-bit tensor in float32 where autocast is on and ATen's lists have the function; all else as it is."""
    if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
        device = "cuda" if x.is_cuda else x.device.type  # whose text takes as long as all else here
        if function in AUTOCAST_TO_FLOAT32.get(device, ()) and torch.is_autocast_enabled(device):
            return x.float()
    return x


def converted(function: str, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in the dtype that a call asks for, or in autocast's."""
    if dtype is None:
        return autocast(function, x)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"tk.{function}: dtype must be a torch.dtype or None, is {dtype!r}")
    return x.to(dtype) if isinstance(x, Tensor) else x


def taken(function: str, takes: Sequence[torch.dtype] = FLOATS, **tensors: Tensor | None) -> bool:
    """Whether the kernels take these tensors, all of one dtype of `takes`; False where ATen shall: on the CPU, and
    float64 where no kernel has it, but for strict mode.

    tensors: the first must be there, others may be None. Raises tk.UnsupportedError for the rest on CUDA, TypeError for
    what is no tensor."""
    first, good = None, True
    for name, x in tensors.items():
        if x is None and first is not None:
            continue
        if not isinstance(x, Tensor):
            raise _not_a_tensor(function, name, x)
        if x.layout is not torch.strided or x.is_nested:
            check_tensor(function, name, x)
        if first is None:
            first, dtype = x, x.dtype
            good = dtype in takes
        elif x.dtype != dtype:
            good = False
    if first is None:
        raise TypeError(f"tk.{function}: no tensor is given")
    if good:
        return True
    one_device(function, **tensors)
    is_float64 = all(x is None or x.dtype == torch.float64 for x in tensors.values()) and not is_strict()
    if first.device.type != "cpu" and not is_float64:
        given = ", ".join(f"{name} is {_name(x.dtype)}" for name, x in tensors.items() if x is not None)
        raise errors.UnsupportedError(
            f"tk.{function}: {given}; on {first.device.type} it takes {', '.join(map(_name, takes))}"
            f"{', and all of one dtype' if len(tensors) > 1 else ''}"
        )
    return False


def check_tensor(function: str, name: str, x: Any) -> None:
    """Raises TypeError for what is no tensor, tk.UnsupportedError for one that is not dense."""
    if not isinstance(x, Tensor):
        raise _not_a_tensor(function, name, x)
    if x.layout is torch.strided and not x.is_nested:
        return
    if (refused := errors.not_dense(function, name, x)) is not None:
        raise refused


def check_plain(function: str, name: str, x: Any) -> None:
    """:func:`check_tensor`, and tk.UnsupportedError for a quantized tensor: where no function of ATen takes one, what
    ATen says of a cast of it, or of one without dimensions, names no argument."""
    check_tensor(function, name, x)
    if x.is_quantized:
        raise errors.UnsupportedError(
            f"tk.{function}: {name} is quantized ({_name(x.dtype)}), must be a plain tensor, as x.dequantize() makes "
            "one"
        )


def _not_a_tensor(function: str, name: str, x: Any) -> TypeError:
    return TypeError(f"tk.{function}: {name} must be a Tensor, is {type(x).__name__}")


def one_device(function: str, **tensors: Tensor | None) -> None:
    """What ops check themselves; ATen's, on the CPU, do not all do so."""
    device = None
    for name, x in tensors.items():
        if x is None:
            continue
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(
                f"tk.{function}: {first} is on {device}, {name} on {x.device}; all tensors must be on one device"
            )


def only_aten_has(function: str, x: Tensor, what: str) -> None:
    """Raises tk.UnsupportedError for an argument that no kernel has, in strict mode: ATen takes it."""
    if x.device.type != "cpu" and is_strict():
        raise errors.UnsupportedError(
            f"tk.{function}: {what}: no kernel has it, and strict mode keeps it from ATen; input is on {x.device}"
        )


def is_strict() -> bool:
    return bool(config.current().mode & config.MODE_BITS["strict"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Dimensions ---


def wrap(function: str, x: Tensor, dim: int) -> int:
    """A dimension counted from the front; a 0-d tensor has one to count. Raises IndexError."""
    if type(dim) is not int:
        dim = whole(function, "dim", dim)
    n = x.dim() or 1
    if not -n <= dim < n:
        raise IndexError(f"tk.{function}: dim is {dim}, must be {-n} to {n - 1} for {list(x.shape)}")
    return dim % n


def to_end(x: Tensor, dim: int) -> Tensor:
    """The tensor with dimension `dim` (counted from the front) last, and at least one dimension."""
    if x.dim() < 2:
        return x if x.dim() else x.reshape(1)
    return x if dim == x.dim() - 1 else x.movedim(dim, -1)


def classes_last(x: Tensor) -> Tensor:
    """[rows, C] of [C], [N, C] or [N, C, ...]."""
    if x.dim() == 2:
        return x
    x = x.movedim(0 if x.dim() == 1 else 1, -1)
    return x.reshape(product(x.shape[:-1]), x.shape[-1])


def dense_rows(x: Tensor, dim: int, least: int = 2) -> Tensor:
    """:func:`to_end`, a copy where `least` elements of a row, or more, lie apart: kernels that sort or scan rows share
    them out, or read them several times, only where they lie beside each other."""
    x = to_end(x, dim)
    return x if x.stride(-1) == 1 or x.shape[-1] < least else x.clone(memory_format=torch.contiguous_format)


def even_rows(x: Tensor, dim: int) -> Tensor:
    """:func:`dense_rows`, a copy too where rows do not all lie as far from the next as the first from the second: what
    sorts them has one pitch."""
    x = dense_rows(x, dim)
    pitch = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1:
            if pitch is not None and stride != pitch:
                return x.contiguous()
            pitch = stride * size
    return x


def from_end(out: Tensor, like: Tensor, dim: int) -> Tensor:
    """:func:`to_end` undone, in a result of the same shape."""
    if like.dim() < 2:
        return out if like.dim() else out.reshape(())
    return out if dim == like.dim() - 1 else out.movedim(-1, dim)


def have_one(x: Tensor, dims: Sequence[int]) -> bool:
    """Whether each of these dimensions (counted from the front) has one element, as the one that a tensor without
    dimensions has: what is scanned or reduced there is the element itself, which takes a copy and no kernel. A size
    that a graph does not know is not taken for 1, and a DTensor may be sharded over one: its op has a rule for that."""
    for dim in dims if x.dim() else ():
        size = x.size(dim)
        if type(size) is not int or size != 1:
            return False
    return not parallel.is_distributed(x)


def needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def as_int64(x: Tensor) -> Tensor:
    """``x.long()``, which asks the dispatcher also where there is nothing to do."""
    return x if x.dtype == torch.int64 else x.long()


def product(sizes: Sequence[int]) -> int:
    n = 1
    for size in sizes:
        n = n * size
    return n
