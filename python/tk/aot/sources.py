"""Where families come from: the package's own kernel files, or a user's. A file declares them as records (FAMILY,
FAMILIES), as torch functions under ``@tk.op``, which ``tk.codegen`` makes families of, or as attention's mods, which
``tk.flex`` does."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from tk import codegen
from tk.aot.errors import BuildError, Refused
from tk.aot.files import import_file
from tk.aot.spec import Family
from tk.errors import UnsupportedError
from tk.generated import refusals
from tk.generated.declare import Declared


def package_families(debug: bool = False) -> list[Family]:
    """Those of every module of tk.kernels, in the order of the modules' names. debug: of the generated ones the debug
    variants."""
    import tk.kernels

    modules = sorted(m.name for m in pkgutil.walk_packages(tk.kernels.__path__, "tk.kernels."))
    return _distinct([f for name in modules for f in families_of(importlib.import_module(name), debug)])


def file_families(paths: Sequence[Path], debug: bool = False) -> list[Family]:
    """Those of the user's files. Raises BuildError for a file that cannot be imported or exports none."""
    found: list[Family] = []
    refused: list[Exception] = []
    for path in paths:
        with refusals.kept() as declarations:
            module = import_file(path)
            families = _collected(_parts(module, debug), refused)
        refused += declarations
        if not (families or refused):
            raise BuildError(
                f"{path} declares nothing: no function under @tk.op, no mods (tk.flex.register), no tk.b2b.register, "
                "no FAMILY, no FAMILIES"
            )
        found += families
    if refused:
        raise Refused(refused)
    return _distinct(found)


def families_of(module: ModuleType, debug: bool = False) -> list[Family]:
    """Raises Refused, of all that cannot be built."""
    refused: list[Exception] = []
    found = _collected(_parts(module, debug), refused)
    if refused:
        raise Refused(refused)
    return found


Part = Callable[[], Sequence[Family]]


def _collected(parts: Iterable[Part], refused: list[Exception]) -> list[Family]:
    """Of all parts, with what of them cannot be built in `refused`."""
    found: list[Family] = []
    for part in parts:
        try:
            found += part()
        except Refused as several:
            refused += several.errors
        except (BuildError, UnsupportedError) as error:
            refused.append(error)
    return found


def _parts(module: ModuleType, debug: bool) -> Iterator[Part]:
    own = _declared_families(module)
    yield lambda: own
    names = {family.op.name for family in own}  # of such a function under @tk.op the kernels are written by hand
    yield lambda: [family for family in _generated(module, debug) if family.op.name not in names]
    yield from _mods(module)
    yield from _between_products(module)


def _declared_families(module: ModuleType) -> list[Family]:
    one, several = getattr(module, "FAMILY", None), getattr(module, "FAMILIES", ())
    found = [*([] if one is None else [one]), *several]
    for family in found:
        if not isinstance(family, Family):
            raise BuildError(f"{module.__name__}: {family!r} is no Family")
    return found


def _generated(module: ModuleType, debug: bool) -> list[Family]:
    """What the module itself declares under @tk.op, not what it imports."""
    if not any(isinstance(x, Declared) for x in vars(module).values()):
        return []
    return codegen.families_of(module, debug)


def _mods(module: ModuleType) -> list[Part]:
    """Pairs of attention's mods that the module's file announced."""
    if "tk.flex.registry" not in sys.modules or not getattr(module, "__file__", None):
        return []
    from tk.flex import registry

    if not (found := registry.registered(module.__file__)):
        return []
    from tk.flex.codegen.family import registered_families

    return [partial(registered_families, registered) for registered in found]


def _between_products(module: ModuleType) -> list[Part]:
    """Functions of b2b_gemm that the module's file announced."""
    if "tk.b2b.function" not in sys.modules or not getattr(module, "__file__", None):
        return []
    from tk.b2b import function

    if not (found := function.registered(module.__file__)):
        return []
    from tk.b2b.family import registered_family

    return [lambda registered=registered: [registered_family(registered)] for registered in found]  # type: ignore[misc]


def _distinct(families: list[Family]) -> list[Family]:
    names = [f.op.name for f in families]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise BuildError(f"more than one family declares op {', '.join(twice)}")
    return families
