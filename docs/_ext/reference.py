"""The API reference: a block {tk-api} has names, whose docstrings are set; {tk-schemas} lists torch.ops.tk."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from docutils.nodes import Node
from sphinx.util.docutils import SphinxDirective

SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields|Example|Examples):$")
PRIVATE = re.compile(r"tk::(_|flex_|b2b_[0-9a-f]{16})")


def find(name: str) -> Any:
    """The object of a dotted name."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    for part in rest:
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")
    return found


class Api(SphinxDirective):
    """The docstring of each name in the block."""

    has_content = True

    def run(self) -> list[Node]:
        lines = ["```{eval-rst}"]
        for name in filter(None, map(str.strip, self.content)):
            thing = find(name)
            if inspect.isclass(thing):
                lines += [f".. autoclass:: {name}", "   :members:", ""]
            elif inspect.isroutine(thing):
                lines += [f".. autofunction:: {name}", ""]
            else:
                raise self.error(f"{name} is neither a function nor a class")
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def schemas() -> list[str]:
    """Of the ops that users call, by name. (Ops of single mods have names that nobody types.)"""
    found = {str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("tk::")}
    return sorted(s for s in found if not PRIVATE.match(s))


class Schemas(SphinxDirective):
    """The schemas of torch.ops.tk, each as torch prints it."""

    has_content = True

    def run(self) -> list[Node]:
        return self.parse_text_to_nodes("\n".join(["```text", *(s.removeprefix("tk::") for s in schemas()), "```"]))


def with_code_set(lines: list[str]) -> Iterator[str]:
    """A docstring's indented examples as literal blocks. What stands below a section's name is that section's."""
    is_section = in_code = False
    before = ""
    for line in lines:
        is_indented = line.startswith("    ")
        if line and not is_indented:
            is_section, in_code = bool(SECTION.match(line)), False
        elif is_indented and not before and not is_section and not in_code:
            in_code = True
            yield from ("::", "")
        yield line
        before = line


def set_code(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = with_code_set(lines)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("tk-api", Api)
    app.add_directive("tk-schemas", Schemas)
    app.connect("autodoc-process-docstring", set_code, priority=100)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
