"""How docstrings begin: with what a thing is or does. One that begins in the middle of a sentence ("Of a tensor's …")
says it only to who has read the name and the signature before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MIDDLE = frozenset(
    "After Against Along And As At Because Before Behind Below Beside By From If In Instead Not Of On Only So Then To "
    "Under Until When Where While With Within Without".split()
)
# A change of their sources is another key: they would all be compiled again for their docstrings alone.
DEVICE_CODE = ("jit", "constexpr_function", "aggregate")


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(place, docstring) of modules, classes and functions, but for device code and bundles of it."""
    is_kernel = path.is_relative_to(ROOT / "kernels")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
        is_device_code = any(word in d for d in decorators for word in DEVICE_CODE)
        if (text := ast.get_docstring(node)) and not is_device_code and not (is_kernel and isinstance(node, ast.ClassDef)):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


@pytest.mark.parametrize("folder", ["python", "kernels", "tools"])
def test_a_docstring_does_not_begin_in_the_middle_of_a_sentence(folder: str) -> None:
    found = [x for path in sorted((ROOT / folder).rglob("*.py")) for x in _docstrings(path)]
    assert found
    assert [f"{place}: {text.splitlines()[0]}" for place, text in found if text.split()[0] in MIDDLE] == []
