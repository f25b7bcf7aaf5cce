"""A user's file as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tk.aot.errors import BuildError


def import_file(path: Path) -> ModuleType:
    """Imports a file as a script would be: its own folder comes first on the path, for good. The file's name enters the
    keys of what is compiled, the folder's does not."""
    if not path.is_file():
        raise BuildError(f"{path} is no regular file" if path.exists() else f"{path}: there is no such file")
    name = f"tk_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        del sys.modules[name]
        raise BuildError(f"{path} cannot be imported: {type(e).__name__}: {e}{_instead(e)}") from e
    return module


def _instead(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return '; what ends the process belongs under if __name__ == "__main__"'
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; a file is imported by itself, with its folder on the path: write import NAME, not from . import NAME"
    return ""
