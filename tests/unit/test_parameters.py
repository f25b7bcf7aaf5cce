"""No device function has so many parameters that nobody can read its calls: what belongs together comes in bundles."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 20


def device_functions(path: Path) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).split("(")[0] in ("triton.jit", "gluon.jit", "jit") for d in node.decorator_list)
    ]


def test_no_device_function_has_more_than_twenty_parameters() -> None:
    paths = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "python/tk").rglob("*.py")]
    names = {path: path.relative_to(ROOT).as_posix() for path in paths}
    counts = {
        f"{name}: {f.name}": len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs)
        for path, name in names.items()
        for f in device_functions(path)
    }
    assert len(counts) > 100
    assert {name: count for name, count in counts.items() if count > MOST} == {}
