"""The scripts that the Makefile calls."""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_system_venv_sees_the_packages_of_a_venv(tmp_path: Path) -> None:
    """TORCH=system where torch is in a virtual environment, by the Makefile's PATH: the new folder first."""
    outer, folder = tmp_path / "outer", tmp_path / "made"
    venv.create(outer, with_pip=False, symlinks=True)
    package = outer / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/only_outside.py"
    package.write_text("")
    env = os.environ | {"PATH": os.pathsep.join([f"{folder}/bin", f"{outer}/bin", os.environ["PATH"]])}
    env.pop("PYTHONPATH", None)
    # The second time, the folder has a python3 of its own.
    for _ in range(2):
        subprocess.run([ROOT / "tools/make_venv.sh", "python3", folder, "system"], env=env, check=True)
        subprocess.run([folder / "bin/python", "-c", "import only_outside"], env=env, check=True)
