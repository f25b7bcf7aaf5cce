"""Calls of the functions that a file declares under @tk.op. Scripts in other processes import it by its folder, so that
it takes nothing but tk."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tk.generated import Declared, inputs, register


def calls(module: ModuleType, size: int, leading: tuple[int, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, arguments on the CPU) of each, by the op of a loaded pack. size: of every letter; leading: of the
    dimensions that "..." stands for."""
    for name in [name for name, x in vars(module).items() if isinstance(x, Declared)]:
        op = register.find(name)
        assert op is not None, name
        dtypes, flags = next(inputs.kinds(op))
        signature = inputs.signature_of(op)
        given = leading if any(t.leading for t in signature.tensors.values()) else ()
        sizes = dict.fromkeys(signature.letters, size)
        yield name, inputs.Example(op, signature, dtypes, given, sizes, flags).arguments("cpu")
