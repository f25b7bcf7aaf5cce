"""Packages that bring packs for more GPUs, such as ``torch-tk-sm100``.

Such a package has an entry point of the group ``tk.packs``, whose value names a package with a folder of packs:

    [project.entry-points."tk.packs"]
    sm100 = "torch_tk_sm100.packs"    # site-packages/torch_tk_sm100/packs/sm100.tkpack

The folder is found, and nothing of the package is imported. A pack is opened when a GPU first needs it.
"""

from __future__ import annotations

import os
import warnings
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tk import _library, errors

GROUP = "tk.packs"


def load() -> None:
    """Makes their packs known. One that cannot be used does not keep the program from starting: it warns."""
    for found in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        try:
            _library.check(_library.core().tk_add_pack_directory(os.fsencode(folder(found))))
        except errors.PackError as error:
            warnings.warn(f"{_package(found)} brings packs that tk cannot use: {error}", stacklevel=2)


def folder(found: EntryPoint) -> Path:
    """That an entry point names. Raises PackError where there is none."""
    top, *inner = found.value.split(".")
    spec = PathFinder.find_spec(top)
    places = [] if spec is None else [Path(place, *inner) for place in spec.submodule_search_locations or ()]
    existing = [place for place in places if place.is_dir()]
    if not existing:
        raise errors.PackError(f"there is no folder {found.value.replace('.', '/')}, which its entry point names")
    return existing[0]


def _package(found: EntryPoint) -> str:
    return found.dist.name if found.dist else f"the entry point {found.name}"
