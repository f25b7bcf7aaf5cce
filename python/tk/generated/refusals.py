"""What a file's declarations are refused for: raised at once, or while ``tk build`` reads the file kept until its end,
so that all are told together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_kept: list[Exception] | None = None


@contextmanager
def kept() -> Iterator[list[Exception]]:
    """Within it :func:`refuse` fills the list."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def are_kept() -> bool:
    """Whether a file is being read."""
    return _kept is not None


def refuse(error: Exception) -> None:
    """Raises the error, or keeps it."""
    if _kept is None:
        raise error from None
    _kept.append(error)
