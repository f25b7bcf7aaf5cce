"""What :func:`tk.use` did, and how it is undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from tk._table import Records, table
from tk.dropin.measured import Measurement, Measurements, Whole, Wholes

__all__ = ["Record", "Records", "Report", "Swap"]


@dataclass(frozen=True)
class Record:
    """path: of the module in the model, "" for the model itself. type: its class. op: the ops of tk that it calls now,
    or would call, separated by commas; None where there is none. replaced: whether it was. reason: why not; of what
    was replaced, for which calls it holds ("" for all)."""

    path: str
    type: str
    op: str | None
    replaced: bool
    reason: str


class Swap(NamedTuple):
    """A method that stands in front of the class's, on the instance."""

    module: nn.Module
    name: str
    method: MethodType

    def do(self) -> None:
        vars(self.module)[self.name] = self.method

    def undo(self) -> bool:
        """False where something else stands there by now."""
        if vars(self.module).get(self.name) is not self.method:
            return False
        del vars(self.module)[self.name]
        return True


class _Swaps(list[Swap]):
    """The swaps of one model, shared by its report and its slices. is_undone: whether they were taken back."""

    is_undone = False


_MOST_ROWS = 24  # of a table that is printed whole
_SLOWER = ", so it runs as it is written, but in CUDA graphs and compiled"


class Report(Records[Record]):
    """A record for each module that could be replaced, in the order of ``model.named_modules()``.

    Prints as a table, which of a large model has a row for each type of module; ``report.table`` has all modules.
    ``measured`` has both times of every class of calls that a sample made, ``whole`` those of the model itself.

    ``undo()`` restores the model; as a context manager it does so at the end. Slices and ``replaced``, ``left`` are
    tables too, of the same model: what is undone is always the whole of it.
    """

    header = ("module", "type", "op", "replaced", "reason")
    measured: Measurements
    whole: Wholes
    _swaps: _Swaps

    def __new__(
        cls,
        records: Iterable[Record],
        swaps: Iterable[Swap] = (),
        measured: Iterable[Measurement] = (),
        whole: Iterable[Whole] = (),
    ) -> Report:
        self = super().__new__(cls, tuple(records))
        self.measured = Measurements(measured)
        self.whole = Wholes(whole)
        self._swaps = swaps if isinstance(swaps, _Swaps) else _Swaps(swaps)
        return self

    def __str__(self) -> str:
        said = ["undone: the model is as it was before"] if self._swaps.is_undone else []
        if self.measured:
            passes = [p for m in self.measured for _, p in m.passes]
            won = sum(p.wins(False) for p in passes)
            said.append(f"tk is faster in {won} of {len(passes)} classes of calls; report.measured has the times")
        said += [
            f"the model, {w.name} of {w.example}: {w.ratio:.2f} times as fast" + (_SLOWER if w.is_slower else "")
            for w in self.whole
        ]
        if len(self) <= _MOST_ROWS:
            return "\n".join([*said, self.table])
        rows = [(n, *cells) for cells, n in Counter(self.cells(r)[1:] for r in self).items()]
        said.append(f"{len(self.replaced)} of {len(self)} modules that could be replaced were; report.table has each")
        return "\n".join([*said, table(("modules", *self.header[1:]), rows)])

    __repr__ = __str__

    @property
    def table(self) -> str:
        """A row for each module."""
        return super().__str__()

    def cells(self, row: Record) -> tuple[object, ...]:  # type: ignore[override]
        """What is shown of a record now: after ``undo()`` nothing is replaced, whatever was."""
        replaced, reason = "yes" if row.replaced else "no", row.reason
        if row.replaced and self._swaps.is_undone:
            replaced, reason = "no", "undone"
        return row.path or "(model)", row.type, row.op, replaced, reason

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return self._part(found) if isinstance(index, slice) else found

    def _part(self, records: Iterable[Record]) -> Report:
        return type(self)(records, self._swaps, self.measured, self.whole)

    @property
    def replaced(self) -> Report:
        """What was replaced."""
        return self._part(r for r in self if r.replaced)

    @property
    def left(self) -> Report:
        """What was left alone."""
        return self._part(r for r in self if not r.replaced)

    def undo(self) -> None:
        """Restores what was replaced; a second call does nothing.

        Raises:
            RuntimeError: something else has been put in the place of a method since then. It is left there, and all
                others are restored.
        """
        changed = _undo(self._swaps)
        self._swaps.clear()
        self._swaps.is_undone = True
        if changed:
            raise RuntimeError(
                f"tk.use: cannot undo {', '.join(changed)}: replaced by something else since; undo that before, in the "
                "reverse order. All others are restored"
            )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __reduce__(self) -> Any:
        swaps = _Swaps()  # another process has no model to undo
        swaps.is_undone = self._swaps.is_undone
        return type(self), (tuple(self), swaps, tuple(self.measured), tuple(self.whole))


def _undo(swaps: Sequence[Swap]) -> list[str]:
    """The methods that were no longer there."""
    return [f"{type(s.module).__name__}.{s.name}" for s in reversed(swaps) if not s.undo()]
