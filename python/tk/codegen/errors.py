"""What the generator refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from tk.aot.errors import BuildError


class TraceError(BuildError):
    """A function that cannot become a kernel. The message names its source line."""


class SideEffect(TraceError):
    """Something that a function does beside returning tensors and writing its arguments."""


class IRError(BuildError):
    """The generator's own mistake: a kernel that its verifier refuses."""


class InternalError(IRError):
    """What should not happen, whatever the function is: to be reported."""


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Raises InternalError, which names `what`, for anything that is not raised for the user to read."""
    try:
        yield
    except InternalError as error:
        if what in str(error):
            raise
        raise InternalError(f"{what}: {error}") from error
    except BuildError as error:
        if not isinstance(error, IRError):
            raise
        raise _internal(what, error) from error
    except Exception as error:
        raise _internal(what, error) from error


def _internal(what: str, error: Exception) -> InternalError:
    first = (str(error).strip().splitlines() or [""])[0]
    return InternalError(
        f"{what}: no kernels can be made of it, and that is a mistake in tk, not in the function: "
        f"{type(error).__name__}: {first}. Please report it with the function's text"
    )


def where(fn: Any, line: int | None = None, code: CodeType | None = None) -> str:
    """The function, and a line of it or of the helper that has this code."""
    code = code or getattr(fn, "__code__", None)
    return repr(fn) if code is None else f"{of_function(fn, code)}{line or code.co_firstlineno})"


def of_function(fn: Any, code: CodeType | None = None) -> str:
    """What :func:`where` begins with, whatever the line."""
    code = code or getattr(fn, "__code__", None)
    return repr(fn) if code is None else f"{getattr(fn, '__name__', fn)} ({code.co_filename}:"


def needs_a_number(fn: Any, line: int | None, size: Any) -> str:
    return (
        f"{where(fn, line)}: something that needs {size} as a number, such as a loop over a dimension. One kernel "
        "serves every size: work on whole tensors, or declare the size as a number"
    )
