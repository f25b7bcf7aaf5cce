"""What the generator refuses."""

from __future__ import annotations

from tk.aot.errors import BuildError


class TraceError(BuildError):
    """A function that cannot become a kernel. The message names its source line."""


class IRError(BuildError):
    """The generator's own mistake: a kernel that its verifier refuses."""
