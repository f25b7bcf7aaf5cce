"""No variant reads or writes outside of its operands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .test_conv import PARTS

SANITIZER = "compute-sanitizer"
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")
HERE = Path(__file__).parent
PROCESSES = max(1, min(12, (os.cpu_count() or 1) - 2))  # most of the time is the host's: several share the GPU


def _tests(name: str, which: str) -> list[str]:
    """Tests of a file, by pytest's -k: those that call every config, or every kernel, at sizes that cut tiles off."""
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(HERE / f"test_{name}.py"), "-k", which]


def _parts(script: str) -> list[list[str]]:
    return [[str(HERE / f"{script}.py"), "--part", f"{i + 1}/{PROCESSES}"] for i in range(PROCESSES)]


WATCHED: dict[str, list[list[str]]] = {
    "mm": _parts("sanitize"),
    "generated": _parts("sanitize_generated"),
    "bmm": [_tests("bmm", f"every_config and [{order}-") for order in ("nn", "nt", "tn", "tt", "ss")],
    "mm_plus_mm": [_tests("mm_plus_mm", "every_config")],
    "grouped_mm": [
        *(_tests("grouped_mm", f"every_config and {ragged} and {order}") for ragged in ("rows", "columns", "inner")
          for order in ("nn", "nt", "tn", "tt", "ss")),
        _tests("grouped_mm", "outside or gradients"),
    ],
    "scaled_mm": [_tests("scaled_mm", "every_config and not graphs"), _tests("scaled_mm", "edges or static")],
    "scaled_grouped_mm": [_tests("scaled_grouped_mm", "every_config or outside")],
    "int4": [_tests("int4", "every_config"), _tests("int4", "extremes or layout")],
    "b2b_gemm": [_tests("b2b_gemm", "every_size")],
    "lists": [_tests("lists", "steps or odd")],
    "conv": [
        *(_tests("conv", f"every_config_of_the_{what} and [{part}]")
          for what in ("forward", "gradients") for part in range(PARTS)),
        _tests("conv", "random_convolutions and -0"),
    ],
    "attention": [
        *(_tests("attention", f"test_mods and -{mask}]") for mask in ("none", "causal", "window", "document")),
        _tests("attention", "prefix or both_ways or of_all or long_ids or dilated or image"),
        _tests("attention", "decode or few_rows or layouts or differ or another"),
        *(_tests("attention_backward", which) for which in
          ("masks and bfloat16", "masks and float16", "lengths and 64", "lengths and 128", "groups or keys or sizes")),
    ],
}  # fmt: skip


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}, which comes with the CUDA toolkit")
@pytest.mark.parametrize("family", list(WATCHED))
def test_memcheck_of_every_variant(family: str) -> None:
    # Every tensor an allocation of its own: one byte too far is seen. A graph's capture allows none.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = [
        subprocess.Popen([SANITIZER, *OPTIONS, sys.executable, *command], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, env=environment)
        for command in WATCHED[family]
    ]  # fmt: skip
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said, strict=True):
        assert process.returncode == 0, text[-6000:]
        assert "ERROR SUMMARY: 0 errors" in text
