"""The file that a declaration belongs to."""

from __future__ import annotations

import os
import sys

from tk.generated import refusals


def declaring() -> str:
    """The file that calls the function which asks. While ``tk build`` reads a file, the one whose module is being run:
    a helper of another file declares for it, and a module that it imports for itself."""
    caller = frame = sys._getframe(2)
    while refusals.are_kept() and frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return (frame if frame.f_code.co_name == "<module>" else caller).f_code.co_filename


def is_same(one: str, other: str) -> bool:
    """Also of files that are none: what an interactive session declares."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)
