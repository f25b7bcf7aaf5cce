"""No variant reads or writes outside of its operands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = "compute-sanitizer"
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")


# Most of the time is the host's: several processes share the GPU.
PARTS = {"sanitize.py": 1, "sanitize_generated.py": max(1, min(12, (os.cpu_count() or 1) - 2))}


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}, which comes with the CUDA toolkit")
@pytest.mark.parametrize("script", list(PARTS))
def test_memcheck_of_every_variant(script: str) -> None:
    path, parts = Path(__file__).with_name(script), PARTS[script]
    running = [
        subprocess.Popen(
            [SANITIZER, *OPTIONS, sys.executable, path, "--part", f"{i + 1}/{parts}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(parts)
    ]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-6000:]
        assert "ERROR SUMMARY: 0 errors" in text
