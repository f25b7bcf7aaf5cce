"""What tk raises beyond the ``ValueError`` and ``TypeError`` of a wrong argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tk._names import did_you_mean

__all__ = ["DriverError", "Error", "PackError", "UnsupportedError", "VariantNotFoundError"]


class Error(RuntimeError):
    """The base of what tk raises by itself."""


class UnsupportedError(Error):
    """This GPU, driver, dtype or situation cannot run the call."""


class VariantNotFoundError(Error):
    """No loaded pack holds a kernel for the problem. The message has the command that builds one, or, for an op of tk's
    own, the command that lists what there is."""


class PackError(Error):
    """A pack is missing, damaged, of another version, or clashes with a loaded one."""


class DriverError(Error):
    """The CUDA driver refused a call; the message names the call and the driver's reason."""


# The native library marks its errors with a prefix, since only their text reaches Python.
_BY_NAME: dict[str, type[Exception]] = {
    "Unsupported": UnsupportedError,
    "VariantNotFound": VariantNotFoundError,
    "Pack": PackError,
    "Driver": DriverError,
}
_PREFIX = re.compile(r"\[tk:(\w+)\] ")

# What the dispatcher says, as a RuntimeError, of an argument that is not what the op's schema has.
_MISMATCH = re.compile(
    r"tk::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'"
)
_UNKNOWN = re.compile(r"Unknown keyword argument '(\w+)' for operator 'tk::(\w+)'\. Schema: tk::\w+\((.*)\) ->")
_LEFT_OUT = re.compile(r"tk::(\w+)\(\) is missing value for argument '(\w+)'")
_TOO_MANY = re.compile(r"tk::(\w+)\(\) expected at most \d+ argument\(s\) but received (\d+)")
_KINDS = {"float": "a float", "int": "an int", "bool": "a bool", "List[int]": "an int or a list of ints"}

# tk_status of tk.h.
_BY_STATUS = {1: ValueError, 2: UnsupportedError, 3: VariantNotFoundError, 4: PackError, 5: DriverError}


def typed(error: Exception) -> Exception:
    """The typed form of an error that an op raised; the error itself if it has none."""
    text = str(error)
    found = _PREFIX.match(text)
    if not found:
        for pattern, make in _OF_THE_DISPATCHER:
            if (said := pattern.search(text)) is not None:
                return make(*said.groups())
        return error
    return (_out_of_memory() if found[1] == "OutOfMemory" else _BY_NAME[found[1]])(text[found.end() :])


def _wrong_type(op: str, wanted: str, name: str, given: str) -> TypeError:
    """The error for an argument of another type, with the schema's type in a user's words: a dtype is an int there."""
    kind = "a torch.dtype or None" if name == "out_dtype" else _KINDS.get(wanted, f"of type {wanted}")
    return TypeError(f"tk.{op}: {name} must be {kind}, is of type {given}")


def _unknown_argument(given: str, op: str, schema: str) -> TypeError:
    names = [part.split("=")[0].split()[-1] for part in schema.split(", ")]
    hint = did_you_mean(given, names, 0.5)
    takes = f"there are {', '.join(name for name in names if name.isidentifier())}"
    return TypeError(f"tk.{op}: there is no argument {given!r}; {hint or takes}")


_OF_THE_DISPATCHER: tuple[tuple[re.Pattern[str], Callable[..., TypeError]], ...] = (
    (_MISMATCH, _wrong_type),
    (_UNKNOWN, _unknown_argument),
    (_LEFT_OUT, lambda op, name: TypeError(f"tk.{op}: argument {name!r} is missing")),
    (_TOO_MANY, lambda op, given: TypeError(f"tk.{op}: there are fewer arguments than the {given} that are given")),
)


def not_dense(function: str, name: str, x: Any) -> UnsupportedError | None:
    """What to raise for a tensor whose elements do not lie at strides: a sparse or a nested one."""
    import torch  # here, so that errors can be had without it

    if x.layout is torch.strided and not x.is_nested:
        return None
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
    remedy = "to_padded_tensor(0)" if x.is_nested else "to_dense()"
    return UnsupportedError(f"tk.{function}: {name} is {kind}, must be a dense tensor, as x.{remedy} makes one")


def _out_of_memory() -> type[Exception]:
    import torch  # here, so that errors can be had without it

    return torch.OutOfMemoryError


def from_status(status: int, message: str) -> Exception:
    """The error that a ``tk_status`` stands for."""
    return _BY_STATUS[status](message)
