"""Enumerate: from a family's records to the variants that make sense on an architecture.

The order is that of the declaration — kernel, axes (the last varies fastest), config — and so the same on every run. A
point whose constraint folds to false is dropped, with the constraint's message for a reason; what is left of the
constraints is checked before every launch.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tk.aot.errors import GridError
from tk.aot.expr import Expr, select
from tk.aot.spec import Config, Constraint, Family, Kernel, Op, Plan, Point

NO_PLAN = "no combination that the kernel is for"


@dataclass(frozen=True)
class Variant:
    """A kernel at one point of its grid, and what it does there."""

    kernel: Kernel
    point: Point
    plan: Plan

    @property
    def name(self) -> str:
        """``mm_tma[dtype=bf16, order=nt] 128x256x64 sm_90``: for people, unique within a family's grid."""
        return f"{self.kernel.name}[{describe(self.point.axes)}] {self.point.config.name} sm_{self.point.arch}"


def describe(axes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in axes.items())


@dataclass
class Grid:
    """What is left of a family on one architecture. considered and dropped count points, by kernel name; dropped also
    by reason."""

    family: Family
    arch: int
    variants: list[Variant] = field(default_factory=list)
    considered: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def op(self) -> Op:
        return self.family.op


def enumerate_grid(family: Family, arch: int, sample: bool = False, portable: bool = False) -> Grid:
    """All variants of `family` on `arch` (90 for sm_90). sample: only those that the family's sample takes, and of
    a kernel's oldest architecture of several only the first; portable: only those that it keeps as PTX.

    Raises GridError when the records contradict themselves, or when the newest architecture's sample misses a value of
    an axis."""
    grid = Grid(family, arch)
    for kernel in family.kernels:
        if kernel.op.name != family.op.name:
            raise GridError(f"kernel {kernel.name} is for op {kernel.op.name}, its family for {family.op.name}")
        if not sample:
            grid.variants += _variants(grid, kernel, points(kernel, arch))
        elif family.sampled:
            grid.variants += _sample(grid, kernel, portable)
    if sample and family.sampled:
        _check_sample(grid)
    if portable:
        grid.variants = [v for v in grid.variants if family.portable(v.kernel, v.point)]
    buckets(family.op, grid.variants)  # an ambiguity is an error here, before anything is compiled
    return grid


def points(kernel: Kernel, arch: int) -> Iterator[Point]:
    for values in itertools.product(*kernel.axes.values()):
        axes = dict(zip(kernel.axes, values, strict=True))
        for config in kernel.configs.get(arch, ()):
            yield Point(arch, axes, config)


def _variants(grid: Grid, kernel: Kernel, among: Iterable[Point]) -> Iterator[Variant]:
    """A kernel's variants at those points where it makes sense; the grid counts the others."""
    for point in among:
        grid.considered[kernel.name] += 1
        plan = kernel.plan(point)
        constraints, reason = ((), NO_PLAN) if plan is None else fold(plan.constraints)
        if plan is None or reason is not None:
            grid.dropped[kernel.name][reason or NO_PLAN] += 1
            continue
        variant = Variant(kernel, point, replace(plan, constraints=constraints))
        _check_serves(grid.op, variant)
        yield variant


def _sample(grid: Grid, kernel: Kernel, portable: bool) -> list[Variant]:
    family, arch = grid.family, grid.arch
    taken = (p for p in points(kernel, arch) if family.sample(kernel, p))
    if arch == min(kernel.configs) < max(kernel.configs):  # it differs in what is compiled, not in what is written
        of_it = (p for p in taken if not portable or family.portable(kernel, p))
        return list(itertools.islice(_variants(grid, kernel, of_it), 1))
    return list(_variants(grid, kernel, taken))


def fold(constraints: Sequence[Constraint]) -> tuple[tuple[Constraint, ...], str | None]:
    """The constraints that are not yet decided, and the message of the first that cannot hold (None: all may)."""
    for c in constraints:
        if c.holds.value == 0:
            return (), c.message
    return tuple(c for c in constraints if c.holds.value is None), None


