"""Plain text tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[_text(x) for x in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) for i in range(len(header))]
    lines = [_line(row, widths, numeric) for row in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def _text(x: object) -> str:
    if x is None:
        return "-"
    return f"{x:.2f}" if isinstance(x, float) else str(x)


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(".", "", 1).lstrip("-").isdigit()


def _line(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
    return "  ".join(padded).rstrip()


_PER_ONE, _LONGEST = 5, 20  # characters


def bar(ratio: float) -> str:
    """A ratio as a line of characters, with a mark where it is 1. What is longer than the line ends with an arrow."""
    length = round(ratio * _PER_ONE)
    line = "=" * length if length <= _LONGEST else "=" * (_LONGEST - 1) + ">"
    return f"{line[:_PER_ONE]:<{_PER_ONE}}|{line[_PER_ONE:]}"


class Records(tuple[T, ...]):
    """A sequence of records with names that prints as a table. A slice of it is one too."""

    header: ClassVar[tuple[str, ...]] = ()

    __slots__ = ()

    @staticmethod
    def cells(row: Any) -> tuple[object, ...]:
        """What is shown of a record under ``header``."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | Self:
        if isinstance(index, slice):
            return type(self)(super().__getitem__(index))
        return super().__getitem__(index)

    def __str__(self) -> str:
        return table(self.header, map(self.cells, self))

    __repr__ = __str__
