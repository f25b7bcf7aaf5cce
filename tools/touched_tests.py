"""Runs the tests that belong to what has changed (`make quick`).

    python tools/touched_tests.py [BASE]

What has changed since the branch left BASE (default: main; on main itself, since the last commit), and what is not
committed yet. A test belongs to a file that has its name: test_bmm.py to kernels/bmm/, csrc/ops/bmm.cpp and
python/tk/ops/bmm.py, all of tests/flex/ to python/tk/flex/. So a stem is all that ties an op's files together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Names of folders that say nothing about what stands in them.
_GENERAL = {"python", "tk", "kernels", "csrc", "tests", "core", "ops", "interpreted", "gpu", "install", "include"}
# Tests of a room that has another name.
_OTHER_NAMES = {"dropin": "use", "aot": "unit", "build": "unit", "hopper": "mm", "gemm": "mm", "product": "mm"}
# What takes a GPU, a wheel (make gpu-test, make test-install), or runs a whole folder of others.
_ELSEWHERE = re.compile(r"tests/(gpu|install)/|.*/test_interpreter\.py")


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def changed(base: str) -> set[str]:
    (since,) = git("merge-base", "HEAD", base)
    if since == git("rev-parse", "HEAD")[0]:
        (since,) = git("rev-parse", "HEAD~1")
    return {*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")}


def names(path: str) -> set[str]:
    """What a file's tests may be called."""
    parts = Path(path).with_suffix("").parts
    found = {part.removeprefix("test_") for part in parts} - _GENERAL - {"__init__"}
    return found | {_OTHER_NAMES[name] for name in found if name in _OTHER_NAMES}


def touched(files: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Those of `tests` that have changed, and those of the changed `files`."""
    files = set(files)
    sources = [f for f in files if not f.startswith("tests/") and Path(f).suffix in (".py", ".cpp", ".h", ".json")]
    stems = {name for source in sources for name in names(source)}

    def belongs(test: str) -> bool:
        stem = Path(test).stem.removeprefix("test_")
        return Path(test).parent.name in stems or any(stem == s or stem.startswith(f"{s}_") for s in stems)

    return sorted(t for t in tests if not _ELSEWHERE.match(t) and (t in files or belongs(t)))


def run(tests: list[str], **environment: str) -> int:
    if not tests:
        return 0
    workers = ["--numprocesses", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", "-q", *workers, *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode


def main(base: str = "main") -> int:
    found = touched(changed(base), git("ls-files", "--cached", "--others", "--exclude-standard", "tests/*test_*.py"))
    print("\n".join(found) or "no test belongs to what has changed", flush=True)
    interpreted = [t for t in found if "/interpreted/" in t]
    failed = run([t for t in found if t not in interpreted])
    return failed or run(interpreted, TRITON_INTERPRET="1", TK_NO_LIBRARY="1", PYTHONPATH=str(ROOT / "python"))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