def _check_serves(op: Op, variant: Variant) -> None:
    serves = variant.plan.serves
    if set(serves) != set(op.selectors):
        raise GridError(f"{variant.name}: serves names {sorted(serves)}, op {op.name} selects by {list(op.selectors)}")
    for axis, values in serves.items():
        size = op.selectors[axis].size
        wrong = [v for v in values if not 0 <= v < size]
        if wrong or not values:
            what = f"{axis} {wrong}" if wrong else f"no {axis}"
            raise GridError(f"{variant.name}: serves {what}; {axis} is one of range({size})")


def _check_sample(grid: Grid) -> None:
    """Every value of every axis that a kernel's full grid has on its newest architecture must be in the sample."""
    touched = {(v.kernel.name, axis, str(value)) for v in grid.variants for axis, value in v.point.axes.items()}
    missing = sorted(
        f"{kernel.name}: {axis}={value}"
        for kernel in grid.family.kernels
        for axis, values in kernel.axes.items()
        for value in map(str, values)
        if grid.arch == max(kernel.configs) and (kernel.name, axis, value) not in touched
        if _is_in_grid(grid, kernel, axis, value)
    )
    if missing:
        raise GridError(f"the sample misses values that the grid has: {'; '.join(missing)}")


def _is_in_grid(grid: Grid, kernel: Kernel, axis: str, value: str) -> bool:
    among = (p for p in points(kernel, grid.arch) if str(p.axes[axis]) == value)
    return next(_variants(Grid(grid.family, grid.arch), kernel, among), None) is not None


# --- Configs: one list for each op, the same on every architecture ---


@dataclass(frozen=True)
class NumberedConfig:
    number: int
    config: Config


def config_numbers(family: Family, arch: int) -> list[NumberedConfig]:
    """The op's configs by number: dense from 0, in order of first appearance over kernels and then architectures.

    A number means the same name in every pack, whatever was left out of it; the params are those of `arch` where it has
    the config. Raises GridError when one name stands for two settings on one architecture."""
    seen: dict[str, Config] = {}
    for kernel in family.kernels:
        for declared_for in sorted(kernel.configs):
            for config in kernel.configs[declared_for]:
                seen.setdefault(config.name, config)
    here: dict[str, Config] = {}
    for kernel in family.kernels:
        for config in kernel.configs.get(arch, ()):
            if here.setdefault(config.name, config).params != config.params:
                raise GridError(
                    f"op {family.op.name}, sm_{arch}: config {config.name} stands for {dict(here[config.name].params)} "
                    f"and, in kernel {kernel.name}, for {dict(config.params)}"
                )
    return [NumberedConfig(n, here.get(name, config)) for n, (name, config) in enumerate(seen.items())]


# --- Buckets ---


def bucket_key(op: Op, values: Mapping[str, int]) -> int:
    """The number of a bucket: mixed radix over the selector axes, the first the most significant."""
    key = 0
    for axis, selector in op.selectors.items():
        key = key * selector.size + values[axis]
    return key


def bucket_expr(op: Op) -> Expr | int:
    """The same for a problem; -1, which no bucket has, when a selector's value is out of its range."""
    key: Expr | int = 0
    valid: Expr | int = 1
    for selector in op.selectors.values():
        key = key * selector.size + selector.value
        valid = valid & ((selector.value >= 0) & (selector.value < selector.size))
    return select(valid, key, -1) if isinstance(valid, Expr) else key


def buckets(op: Op, variants: Sequence[Variant]) -> dict[int, list[int]]:
    """key -> the variants that may run there, as indices into `variants`; sorted by key.

    Raises GridError when a config of a bucket belongs to two kernels: its name would not say what runs. Variants of one
    kernel may share it: their constraints tell them apart."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, variant in enumerate(variants):
        serves = variant.plan.serves
        for values in itertools.product(*(serves[axis] for axis in op.selectors)):
            found[bucket_key(op, dict(zip(op.selectors, values, strict=True)))].append(index)
    for candidates in found.values():
        _check_configs(op, [variants[i] for i in candidates])
    return dict(sorted(found.items()))


def _check_configs(op: Op, candidates: Sequence[Variant]) -> None:
    owner: dict[str, Variant] = {}
    for v in candidates:
        first = owner.setdefault(v.point.config.name, v)
        if first.kernel.name != v.kernel.name:
            raise GridError(
                f"op {op.name}: config {v.point.config.name} of one bucket belongs to two kernels, {first.name} and "
                f"{v.name}; give them names of their own"
            )
