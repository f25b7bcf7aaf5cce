"""Random calls of generated ops: dtypes, sizes, strides, values; drawn, placed in memory, run, and judged."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import ops
from tk import capi
from tk.generated import inputs
from tk.generated.inputs import Example
from tk.generated.records import GeneratedOp
from tk.heuristics.problem import describe

from .device import DEVICE

MOST_ELEMENTS = 1 << 21
LONGEST_ROW = 70_000
LAYOUTS = ("contiguous", "offset", "transposed", "permuted", "channels_last", "gaps", "pitch", "odd_pitch", "block",
           "sliced", "expanded")  # fmt: skip
SPECIAL = ("nan", "inf", "-inf", "zero")  # "zero": a whole tensor of it
SCALES = (1.0, 1.0, 1.0, 0.01, 20.0)
TAME = ("cumprod",)  # larger numbers overflow in the products of parts, wherever they begin


# --- Tensors anywhere in memory ---


def strides(shape: tuple[int, ...], layout: str, rng: random.Random) -> tuple[int, list[int]]:
    """(offset, strides): any order of dimensions in memory, with gaps, repeats and odd addresses."""
    n = len(shape)
    order = list(range(n))  # outermost first
    if layout == "transposed":
        order.reverse()
    elif layout == "permuted":
        rng.shuffle(order)
    elif layout == "channels_last" and n > 2:
        front = order[: n - 1]
        rng.shuffle(front)
        order = [*front, n - 1]
    padding = dict.fromkeys(order, 0)
    if n and layout in ("pitch", "odd_pitch"):
        padding[order[-1]] = 16 * rng.randint(1, 3) if layout == "pitch" else 2 * rng.randint(0, 4) + 1
    if layout == "block" and n > 2:  # of a larger tensor: the outer dimensions do not run together with the inner two
        padding[order[-2 if n == 3 else -3]] = 16
    if layout == "sliced":
        padding = {d: rng.choice((0, 1, 3)) for d in order}
    step = rng.choice((2, 3)) if layout == "gaps" else 1
    repeated = rng.choice(order) if layout == "expanded" and n else None
    found = [0] * n
    for d in reversed(order):
        if d != repeated:
            found[d] = step
            step *= max(shape[d], 1) + padding[d]
    offset = {"offset": 1, "sliced": rng.choice((0, 1, 8)), "gaps": rng.choice((0, 1))}.get(layout, 0)
    return offset, found


def place(values: Tensor, layout: str, rng: random.Random) -> Tensor:
    """The values in a layout, with NaN wherever the view does not reach. A dimension that repeats has its first."""
    shape = tuple(values.shape)
    offset, steps = strides(shape, layout, rng)
    reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1 if values.numel() else 0
    fill = math.nan if values.is_floating_point() else 1
    storage = torch.full((offset + reach + 64,), fill, dtype=values.dtype, device=values.device)
    view = storage.as_strided(shape, steps, offset)
    once, source = view, values
    for d, step in enumerate(steps):
        if step == 0 and shape[d] > 1:
            once, source = once.narrow(d, 0, 1), source.narrow(d, 0, 1)
    once.copy_(source)
    return view


# --- Cases ---


@dataclass(frozen=True)
class Case:
    """layouts: of each tensor. special: a value put into some places of one tensor, "" for none. any_config: one drawn
    of those that fit, instead of the chosen one."""

    example: Example
    layouts: Mapping[str, str]
    special: str = ""
    scale: float = 1.0
    any_config: bool = False
    seed: int = 0


# ATen's mean of a row with an infinity is infinite or NaN, by where it stands.
BY_PLACE = ("row_var_mean",)
EVEN = ("rope_interleaved",)  # halves its last dimension


def draw(rng: random.Random, op: GeneratedOp) -> Case:
    signature = inputs.signature_of(op)
    dtypes, flags = rng.choice(list(inputs.kinds(op)))
    room = MOST_ELEMENTS
    sizes: dict[str, int] = {}
    for letter in signature.letters:
        sizes[letter] = draw_size(rng, min(LONGEST_ROW, room))
        room //= sizes[letter]
    if op.name in EVEN:
        sizes = {letter: n + n % 2 for letter, n in sizes.items()}
    has_leading = any(spec.leading for spec in signature.tensors.values())
    leading = draw_leading(rng, max(room, 1)) if has_leading else ()
    usual = rng.random() < 0.4
    layouts = {name: "contiguous" if usual or rng.random() < 0.3 else rng.choice(LAYOUTS) for name in signature.tensors}
    special = rng.choice(SPECIAL) if rng.random() < 0.1 else ""
    if op.name in BY_PLACE and "inf" in special:
        special = "nan"
    example = Example(op, signature, dtypes, leading, sizes, flags)
    scale = rng.choice(SCALES)
    if op.name in TAME:
        scale = min(scale, 1.0)
    return Case(example, layouts, special, scale, rng.random() < 0.25, rng.randrange(1 << 30))


def draw_size(rng: random.Random, largest: int) -> int:
    """1, small, powers of two and their neighbours, multiples of 128, anything."""
    way = rng.random()
    if way < 0.05:
        return 1
    if way < 0.2:
        return min(largest, rng.randint(2, 17))
    if way < 0.5:
        return min(largest, max(1, 2 ** rng.randint(2, 16) + rng.choice((-1, 0, 0, 0, 1))))
    if way < 0.7:
        return min(largest, 128 * rng.randint(1, 99))
    return max(1, min(largest, round(largest ** rng.random())))


def draw_leading(rng: random.Random, room: int) -> tuple[int, ...]:
    """Up to five dimensions; rarely no row at all."""
    found = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 5))):
        size = max(1, round(room ** (rng.random() ** 0.7)))
        size = size if rng.random() < 0.8 else rng.randint(1, min(room, 4))
        found.append(size)
        room = max(1, room // size)
    if found and rng.random() < 0.03:
        found[rng.randrange(len(found))] = 0
    rng.shuffle(found)
    return tuple(found)


def make(case: Case, device: str | None = None) -> list[Any]:
    """The arguments, in memory as the case says."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    signature = case.example.signature
    chosen = rng.choice(list(signature.tensors))
    args: list[Any] = []
    for name in signature.params:
        if name not in signature.tensors:
            args.append(case.example.number(name))
            continue
        values = case.example.values(name, device or DEVICE)
        if values.is_floating_point():
            values = values * case.scale
            if case.special and name == chosen:
                values = _with_special(values, case.special, rng)
        args.append(place(values, case.layouts[name], rng))
    return args


