"""Runs interpreted/ in a process where Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_printed_kernels_in_the_interpreter(tmp_path: Path) -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1", TK_NO_LIBRARY="1", TK_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, cwd=HERE.parents[1])
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
