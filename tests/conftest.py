import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import seeds

ROOT = Path(__file__).resolve().parents[1]

# Workers share the cores. With as many threads as cores in each, torch's loops wait for each other: tests of numbers
# take twice as long. Set before anything imports torch, and for the processes that tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreted_numbers  # noqa: F401
    import quick_interpreter  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests that are marked `drawn`, so many alike that a run need not have all, those that TK_DRAWN names: a
    fresh third of them. Without it, and where it is "all", all run."""
    seed = os.environ.get("TK_DRAWN", "all")
    if seed == "all":
        return
    run, left = [], []
    for item in items:
        is_left = item.get_closest_marker("drawn") and zlib.crc32(f"{seed} {item.nodeid}".encode()) % 3
        (left if is_left else run).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = run


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was measured on this machine decides."""
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))


def pytest_report_header() -> str | None:
    drawn = os.environ.get("TK_DRAWN")
    return f"TK_SEED={seeds.RUN}" + (f", TK_DRAWN={drawn}" if drawn else "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", metavar="FILE", help="the wheel that tests/install looks into and installs")
    parser.addoption(
        "--other-python",
        metavar="FILE",
        action="append",
        help="a Python of another version that tests/install runs the wheel in (default: those on PATH and of pyenv)",
    )


@pytest.fixture
def interpret(tmp_path: Path) -> Callable[[Path], None]:
    """Runs the tests of a folder in processes where Triton interprets: that must be so before it is imported."""

    def run(folder: Path) -> None:
        environment = dict(os.environ, TRITON_INTERPRET="1", TK_NO_LIBRARY="1", TK_CACHE_DIR=str(tmp_path))
        drawn = environment.setdefault("TK_DRAWN", seeds.RUN)
        print(f"TK_DRAWN={drawn}")
        several = ["--numprocesses", str(min(os.cpu_count() or 1, 8)), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *several, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=ROOT)
        print(done.stdout)
        assert done.returncode == 0, f"TK_DRAWN={drawn}\n" + done.stdout[-6000:] + done.stderr[-2000:]

    return run
