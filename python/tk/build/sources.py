"""The sources of families: the package's own kernel files, or a user's. A file declares them as records (FAMILY,
FAMILIES), as torch functions under ``@tk.op``, which ``tk.codegen`` makes families of, or as attention's mods, which
``tk.flex`` does."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import tk.kernels
from tk import _library, codegen
from tk.aot.errors import BuildError, Refused
from tk.aot.files import import_file
from tk.aot.spec import Family
from tk.errors import Error
from tk.generated import refusals
from tk.generated.declare import Declared


def package_families(debug: bool = False) -> list[Family]:
    """Those of every module of tk.kernels, in the order of the modules' names. debug: of the generated ones the debug
    variants. Raises Refused, of all that cannot be built."""
    modules = sorted(m.name for m in pkgutil.walk_packages(tk.kernels.__path__, "tk.kernels."))
    found = _Found()
    for name in modules:
        found.add_module(importlib.import_module(name), debug)
    return found.checked()


def file_families(paths: Sequence[Path], debug: bool = False) -> list[Family]:
    """Those of the user's files. Raises Refused, of all that cannot be built in any of them: declarations, and files
    that cannot be imported or declare nothing."""
    found = _Found()
    for path in paths:
        families, before = len(found.families), len(found.families) + len(found.refused)
        with refusals.kept() as declarations:
            found.add(lambda path=path: found.add_file(path, debug))  # type: ignore[misc]
        found.refused += declarations
        found.files.update((id(family), path) for family in found.families[families:])
        if len(found.families) + len(found.refused) == before:
            found.refused.append(BuildError(
                f"{path} declares nothing: no function under @tk.op, no mods (tk.flex.register), no tk.b2b.register, "
                "no FAMILY, no FAMILIES; what it imports is built from the file that declares it"
            ))  # fmt: skip
    return found.checked()


def families_of(module: ModuleType, debug: bool = False) -> list[Family]:
    """Raises Refused, of all that cannot be built."""
    found = _Found()
    found.add_module(module, debug)
    return found.checked()


Part = Callable[[], Sequence[Family] | None]


@dataclass
class _Found:
    """What declarations come to, and why some cannot be built: one of them hides no other."""

    families: list[Family] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    files: dict[int, Path] = field(default_factory=dict)  # by the family's id: the user's file that declares it

    def add(self, part: Part) -> None:
        try:
            self.families += part() or ()
        except Refused as several:
            self.families += several.families
            self.refused += several.errors
        except (BuildError, Error, ValueError, TypeError) as error:
            self.refused.append(error)

    def add_module(self, module: ModuleType, debug: bool) -> None:
        for part in _parts(module, debug):
            self.add(part)

    def add_file(self, path: Path, debug: bool) -> None:
        module = import_file(path)
        self.add_module(module, debug)
        self.refused += _named_as_tks(module, path)

    def checked(self) -> list[Family]:
        """The families. Raises Refused where anything is refused."""
        by_name: dict[str, Family] = {}
        for family in self.families:
            first = by_name.setdefault(family.op.name, family)
            if first is not family:
                files = [f"{self.files[id(one)]}" for one in (first, family) if id(one) in self.files]
                where = f", in {' and in '.join(dict.fromkeys(files))}; rename one" if files else ""
                self.refused.append(BuildError(f"more than one family declares op {family.op.name}{where}"))
        if self.refused:
            raise Refused(self.refused, list(by_name.values()))
        return self.families


def _named_as_tks(module: ModuleType, path: Path) -> Iterator[BuildError]:
    """An error for each op of a user's that has the name of one of tk's: a pack with it would be built, and then
    refused by every load."""
    if not _library.is_wanted() or any(path.resolve().is_relative_to(Path(p).resolve()) for p in tk.kernels.__path__):
        return
    loaded = tk.packs()
    users = {op for pack in loaded if not pack.is_builtin for op in pack.ops}
    own = {op for pack in loaded if pack.is_builtin for op in pack.ops}
    for declared in vars(module).values():
        if not isinstance(declared, Declared) or declared.fn.__module__ != module.__name__:
            continue
        name = declared.name
        if name in own or (name not in users and torch._C._jit_get_schemas_for_operator(f"tk::{name}")):
            line = declared.fn.__code__.co_firstlineno
            yield BuildError(
                f"@tk.op on {name} ({path}:{line}): it has the name of an op of tk's own: call it something else"
            )


def _parts(module: ModuleType, debug: bool) -> Iterator[Part]:
    own = _declared_families(module)
    yield from (partial(_checked_family, module, one) for one in own)
    by_hand = {one.op.name for one in own if isinstance(one, Family)}  # an op under @tk.op may have such kernels
    yield lambda: _generated(module, debug, by_hand)
    yield from _mods(module)
    yield from _between_products(module)


def _declared_families(module: ModuleType) -> list[Any]:
    one, several = getattr(module, "FAMILY", None), getattr(module, "FAMILIES", ())
    return [*([] if one is None else [one]), *several]


def _checked_family(module: ModuleType, family: Any) -> list[Family]:
    if not isinstance(family, Family):
        raise BuildError(f"{module.__name__}: {family!r} is no Family")
    return [family]


def _generated(module: ModuleType, debug: bool, by_hand: Set[str]) -> list[Family]:
    """What the module itself declares under @tk.op, not what it imports, but for ops whose kernels are written by
    hand."""
    if not any(isinstance(x, Declared) for x in vars(module).values()):
        return []
    try:
        return [f for f in codegen.families_of(module, debug) if f.op.name not in by_hand]
    except Refused as several:
        raise Refused(several.errors, [f for f in several.families if f.op.name not in by_hand]) from None


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
