"""Packages that bring packs for more GPUs, found by their entry points: fakes on the path of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import tiny_pack


def package(site: Path, arch: int, value: str = "") -> Path:
    """torch-tk-smARCH, as pip would install it. Its module is never to be imported. Returns its folder of packs."""
    name = f"torch_tk_sm{arch}"
    packs = site / name / "packs"
    packs.mkdir(parents=True)
    (site / name / "__init__.py").write_text("raise SystemExit('imported')")
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[tk.packs]\nsm{arch} = {value or name + '.packs'}\n")
    return packs


def run(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": places}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_a_packs_gpu_gets_it_and_no_other(tmp_path: Path) -> None:
    for arch in (100, 120):
        tiny_pack.write(package(tmp_path, arch) / f"sm{arch}.tkpack", "from_an_addon", arch)
    shown = run("import tk; print([(p.arch, p.path) for p in tk.packs() if 'from_an_addon' in p.ops])", tmp_path)
    assert shown.returncode == 0, shown.stderr
    expected = [(f"sm_{a}", str(tmp_path / f"torch_tk_sm{a}/packs/sm{a}.tkpack")) for a in (100, 120)]
    assert shown.stdout.strip() == str(expected) and not shown.stderr


@pytest.mark.parametrize(
    ("arch", "value", "files", "said"),
    [
        (100, "torch_tk_sm100.none", {}, "there is no folder torch_tk_sm100/none"),
        (100, "not_installed.packs", {}, "there is no folder not_installed/packs"),
        (100, "", {}, "there are no packs in"),
        (100, "", {"sm90.tkpack": 90}, "sm90.tkpack is for sm_90, as "),
    ],
)
def test_one_that_cannot_be_used_is_named_and_not_fatal(
    arch: int, value: str, files: dict[str, int], said: str, tmp_path: Path
) -> None:
    packs = package(tmp_path, arch, value)
    for name, of in files.items():
        tiny_pack.write(packs / name, "from_an_addon", of)
    shown = run("import tk; print('imported tk')", tmp_path)
    assert shown.returncode == 0 and shown.stdout.strip() == "imported tk"
    assert f"torch-tk-sm{arch} brings packs that tk cannot use: " in shown.stderr and said in shown.stderr


def test_looking_for_them_costs_nothing_to_speak_of(tmp_path: Path) -> None:
    """With two hundred packages, none of which has packs: far less than the import of tk."""
    for n in range(200):
        info = tmp_path / f"other{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other{n}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[console_scripts]\nother = other:main\n")
    code = """
import time
import torch, tk
from tk import _addons
took = []
for _ in range(5):
    begin = time.perf_counter()
    _addons.load()
    took.append(time.perf_counter() - begin)
print(min(took))
"""
    shown = run(code, tmp_path)
    assert float(shown.stdout) < 0.03, shown.stderr
