"""What the build says no with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tk.errors import Error

if TYPE_CHECKING:
    from tk.aot.spec import Family


class BuildError(Error):
    """A record, a tuned table, a source file or a pack that cannot be used; the message names it and says why."""


class SelectsNothing(BuildError):
    """Arguments of a build that choose no kernel at all; the message says what there is."""


class Refused(BuildError):
    """Declarations that cannot be built. ``errors`` has all of them, ``families`` what the others came to."""

    def __init__(self, errors: Sequence[Exception], families: Sequence[Family] = ()):
        super().__init__("\n".join(map(str, errors)))
        self.errors, self.families = tuple(errors), tuple(families)


class GridError(BuildError):
    """A family's records contradict themselves."""


class CompileError(BuildError):
    """A launch does not fit its device function, or does not compile."""


class PackFormatError(BuildError):
    """The bytes of a pack are not what ``csrc/core/pack_format.h`` says."""
