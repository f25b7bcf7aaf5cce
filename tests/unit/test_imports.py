"""Which module imports which: no circles, and in the generator none that an import inside a function would hide."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"

# Imports of tk's modules inside the generator's functions, each with its reason.
LATE = {
    # Printed kernels import tk.codegen.device, and with it this package: processes that compile them need no torch.fx.
    ("tk.codegen", "tk.codegen.family"),
    ("tk.codegen", "tk.codegen.stages"),
    ("tk.codegen", "tk.generated.declare"),
}

# The generator's rooms, in the order of its road: each may import those before it.
ROAD = ("tracing", "lowering", "printing", "scheduling")


def _name(path: Path) -> str:
    parts = path.relative_to(PYTHON).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted((PYTHON / "tk").rglob("*.py"))}


def _imports(tree: ast.AST, when: str = "at once") -> Iterator[tuple[str, str]]:
    """(when, module): "at once", "late" inside of a function, or "typing"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(node, "late")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node, "typing")
        elif isinstance(node, ast.Import):
            yield from ((when, alias.name) for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((when, name if name in MODULES else node.module) for name in inside)
        else:
            yield from _imports(node, when)


IMPORTS = {name: set(_imports(ast.parse(path.read_text()))) for name, path in MODULES.items()}


def _graph(within: str, *when: str) -> Mapping[str, set[str]]:
    return {
        name: {to for at, to in found if at in when and to != name and to.startswith(within)}
        for name, found in IMPORTS.items()
        if name.startswith(within)
    }


@pytest.mark.parametrize(
    ("within", "when"), [("tk", ("at once",)), ("tk.codegen", ("at once", "late", "typing"))], ids=["tk", "tk.codegen"]
)
def test_nothing_imports_what_imports_it(within: str, when: tuple[str, ...]) -> None:
    try:
        TopologicalSorter(_graph(within, *when)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_the_generator_imports_late_for_a_reason_alone() -> None:
    found = {(name, to) for name, found in IMPORTS.items() if name.startswith("tk.codegen")
             for when, to in found if when == "late"}  # fmt: skip
    assert found == LATE


@pytest.mark.parametrize("room", ROAD)
def test_the_rooms_stand_in_the_order_of_the_road(room: str) -> None:
    later = tuple(f"tk.codegen.{name}" for name in ROAD[ROAD.index(room) + 1 :])
    graph = _graph("tk.codegen", "at once", "late", "typing")
    assert not [
        (n, to) for n in graph for to in graph[n] if n.startswith(f"tk.codegen.{room}.") and to.startswith(later)
    ]
