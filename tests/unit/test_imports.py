"""Which module imports which: no circles, inside functions neither, and the rooms of docs/design.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"

# Imports of tk's modules inside the generator's functions, each with its reason.
LATE = {
    # Printed kernels import tk.codegen.device, and with it this package: processes that compile them need no torch.fx.
    ("tk.codegen", "tk.codegen.family"),
    ("tk.codegen", "tk.codegen.stages"),
    ("tk.codegen", "tk.generated.declare"),
}

# Imports inside functions that close a circle, each with its reason.
CIRCLES = {
    # The public functions are looked up by name, in the module that a program sees.
    ("tk.inspect", "tk"),
    # What torch's registry of flash attention calls, once somebody asks for tk there.
    ("tk._flash", "tk.dropin.flash"),
    # It calls the functions that a program sees.
    ("tk", "tk.dropin"),
}

# The generator's rooms, in the order of its road: each may import those before it.
ROAD = ("tracing", "lowering", "printing", "scheduling")


def _name(path: Path) -> str:
    is_kernel = path.is_relative_to(ROOT / "kernels")
    parts = ("tk" if is_kernel else "", *path.relative_to(ROOT if is_kernel else PYTHON).with_suffix("").parts)
    return ".".join(filter(None, parts[:-1] if parts[-1] == "__init__" else parts))


MODULES = {_name(path): path for root in (ROOT / "kernels", PYTHON / "tk") for path in sorted(root.rglob("*.py"))}


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from ((when, x.value) for x in node.args if isinstance(x, ast.Constant) and x.value in MODULES)
        else:
            yield from _imports(node, when)


IMPORTS = {name: set(_imports(ast.parse(path.read_text()))) for name, path in MODULES.items()}


def _graph(within: str, *when: str) -> dict[str, set[str]]:
    return {
        name: {to for at, to in found if at in when and to != name and to.startswith(within)}
        for name, found in IMPORTS.items()
        if name.startswith(within)
    }


def _circle(graph: Mapping[str, set[str]]) -> str:
    """The modules of one; "" where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def _without(graph: Mapping[str, set[str]], edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    return {name: {to for to in found if (name, to) not in edges} for name, found in graph.items()}


def test_nothing_imports_what_imports_it() -> None:
    assert not _circle(_graph("tk", "at once"))
    assert not _circle(_graph("tk.codegen", "at once", "late", "typing"))
    assert not _circle(_without(_graph("tk", "at once", "late"), CIRCLES))


@pytest.mark.parametrize("edge", sorted(CIRCLES), ids="-".join)
def test_a_late_import_is_a_circle(edge: tuple[str, str]) -> None:
    """Else it needs no mention."""
    assert _circle(_without(_graph("tk", "at once", "late"), CIRCLES - {edge}))


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


# --- The rooms of docs/design.md ---


class Room(NamedTuple):
    modules: tuple[str, ...]
    at_once: set[str]
    late: set[str]


def _rooms() -> dict[str, Room]:
    """As the tables say, in their order."""
    text = (ROOT / "docs/design.md").read_text()
    rooms = {}
    for table in re.findall(r"^\| room \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            name, modules, _, at_once, late = (cell.strip() for cell in row.strip("|").split("|"))
            lists = (set(filter(None, cell.split(", "))) for cell in (at_once, late))
            rooms[name] = Room(tuple(re.findall("`(.+?)`", modules)), *lists)
    return rooms


ROOMS = _rooms()
_ROOM_OF = {
    module if "/" in module else f"tk.{module}": name for name, room in ROOMS.items() for module in room.modules
}


def _room(name: str) -> str:
    """Of a module, or of a file of the C++ side: by its own name, else by the longest of those that it stands under."""
    parts = re.split(r"([./])", name)
    under = ["".join(parts[: n + 1]) for n in range(0, len(parts), 2)]
    found = [x for x in (*under, f"{name}.__init__") if x in _ROOM_OF]
    assert found, f"{name} is in no room of docs/design.md"
    return _ROOM_OF[found[-1]]


def _includes(path: Path) -> Iterator[tuple[str, str]]:
    for header in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
        folders = (path.parent, ROOT / "csrc/core/include", ROOT / "csrc/ops/include")
        found = next((folder / header for folder in folders if (folder / header).exists()), None)
        if found is not None:  # else it is made by the build
            yield "at once", str(found.resolve().relative_to(ROOT))


@cache
def _imports_of_rooms() -> dict[str, Room]:
    """As the sources have them."""
    files = [path for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix in (".c", ".cpp", ".h")]
    includes = {str(path.relative_to(ROOT)): set(_includes(path)) for path in files}
    found = {name: Room(room.modules, set(), set()) for name, room in ROOMS.items()}
    for name, imports in (IMPORTS | includes).items():
        here = found[_room(name)]
        for when, to in imports:
            if _room(to) != _room(name) and when != "typing":
                (here.at_once if when == "at once" else here.late).add(_room(to))
    for room in found.values():
        room.late.difference_update(room.at_once)
    return found


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_the_table_says(name: str) -> None:
    assert _imports_of_rooms()[name] == ROOMS[name]


def test_a_room_imports_those_above_it() -> None:
    above: set[str] = set()
    for name, room in ROOMS.items():
        assert room.at_once <= above, name
        above.add(name)


def test_a_type_checker_sees_every_name_of_tk():
    """mypy --strict takes what the installed package imports for its own, but for what __all__ has."""
    (checked,) = (
        node
        for node in ast.parse((PYTHON / "tk" / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {a.name for node in checked.body if isinstance(node, ast.ImportFrom) for a in node.names}
    told = {name for node in checked.body if isinstance(node, ast.AugAssign) for name in ast.literal_eval(node.value)}
    assert imported - {"op"} == told and {"softmax", "use", "flex_attention"} <= told  # "op" is in it at run time, too
