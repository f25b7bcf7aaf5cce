"""Runs interpreted/ where Triton interprets."""

from collections.abc import Callable
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter(interpret: Callable[[Path], None]) -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")
    interpret(Path(__file__).with_name("interpreted"))
