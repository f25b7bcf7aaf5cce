"""``torch.ops.tk``: what Python adds to a generated op is registered when the op is first asked for, since a process
calls few of the many that the packs have."""

from __future__ import annotations

from typing import Any

import torch

_Namespace: Any = type(torch.ops.tk)


class _Completing(_Namespace):
    __module__ = _Namespace.__module__  # torch names ops by it, in what it pickles

    def __getattr__(self, name: str) -> Any:
        """Called once for each op: torch's own namespace remembers the packet that it makes."""
        if name.startswith("__"):
            return super().__getattr__(name)
        from tk.generated import register  # it takes longer to import than the rest of tk

        return register.packet(self, name, super().__getattr__)


def install() -> None:
    """Serves torch.ops.tk's names from now on. What was asked for before stays as it is."""
    torch.ops.tk.__class__ = _Completing