def _with_special(values: Tensor, special: str, rng: random.Random) -> Tensor:
    if special == "zero":
        return torch.zeros_like(values)
    flat = values.flatten()
    for _ in range(min(flat.numel(), 3)):
        flat[rng.randrange(flat.numel())] = float(special)
    return flat.view(values.shape)


# --- Running one ---


@dataclass
class Outcome:
    """problem: what is wrong, "" if nothing; it says all that is needed to run the case again."""

    problem: str = ""
    verdicts: ops.Verdicts = field(default_factory=list)


def check(case: Case) -> Outcome:
    """Right, and the same bits when called again."""
    args = make(case)
    config = draw_config(case, args) if case.any_config else -1
    return check_call(case, args, config)


def check_call(case: Case, args: list[Any], config: int) -> Outcome:
    op = case.example.op
    try:
        results = ops.run_tk(op, args, config)
        verdicts = ops.judge(op, args, results)
        if op.name in ops.IN_ANY_ORDER and "fp64" in case.example.dtypes.values():
            return Outcome("", verdicts)  # no kernel adds these in one order
        if op.name in ops.IN_ANY_ORDER:
            config = -1  # one that adds in any order is refused where the order counts
            with deterministic(op):
                results = ops.run_tk(op, args)
        with deterministic(op):
            if not ops.same_bits(results, ops.run_tk(op, args, config)):
                raise ops.WrongResult("the same call gave other bits")
    except (ops.WrongResult, RuntimeError, ValueError) as error:
        if "of no elements" in str(error) and 0 in case.example.leading:
            return Outcome("")  # as torch: there is no largest of none
        return Outcome(f"{described(case, args, config)}: {type(error).__name__}: {error}")
    return Outcome("", verdicts)


