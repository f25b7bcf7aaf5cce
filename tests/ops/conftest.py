"""CPU tests of the public surface. They need the native library (built, installed, or named by TK_LIBRARY_DIR)."""

from collections.abc import Callable
from pathlib import Path

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
