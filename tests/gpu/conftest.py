"""Tests on a GPU: ``python -m pytest tests/gpu -m gpu``. Without one they are skipped.

TK_TEST_DEVICE=cpu runs what makes sense there: for working on the tests themselves.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for benchmarks/, whose references and judgement are used here

from .device import DEVICE  # noqa: E402

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The same random numbers in every order of tests; nothing of a test left in the GPU's queue or memory."""
    torch.manual_seed(0)
    yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > 20e9:
            torch.cuda.empty_cache()