@contextmanager
def deterministic(op: GeneratedOp) -> Iterator[None]:
    """Asked for, of an op that is not so by itself."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or op.name in ops.IN_ANY_ORDER)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def candidates(op: GeneratedOp, args: list[Any]) -> list[capi.Candidate]:
    """Those that fit; none where nothing is launched."""
    problem = describe(ops.run_tk, op, args)
    return [] if problem is None else [c for c in capi.candidates(problem.problem) if c.fits]


def draw_config(case: Case, args: list[Any]) -> int:
    found = sorted({c.config for c in candidates(case.example.op, args)})
    return random.Random(case.seed).choice(found) if found else -1


def described(case: Case, args: list[Any], config: int) -> str:
    """Op, dtypes, sizes, strides, offsets, values and config."""
    names = case.example.signature.params
    where = [f"{name} {case.layouts[name]} strides {list(x.stride())} offset {x.storage_offset()}"
             for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)]  # fmt: skip
    extra = f"{case.special and f'; {case.special} in one tensor'}; scale {case.scale:g}; seed {case.seed}"
    return f"{case.example}; {'; '.join(where)}{extra}; config {config_name(case.example.op, args, config)}"


def config_name(op: GeneratedOp, args: list[Any], config: int) -> str:
    try:
        problem = describe(ops.run_tk, op, args)
        return "none" if problem is None else capi.choose(problem.problem, config).config_name
    except (RuntimeError, ValueError) as error:
        return f"{config} ({error})"


# --- Every variant ---

Runs, Rests = dict[int, int], dict[int, str]
# Columns and rows: whole vectors and not, one block and many, and every number of segments.
VARIANT_SHAPES = ((3, 4096), (5, 4097), (20_000, 32), (20_000, 33), (96, 48), (96, 47), (4, 1), (96, 3), (3, 1500),
                  (70, 7), (3, 2593), (3, 7001), (9, 235), (9, 391), (9, 593), (9, 999), (3, 5001), (3, 9001),
                  (3, 13_001), (3, 5120), (3, 10_240), (1060, 2593))  # fmt: skip
# How tensors lie, with more dimensions than they need but for the first; the last layouts have few settings.
VARIANT_LAYOUTS = ("contiguous", "gaps", "block", "transposed")
FEW_SHAPES = VARIANT_SHAPES[:10]
# Rows of few elements, in all tensors.
FEW_ELEMENTS = (1, 3, 12)
OF_ALL = (1056, 4096)  # enough elements for as many parts as a GPU of 132 multiprocessors wants: reductions of all
# Channels and pixels of a group, which are reduced together. Of one entry of the batch: leading dimensions of the
# gradients then run together.
GROUPS = (*((2, 2**n) for n in range(5, 12)), (2, 7), (3, 2048), (4, 2048), (6, 2048), (8, 2048), (4, 8192), (3, 45),
          (3, 87), (3, 171), (5, 155), (3, 343), (3, 685), (3, 1023), (3, 1367), (3, 2049), (3, 2733), (3, 4097),
          (5, 4097), (3, 9001))  # fmt: skip
# For ops whose variants those above do not reach all, by how the ops' names begin.
MORE_SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "total_": (OF_ALL,),
    "quantize_fp8_tensor": (OF_ALL,),
    "group_norm": [(1, 3, *group) for group in GROUPS],
    # As many rows as whole vectors have elements, too: their targets are read and counted.
    "cross_entropy": [
        (32, n) for n in (48, 112, 240, 496, 1008, 2032, 4080, 6144, 8192, 12_288, 16_384, 32_768, 40_960)
    ],
    # One position, as in decoding.
    "rope": ((5, 1, 2, 4096), (20_000, 1, 2, 64), (5, 1, 2, 33), (20_000, 1, 2, 33)),
}


def problems(op: GeneratedOp, shapes: Sequence[tuple[int, ...]] = VARIANT_SHAPES) -> Iterator[Case]:
    """Calls that between them suit every variant of an op: all dtypes, flags and classes of strides."""
    places = [(shape, layout) for layout in VARIANT_LAYOUTS for shape in shapes
              if layout in VARIANT_LAYOUTS[:2] or shape in FEW_SHAPES]  # fmt: skip
    for name, more in MORE_SHAPES.items():
        places += [(shape, "contiguous") for shape in more if op.name.startswith(name)]
    if op.name.startswith("group_norm"):
        places += [(group, "block") for group in GROUPS[:7:3]]
    for (dtypes, flags), (shape, layout) in itertools.product(inputs.kinds(op), places):
        if layout != "contiguous":
            shape = (2, 3, *shape)
        example = inputs.of_shape(op, shape_of(op, shape), next(iter(dtypes.values()), "fp32"), flags)
        yield Case(example, dict.fromkeys(example.signature.tensors, layout))
    signature = inputs.signature_of(op)
    others = [s for s in signature.letters if s not in inputs.widest(signature).sizes]
    if not others:
        return
    for (dtypes, flags), n in itertools.product(inputs.kinds(op), FEW_ELEMENTS):
        sizes = dict.fromkeys(others, n)
        example = inputs.of_shape(op, shape_of(op, (96, n)), next(iter(dtypes.values()), "fp32"), flags, **sizes)
        yield Case(example, dict.fromkeys(example.signature.tensors, "contiguous"))


def variants(op: GeneratedOp, args: list[Any], run: Callable[..., Any] = ops.run_tk) -> tuple[Runs, Rests]:
    """(variant -> the config that runs it here, the other variants of the bucket -> why not)."""
    described = describe(run, op, args)
    runs: Runs = {}
    rests: Rests = {}
    if described is None:
        return runs, rests
    for row in capi.candidates(described.problem):
        if row.fits and capi.choose(described.problem, row.config).variant == row.variant:
            runs[row.variant] = row.config
        else:
            if op.name in EVEN and row.failed_constraint == "rows of at most 1 elements":
                continue  # which has none: a setting of all ops, and no call's of this one
            rests[row.variant] = f"{row.kernel_name}/{row.config_name}: {row.failed_constraint or 'another is faster'}"
    return runs, rests


def shape_of(op: GeneratedOp, shape: tuple[int, ...]) -> tuple[int, ...]:
    """With at least the dimensions that the op declares, no more where it has no leading ones, and its fixed sizes."""
    spec = inputs.widest(inputs.signature_of(op))
    rank = len(spec.sizes)
    shape = (*(2,) * (rank - len(shape)), *shape)
    front = shape[: len(shape) - rank] if spec.leading else ()
    letters = (n if isinstance(s, str) else s for s, n in zip(spec.sizes, shape[len(shape) - rank :], strict=True))
    return (*front, *(n + n % 2 if op.name in EVEN else n for n in letters))
