"""What the build says no with."""

from __future__ import annotations

from collections.abc import Sequence


class BuildError(Exception):
    """A record, a tuned table, a source file or a pack that cannot be used; the message names it and says why."""


class SelectsNothing(BuildError):
    """Arguments of a build that choose no kernel at all; the message says what there is."""


class Refused(BuildError):
    """Declarations of a file that cannot be built. ``errors`` has all of them."""

    def __init__(self, errors: Sequence[Exception]):
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)


class GridError(BuildError):
    """A family's records contradict themselves."""


class CompileError(BuildError):
    """A launch does not fit its device function, or does not compile."""


class PackFormatError(BuildError):
    """The bytes of a pack are not what ``csrc/core/pack_format.h`` says."""
