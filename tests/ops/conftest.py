"""CPU tests of the public surface. They need the native library (built, installed, or named by TK_LIBRARY_DIR)."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tk
from tk.aot.spec import Op

from . import generated_ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Op]:
    """Packs an op under a name of its own, loads it, and returns it as it is now called."""

    def run(op: Op) -> Op:
        renamed = generated_ops.fresh(op)
        tk.load_pack(generated_ops.write(tmp_path / f"{renamed.name}.tkpack", renamed))
        return renamed

    return run


@pytest.fixture
def declare(tmp_path: Path) -> Callable[..., Any]:
    """torch.ops.tk's op of a function, from a pack that knows it without kernels: it runs on the CPU."""
    from tk.build.packs import definitions
    from tk.codegen.family import generate_any
    from tk.generated.signature import parse

    def make(fn: Callable[..., Any], grad: bool = True, **texts: Any) -> Any:
        name = f"{fn.__name__}_{next(_numbers)}"
        names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
        made = generate_any(fn, parse(texts, names), name, grad)
        families = made.families if hasattr(made, "families") else [made.family]
        path = tmp_path / f"{name}.tkpack"
        path.write_bytes(definitions(families))
        tk.load_pack(path)
        return getattr(torch.ops.tk, name)

    return make


_numbers = itertools.count()
