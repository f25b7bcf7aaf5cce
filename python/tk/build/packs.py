"""Build: families and architectures -> packs. What ``tk build`` does.

enumerate (grid) -> sources (compile) -> images, from the cache or a pool of processes -> packs (assemble, pack).
What spills registers past its bound is left out, and said so, as long as another variant takes its calls; else it is
built, and that is said. What cannot be made at all may be left out likewise of a user's functions: nobody knows
beforehand which tiles suit them.
Nothing is written when anything else failed; all failures are listed by name.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tk._cache import write_atomically
from tk.aot.assemble import Compiled, add_definition, add_op
from tk.aot.cache import Artifact, Cache
from tk.aot.compile import Source, Target, compile_source, compiler_version, source_of, warm_up
from tk.aot.compress import SHARE_OF_ZLIB
from tk.aot.errors import BuildError, CompileError, Refused
from tk.aot.grid import Grid, Variant, enumerate_grid
from tk.aot.pack import FLAG_FAMILY, FLAG_PTX, PackWriter, read_pack, roots_line
from tk.aot.pool import run as run_pool
from tk.aot.spec import Family
from tk.kernels.tuned_tables import load as load_tuned

# What a launch takes before the cache has any of its kind: seconds of one core of an AMD EPYC, and compressed bytes, by
# the module of its function, the first that fits. Means over the sample for sm_90; generated: of examples/my_ops.py.
KINDS = (
    ("tk.kernels.attention.hopper_", 3.0, 40_000),
    ("tk.kernels.attention.", 1.1, 20_000),
    ("tk.kernels.", 0.6, 12_000),
    ("", 0.13, 4_300),
)

# What a pack has besides its images, bytes: of each op its definition, of each variant its records. Means over the
# wheel's sample packs.
OP_BYTES, VARIANT_BYTES = 5_700, 1_660
# What a build takes before the first launch is compiled and after the last one, seconds of one core: Triton is loaded
# and processes start; the images are compressed.
FIXED_SECONDS = 1.5

PORTABLE_ARCH = 80
# Shared memory of a block, bytes, by architecture (CUDA programming guide, technical specifications).
SHARED_LIMIT = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448,
                120: 101_376, 121: 101_376}  # fmt: skip


@dataclass(frozen=True)
class PlannedVariant:
    """sources: one for each launch of the plan."""

    variant: Variant
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class PlannedOp:
    grid: Grid
    variants: tuple[PlannedVariant, ...]


@dataclass(frozen=True)
class PlannedPack:
    target: Target
    path: Path
    ops: tuple[PlannedOp, ...]
    partial: bool  # variants were left out on purpose


@dataclass(frozen=True)
class Failure:
    """name: of the variant and the device function. log: where the whole text is, if it is anywhere."""

    name: str
    error: str
    log: Path | None = None
    spill_bytes: int = 0  # it is slow, else it cannot run

    def __str__(self) -> str:
        where = f"\n    {self.log}" if self.log else ""
        return f"{self.name}: {summary(self.error)}{where}"


def summary(error: str) -> str:
    """The line that says most: the last of Python's, the first of the compiler's that says "error"."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no message"]
    telling = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), None)
    return (telling if telling and not lines[0].startswith("Traceback") else lines[-1])[:300]


class BuildFailed(BuildError):
    """Some launches did not compile. ``failures`` has them all."""

    def __init__(self, failures: Sequence[Failure]):
        self.failures = tuple(failures)
        super().__init__(f"{len(failures)} failed:\n" + "\n".join(f"  {f}" for f in failures))


# --- Plan ---


def plan_pack(families: Sequence[Family], target: Target, path: Path, sample: bool = False,
              only: str | None = None) -> PlannedPack:  # fmt: skip
    """All that would be compiled for one pack. sample: the families' samples. only: variants whose name matches.

    Raises BuildFailed where launches do not fit their functions, Refused where records contradict themselves."""
    ops, failures, refused = [], [], []
    for family in families:
        try:
            grid = grid_of(family, target, sample)
        except BuildError as e:
            refused.append(e)
            continue
        chosen = [v for v in grid.variants if only is None or re.search(only, v.name)]
        variants = []
        for v in chosen:
            try:
                variants.append(PlannedVariant(v, tuple(source_of(v.plan, x, target) for x in v.plan.launches)))
            except CompileError as e:
                failures.append(Failure(v.name, str(e)))
        ops.append(PlannedOp(grid, tuple(variants)))
    if refused:
        raise Refused([*refused, *([BuildFailed(failures)] if failures else [])])
    if failures:
        raise BuildFailed(failures)
    return PlannedPack(target, path, tuple(ops), sample or only is not None)


