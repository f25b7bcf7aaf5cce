"""How docstrings begin: with what a thing is or does. One that begins in the middle of a sentence ("Of a tensor's …")
says it only to who has read the name and the signature before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MIDDLE = frozenset({
    "After", "Against", "Along", "And", "As", "At", "Because", "Before", "Behind", "Below", "Beside", "By",
    "From", "If", "In", "Instead", "Not", "Of", "On", "Only", "So", "Then", "To", "Under", "Until", "When",
    "Where", "While", "With", "Within", "Without",
})  # fmt: skip
# A change of their sources is another key: they would all be compiled again for their docstrings alone.
DEVICE_CODE = ("jit", "constexpr_function", "aggregate")


def _docstrings(tree: ast.AST, is_kernel: bool) -> Iterator[tuple[int, str]]:
    """(line, docstring) of modules, classes and functions, but for device code and bundles of it."""
    decorators = [ast.unparse(d) for d in getattr(tree, "decorator_list", ())]
    if any(word in d for d in decorators for word in DEVICE_CODE) or (is_kernel and isinstance(tree, ast.ClassDef)):
        return
    has_one = isinstance(tree, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if has_one and (text := ast.get_docstring(tree)):  # type: ignore[arg-type]
        yield getattr(tree, "lineno", 1), text
    for node in ast.iter_child_nodes(tree):
        yield from _docstrings(node, is_kernel)


@pytest.mark.parametrize("folder", ["python", "kernels", "tools"])
def test_a_docstring_does_not_begin_in_the_middle_of_a_sentence(folder: str) -> None:
    found = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in _docstrings(ast.parse(path.read_text()), folder == "kernels")
    ]
    assert found
    assert [f"{place}: {text.splitlines()[0]}" for place, text in found if text.split()[0] in MIDDLE] == []
