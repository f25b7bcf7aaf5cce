"""The wheel, which one Python built, in Pythons of other versions: all of it in one that has torch; else what looks
into packs, which needs none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from environment import Environment

OLDEST = (3, 10)  # pyproject.toml's requires-python
OLDEST_TRITON = (3, 8)  # of pyproject.toml's extra "build"
Run = Callable[..., str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other" in metafunc.fixturenames:
        found = [Path(p) for p in metafunc.config.getoption("--other-python") or ()] or sorted(pythons().values())
        none = [pytest.param(None, marks=pytest.mark.skip("no Python of another version is to be had here"))]
        metafunc.parametrize("other", found or none, ids=str)


def pythons() -> dict[str, Path]:
    """Those of other versions than this, by "3.12"."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/*/bin")
    found: dict[str, Path] = {}
    for folder in [*os.get_exec_path(), *map(str, sorted(pyenv))]:
        for minor in range(OLDEST[1], 30):
            python = shutil.which(f"python3.{minor}", path=folder)
            if python and minor != sys.version_info.minor and runs(python):
                found.setdefault(f"3.{minor}", Path(python))
    return found


def runs(python: str) -> bool:
    """Not so of the commands by which pyenv says that a version is not chosen."""
    return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


@pytest.fixture
def run(other: Path, unpacked: Path, tmp_path: Path) -> Run:
    """Runs the other Python on the unpacked wheel; fails the test with its output when it does not exit with 0."""

    def call(*arguments: str, **variables: str) -> str:
        variables |= {"PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
        command = [other, *arguments]
        result = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return call


@pytest.fixture(scope="session")
def table(clean: Environment) -> str:
    """What `tk list` prints in this Python."""
    return clean.run("-m", "tk", "list").stdout


WITHOUT_TORCH = """
import os, sys
sys.modules["torch"] = None
from tk import _library, _packs
_library.check(_library.core().tk_set_builtin_directory(os.fsencode(sys.argv[1])))
print(_packs.coverage())
for pack in _packs.packs():
    assert not pack.problem, pack
    assert _packs.verify(pack.path) == pack.images
    print(pack.arch, file=sys.stderr)
"""


def test_packs_are_looked_into(other: Path, run: Run, unpacked: Path, table: str):
    packs = unpacked / "tk" / "packs"
    assert any(packs.iterdir())
    assert run("-c", WITHOUT_TORCH, str(packs), TK_NO_LIBRARY="1") == table


def test_every_source_compiles(other: Path, unpacked: Path, tmp_path: Path):
    """What a newer Python's grammar alone has would fail here, also in files that only a Python with torch imports."""
    sources = [*unpacked.rglob("*.py")]
    assert len(sources) > 100
    command = [other, "-W", "error", "-m", "compileall", "-q", "-f", unpacked]
    variables = {"PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    compiled = (tmp_path / unpacked.relative_to("/")).rglob("*.pyc")  # beside those of Python's own modules
    assert len(list(compiled)) == len(sources)


@pytest.fixture
def torchs(other: Path) -> None:
    version = subprocess.run([other, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    if version.returncode:
        pytest.skip(f"{other} has no torch; --other-python names one that has")
    if tuple(map(int, re.findall(r"\d+", version.stdout)[:2])) < (2, 11):
        pytest.skip(f"{other} has torch {version.stdout.strip()}; tk needs 2.11")


def test_commands(torchs: None, run: Run, unpacked: Path, table: str):
    assert run("-m", "tk", "list") == table
    packs = {str(path) for path in (unpacked / "tk" / "packs").iterdir()}
    assert all(path in run("-m", "tk", "info") for path in packs)
    verified = run("-m", "tk", "verify", "--no-gpu")
    assert all(f"{path}: " in verified for path in packs)
    assert "ATen" in run("-m", "tk", "explain", "mm", "4x8", "8x2", "--device", "cpu")


USE = """
import torch, tk
a, b = torch.randn(33, 70), torch.randn(70, 19, requires_grad=True)
torch.testing.assert_close(tk.mm(a, b), a @ b)
tk.mm(a, b, activation="relu").sum().backward()
with torch.no_grad():
    torch.testing.assert_close(torch.ops.tk.mm(a, b), a @ b)
assert len(tk.packs()) and len(tk.coverage()) and tk.supports("mm", a, b)
try:
    torch.ops.tk.mm(b, b)
except ValueError as error:
    assert "the inner sizes differ" in str(error)
"""


def test_functions(torchs: None, run: Run):
    run("-c", USE)


DECLARED = """
import torch, tk

@tk.op(x="T[M, N]", a="float", n="int", T=("bf16", "fp32"), grad=True)
def powers(x, a, n):
    return torch.softmax(x.abs() ** a, 0) + x ** n

@tk.op(x="fp32[..., N]", p="float")
def thinned(x, p):
    return torch.nn.functional.dropout(x, p)
"""

LOADED = """
import sys, torch, tk
tk.load_pack(sys.argv[1])
x = torch.rand(5, 7) + 1
torch.testing.assert_close(torch.ops.tk.powers(x, 1.5, 3), torch.softmax(x ** 1.5, 0) + x ** 3)
assert torch.ops.tk.thinned(x, 0.0, torch.tensor(3), 0).equal(x)
"""


def test_a_pack_is_built(torchs: None, other: Path, run: Run, tmp_path: Path):
    """By whichever torch there is: with exponents given at run time, with random numbers, with gradients."""
    code = "import zstandard, triton; print(triton.__version__)"
    version = subprocess.run([other, "-c", code], capture_output=True, text=True)
    if version.returncode:
        pytest.skip(f"{other} has no Triton or no zstandard, which building needs")
    if tuple(map(int, re.findall(r"\d+", version.stdout)[:2])) < OLDEST_TRITON:
        pytest.skip(f"{other} has Triton {version.stdout.strip()}, which its torch asks for; building needs 3.8")
    (tmp_path / "declared.py").write_text(DECLARED)
    run("-m", "tk", "build", "declared.py", "-o", "declared.tkpack", "--sample", "--arch", "90")
    run("-c", LOADED, "declared.tkpack")
