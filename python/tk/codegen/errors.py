"""What the generator refuses."""

from __future__ import annotations

from typing import Any

from tk.aot.errors import BuildError


class TraceError(BuildError):
    """A function that cannot become a kernel. The message names its source line."""


class IRError(BuildError):
    """The generator's own mistake: a kernel that its verifier refuses."""


def where(fn: Any, line: int | None = None) -> str:
    code = getattr(fn, "__code__", None)
    if code is None:
        return repr(fn)
    return f"{fn.__name__} ({code.co_filename}:{line or code.co_firstlineno})"


def needs_a_number(fn: Any, line: int | None, size: Any) -> str:
    return (
        f"{where(fn, line)}: something that needs {size} as a number, such as a loop over a dimension. One kernel "
        "serves every size: work on whole tensors, or declare the size as a number"
    )
