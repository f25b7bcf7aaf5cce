"""What the build says no with."""


class BuildError(Exception):
    """A record, a tuned table, a source file or a pack that cannot be used; the message names it and says why."""


class GridError(BuildError):
    """A family's records contradict themselves."""


class CompileError(BuildError):
    """A launch does not fit its device function, or does not compile."""


class PackFormatError(BuildError):
    """The bytes of a pack are not what ``csrc/core/pack_format.h`` says."""