def grid_of(family: Family, target: Target, sample: bool = False) -> Grid:
    """The grid with the configs of the target's architecture, or where a family of GPUs has none, with those that are
    for PTX. What sm_90 adds to these, as wgmma, newer GPUs lack."""
    has_own = any(target.arch in kernel.configs for kernel in family.kernels)
    arch = PORTABLE_ARCH if target.family and not has_own else target.arch
    return enumerate_grid(family, arch, sample, target.ptx)


@dataclass
class Work:
    """The distinct sources of some packs, by key, and what the cache has of them."""

    sources: dict[str, Source] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of the first variant that needs it
    done: dict[str, Artifact] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    record_bytes: int = 0  # about what the packs have besides images

    @property
    def missing(self) -> list[str]:
        return [key for key in self.sources if key not in self.done]


def find_work(packs: Sequence[PlannedPack], cache: Cache) -> Work:
    work = Work()
    for op in (op for pack in packs for op in pack.ops if op.variants):
        work.record_bytes += OP_BYTES + VARIANT_BYTES * len(op.variants)
    for planned, source in _planned_sources(packs):
        if source.key in work.sources:
            continue
        work.sources[source.key] = source
        work.names[source.key] = f"{source.fn.__name__} of {planned.variant.name}"
        if (artifact := cache.load(source.key)) is not None:
            work.done[source.key] = artifact
    return work


def _planned_sources(packs: Sequence[PlannedPack]) -> Iterator[tuple[PlannedVariant, Source]]:
    for pack in packs:
        for op in pack.ops:
            for planned in op.variants:
                for source in planned.sources:
                    yield planned, source


# --- Compile ---


def compile_missing(work: Work, cache: Cache, jobs: int, out: TextIO) -> None:
    """Fill ``work.done``, and ``work.failed`` with what does not compile."""
    missing = work.missing
    if not missing:
        return
    warm_up()
    progress = Progress(len(missing), out)

    def compile_one(index: int) -> None:
        key = missing[index]
        cache.store(key, compile_source(work.sources[key]))

    for outcome in run_pool(compile_one, len(missing), min(jobs, len(missing))):
        key = missing[outcome.index]
        artifact = None if outcome.error else cache.load(key)
        if artifact is None:
            error = outcome.error or "the cache lost it as soon as it was written"
            log = cache.record_failure(key, f"{work.names[key]}\n{error}\n")
            work.failed[key] = Failure(work.names[key], error, log)
        else:
            work.done[key] = artifact
        progress.step(work.names[key], failed=len(work.failed))
    progress.finish()


