"""Tells DTensor of tk's ops, once it is there.

torch's DTensor asks each op along which dimensions it may be sharded. tk answers for its ops as soon as somebody
imports torch.distributed.tensor, which tk itself never does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DTENSOR = "torch.distributed.tensor"


def install() -> None:
    """Registers the rules of all ops, now or when torch.distributed.tensor is imported."""
    if _DTENSOR in sys.modules:
        _register_all()
    else:
        sys.meta_path.insert(0, _Finder())


def _register_all() -> None:
    from tk.parallel import registration

    registration.register_all()


class _Finder(MetaPathFinder):
    """Waits for the import of torch.distributed.tensor, which it leaves to the finder that would do it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _DTENSOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register_all()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
