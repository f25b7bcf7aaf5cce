"""What the arguments of a build choose: an argument that chooses nothing is an error, which says what there is."""

from __future__ import annotations

import difflib
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tk.aot.compile import Target
from tk.aot.errors import BuildError, SelectsNothing
from tk.aot.spec import Family
from tk.build.packs import PlannedPack, grid_of


def read_targets(text: str) -> list[Target]:
    """The targets that --arch names. Raises SelectsNothing where one of them is none."""
    try:
        return list(dict.fromkeys(Target.parse(one) for one in text.split(",")))
    except ValueError as error:
        raise SelectsNothing(f"--arch {text}: {error}") from None


def check_targets(families: Sequence[Family], targets: Sequence[Target]) -> None:
    """Raises SelectsNothing for a target that none of the families has kernels for."""
    archs = sorted({arch for family in families for kernel in family.kernels for arch in kernel.configs})
    for target in targets:
        if target.arch not in archs and not (target.family and target.arch > archs[0]):
            raise SelectsNothing(f"--arch {_written(target)}: {_instead(target, archs)}")


def _written(target: Target) -> str:
    return target.name.removeprefix("sm")


def _instead(target: Target, archs: Sequence[int]) -> str:
    there = (
        f"there are kernels for {', '.join(map(str, archs))}, and ptx{archs[0]} is PTX for GPUs from sm_{archs[0]} on"
    )
    if target.arch < archs[0]:
        return f"tk needs compute capability {archs[0] // 10}.{archs[0] % 10} or newer; {there}"
    if target.ptx:
        return f"there is no PTX for it alone; write --arch ptx{archs[0]}, which runs on it, too"
    # A cubin runs on later GPUs of its generation, except those of sm_90 on: Triton compiles them for one alone.
    older = [arch for arch in archs if arch // 10 == target.arch // 10 and arch <= target.arch and arch < 90]
    if older:
        return f"cubins of sm_{older[-1]} run on it, too: write --arch {older[-1]}"
    family = f"{target.arch}f, whose cubins run on newer GPUs of {target.arch // 10}.x, too, or "
    return f"write --arch {family if target.arch >= 100 else ''}ptx{archs[0]}, which its driver translates; {there}"


def check_variants(
    families: Sequence[Family], packs: Sequence[PlannedPack], only: str | None, sample: bool = False
) -> None:
    """Raises SelectsNothing where no variant of any pack is left."""
    if any(op.variants for pack in packs for op in pack.ops):
        return
    if only is None:
        raise SelectsNothing(
            "--sample: these families have no sample; leave it out" if sample else "there is no kernel"
        )
    names = [v.name for f in families for p in packs for v in grid_of(f, p.target).variants]
    nearest = difflib.get_close_matches(only, dict.fromkeys([*(n.split("[")[0] for n in names), *names]), 3, 0.3)
    raise SelectsNothing(
        f"--only {only!r} matches none of the names of {len(names)} variants, which are like {names[0]!r}"
        + (f"; the nearest: {', '.join(map(repr, nearest))}" if nearest else "")
    )


def check_only(only: str | None) -> None:
    """Raises SelectsNothing for what is no regular expression."""
    try:
        re.compile(only or "")
    except re.error as error:
        raise SelectsNothing(
            f"--only {only!r} is no regular expression: {error}; to match it as it stands write --only "
            f"{shlex.quote(re.escape(only or ''))}"
        ) from None


def check_out(files: Sequence[Path], out: Path | None, paths: Sequence[Path]) -> None:
    """Raises BuildError where the packs cannot be written. Asked before anything is compiled. files: the user's."""
    for path in (out, *paths) if files and out else paths:
        if path.is_dir():
            raise BuildError(f"-o {path}: it is a folder; write the name of the pack, such as {path / 'my.tkpack'}")
        if any(path.resolve() == file.resolve() for file in files):
            raise BuildError(f"-o {path}: it is the file that is built; write {path.with_suffix('.tkpack')}")
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BuildError(f"-o {path}: {folder} cannot be made: {error.strerror}") from None
        try:
            tempfile.TemporaryFile(dir=folder).close()  # permissions alone do not tell
        except OSError as error:
            raise BuildError(f"-o {path}: {folder} cannot be written to: {error.strerror}") from None


def check_files(files: Sequence[Path]) -> None:
    """Raises BuildError for what is no Python file, or is named twice."""
    for i, path in enumerate(files):
        if any(path.resolve() == other.resolve() for other in files[:i]):
            raise BuildError(f"{path} is named twice; name it once")
        if path.is_dir():
            raise BuildError(f"{path} is a folder; name the files in it that declare ops or mods")