def duration(seconds: float) -> str:
    """A duration as a person says it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


class Progress:
    """A bar on a terminal; elsewhere a line every five seconds, of a long build twenty lines or so."""

    def __init__(self, total: int, out: TextIO):
        self.total, self.out, self.done = total, out, 0
        self.start = self.last = time.monotonic()

    def step(self, name: str, failed: int) -> None:
        self.done += 1
        now = time.monotonic()
        left = (now - self.start) / self.done * (self.total - self.done)
        status = f"{self.done}/{self.total} compiled{f', {failed} FAILED' if failed else ''}, {duration(left)} left"
        if self.out.isatty():
            width = 30 * self.done // self.total
            self.out.write(f"\r\x1b[K[{'=' * width}{' ' * (30 - width)}] {status}  {name[:60]}")
        elif self.done == self.total or now - self.last > max(5.0, (now - self.start) / 20):
            self.last = now
            self.out.write(f"{status}\n")
        self.out.flush()

    def finish(self) -> None:
        if self.out.isatty():
            self.out.write("\r\x1b[K")
        self.out.write(f"{self.total} compiled in {time.monotonic() - self.start:.0f} s\n")
        self.out.flush()


# --- Check and write ---


def leave_out(packs: Sequence[PlannedPack], work: Work, out: TextIO, any_variant: bool) -> list[PlannedPack]:
    """The packs without what spills registers while another variant takes its calls; where none does, it is kept. `out`
    is told of both. any_variant: without what cannot be made, likewise.

    Raises BuildFailed with everything else that failed."""
    left, failures = [], {}
    for pack in packs:
        ops, dropped, slow = [], [], []
        for op in pack.ops:
            broken = {p.variant.name: found for p in op.variants if (found := list(_failures(p, work, pack.target)))}
            serving = [p for p in op.variants if p.variant.name not in broken]
            for planned in sorted(
                (p for p in op.variants if p.variant.name in broken), key=lambda p: _by_use(broken[p.variant.name])
            ):
                found = broken[planned.variant.name]
                only_spills = _only_spills(found)
                is_served = planned.variant.plan.droppable or any(_takes(p.variant, planned.variant) for p in serving)
                if is_served and (any_variant or only_spills):
                    dropped.append(Failure(planned.variant.name, found[0].error, found[0].log))
                elif only_spills:
                    slow.append(Failure(planned.variant.name, found[0].error))
                    serving.append(planned)
                else:
                    failures.update({str(f): f for f in found})
            names = {p.variant.name for p in serving}
            ops.append(replace(op, variants=tuple(p for p in op.variants if p.variant.name in names)))
        told = f"{_counted(len(dropped), 'variant')} left out; others take their calls"
        if dropped and any_variant:  # nobody asked for these: the reason is enough
            out.write(f"{pack.target.name}: {told}: {summary(dropped[0].error)}\n")
        else:
            _report(pack, told, dropped, out)
        _report(pack, f"{_counted(len(slow), 'variant')} will be slow; no other takes their calls", slow, out)
        left.append(replace(pack, ops=tuple(ops)))
    if failures:
        raise BuildFailed(sorted(failures.values(), key=lambda f: f.name))
    return left


def _only_spills(found: Sequence[Failure]) -> bool:
    """Whether a variant is slow, and nothing worse."""
    return all(f.spill_bytes for f in found)


def _by_use(found: Sequence[Failure]) -> tuple[bool, int]:
    """The order in which those with failures are looked at: one that spills less takes the calls of one that spills
    more, and any that spills those of one that cannot be made."""
    return not _only_spills(found), sum(f.spill_bytes for f in found)


def _failures(planned: PlannedVariant, work: Work, target: Target) -> Iterator[Failure]:
    """What is wrong with the launches of a variant: they do not compile, or pass their bounds."""
    for launch, source in zip(planned.variant.plan.launches, planned.sources, strict=True):
        if source.key in work.failed:
            yield work.failed[source.key]
            continue
        name = f"{source.fn.__name__} of {planned.variant.name}"
        artifact, limit = work.done[source.key], SHARED_LIMIT.get(target.arch)
        if artifact.spill_bytes > launch.max_spill_bytes:
            error = (f"{artifact.spill_bytes} bytes of registers spilled with {artifact.registers} registers a thread; "
                     f"its max_spill_bytes is {launch.max_spill_bytes}")  # fmt: skip
            yield Failure(name, error, spill_bytes=artifact.spill_bytes)
        if limit is not None and artifact.shared > limit:
            yield Failure(name, f"{artifact.shared} bytes of shared memory, the architecture has {limit}")


def _takes(other: Variant, variant: Variant) -> bool:
    """Whether `other` takes every call that `variant` takes: another config of the kernel, or a fallback, which takes
    every layout, that asks for no more. Attention's fallbacks ask for nothing but sizes of heads."""
    mine, theirs = variant.plan, other.plan
    if any(n in theirs.serves and not set(values) <= set(theirs.serves[n]) for n, values in mine.serves.items()):
        return False
    axes = {n: x for n, x in variant.point.axes.items() if n in other.point.axes}
    equal = {n for n, x in axes.items() if x == other.point.axes[n]}
    asks_no_more = {c.message for c in theirs.constraints} <= {c.message for c in mine.constraints}
    if theirs.general and "head" in axes:
        return axes.keys() - equal <= {"layout", "head"} and other.point.head.covers(variant.point.head)
    if theirs.general:
        return asks_no_more and axes.keys() - equal <= {"layout"}
    return asks_no_more and equal == other.point.axes.keys() and other.kernel.name == variant.kernel.name


def _report(pack: PlannedPack, what: str, failures: Sequence[Failure], out: TextIO) -> None:
    if failures:
        out.write(f"{pack.target.name}: {what}:\n")
        out.writelines(f"  {failure}\n" for failure in failures[:_MOST_TOLD])
        if len(failures) > _MOST_TOLD:
            out.write(f"  and {len(failures) - _MOST_TOLD} more\n")


_MOST_TOLD = 8


