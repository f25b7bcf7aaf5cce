"""No variant reads or writes outside of its operands."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = "compute-sanitizer"
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}, which comes with the CUDA toolkit")
@pytest.mark.parametrize("script", ["sanitize.py", "sanitize_generated.py"])
def test_memcheck_of_every_variant(script: str) -> None:
    path = Path(__file__).with_name(script)
    done = subprocess.run([SANITIZER, *OPTIONS, sys.executable, path], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "ERROR SUMMARY: 0 errors" in said
