"""docs/add-a-kernel.md holds what it says: its file becomes a pack, and the installed package loads it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from environment import ROOT, Environment


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    source = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add-a-kernel.md").read_text(), re.DOTALL)[0]
    (folder / "scale.py").write_text(source)
    command = [sys.executable, "-m", "tk", "build", "scale.py", "-o", "scale.tkpack", "--arch", "90"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "scale.tkpack"


def test_the_documented_kernel_is_loaded_from_a_pack(pack: Path, clean: Environment):
    show = f"import tk; tk.load_pack({str(pack)!r}); print(tk.coverage().only(op='scale'))"
    shown = clean.run("-c", show).stdout
    assert "block_1024" in shown and "block_4096" in shown


def test_the_documented_kernel_is_an_op_of_torch(pack: Path, clean: Environment):
    call = f"import torch, tk; tk.load_pack({str(pack)!r}); print(torch.ops.tk.scale(torch.ones(2), 3.0).tolist())"
    assert clean.run("-c", call).stdout.split() == ["[3.0,", "3.0]"]


CALL_ALL = """
import sys
import torch, tk
from torch.testing import assert_close
tk.load_pack(sys.argv[1])
sys.path += sys.argv[2:]
import declared_calls, my_ops
names = []
for name, args in declared_calls.calls(my_ops, 8, (2, 3)):
    names.append(name)
    own = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, args)
    found = getattr(torch.ops.tk, name)(*args)
    assert_close([found, args], [getattr(my_ops, name)(*own), own])
print(len(names), "triton" in sys.modules)
"""


def test_a_file_of_functions(clean: Environment, tmp_path: Path):
    """Built here; called where there is neither Triton nor a compiler, against the functions themselves."""
    command = [sys.executable, "-m", "tk", "build", ROOT / "examples/my_ops.py", "--sample", "--arch", "90"]
    result = subprocess.run([*command, "-o", tmp_path / "my_ops.tkpack"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = clean.run(
        "-c", CALL_ALL, str(tmp_path / "my_ops.tkpack"), str(ROOT / "examples"), str(ROOT / "tests")
    ).stdout
    assert shown.split() == ["22", "False"]


def test_a_pack_on_tk_pack_path_is_loaded_at_import(pack: Path, clean: Environment):
    shown = clean.run("-c", "import tk; print([p.path for p in tk.packs()])", TK_PACK_PATH=str(pack)).stdout
    assert str(pack) in shown


def test_a_missing_pack_on_the_path_does_not_stop_the_import_and_is_named(clean: Environment, tmp_path: Path):
    missing = tmp_path / "missing.tkpack"
    code = "import torch, tk; print(tk.mm(torch.eye(2), torch.eye(2)).sum().item())"
    result = clean.run("-c", code, TK_PACK_PATH=str(missing))
    assert result.stdout.strip() == "2.0"
    assert str(missing) in result.stderr
