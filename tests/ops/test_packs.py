"""Packs of users beside each other, built by ``tk build``: one op in two of them, one name for the files of several
architectures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tk
from tk import capi
from tk.cli import main
from tk.flex.tracing import trace

from .test_attention_build import arguments
from .test_generated_launch import Kernel

pytest.importorskip("triton")

OPS = """
import torch

import tk


@tk.op(x="T[...]", T=("fp32",))
def packs_shared(x):
    return torch.relu(x) {change}


@tk.op(x="T[...]", T=("fp32",))
def packs_{own}(x):
    return x + 1
"""

MODS = """
import torch

import tk


def every_seventh(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 7 == 0)


tk.flex.register("every_seventh", mask_mod=every_seventh, head_dims=({head},), dtypes=({dtypes},), backward=False,
                 decode=False)
"""


def every_seventh(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 7 == 0)


def build(folder: Path, name: str, source: str, arch: str = "90", *options: str) -> Path:
    """The path that tk.load_pack takes."""
    (folder / f"{name}.py").write_text(source)
    assert (
        main(["build", str(folder / f"{name}.py"), "-o", str(folder / f"{name}.tkpack"), "--arch", arch, *options]) == 0
    )
    return folder / f"{name}.tkpack"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="module")
def first(folder: Path) -> Path:
    """Of two architectures, loaded by the name that stands for both files."""
    path = build(folder, "first", OPS.format(change="", own="first"), "80,90")
    tk.load_pack(path)
    return path


def loaded() -> dict[str, tk.inspect.Pack]:
    return {Path(pack.path).name: pack for pack in tk.packs()}


def test_one_name_stands_for_the_files_of_all_architectures(first: Path):
    assert not first.exists()
    assert {pack.arch for name, pack in loaded().items() if name.startswith("first.")} == {"sm_80", "sm_90"}
    torch.testing.assert_close(torch.ops.tk.packs_first(torch.ones(3)), torch.full((3,), 2.0))
    for arch, served in ((80, "sm80"), (86, "sm80"), (89, "sm80"), (90, "sm90")):
        described = Kernel("packs_first", capi.describe_device(100, arch, 101376, 40 << 20))(torch.ones(8), -1, 0)
        assert described is not None
        assert Path(capi.choose(described.problem).pack_path).name == f"first.{served}.tkpack"


def test_so_it_does_on_tk_pack_path(first: Path):
    code = "import torch, tk; print(torch.ops.tk.packs_first(torch.ones(2)).tolist())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TK_PACK_PATH": str(first)},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr


def test_a_name_without_files_is_refused(folder: Path):
    with pytest.raises(tk.PackError, match=r"nowhere\.tkpack"):
        tk.load_pack(folder / "nowhere.tkpack")


def test_an_op_of_one_definition_may_be_in_two_packs(first: Path, folder: Path):
    tk.load_pack(build(folder, "second", OPS.format(change="", own="second")))
    (shared,) = loaded()["second.tkpack"].shared
    assert shared == ("packs_shared", str(folder / "first.sm90.tkpack"))
    assert "first.sm90.tkpack first serves packs_shared" in str(tk.packs())
    torch.testing.assert_close(torch.ops.tk.packs_second(torch.ones(3)), torch.full((3,), 2.0))


def test_another_definition_of_that_name_is_refused(first: Path, folder: Path):
    other = build(folder, "other", OPS.format(change="+ 2", own="other"))
    with pytest.raises(tk.PackError, match="packs_shared") as caught:
        tk.load_pack(other)
    assert "other.tkpack" in str(caught.value) and "first.sm80.tkpack" in str(caught.value)
    assert not hasattr(torch.ops.tk, "packs_other")


def test_a_pair_of_mods_gains_head_sizes_and_dtypes(folder: Path):
    """What the first pack has it serves; the second adds what the first lacks."""
    general = ("90", "--only", "_forward")  # not Hopper's kernels too: they take the longest
    small = build(folder, "small", MODS.format(head=64, dtypes="torch.float16"), *general)
    large = build(folder, "large", MODS.format(head=96, dtypes="torch.bfloat16"), *general)
    tk.load_pack(small)
    name = f"flex_{trace.pair(None, every_seventh).fingerprint[:16]}"
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))

    def pack(size: int, dtype: torch.dtype) -> str:
        args = [x.to(dtype) if torch.is_tensor(x) and x.dim() == 4 and x.numel() else x
                for x in arguments(4, 4, 256, 256, size)]  # fmt: skip
        described = call(*args, 1, 0, -1, 0)
        assert described is not None
        return Path(capi.choose(described.problem).pack_path).name

    with pytest.raises(tk.VariantNotFoundError):
        pack(96, torch.float16)
    with pytest.raises(ValueError, match="dtype"):
        pack(64, torch.bfloat16)
    tk.load_pack(large)
    assert pack(64, torch.float16) == "small.tkpack"
    assert pack(96, torch.bfloat16) == "large.tkpack"
    assert pack(64, torch.bfloat16) == "large.tkpack"
    assert loaded()["large.tkpack"].shared == ((name, str(small)),)
