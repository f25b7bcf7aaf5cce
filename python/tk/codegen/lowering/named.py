"""Names of the locals that lowering makes: numbers of parts, and of programs that walk.

An op has few locals, but a graph for every choice of dtypes and flags. What is the same in several graphs is one local.
What differs has another name: else one graph's would be taken for the other's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Names:
    """Those that the graphs of one op have, by what they name."""

    found: dict[tuple[str, tuple[Hashable, ...]], str] = field(default_factory=dict)

    def of(self, kind: str, *what: Hashable) -> str:
        """The kind with a number, the same one for what is equal."""
        number = sum(key[0] == kind for key in self.found)
        return self.found.setdefault((kind, what), f"{kind}{number}")
