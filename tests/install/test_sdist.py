"""The source distribution: complete, and what a user builds from it with the torch and Triton that are there."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from environment import ROOT

# What git tracks and a source distribution does not take: it is of the repository itself.
OF_THE_REPOSITORY = re.compile(r"\.gitignore|\.ci/.*|\.github/.*")
# What setuptools adds.
ADDED = {"PKG-INFO", "setup.cfg"}


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, capture_output=True, text=True)
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
