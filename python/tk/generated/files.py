"""The file that a declaration belongs to."""

from __future__ import annotations

import os
import sys
from types import FrameType

from tk.generated import refusals


def declaring() -> str:
    """The file that calls the function which asks. While ``tk build`` reads a file, the one whose module is being run:
    a helper of another file declares for it, and a module that it imports for itself."""
    caller = sys._getframe(2)
    frame: FrameType | None = caller if refusals.are_kept() else None
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return (frame or caller).f_code.co_filename


def is_same(one: str, other: str) -> bool:
    """Whether two names are of one file; also where they are no files, as in an interactive session."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)
