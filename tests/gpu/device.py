"""Where the tests run, and packs that are built for it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import tk

DEVICE = os.environ.get("TK_TEST_DEVICE", "cuda")


def environment() -> dict[str, str]:
    """Of a Python process that is to find what this one finds, however it was started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tk.__file__).parents[1]), *filter(None, sys.path)])}


def build(file: Path, pack: Path, *options: str) -> Path:
    """The pack of a user's file, by ``tk build`` for this GPU. What that says when it fails is the error's text."""
    major, minor = torch.cuda.get_device_capability()
    arguments = ["build", str(file), "-o", str(pack), "--arch", f"{major}{minor}", *options]
    command = [sys.executable, "-m", "tk", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, f"tk {' '.join(arguments)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return pack