def write_pack(pack: PlannedPack, work: Work, cache: Cache | None = None, jobs: int = 1) -> bytes:
    """The bytes of one pack. cache: holds what was compressed before. Raises BuildError."""
    ops = [op for op in pack.ops if op.variants]
    names = [op.grid.family.op.name for op in ops]
    target = pack.target
    flags = FLAG_PTX * target.ptx | FLAG_FAMILY * target.family
    writer = PackWriter(target.arch, flags, compiler_version(target.arch), names)
    for op in ops:
        compiled = [Compiled(p.variant, tuple(work.done[s.key] for s in p.sources)) for p in op.variants]
        add_op(writer, op.grid, compiled, pack.target, _tuned_table(op.grid.family, pack.target), pack.partial)
    return writer.finish(cache, jobs)


def _tuned_table(family: Family, target: Target) -> Mapping[str, Any]:
    """PTX has none: what was measured on the GPU that it is named after says nothing of those that it is for."""
    return load_tuned(family.tuned, target.arch) if family.tuned and not target.ptx else {}


def write_if_changed(path: Path, data: bytes) -> None:
    """An unchanged file keeps its time, so that nothing that depends on it is made again."""
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)


def definitions(families: Sequence[Family]) -> bytes:
    """The bytes of ops.tkpack: the generated ops of some families without their kernels, for no architecture. It makes
    them known where there is no GPU."""
    ops = [family.op for family in families if family.op.params]
    writer = PackWriter(0, 0, "", [op.name for op in ops])
    for op in ops:
        add_definition(writer, op)
    return writer.finish()


def build(packs: Sequence[PlannedPack], cache: Cache, jobs: int, roots: Path | None = None,
          out: TextIO | None = None, ops: tuple[Path, bytes] | None = None,
          any_variant: bool = False) -> None:  # fmt: skip
    """Compile what the cache lacks, write the packs, and `roots` with their hashes. ops: one more pack, of definitions,
    that is rooted with them. any_variant: see leave_out. out: by default what sys.stdout is by then. Raises
    BuildError."""
    out = out or sys.stdout
    empty = [p.target.name for p in packs if not any(op.variants for op in p.ops)]
    if empty:
        raise BuildError(f"nothing to build for {', '.join(empty)}")
    start = time.monotonic()
    work = find_work(packs, cache)
    describe_build(packs, work, jobs, out)
    compile_missing(work, cache, jobs, out)
    packs = leave_out(packs, work, out, any_variant)
    lines = []
    for pack in packs:
        data = write_pack(pack, work, cache, jobs)
        checked = read_pack(data)
        write_if_changed(pack.path, data)
        lines.append(roots_line(pack.path, checked))
        variants = sum(len(op.variants) for op in pack.ops)
        out.write(
            f"{pack.path}: {_counted(variants, 'variant')}, {len(checked.images)} images, {megabytes(len(data))}\n"
        )
    if ops is not None:
        path, data = ops
        write_if_changed(path, data)
        lines.append(roots_line(path, read_pack(data)))
    if roots is not None:
        write_if_changed(roots, "".join(lines).encode())
    _report_spills(packs, work, out)
    out.write(f"done in {time.monotonic() - start:.1f} s\n")


_MOST_OPS = 4  # that a build's beginning lists


def describe_build(packs: Sequence[PlannedPack], work: Work, jobs: int, out: TextIO) -> None:
    """What will be compiled: the ops with most variants by name, and how long it may take."""
    variants: Counter[str] = Counter()
    for pack in packs:
        variants.update({op.grid.op.name: len(op.variants) for op in pack.ops if op.variants})
    out.write(f"{_counted(len(variants), 'op')} for {', '.join(p.target.name for p in packs)}\n")
    for name, count in variants.most_common(_MOST_OPS):
        out.write(f"  {name}: {_counted(count, 'variant')}\n")
    if len(variants) > _MOST_OPS:
        rest = variants.total() - sum(count for _, count in variants.most_common(_MOST_OPS))
        out.write(f"  and {_counted(len(variants) - _MOST_OPS, 'more op')}: {_counted(rest, 'variant')}\n")
    size, seconds = predict(work, jobs)
    cached = f", {len(work.done)} of them in the cache" if work.done else ""
    out.write(f"{_counted(len(work.sources), 'launch', 'launches')}{cached}; about {megabytes(size)} and "
              f"{duration(seconds)} with {_counted(jobs, 'job')}{_of_which_cores(work)}\n")  # fmt: skip
    out.flush()


