"""The installed package where there is neither Triton nor a compiler: it imports, computes and explains itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import environment
from environment import ROOT, Environment

# What tk must not do at run time, refused from the inside: writing, starting a process, opening a connection. Reading
# is an "open" as well, told by its flags. torch does things of its own on import, so it comes first.
GUARD = """
import os, sys
import torch

REFUSED = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.mkdir",
           "os.rename", "os.remove", "os.truncate", "os.symlink", "socket.connect", "socket.bind", "tempfile.mkstemp",
           "tempfile.mkdtemp")

def refuse(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in REFUSED or writes:
        raise RuntimeError(f"tk did {event} {args}")

sys.addaudithook(refuse)
"""
USE = """
import tk

a, b, bias = torch.randn(33, 70), torch.randn(70, 19), torch.randn(19)
torch.testing.assert_close(tk.mm(a, b), a @ b)
torch.testing.assert_close(torch.ops.tk.mm(a, b), a @ b)
torch.testing.assert_close(tk.linear(a, b.T, bias, activation="relu"), torch.relu(torch.addmm(bias, a, b)))
weight = b.clone().requires_grad_()
tk.mm(a, weight).sum().backward()
torch.testing.assert_close(weight.grad, a.sum(0)[:, None].expand_as(b))
assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
"""


def test_there_is_neither_triton_nor_a_compiler(clean: Environment):
    """The premise of the other tests."""
    tools = ("cc", "gcc", "c++", "g++", "clang", "ld", "nvcc", "ptxas")
    assert [tool for tool in tools if shutil.which(tool, path=clean.variables["PATH"])] == []
    result = clean.attempt("-c", "import triton")
    assert "No module named 'triton'" in result.stderr


def test_pip_finds_nothing_missing(clean: Environment):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(clean.python), "check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_importing_and_computing_writes_starts_and_connects_nothing(clean: Environment):
    clean.run("-c", GUARD + USE)


def test_readmes_first_snippet_runs_as_it_stands(clean: Environment):
    """Pasted by someone who has only just installed the wheel, on any machine."""
    (first, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    shown = clean.run("-c", first + "print(list(y.shape), y.device.type, report)").stdout
    assert shown.startswith("[512, 14336] ")


def test_uninstalling_leaves_nothing(wheel: Path, tmp_path: Path):
    """Also after it was used: what Python compiled is gone, and tk has written nothing."""
    other = environment.create(tmp_path / "venv")
    other.run("-c", "import torch")  # of which Python compiles modules, too

    def files() -> set[str]:
        return {str(path.relative_to(other.folder)) for path in other.folder.rglob("*")}

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(other.python)]
    before = files()
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-cache-dir", wheel], check=True)
    other.run("-m", "tk", "info")
    assert files() > before
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torch-tk"], check=True)
    assert files() == before


def test_it_needs_no_home_and_no_writable_file_system(clean: Environment):
    """In a mount namespace of its own where every file system is read-only."""
    remount = """
        set -e
        grep -v -E ' (proc|sysfs|devpts|cgroup2?|mqueue) ' /proc/self/mounts | cut -d ' ' -f 2 | sort -r |
          while read -r where; do mount -o remount,bind,ro "$where" 2>/dev/null || true; done
        if touch "$0/probe" 2>/dev/null; then echo "$0 is still writable" >&2; exit 77; fi
        exec env -i "$@"
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", remount, str(clean.folder)]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no mount namespace of one's own")
    path = f"PATH={clean.variables['PATH']}"
    command += [path, str(clean.python), "-c", "import sys, torch\n" + USE]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_call_is_explained(clean: Environment):
    code = "import torch, tk; a = torch.ones(2, 2); print(tk.supports('mm', a, a)); print(tk.explain('mm', a, a))"
    shown = clean.run("-c", code).stdout
    assert shown.startswith("yes") and "CPU" in shown


def test_what_ships_is_listed(clean: Environment):
    code = "import json, tk; print(json.dumps([[p.arch, p.path] for p in tk.packs()]))"
    packs = json.loads(clean.run("-c", code).stdout)
    on_disk = {str(path) for path in clean.site_packages.glob("tk/packs/*.tkpack")}
    assert on_disk and {path for _, path in packs} == on_disk
    coverage = clean.run("-c", "import tk; print(tk.coverage())").stdout
    assert "mm_pointer" in coverage


def test_the_packages_generated_ops_are_there_without_a_gpu(clean: Environment):
    code = """
import torch, tk
(definitions,) = [p for p in tk.packs() if p.arch == "any"]
missing = [op for op in definitions.ops if not hasattr(torch.ops.tk, op)]
assert not missing, missing
"""
    clean.run("-c", code)


@pytest.mark.parametrize("command", ["info", "list", "verify", "--help"])
def test_the_command_line_works(clean: Environment, command: str):
    assert clean.run("-m", "tk", command).stdout.strip()


def test_the_console_script_is_the_same(clean: Environment):
    script = clean.folder / "bin" / "tk"
    shown = subprocess.run([script, "--help"], env=clean.variables, check=True, capture_output=True, text=True).stdout
    assert shown == clean.run("-m", "tk", "--help").stdout


def test_building_says_what_to_install(clean: Environment):
    result = clean.attempt("-m", "tk", "build", "--arch", "90", "--dry-run")
    assert result.returncode != 0
    assert 'pip install "torch-tk[build]"' in result.stderr


def test_a_damaged_pack_is_refused_and_the_rest_goes_on(clean: Environment, tmp_path: Path):
    pack = next(iter(clean.site_packages.glob("tk/packs/*.tkpack")))
    damaged = tmp_path / "damaged.tkpack"
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    code = f"""
import torch, tk
try:
    tk.load_pack({str(tmp_path / "missing.tkpack")!r})
except tk.PackError as error:
    assert "missing.tkpack" in str(error)
else:
    raise SystemExit("a missing pack was loaded")
torch.testing.assert_close(tk.mm(torch.eye(3), torch.ones(3, 3)), torch.ones(3, 3))
"""
    clean.run("-c", code)
    result = clean.attempt("-m", "tk", "verify", str(damaged))
    assert result.returncode != 0 and "damaged.tkpack" in result.stdout + result.stderr
