"""What the unit tests share: packs of the family in unit_kernels.py, built once, with a cache of their own."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for unit_kernels, which tests and packs import by that name

import unit_kernels
from tk.aot.cache import Cache
from tk.aot.compile import Target
from tk.aot.pack import Pack, read_pack
from tk.build.packs import Work, build, find_work, plan_pack


@dataclass(frozen=True)
class Built:
    """The unit family on one target."""

    path: Path
    pack: Pack
    work: Work
    log: str


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def built(cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """By target name: sm80, sm90, sm100, ptx80."""
    folder = tmp_path_factory.mktemp("packs")
    packs = [
        plan_pack([unit_kernels.FAMILY], target, folder / f"{target.name}.tkpack")
        for target in (Target(80), Target(90), Target(100), Target(80, ptx=True))
    ]
    log = io.StringIO()
    build(packs, cache, jobs=2, roots=folder / "roots.inc", out=log)
    return {
        p.target.name: Built(p.path, read_pack(p.path), find_work([p], cache), log.getvalue()) for p in packs
    }  # fmt: skip
