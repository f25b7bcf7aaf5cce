"""Runs interpreted/ where Triton interprets."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_printed_kernels_in_the_interpreter(interpret: Callable[[Path], None]) -> None:
    interpret(Path(__file__).with_name("interpreted"))
