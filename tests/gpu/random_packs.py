"""Builds random functions into packs, a few of them after another in a process of its own:

    python random_packs.py SEED COUNT WORKERS WORKER FOLDER ARCH END

The process takes every WORKERS-th chunk of functions from the WORKER-th on, until COUNT or the time END (of time.time).
What cannot be built is written to FOLDER/chunk_FIRST.json with its reason, what can be to FOLDER/chunk_FIRST.tkpack:
the .json appears last, whole. TK_RANDOM_FUNCTIONS_FULL=1 compiles every setting, else those are that PTX has.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "codegen"))  # for random_functions

from random_functions import Function, function

CHUNK = 1


def drawn(seed: int, first: int, count: int) -> list[Function]:
    """The same in every process."""
    return [function(Random(seed * 1_000_003 + n)) for n in range(first, first + count)]


def main(seed: int, count: int, workers: int, worker: int, folder: Path, arch: str, end: float) -> None:
    for first in range(worker * CHUNK, count, workers * CHUNK):
        if time.time() >= end:
            return
        say(folder, first, _chunk(seed, first, min(CHUNK, count - first), folder, arch))


def say(folder: Path, first: int, found: dict[str, object]) -> None:
    """Of a chunk, once its pack is there."""
    part = folder / f"chunk_{first}.part"
    part.write_text(json.dumps(found, indent=1))
    part.rename(part.with_suffix(".json"))


def _chunk(seed: int, first: int, count: int, folder: Path, arch: str) -> dict[str, object]:
    """names: of all functions that were tried."""
    from random_judges import built, compile_plain

    from tk.aot.cache import open_cache
    from tk.aot.compile import Target
    from tk.aot.spec import Family

    failures: dict[str, str] = {}
    families: dict[str, list[Family]] = {}
    functions = drawn(seed, first, count)
    for n, one in enumerate(functions, first):
        try:
            op = built(one, compile_plain(one, folder / "functions"))
            if op is not None:
                families[one.name] = op.families
        except Exception:
            failures[one.name] = f"function {n} is not built: {traceback.format_exc()}"
    target, path = Target.parse(arch), folder / f"chunk_{first}.tkpack"
    with open_cache(lambda message: None) as cache:
        try:
            write([f for of in families.values() for f in of], target, path, cache)
        except Exception:
            working = {}
            for name, own in families.items():
                try:
                    write(own, target, folder / "one" / f"{name}.tkpack", cache)
                    working[name] = own
                except Exception:
                    failures[name] = f"{name} does not compile: {traceback.format_exc()}"
            families = working
            write([f for of in families.values() for f in of], target, path, cache)
    return dict(names=[f.name for f in functions], built=sorted(families), failures=failures)


def write(families: Sequence[object], target: object, path: Path, cache: object) -> None:
    from tk.build.packs import build, plan_pack

    if not families:
        return
    path.parent.mkdir(exist_ok=True, parents=True)
    pack = plan_pack(families, target, path)  # type: ignore[arg-type]
    if os.environ.get("TK_RANDOM_FUNCTIONS_FULL") != "1":
        pack = replace(pack, ops=tuple(map(_portable, pack.ops)), partial=True)
    build([pack], cache, 1, out=io.StringIO(), any_variant=True)  # type: ignore[arg-type]


def _portable(op: Any) -> Any:
    """Of every graph what serves every call, and the fastest layout."""
    portable = op.grid.family.portable
    return replace(op, variants=tuple(p for p in op.variants if portable(p.variant.kernel, p.variant.point)))


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:5]]
    main(*numbers, Path(sys.argv[5]), sys.argv[6], float(sys.argv[7]))
