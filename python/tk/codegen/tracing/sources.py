"""What a call is given, by its text: a profile function is told who is called, and not with what."""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
_TO_NUMBERS = (bool, int, float, complex, abs, len, ord, round)


def is_given(frame: FrameType, called: Callable[..., Any], is_plain: Callable[[Any], bool]) -> bool:
    """Whether every call of a built-in function in this line is given values alone that are plain, as far as can be
    seen without computing them again."""
    name = called.__name__
    line = frame.f_lineno
    calls = [
        node
        for node in _nodes("".join(_lines(frame.f_code)))
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    try:
        calls = [c for c in calls if (isinstance(c.func, ast.Name) and _value(c.func, frame) is called)
                 or (isinstance(c.func, ast.Attribute) and c.func.attr == name)]  # fmt: skip
        return bool(calls) and all(is_plain(x) for call in calls for x in _leaves(call.args[0], frame))
    except LookupError:
        return False


def is_passed(code: CodeType, line: int, name: str) -> bool:
    """Whether this name, or attribute, is read in the line otherwise than to call it. Of code without a text it is said
    that it is not."""
    nodes = [n for n in _nodes("".join(_lines(code))) if isinstance(n, ast.expr)]
    here = [n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)]
    others = [n.func for n in here if isinstance(n, ast.Call)] + [n.value for n in here if isinstance(n, ast.Attribute)]
    read = [n for n in here if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)]
    return any(name == (n.id if isinstance(n, ast.Name) else n.attr) and n not in others for n in read)


def line_of_name(code: CodeType, name: str) -> int | None:
    """The line of the code in which a name is read that its compiler puts a constant for."""
    text = _lines(code)
    lines = [line for _, _, line in code.co_lines() if line]
    own = range(min(lines, default=1), max(lines, default=0) + 1)
    if not any(name in line for line in text[own.start - 1 : own.stop - 1]):
        return None
    found = (node.lineno for node in _nodes("".join(text)) if isinstance(node, ast.Name) and node.id == name)
    return next((line for line in found if line in own), None)


def _lines(code: CodeType) -> list[str]:
    """The lines of its file, as it is now; none of what was never a file."""
    linecache.checkcache(code.co_filename)
    return linecache.getlines(code.co_filename)


@lru_cache(maxsize=64)
def _nodes(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return []


def _leaves(node: ast.expr, frame: FrameType) -> Iterator[Any]:
    """The values that an expression is made of. Raises LookupError for what would have to be computed."""
    if isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from _leaves(element, frame)
    elif isinstance(node, ast.UnaryOp):
        yield from _leaves(node.operand, frame)
    elif isinstance(node, ast.BinOp):
        yield from _leaves(node.left, frame)
        yield from _leaves(node.right, frame)
    elif isinstance(node, ast.Call) and any(_value(node.func, frame) is f for f in _TO_NUMBERS):
        yield 0
    else:
        yield from _inside(_value(node, frame))


def _inside(x: Any) -> Iterator[Any]:
    if type(x) in (tuple, list, torch.Size, frozenset, set):
        for part in x:
            yield from _inside(part)
    elif type(x) is dict:
        yield from _inside([*x, *x.values()])
    else:
        yield x


def _value(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Subscript):
        held = _value(node.value, frame)
        if type(held) in (tuple, list, torch.Size, dict):  # any of them
            return tuple(held.values()) if isinstance(held, dict) else tuple(held)
    if isinstance(node, ast.Attribute):
        return attribute(_value(node.value, frame), node.attr)
    raise LookupError


def attribute(x: Any, name: str) -> Any:
    """What no code of the user's runs for. Raises LookupError."""
    if isinstance(x, torch.Tensor) and name in ("shape", "dtype", "ndim"):
        return x.dim() if name == "ndim" else getattr(x, name)
    is_plain = isinstance(x, ModuleType) or type(x).__getattribute__ is object.__getattribute__
    if is_plain and not hasattr(type(x), name) and name in getattr(x, "__dict__", ()):
        return vars(x)[name]
    raise LookupError


def is_a_number(x: Any) -> bool:
    return type(x) in _NUMBERS


def has_no_address(x: Any) -> bool:
    """Whether the text of a value is the same in every process."""
    is_of_the_user = hasattr(type(x).__repr__, "__code__")  # who is watched there
    plain = (*_NUMBERS, str, bytes, bytearray, type(None), type(...), range, slice, torch.dtype, torch.device)
    return is_of_the_user or type(x) in plain
