"""The wheel, unpacked, and installed into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import environment


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--wheel")
    if not given:
        pytest.fail("tests/install needs a wheel: make test-install, or pytest tests/install --wheel FILE")
    path = Path(given).resolve()
    assert path.is_file(), f"there is no wheel at {path}"
    return path


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> environment.Environment:
    """torch, what torch requires, and the wheel, installed by pip from nothing but these."""
    clean = environment.create(tmp_path_factory.mktemp("clean") / "venv")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", clean.python]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-cache-dir", wheel], check=True)
    return clean
