"""CPU tests of the public surface. They need the native library (built, installed, or named by TK_LIBRARY_DIR)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
