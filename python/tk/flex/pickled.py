"""How a block mask's mod is pickled. The library's mods are functions within functions, which pickle refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

from tk.flex import mods

__all__ = ["PickledMod"]

_LOCAL = ".<locals>."


class PickledMod:
    """A mask_mod in the state of a BlockMask. Copies have the mod itself. Pickled, one of the library's is what it was
    made with; another goes by its name.

    Raises pickle.PicklingError of a function that has no name to be found by."""

    def __init__(self, mod: Any):
        self.mod = mod

    def __deepcopy__(self, _: Any) -> PickledMod:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        mod = self.mod
        if not isinstance(mod, FunctionType):
            return _itself, (mod,)
        if mod.__module__ == mods.__name__ and _LOCAL in mod.__qualname__:
            held = [cell.cell_contents for cell in mod.__closure__ or ()]
            return _made, (mod.__qualname__, mod.__name__, tuple(map(_content, held)))
        if mod.__module__ == "tk.flex.block_mask":
            raise pickle.PicklingError(
                f"tk.flex.BlockMask: a part of a mask cannot be pickled ({mod.__name__}). Pickle the whole mask, and "
                "take the part where it is loaded"
            )
        try:
            pickle.dumps(mod)
        except (AttributeError, pickle.PicklingError) as error:
            raise pickle.PicklingError(
                f"tk.flex.BlockMask: its mask_mod {mod.__qualname__} cannot be pickled ({error}). Define it at the top "
                "level of a module; or set mask_mod to None, and to the function again where the mask is loaded"
            ) from None
        return _itself, (mod,)


def _itself(mod: Any) -> Any:
    return mod


def _content(held: Any) -> Any:
    """What a mod of the library's holds: tensors and numbers, or, of and_masks, other mods."""
    if isinstance(held, tuple):
        return tuple(map(_content, held))
    return PickledMod(held) if callable(held) else held


def _made(path: str, name: str, held: tuple[Any, ...]) -> FunctionType:
    """A mod of the library's, by the path of its function in the module. Raises AttributeError where this version of
    tk has no such mod, or one that holds something else."""
    factory, _, inner = path.partition(_LOCAL)
    codes = getattr(mods, factory).__code__.co_consts
    code = next((c for c in codes if isinstance(c, CodeType) and c.co_name == inner), None)
    if code is None or len(code.co_freevars) != len(held):
        raise AttributeError(f"tk.flex.mods has no {path} of {len(held)} values in this version of tk")
    made = FunctionType(code, vars(mods), name, None, tuple(map(CellType, held)))
    made.__qualname__ = path
    return made
