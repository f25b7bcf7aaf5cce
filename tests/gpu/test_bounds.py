"""Indices out of bounds on a GPU: the kernel ends, and reads and writes nothing foreign before. Each call has a process
of its own, since the trap ends its CUDA context."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .device import DEVICE, environment
from .test_indexed_ops import pack
from .test_memcheck import SANITIZER

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")
HEAD = "import sys, torch, tk; tk.load_pack(sys.argv[1]); ops = torch.ops.tk; cuda = dict(device='cuda');"
CALLS = {
    "embedding": "tk.embedding(torch.full((3,), {row}, **cuda), torch.ones(5, 64, **cuda))",
    "embedding of 32 bits": "tk.embedding(torch.full((3,), {row}, **cuda, dtype=torch.int32), "
                            "torch.ones(5, 64, **cuda))",
    "embedding's gradient": "ops.embedding_backward(torch.ones(3, 64, **cuda), torch.full((3,), {row}, **cuda), "
                            "torch.ones(5, 64, **cuda), 2)",
    "look-up": "ops.gpu_look_up(torch.ones(5, 64, **cuda), torch.full((2, 3), {row}, **cuda))",
    "scatter_add": "ops.gpu_scatter_add(torch.ones(5, 64, **cuda), torch.full((3, 64), {row}, **cuda), "
                   "torch.ones(3, 64, **cuda))",
    "index_add": "ops.gpu_add_in_place(torch.ones(5, 64, **cuda), torch.full((3,), {row}, **cuda), "
                 "torch.ones(3, 64, **cuda))",
    "cross_entropy": "tk.cross_entropy(torch.ones(3, 5, **cuda), torch.full((3,), {row}, **cuda))",
    "cross_entropy of rows": "tk.cross_entropy(torch.ones(3, 5, **cuda), torch.full((3,), {row}, **cuda), "
                             "reduction='none')",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("packs"))


def run(pack_path: Path, call: str, *under: str) -> subprocess.CompletedProcess[str]:
    code = f"{HEAD} {call}; torch.cuda.synchronize(); print('went on')"
    command = [*under, sys.executable, "-c", code, str(pack_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


@pytest.mark.parametrize("row", [5, -1, 2**40])
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_ends(built: Path, name: str, row: int) -> None:
    if row == -1 and "embedding's" in name:
        row = -7
    if row == 2**40 and "32" in name:
        row = 2**31 - 1
    done = run(built, CALLS[name].format(row=row))
    assert done.returncode != 0 and "went on" not in done.stdout, done.stderr
    assert "CUDA error" in done.stderr


@pytest.mark.parametrize("name", CALLS)
def test_within_bounds(built: Path, name: str) -> None:
    done = run(built, CALLS[name].format(row=4))
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}, which comes with the CUDA toolkit")
@pytest.mark.parametrize("name", CALLS)
def test_nothing_foreign_is_touched(built: Path, name: str) -> None:
    """A row far from every allocation."""
    row = 2**31 - 1 if "32" in name else 2**40
    done = run(built, CALLS[name].format(row=row), SANITIZER, "--tool", "memcheck", "--report-api-errors", "no")
    assert "went on" not in done.stdout
    assert "Invalid __global__" not in done.stdout + done.stderr
