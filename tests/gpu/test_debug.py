"""The debug variant on a GPU: each call in a process of its own, since a failed assertion ends its CUDA context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .device import DEVICE
from .test_indexed_ops import pack

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")
HEAD = "import sys, torch, tk; tk.load_pack(sys.argv[1]); ops = torch.ops.tk; cuda = dict(device='cuda');"


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("packs"), "--debug")


def run(pack_path: Path, call: str) -> subprocess.CompletedProcess[str]:
    code = f"{HEAD} {call}; torch.cuda.synchronize(); print('went on')"
    return subprocess.run([sys.executable, "-c", code, str(pack_path)], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("row", [5, -1])
def test_a_read_out_of_bounds(debug: Path, row: int) -> None:
    done = run(debug, f"ops.gpu_look_up(torch.ones(5, 64, **cuda), torch.full((2, 3), {row}, **cuda))")
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "tk.gpu_look_up: index out of bounds: dimension -2 of weight, which is read" in done.stdout + done.stderr
    assert "device-side assert triggered" in done.stderr


def test_a_write_out_of_bounds(debug: Path) -> None:
    done = run(debug, "ops.gpu_add_in_place(torch.ones(5, 64, **cuda), torch.full((3,), 5, **cuda), "
                      "torch.ones(3, 64, **cuda))")  # fmt: skip
    assert done.returncode != 0
    assert "index out of bounds: dimension -2 of x, which is written" in done.stdout + done.stderr


def test_what_is_not_finite_is_said(debug: Path) -> None:
    done = run(debug, "ops.gpu_look_up(torch.full((5, 64), float('nan'), **cuda), torch.full((1, 3), 4, **cuda))")
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
    said = [line for line in done.stdout.splitlines() if "tk.gpu_look_up: NaN or infinity in out0" in line]
    assert said, done.stdout[:2000]  # by every thread of a program
    assert {line.rpartition(": ")[2] for line in said} == {"192"}


def test_nothing_is_said_of_what_is_right(debug: Path) -> None:
    done = run(debug, "ops.gpu_look_up(torch.ones(5, 64, **cuda), torch.full((2, 3), 4, **cuda)); "
                      "ops.gpu_scatter_add(torch.ones(5, 64, **cuda), torch.full((3, 64), 4, **cuda), "
                      "torch.full((3, 64), 3e38, **cuda) * 0)")  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["went", "on"], done.stdout + done.stderr
