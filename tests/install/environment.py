"""A virtual environment that has torch, and neither Triton nor a compiler."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose PATH is its own bin alone."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (folder,) = self.folder.glob("lib/python3.*/site-packages")
        return folder

    @property
    def variables(self) -> dict[str, str]:
        return {"PATH": str(self.folder / "bin"), "HOME": str(self.folder), "CC": "/bin/false", "CXX": "/bin/false"}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs this environment's Python; fails the test with all of its output when it does not exit with 0."""
        result = self.attempt(*arguments, **variables)
        assert result.returncode == 0, f"{arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def attempt(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments],
            env=self.variables | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )


def create(folder: Path) -> Environment:
    """An environment with torch and what torch requires, linked from the one that runs the tests."""
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    for distribution in with_requirements("torch"):
        link(distribution, environment.site_packages)
    return environment


def with_requirements(name: str) -> list[importlib.metadata.Distribution]:
    """An installed distribution and what it requires."""
    found: dict[str, importlib.metadata.Distribution] = {}

    def add(name: str) -> None:
        key = canonical(name)
        if key in found:
            return
        found[key] = importlib.metadata.distribution(name)
        for requirement in found[key].requires or ():
            if is_installed(requirement):
                add(re.match(r"[\w.-]+", requirement)[0])

    add(name)
    return list(found.values())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(requirement: str) -> bool:
    """Whether what is required (extras aside) is there: markers for other systems and Pythons name what is not."""
    if "extra ==" in requirement:
        return False
    try:
        importlib.metadata.distribution(re.match(r"[\w.-]+", requirement)[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def link(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """Makes a distribution visible from another site-packages without copying it (torch takes gigabytes). Of Triton
    its metadata alone: torch's CUDA builds require it, and tk must not use it."""
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    if canonical(distribution.name).startswith("triton"):
        tops = {top for top in tops if top.endswith(".dist-info")}
    for top in tops:
        target = folder / top
        if not target.exists():
            target.symlink_to(Path(distribution.locate_file(top)).resolve())
