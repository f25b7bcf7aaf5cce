"""Printed kernels as modules: Triton reads a function's source from its file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tk._cache import directory, write_atomically

_HEAD = {
    "tl.": "import triton.language as tl",
    "libdevice.": "from triton.language.extra.cuda import libdevice",
    "device.": "from tk.codegen import device",
}


MODULE = "tk_generated_"


def module_text(name: str, function: str) -> str:
    lines = [line for use, line in _HEAD.items() if any(word.startswith(use) for word in _words(function))]
    ours = [line for line in lines if line.startswith("from tk")]
    theirs = [line for line in lines if not line.startswith("from tk")]
    head = "\n".join(["import triton", *theirs, *([""] if ours else []), *ours])
    return f'"""{name}, printed by tk.codegen."""\n\n{head}\n\n\n{function}'


def _words(text: str) -> list[str]:
    return text.replace("(", " ").replace("-", " ").replace("[", " ").split()


def folder() -> Path:
    """The folder of printed modules, beside what is compiled of them."""
    return directory() / "generated"


def function(name: str, text: str) -> Any:
    """The device function `name` of a module's text."""
    return getattr(module(name, text), name)


def module(name: str, text: str) -> ModuleType:
    """A module of this text. Equal texts are one module."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    module_name = f"{MODULE}{name}_{digest}"
    if module_name not in sys.modules:
        file = f"{module_name}.py"
        try:
            path = folder() / file
            if not path.is_file() or path.read_text() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text.encode())
        except OSError:
            path = Path(tempfile.mkdtemp(prefix="tk-generated-")) / file
            path.write_text(text)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def text_of(fn: Any) -> str | None:
    """The module that a device function was printed into; None of one that was not."""
    return Path(inspect.getfile(fn.fn)).read_text() if fn.fn.__module__.startswith(MODULE) else None
