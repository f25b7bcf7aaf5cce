"""What tk raises beyond the ``ValueError`` and ``TypeError`` of a wrong argument."""

from __future__ import annotations

import re

__all__ = ["DriverError", "Error", "PackError", "UnsupportedError", "VariantNotFoundError"]


class Error(RuntimeError):
    """The base of what tk raises by itself."""


class UnsupportedError(Error):
    """This GPU, driver, dtype or situation cannot run the call."""


class VariantNotFoundError(Error):
    """No loaded pack holds a kernel for the problem; the message has the ``tk build`` line that makes one."""


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

# tk_status of tk.h.
_BY_STATUS = {1: ValueError, 2: UnsupportedError, 3: VariantNotFoundError, 4: PackError, 5: DriverError}


def typed(error: Exception) -> Exception:
    """The typed form of an error that an op raised; the error itself if it has none."""
    text = str(error)
    found = _PREFIX.match(text)
    if not found:
        return error
    return (_out_of_memory() if found[1] == "OutOfMemory" else _BY_NAME[found[1]])(text[found.end() :])


def _out_of_memory() -> type[Exception]:
    import torch  # here, so that errors can be had without it

    return torch.OutOfMemoryError


def from_status(status: int, message: str) -> Exception:
    """The error that a ``tk_status`` stands for."""
    return _BY_STATUS[status](message)
