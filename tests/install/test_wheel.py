"""What is in the wheel, and nothing else."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from environment import ROOT


def names(wheel: Path, prefix: str = "") -> set[str]:
    return {name[len(prefix) :] for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)}


def sources(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi")}


@pytest.fixture
def metadata(unpacked: Path) -> email.message.Message:
    (folder,) = unpacked.glob("*.dist-info")
    return email.message_from_string((folder / "METADATA").read_text())


def test_one_wheel_serves_every_python(wheel: Path, metadata: email.message.Message):
    assert wheel.name.startswith(f"torch_tk-{metadata['Version']}-py3-none-")


def test_it_requires_torch_alone(metadata: email.message.Message):
    requirements = metadata.get_all("Requires-Dist")
    assert [r for r in requirements if "extra" not in r] == ["torch>=2.11"]
    extra = {re.split(r"[>=;]", r)[0] for r in requirements if "extra" in r}
    assert extra == {"triton", "numpy", "zstandard"}


def test_every_python_source_is_there(wheel: Path):
    package = {n for n in names(wheel, "tk/") if n.endswith((".py", ".pyi"))}
    checkout = {n for n in sources(ROOT / "python/tk") if not n.startswith("kernels/")}
    assert package == checkout | {f"kernels/{n}" for n in sources(ROOT / "kernels")}
    tuned = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels/tuned").rglob("*.json")}
    tuned = {name for name in tuned if not name.endswith("_timings.json")}  # what the tables were made from
    assert {n for n in names(wheel, "tk/") if n.endswith(".json")} == tuned
    assert "py.typed" in names(wheel, "tk/")


def test_the_rest_is_libraries_packs_headers_and_the_cmake_config(wheel: Path):
    rest = {n for n in names(wheel, "tk/") if not n.endswith((".py", ".pyi", ".json", "py.typed"))}
    config = {n for n in rest if n.startswith("share/cmake/tk/")}
    assert {"share/cmake/tk/tkConfig.cmake", "share/cmake/tk/tkConfigVersion.cmake"} <= config
    headers = {f"include/tk/{path.name}" for path in ROOT.glob("csrc/*/include/tk/*.h")}
    assert {"include/tk/tk.h", "include/tk/ops.h"} <= headers
    libraries = {"lib/libtk_core.so", "lib/libtk_ops.so"}
    packs = {n for n in rest if n.startswith("packs/")}
    assert packs and all(n.endswith(".tkpack") for n in packs)
    assert rest == config | headers | libraries | packs
    tops = {"tk", "_tk_command.py", wheel.name[: wheel.name.index("-py3")] + ".dist-info"}
    assert {n.split("/")[0] for n in names(wheel)} == tops


def test_the_licences_of_what_is_linked_in_are_there(wheel: Path):
    licences = {Path(n).name for n in names(wheel) if "/licenses/" in n}
    assert licences == {"LICENSE", "zstd.txt", "openssl.txt", "libstdc++.txt"}


def test_the_record_has_the_hash_of_every_file(unpacked: Path):
    (record,) = unpacked.glob("*.dist-info/RECORD")
    rows = {name: hash for name, hash, _ in csv.reader(record.open()) if hash}
    for name, expected in rows.items():
        digest = hashlib.sha256((unpacked / name).read_bytes()).digest()
        assert expected == "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), name
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert files == {*rows, str(record.relative_to(unpacked))}


def test_nothing_tells_where_it_was_built(unpacked: Path):
    """Paths of the build machine: they leak, and they make two builds of one source differ."""
    here = str(ROOT).encode()
    leaks = [str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file() and here in p.read_bytes()]
    assert leaks == []


def test_it_is_small(wheel: Path):
    assert wheel.stat().st_size <= 80 * 2**20
