"""What a function's code reads of its globals, and the same code with other names.

A path is a global and what is read of it: ("F", "silu") for ``F.silu``.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType

__all__ = ["Path", "codes", "paths", "renamed"]

Path = tuple[str, ...]


def renamed(code: CodeType, names: Mapping[Path, str]) -> CodeType:
    """The code with other names for the first of these paths, wherever it reads one of them.

    Raises ValueError where an instruction has no room for one more name.
    """
    consts = tuple(renamed(c, names) if isinstance(c, CodeType) else c for c in code.co_consts)
    sites = {i.offset: new for i, path in _reads(code) if (new := _first_of(path, names)) is not None}
    known, instructions = list(code.co_names), bytearray(code.co_code)
    by_name: dict[str, set[str | None]] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            by_name.setdefault(instruction.argval, set()).add(sites.get(instruction.offset))
    for instruction in dis.get_instructions(code):
        new = sites.get(instruction.offset)
        if new is None:
            continue
        if by_name[instruction.argval] == {new}:  # nothing reads the old one
            known[code.co_names.index(instruction.argval)] = new
            continue
        if new not in known:
            known.append(new)
        # From 3.11 on the lowest bit says whether a NULL is pushed as well.
        is_shifted = sys.version_info >= (3, 11)
        arg = known.index(new)
        arg = arg << 1 | (instruction.arg or 0) & 1 if is_shifted else arg
        at, has_more = instruction.offset, (instruction.arg or 0) > 0xFF
        if arg > (0xFFFF if has_more else 0xFF):
            raise ValueError(f"{code.co_name} reads too many names")
        instructions[at + 1] = arg & 0xFF
        if has_more:
            instructions[at - 1] = arg >> 8
    return code.replace(co_consts=consts, co_names=tuple(known), co_code=bytes(instructions))


def _first_of(path: Path, names: Mapping[Path, str]) -> str | None:
    return next((names[path[:n]] for n in range(1, len(path) + 1) if path[:n] in names), None)


def _reads(code: CodeType) -> Iterator[tuple[dis.Instruction, Path]]:
    """Each instruction that reads a global, with all that is read of that: ("F", "silu") for F.silu."""
    first: dis.Instruction | None = None
    path: Path = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            if first is not None:
                yield first, path
            first, path = instruction, (instruction.argval,)
        elif first is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
        elif first is not None and instruction.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
            yield first, path
            first = None
    if first is not None:
        yield first, path


def paths(function: FunctionType) -> list[Path]:
    """What is read of globals, and of what."""
    found: dict[Path, None] = {}
    for code in codes(function):
        for _, path in _reads(code):
            found.update(dict.fromkeys(path[:n] for n in range(1, len(path) + 1)))
    return list(found)


def codes(function: FunctionType) -> Iterator[CodeType]:
    """Its code and that of the functions in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
