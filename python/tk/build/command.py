"""``tk build`` and ``python -m tk.build``: arguments in, packs or a list of failures out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tk import codegen
from tk.aot.cache import Cache, open_cache
from tk.aot.compile import Target
from tk.aot.errors import BuildError, Refused, SelectsNothing
from tk.aot.pool import default_jobs
from tk.aot.spec import Family
from tk.build import finished
from tk.build.packs import PlannedPack, build, definitions, dry_run, plan_pack
from tk.build.selection import check_files, check_only, check_out, check_targets, check_variants, read_targets
from tk.build.sources import file_families, package_families


def pack_paths(targets: list[Target], files: list[Path], out: Path | None) -> list[Path]:
    """The path of each target's pack: OUT/sm90.tkpack for the package's own kernels; OUT itself for a user's files and
    one architecture, else OUT with the architecture before its suffix."""
    if not files:
        if out is None:
            raise BuildError("say into which folder the package's own packs go: tk build --all -o FOLDER")
        return [out / f"{t.name}.tkpack" for t in targets]
    out = out or Path(files[0].stem + ".tkpack")
    if len(targets) == 1:
        return [out]
    return [out.with_name(f"{out.stem}.{t.name}{out.suffix}") for t in targets]


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, or 1 after a message, or 2 where the arguments choose nothing, or 130 when interrupted (what
    was compiled stays in the cache)."""
    try:
        _run(args)
    except Refused as e:
        for error in e.errors:
            print(f"tk build: {error}", file=sys.stderr)
        return 1
    except SelectsNothing as e:
        print(f"tk build: {e}", file=sys.stderr)
        return 2
    except (BuildError, ValueError) as e:
        print(f"tk build: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntk build: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.show:
        _show(*args.show)
        return
    targets = read_targets(args.arch)
    jobs = args.jobs or default_jobs()
    if not (args.files or args.all or args.sample or args.only or args.dry_run):
        raise SelectsNothing(_ALL)
    if args.files and args.all:
        raise SelectsNothing("--all is of the kernels that ship with tk; of FILE.py everything is built without it")
    check_only(args.only)
    check_files(args.files)
    paths = pack_paths(targets, args.files, args.out) if not args.dry_run else []
    if not args.dry_run:
        check_out(args.files, args.out, paths)
    with open_cache(lambda message: print(f"tk build: {message}", file=sys.stderr)) as cache:
        if args.dry_run:
            _dry_run(args, cache, targets, jobs)
            return
        if args.files:
            packs = _planned(args, file_families(args.files, args.debug), targets, paths)
            build(packs, cache, jobs, args.roots, any_variant=True)
            named = args.out or Path(args.files[0].stem + ".tkpack")
            print(f"tk.load_pack({str(named)!r}) loads {'the one for the GPU' if len(paths) > 1 else 'it'}")
            return
        outputs = [*paths, args.out / "ops.tkpack", *([args.roots] if args.roots else [])]
        key = finished.digest([*(t.name for t in targets), str(args.sample), str(args.only), str(args.debug)])
        if finished.is_finished(cache, key, outputs):
            print(f"{', '.join(p.name for p in outputs)}: nothing has changed")
            return
        families = package_families(args.debug)
        packs = _planned(args, families, targets, paths)
        build(packs, cache, jobs, args.roots, ops=(args.out / "ops.tkpack", definitions(families)))
        finished.record(cache, key, outputs)


_ALL = """\
no FILE.py is named. Without one the kernels that ship with tk are compiled, all of them: thousands of
launches for each architecture, which take an hour on a few cores. The wheel has them already.
  tk build my_ops.py -o my_ops.tkpack      compiles the functions and mods that a file of yours declares
  tk build --dry-run                       counts what ships with tk, and compiles nothing
  tk build --all -o FOLDER                 compiles it"""


def _dry_run(args: argparse.Namespace, cache: Cache, targets: Sequence[Target], jobs: int) -> None:
    """Lists what can be built; raises Refused for the rest, if there is any."""
    refused = None
    try:
        families = file_families(args.files, args.debug) if args.files else package_families(args.debug)
    except Refused as error:
        refused, families = error, list(error.families)
    if families:
        dry_run(_planned(args, families, targets, [Path()] * len(targets)), cache, jobs, sys.stdout)
    if refused is not None:
        raise refused


def _planned(
    args: argparse.Namespace, families: Sequence[Family], targets: Sequence[Target], paths: Sequence[Path]
) -> list[PlannedPack]:
    check_targets(families, targets)
    packs = [plan_pack(families, target, path, args.sample, args.only)
             for target, path in zip(targets, paths, strict=True)]  # fmt: skip
    check_variants(families, packs, args.only, args.sample)
    return packs


def _show(stage: str, where: str) -> None:
    path, separator, name = where.rpartition(":")
    if not separator:
        raise BuildError(f"--show {stage} {where}: write FILE.py:FUNCTION")
    print(codegen.show(path, name, stage), end="")
