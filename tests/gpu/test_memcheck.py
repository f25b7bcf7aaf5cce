"""No variant reads or writes outside of its operands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = "compute-sanitizer"
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}, which comes with the CUDA toolkit")
@pytest.mark.parametrize(
    "script",
    [
        ("sanitize.py",),
        # One op of each kind of kernel: all of them take more than ten minutes, by the script itself.
        ("sanitize_generated.py", "--only", "^(silu|softmax|column_sum)$"),
    ],
    ids=lambda script: script[0],
)
def test_memcheck_of_every_variant(script: tuple[str, ...]) -> None:
    path = Path(__file__).with_name(script[0])
    command = [SANITIZER, *OPTIONS, sys.executable, path, *script[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "ERROR SUMMARY: 0 errors" in said
