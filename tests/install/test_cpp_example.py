"""examples/cpp, built outside the tree against the installed package alone, and run on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from environment import ROOT, Environment


@pytest.fixture(scope="session")
def build(clean: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    source = shutil.copytree(ROOT / "examples" / "cpp", folder / "source")
    prefixes = f"{clean.site_packages / 'tk'};{torch.utils.cmake_prefix_path}"
    options = [f"-DCMAKE_PREFIX_PATH={prefixes}", "-DCMAKE_BUILD_TYPE=Release", "-G", "Ninja"]
    run("cmake", "-S", source, "-B", folder / "build", *options)
    run("cmake", "--build", folder / "build")
    return folder / "build"


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_a_program_calls_a_product(build: Path):
    assert "[512, 256]" in run(build / "product")


def test_a_program_finds_the_op_of_a_pack(build: Path, tmp_path: Path):
    sys.path.insert(0, str(ROOT / "tests" / "ops"))
    import generated_ops

    pack = generated_ops.write(tmp_path / "twice.tkpack", generated_ops.TWICE)
    assert run(build / "generated", pack) == "tk::twice(Tensor x, int config=-1, int mode=0) -> Tensor\n"


def test_a_program_gets_an_error_for_a_missing_pack(build: Path):
    result = subprocess.run([build / "product", "/no/such.tkpack"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "/no/such.tkpack" in result.stderr
