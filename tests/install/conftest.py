"""The wheel, unpacked, and installed into an environment of its own."""

from __future__ import annotations

import importlib.metadata
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


OLDEST_TORCH = "2.11"  # that the wheel is for


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One environment has one torch: the run says aloud which it was not."""
    there = importlib.metadata.version("torch")
    missing = [] if there.startswith(f"{OLDEST_TORCH}.") else [f"torch {OLDEST_TORCH}, the oldest"]
    missing.append(f"any torch newer than {there}")
    terminalreporter.write_line(
        f"WARNING: the wheel was tested with torch {there} alone; not with {' and not with '.join(missing)}. Run "
        "tests/install in an environment that has it.",
        yellow=True,
        bold=True,
    )
