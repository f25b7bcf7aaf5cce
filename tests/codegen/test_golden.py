"""The IR and the source of representative functions, as files: a change of the generator shows as their diff.

To write them anew: ``TK_REWRITE_GOLDEN=1 python -m pytest tests/codegen/test_golden.py``. They are no .py files, so
that no tool formats what the generator printed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import golden_files
import ops
import package_ops
import pytest

from tk.codegen import show
from tk.codegen.family import Generated, generate_any
from tk.codegen.lists import GeneratedLists
from tk.codegen.stages import text, text_of_lists
from tk.codegen.tile import ALIGNED, LAYOUTS
from tk.generated import Declared

FOLDER = Path(__file__).parent / "golden"
OPS = {
    f"{module.__name__.split('.')[-1]}.{name}": declared
    for module in (ops, *package_ops.MODULES)
    for name, declared in vars(module).items()
    if isinstance(declared, Declared)
}
IN_EVERY_LAYOUT = ("ops.scaled_gelu", "ops.middle", "ops.views")


def _first(op: Generated) -> Generated:
    """For the first dtype alone: the others differ in it and little else."""
    return replace(op, graphs=op.graphs[:1], backward=_first(op.backward) if op.backward else None)


def _printed(name: str) -> str:
    declared = OPS[name]
    made = generate_any(declared.fn, declared.signature, declared.name, declared.grad)
    if isinstance(made, GeneratedLists):
        made = replace(made, graphs=made.graphs[:1])
        return "\n".join([text_of_lists(made, "ir"), text_of_lists(made, "schedule"), text_of_lists(made, "source")])
    op = _first(made)
    layouts = LAYOUTS if name in IN_EVERY_LAYOUT else (ALIGNED,)
    return "\n".join([text(op, "ir"), text(op, "schedule"), "", text(op, "source", layouts)])


@pytest.mark.parametrize("name", list(OPS))
def test_golden(name: str) -> None:
    golden_files.check(FOLDER / f"{name}.txt", _printed(name))


def test_no_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.iterdir()} == set(OPS)


def test_show() -> None:
    """More than once in a process."""
    path = Path(ops.__file__)
    assert "kernel softmax(a0 < leading, r0 < N reduced)" in show(path, "softmax", "ir")
    assert "q = r0<N, q reduced" in show(path, "softmax", "schedule")
    assert "def softmax(" in show(path, "softmax", "source")
    with pytest.raises(Exception, match="declares no op nothing"):
        show(path, "nothing", "ir")
    with pytest.raises(Exception, match="there is no stage 'ptx'"):
        show(path, "softmax", "ptx")
