"""How long the whole grid takes to build, with an empty cache and again with nothing changed: dist/build.json.

    python tools/time_build.py [--jobs 2]

For the benchmarks' report. The first build takes as long as it takes: up to an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = "80,90,ptx80"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilations at once")
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as folder:
        cold = build(Path(folder), jobs)
        unchanged = build(Path(folder), jobs)
    times = {"cold_seconds": round(cold, 1), "unchanged_seconds": round(unchanged, 1), "jobs": jobs}
    path = ROOT / "dist" / "build.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(times) + "\n")
    print(f"{path}: {times}")


def build(folder: Path, jobs: int) -> float:
    """Seconds of one build of every pack into `folder`, which has the cache as well."""
    command = [sys.executable, "-m", "tk.build", "--arch", ARCHITECTURES, "--out", folder, "--jobs", str(jobs)]
    environment = {"TK_NO_LIBRARY": "1", "PYTHONPATH": str(ROOT / "python"), "TK_CACHE_DIR": str(folder / "cache")}
    begin = time.perf_counter()
    subprocess.run(command, env=os.environ | environment, check=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
