"""Builds random mods, each pair into a pack of its own: a script for many_packs.py.

Of a pair's kernels only those are compiled that take every call, with the gradients that the test asks for: a seventh
of the time that all take. The chooser would take the kernels for Hopper, whose time is four times as long. Every
WHOLE-th pair has all kernels, and so has each with TK_MODS_WHOLE=1.
"""

from __future__ import annotations

import io
import os
import random
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from flex import random_mods  # noqa: E402

import tk  # noqa: E402

WHOLE = int(os.environ.get("TK_MODS_WHOLE", "40"))
B, H, M, N, D = 2, 2, 150, 200, 64


def pair_of(seed: int, device: str) -> tuple[random_mods.RandomMod, random_mods.RandomMod]:
    """The same in every process. On the device "meta" of the kind that it is on a GPU: a tensor of no dimensions on the
    CPU is a number."""
    rng = random.Random(seed)
    captured = random_mods.captured_of(rng, B, H, M, N, device)
    return random_mods.score_mod(rng, captured), random_mods.mask_mod(rng, captured)


def main(seed: int, count: int, workers: int, worker: int, folder: Path, arch: str, end: float) -> None:
    from gpu.random_packs import say

    for number in range(worker, count, workers):
        if time.time() >= end:
            return
        say(folder, number, _built(seed + number, number, folder, arch))


def _built(seed: int, number: int, folder: Path, arch: str) -> dict[str, object]:
    name = f"mod_{seed}"
    found: dict[str, Any] = dict(names=[name], built=[], failures={})
    score, mask = pair_of(seed, "meta")
    try:
        tk.flex.register(name, score.function(), mask.function(), head_dims=(D,), decode=False)
    except tk.UnsupportedError:
        return found
    except ValueError as error:
        if "computes what" not in str(error):  # an earlier one of this process does
            return found | dict(failures={name: traceback.format_exc()})
    except Exception:
        return found | dict(failures={name: traceback.format_exc()})
    try:
        write(score, mask, arch, folder / f"chunk_{number}.tkpack", (number + 1) % WHOLE == 0)
    except tk.UnsupportedError:
        return found
    except Exception:
        return found | dict(failures={name: f"{name} does not compile: {traceback.format_exc()}"})
    return found | dict(built=[name])


def write(score: random_mods.RandomMod, mask: random_mods.RandomMod, arch: str, path: Path, is_whole: bool) -> None:
    from tk.aot.cache import open_cache
    from tk.aot.compile import Target
    from tk.build.packs import build, plan_pack
    from tk.flex.codegen.family import Wanted, families
    from tk.flex.tracing import trace

    traced = trace.pair(score.function(), mask.function()).traced
    wanted = Wanted(dtypes=("bf16",), exact=((D, D),), rounded=((D, D),), decode=False)
    pack = plan_pack(families(traced, wanted), Target.parse(arch), path)
    if not is_whole:
        pack = replace(pack, ops=tuple(map(_minimal, pack.ops)), partial=True)
    with open_cache(lambda message: None) as cache:
        build([pack], cache, 1, out=io.StringIO(), any_variant=True)


def _minimal(op: Any) -> Any:
    """What takes every layout; with the gradients of captured tensors, where there are any: the test asks for all."""
    axes = [p.variant.point.axes.get("captures") for p in op.variants]
    captures = "wanted" if "wanted" in axes else "none" if "none" in axes else None
    portable = op.grid.family.portable
    taken = (p for p, of in zip(op.variants, axes, strict=True) if of == captures)
    return replace(op, variants=tuple(p for p in taken if portable(p.variant.kernel, p.variant.point)))


if __name__ == "__main__":
    numbers = [int(x) for x in sys.argv[1:5]]
    main(*numbers, Path(sys.argv[5]), sys.argv[6], float(sys.argv[7]))
