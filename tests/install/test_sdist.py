"""The source distribution: complete, and what a user builds from it with the torch and Triton that are there."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from datetime import datetime, timezone
from pathlib import Path

import pytest

from environment import ROOT

# What git tracks and a source distribution does not take: it is of the repository itself.
OF_THE_REPOSITORY = re.compile(r"\.gitignore|\.ci/.*|\.github/.*")
# What setuptools adds.
ADDED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("sdist"))


def made(folder: Path, **variables: str) -> Path:
    folder.mkdir(exist_ok=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    environment = os.environ | variables
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="session")
def sources(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacked."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def test_it_has_what_git_tracks_and_nothing_else(sources: Path) -> None:
    found = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and not OF_THE_REPOSITORY.fullmatch(name)}
    assert len(tracked) > 900
    assert {name for name in found if "torch_tk.egg-info" not in name} == tracked | ADDED


def test_its_metadata_are_the_wheels(sources: Path, unpacked: Path) -> None:
    (folder,) = unpacked.glob("*.dist-info")
    wheels = email.message_from_string((folder / "METADATA").read_text())
    own = email.message_from_string((sources / "PKG-INFO").read_text())
    assert sorted(own.items()) == sorted(wheels.items())
    assert own.get_payload() == wheels.get_payload()


def test_the_same_sources_give_the_same_archive(tmp_path: Path) -> None:
    """Whenever it is made."""
    first, again = (made(tmp_path / name, SOURCE_DATE_EPOCH="1700000000") for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()
    with tarfile.open(first) as archive:
        members = archive.getmembers()
    assert [m.name for m in members] == sorted((m.name for m in members), key=lambda n: n.split("/"))
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode & 0o022) for m in members} == {(1700000000, 0, 0, "", 0)}


def test_the_wheel_that_it_builds_is_the_checkouts_byte_for_byte(sources: Path, wheel: Path, tmp_path: Path) -> None:
    """In another folder, with this environment's torch and Triton. The wheel is that of `make sample`."""
    with zipfile.ZipFile(wheel) as archive:
        packs = {Path(name).stem.removeprefix("sm") for name in archive.namelist() if name.endswith(".tkpack")}
        made_at = datetime(*archive.infolist()[0].date_time, tzinfo=timezone.utc)
    if "ptx80" in packs:
        pytest.skip("it was not built by make sample; the whole grid is not built again here")
    options = ["-DTK_GRID=sample", f"-DTK_ARCHS={','.join(sorted(packs - {'ops'}))}", "-DTK_OLDEST_GLIBC=2.28"]
    # make's CMake, which this environment's is: another writes other files for find_package.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    variables = {
        "CMAKE_ARGS": " ".join(options),
        "SOURCE_DATE_EPOCH": str(int(made_at.timestamp())),
        "PATH": path,
    }
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", tmp_path, sources], env=os.environ | variables, cwd=tmp_path)
    assert built.returncode == 0
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    with zipfile.ZipFile(again) as ours, zipfile.ZipFile(wheel) as theirs:
        assert ours.namelist() == theirs.namelist()
        assert [n for n in ours.namelist() if ours.read(n) != theirs.read(n)] == []
    assert again.read_bytes() == wheel.read_bytes()