def _counted(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _report_spills(packs: Sequence[PlannedPack], work: Work, out: TextIO) -> None:
    """Reports the spills of what was written: `packs` are without what was left out."""
    written = {s.key: f"{s.fn.__name__} of {planned.variant.name}" for planned, s in _planned_sources(packs)}
    spilled = [(work.done[key].spill_bytes, name) for key, name in written.items() if work.done[key].spill_bytes]
    if spilled:
        most, name = max(spilled)
        out.write(
            f"{_counted(len(spilled), 'launch spills', 'launches spill')} registers, the most {most} bytes: {name}\n"
        )


# --- Dry run ---


def dry_run(packs: Sequence[PlannedPack], cache: Cache, jobs: int, out: TextIO) -> None:
    """What a build would do: for each kernel what is considered, excluded and why; compilations, size and time."""
    work = find_work(packs, cache)
    for pack in packs:
        for op in pack.ops:
            for kernel in op.grid.family.kernels:
                _describe_kernel(pack, op, kernel.name, work, out)
    size, seconds = predict(work, jobs)
    out.write(f"\n{len(work.sources)} distinct launches, {len(work.done)} in the cache; predicted {megabytes(size)}, "
              f"{duration(seconds)} with {_counted(jobs, 'job')}{_of_which_cores(work)}\n")  # fmt: skip


def _describe_kernel(pack: PlannedPack, op: PlannedOp, kernel: str, work: Work, out: TextIO) -> None:
    considered = op.grid.considered[kernel]
    if not considered:
        return
    dropped: Counter[str] = op.grid.dropped.get(kernel, Counter())
    variants = [p for p in op.variants if p.variant.kernel.name == kernel]
    keys = {s.key for p in variants for s in p.sources}
    cached = sum(key in work.done for key in keys)
    left_out = considered - dropped.total() - len(variants)
    out.write(f"{pack.target.name} {op.grid.op.name} {kernel}: {considered} combinations, {dropped.total()} excluded, "
              f"{f'{left_out} left out, ' if left_out else ''}{len(variants)} variants, {len(keys)} launches, "
              f"{cached} cached\n")  # fmt: skip
    for reason, count in dropped.most_common(5):
        out.write(f"    {count} excluded: {reason}\n")
    if op.grid.op.params:  # a generated op: by its axes calls differ, by its configs what runs them
        classes = Counter(" ".join(map(str, p.variant.point.axes.values())) for p in variants)
        listed = ", ".join(f"{name} ({count})" for name, count in classes.items())
        out.write(f"    {len(classes)} classes of calls, with their variants: {listed}\n")


def predict(work: Work, jobs: int) -> tuple[float, float]:
    """(bytes, seconds) of a build: known where the cache has it, else the mean of the same function's, else of its
    kind's, else a guess. However many cores there are, it takes as long as its longest launch."""
    missing = work.missing
    bytes_of = _mean_of(work, lambda a: len(a.compressed), {kind: size for kind, _, size in KINDS})
    seconds_of = _mean_of(work, lambda a: a.seconds, {kind: seconds for kind, seconds, _ in KINDS})
    size = sum(len(a.compressed) for a in work.done.values()) + sum(bytes_of(work.sources[k]) for k in missing)
    seconds = 0.0
    if missing:
        each = [seconds_of(work.sources[k]) for k in missing]
        seconds = FIXED_SECONDS + max(*each, sum(each) / cores_for(min(jobs, len(missing))))
    return size * SHARE_OF_ZLIB + work.record_bytes, seconds


def _of_which_cores(work: Work) -> str:
    """What a prediction is of, where it is a guess: the cache has the times of this machine, and KINDS those of
    another."""
    known = {kind_of(work.sources[key]) for key in work.done}
    is_guess = any(kind_of(work.sources[key]) not in known for key in work.missing)
    return " on cores of a current server; slower ones take longer" if is_guess else ""


def cores_for(jobs: int) -> float:
    """How many cores so many processes get, beside what else runs: as much as did in the last minutes. The mean of the
    three averages, since the last minute's alone says too little of the next."""
    others = sum(os.getloadavg()) / 3
    return min(jobs, len(os.sched_getaffinity(0)) * jobs / (jobs + others))


def kind_of(source: Source) -> str:
    return next(kind for kind, *_ in KINDS if (source.fn.__module__ or "").startswith(kind))


def _mean_of(
    work: Work, figure: Callable[[Artifact], float], guesses: Mapping[str, float]
) -> Callable[[Source], float]:
    """The mean time of a function, else of its kind."""
    known: dict[object, list[float]] = {}
    for key, artifact in work.done.items():
        for group in (work.sources[key].fn, kind_of(work.sources[key])):
            known.setdefault(group, []).append(figure(artifact))
    means = dict[object, float](guesses) | {group: sum(v) / len(v) for group, v in known.items()}
    return lambda source: means.get(source.fn, means[kind_of(source)])
