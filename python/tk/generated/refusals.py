"""What a file's declarations are refused for: raised at once, or while ``tk build`` reads the file kept until its end,
so that all are told together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tk.generated.signature import SignatureError

_kept: list[Exception] | None = None
_declared: dict[tuple[str, str], str] = {}  # where, by module and name, in the file that is being read


@contextmanager
def kept() -> Iterator[list[Exception]]:
    """A list that :func:`refuse` fills as long as the block runs."""
    global _kept, _declared
    before, _kept, _declared = (_kept, _declared), [], {}
    try:
        yield _kept
    finally:
        _kept, _declared = before


def are_kept() -> bool:
    """Whether a file is being read."""
    return _kept is not None


def refuse(error: Exception) -> None:
    """Raises the error, or keeps it."""
    if _kept is None:
        raise error from None
    _kept.append(error)


def check_once(module: str, name: str, where: str) -> None:
    """Raises SignatureError where a file that is being built has two functions of one name, of which Python keeps the
    last."""
    if _kept is None:  # in a notebook a cell is run again
        return
    before = _declared.setdefault((module, name), where)
    if before != where:
        raise SignatureError(f"{before} has this name already: Python keeps the last of the two; rename one")
