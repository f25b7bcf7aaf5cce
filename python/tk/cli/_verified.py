"""Calls of every op of the loaded packs besides mm's, each with every config that fits, held against float64.

A call is made with each config of each kernel that it launches: the config is pinned for the problem that the call
describes to the engine, and so no function needs an argument for it. Attention is in _verified_attention.py.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import capi, errors, missing
from tk.cli import _calls
from tk.cli._calls import Call
from tk.cli._wrong import ONCE, Asked, Elements, elements, given
from tk.generated import inputs, register
from tk.generated.inputs import Example
from tk.generated.signature import Signature
from tk.heuristics.overrides import CHOOSE
from tk.heuristics.problem import describe, describe_all
from tk.ops.product import PRECISIONS, allows_tf32
from tk.tune import ops as generated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NOT_RUN = "not run: "
_WRONG = (errors.Error, RuntimeError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Checked:
    """error: the largest deviation from float64 over what the precision that was asked for allows; problem: why there
    is none. Of a kernel whose call was not made it begins with NOT_RUN. function, call: what was called, and with what;
    seed: of its arguments; runs: how often; bad: how many of them were wrong; wrong: of the first of these the elements
    of each result that is wrong."""

    kernel: str
    config: str
    error: float = 0.0
    problem: str = ""
    function: str = ""
    call: str = ""
    seed: int = 0
    runs: int = 1
    bad: int = 0
    wrong: tuple[Elements, ...] = ()

    @property
    def was_run(self) -> bool:
        return not self.problem.startswith(NOT_RUN)

    @property
    def is_good(self) -> bool:
        return not self.problem and self.error <= 1.0

    @property
    def name(self) -> str:
        """What ``--only`` is looked for in."""
        return name_of(f"{self.function} of {self.call}" if self.call else self.function, self.kernel, self.config)

    @property
    def command(self) -> str:
        """That makes this very run again, many times."""
        only = re.sub(r"([][\\.*+?^$|(){}])", r"\\\1", self.name)
        return f"tk verify --only {shlex.quote(f'^{only}$')} --seed {self.seed} --repeat 1000"

    def __str__(self) -> str:
        """The whole case, of one that is wrong."""
        why = self.problem or f"its error is {self.error:.3g} times what is allowed"
        how_often = f", in {self.bad} of {self.runs} runs" if self.runs > 1 else ""
        lines = [f"{self.name}: {why}{how_often}", *map(str, self.wrong)]
        return "\n    ".join([*lines, f"the arguments are of seed {self.seed}; again: {self.command}"])


def name_of(call: object, kernel: str, config: str) -> str:
    """The name of a run."""
    return f"{call} by {kernel} {config}"


@dataclass(frozen=True)
class Case:
    """A call of `function`, in words `what`, and what is to come of it. exactly: on the CPU, in float64. magnitudes: of
    each exact result what its errors are a part of, where that is not the result itself, because its terms cancel.
    given: all arguments, in words, where `what` does not name them all."""

    function: str
    what: str
    run: Callable[[], Any]
    exactly: Callable[[], Any]
    is_tf32: bool = False
    magnitudes: Callable[[Any], Sequence[Tensor]] | None = None
    given: str = ""

    def __str__(self) -> str:
        return f"{self.function} of {self.call}"

    @property
    def call(self) -> str:
        return f"{self.what}: {self.given}" if self.given else self.what

    @cached_property
    def exact(self) -> Any:
        with torch.no_grad():
            return self.exactly()

    @cached_property
    def sizes(self) -> list[Tensor]:
        return tree_leaves(self.exact) if self.magnitudes is None else list(self.magnitudes(self.exact))

    def judge(self, found: Any) -> tuple[float, tuple[Elements, ...]]:
        """The largest deviation from what is exact over what is allowed, and where it is more than that."""
        triples = zip(tree_leaves(found), tree_leaves(self.exact), self.sizes, strict=True)
        worst, wrong = 0.0, []
        for i, (x, exact, size) in enumerate(triples):
            if not isinstance(x, Tensor):
                continue
            error = _error(x, exact, size, self.is_tf32)
            worst = max(worst, error)
            if error > 1.0 and (where := elements(i, x, exact, _bound(x, exact, size, self.is_tf32))):
                wrong.append(where)
        return worst, tuple(wrong)


def every_config(case: Case, device: str, skipped: Sequence[str] = (), asked: Asked = ONCE) -> Iterator[Checked]:
    """Checks every config of each kernel that the call launches, while the others are chosen as ever. skipped: ops of
    other calls."""
    try:
        with torch.no_grad(), _named(f"what describes {case}"):
            problems = {_seen(d.problem): d.problem for d in describe_all(case.run)}.values()
    except _WRONG as error:
        about = dict(function=case.function, call=case.call, seed=asked.seed)
        yield Checked(case.function, case.what, problem=_why(error), **about)  # type: ignore[arg-type]
        return
    if not problems:
        if device == "cpu":
            yield from _held(case, case.function, "ATen", device, asked)
        else:
            yield Checked(case.function, case.what, problem=f"{NOT_RUN}ATen computes it, no kernel")
    for problem in problems:
        if problem.op not in skipped:
            yield from _pinned_to_each(case, problem, device, asked)


def _seen(problem: capi.Problem) -> tuple[object, ...]:
    """What of a problem decides which configs fit it. Of addresses that is how they are aligned: the gradient of an
    input with a stride of 8 is 64 launches, and a config that is pinned for one is pinned for all."""

    def alignment(address: int) -> int:
        return (address | 256) & -(address | 256)

    tensors = (t and replace(t, address=alignment(t.address)) for t in problem.tensors)
    return problem.op, *tensors


def _why(error: Exception) -> str:
    """Which dtypes and sizes there are kernels for is the packs' choice."""
    return f"{NOT_RUN}no pack has a kernel for it" if missing.is_lack(error) else str(error)


def _pinned_to_each(case: Case, problem: capi.Problem, device: str, asked: Asked) -> Iterator[Checked]:
    done: set[int] = set()  # a config has a variant for each class of strides; the engine says which it runs
    for row in capi.candidates(problem):
        if not row.fits:
            yield Checked(row.kernel_name, row.config_name, problem=f"{NOT_RUN}{row.failed_constraint}")
        elif row.config not in done:
            done.add(row.config)
            yield from _with_config(case, problem, row.config, device, asked)


def _with_config(case: Case, problem: capi.Problem, config: int, device: str, asked: Asked) -> Iterator[Checked]:
    capi.pin(problem, config)
    try:
        chosen = capi.choose(problem)
        assert chosen.config == config, f"{case}: {chosen.config_name} would run in the place of {config}"
        yield from _held(case, chosen.kernel_name, chosen.config_name, device, asked)
    finally:
        capi.pin(problem, CHOOSE)


def _held(case: Case, kernel: str, config: str, device: str, asked: Asked) -> Iterator[Checked]:
    """Nothing where the run is not asked for."""
    about = Checked(kernel, config, function=case.function, call=case.call, seed=asked.seed)
    if asked.wants(about.name):
        yield repeated(about, case.run, case.judge, device, asked)


def repeated(
    about: Checked,
    run: Callable[[], Any],
    judge: Callable[[Any], tuple[float, tuple[Elements, ...]]],
    device: str,
    asked: Asked,
) -> Checked:
    """Repeats a run as often as is asked; what it says is of the first run that is wrong."""
    errors, bad, first = [0.0], 0, about
    runs = asked.repeat or 1
    for _ in range(runs):
        asked.prepare(device)
        try:
            with torch.no_grad(), _named(about.name):
                found = run()
            error, wrong = judge(found)
            checked = replace(about, error=error, wrong=wrong)
        except _WRONG as problem:
            checked = replace(about, problem=str(problem))
        errors.append(checked.error)
        if not checked.is_good:
            first, bad = (checked if bad == 0 else first), bad + 1
    return replace(first, error=max(errors), runs=runs, bad=bad)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error on the GPU ends the process's context, and all later calls: it is raised with what ran, at once."""
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        raise SystemExit(f"tk verify: {what} ended the CUDA context: {error}") from error


def _error(found: Tensor, exact: Tensor, size: Tensor, is_tf32: bool) -> float:
    """Integers must be equal."""
    found, exact = found.detach().cpu(), exact.detach().cpu()
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, exact.to(found.dtype)) else float("inf")
    reference = exact.double()
    deviation = (found.double() - reference).abs().max() if reference.numel() else torch.zeros(())
    return float("inf") if bool(deviation.isnan()) else float(deviation) / _bound(found, exact, size, is_tf32)


def _bound(found: Tensor, exact: Tensor, size: Tensor, is_tf32: bool) -> float:
    """What an element may be off by."""
    return (unit(found.dtype, is_tf32) * float(size.double().abs().max()) if exact.numel() else 1.0) + 1e-30


def unit(dtype: torch.dtype, is_tf32: bool) -> float:
    """The share of the largest result that may be wrong in any: a few roundings of what products are made of and of the
    result. Sums of float32 have some in every step."""
    if dtype is torch.float32:
        return 2.0**-8 if is_tf32 else 2.0**-17
    return {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float64: 2.0**-40}.get(dtype, 2.0**-2)


# --- Functions ---


def functions(device: str, asked: Asked = ONCE) -> Iterator[Checked]:
    """Checks tk's functions over kernels written by hand, with ragged sizes and with whole tiles."""
    generated_ones = register.names()  # below, with every dtype that they have
    for dtype in DTYPES:
        calls = [
            *_calls.calls(device, dtype, "small", asked.seed),
            *_calls.written_by_hand(device, dtype, "medium", asked.seed),
        ]
        for call, is_tf32 in _asked(calls, dtype):
            run = partial(call.function, *call.args, **call.kwargs)
            arguments = given(call.args, call.kwargs)
            case = Case(f"tk.{call.name}", str(dtype), run, partial(_exact, call), is_tf32, given=arguments)
            yield from every_config(case, device, generated_ones, asked)


def _asked(calls: Iterable[Call], dtype: torch.dtype) -> Iterator[tuple[Call, bool]]:
    """Calls, of float32 with either precision where a call can name one; and whether each may round to tf32."""
    for call in calls:
        if dtype is not torch.float32 or "precision" not in inspect.signature(call.function).parameters:
            yield call, dtype is torch.float32 and allows_tf32()
            continue
        for precision in ("ieee", "tf32"):
            yield replace(call, kwargs={**call.kwargs, "precision": precision}), precision == "tf32"


def _exact(call: Call) -> Any:
    """The exact result on the CPU: by torch in float64; where torch has no such function, by tk's reference."""
    args, kwargs = tree_map_only(Tensor, lambda x: x.cpu(), (call.args, call.kwargs))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    if call.torchs is None:
        return call.function(*args, **kwargs)
    return call.torchs(*tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, args))


# --- Convolutions and their gradients ---


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution. input: [N, C, ...]; weight: [C_out, C / groups, ...]."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1

    @property
    def lists(self) -> list[list[int]]:
        return [[n] * (len(self.input) - 2) for n in (self.stride, self.padding, self.dilation)]


# Of each kind of kernel one: channels for tensor cores, 1 x 1, strides, few channels a group, depthwise, all rows at
# once (a window as large as the input), one and three dimensions.
GEOMETRIES = (
    Geometry((2, 64, 16, 16), (128, 64, 3, 3), padding=1),
    Geometry((4, 128, 14, 14), (64, 128, 1, 1)),
    Geometry((2, 64, 17, 15), (32, 64, 3, 3), stride=2, padding=1),
    Geometry((2, 64, 16, 16), (64, 64, 3, 3), padding=2, dilation=2),
    Geometry((2, 64, 14, 14), (64, 2, 3, 3), padding=1, groups=32),
    Geometry((2, 64, 14, 14), (64, 1, 3, 3), padding=1, groups=64),
    Geometry((2, 96, 14, 14), (96, 1, 7, 7), padding=3, groups=96),
    Geometry((2, 3, 32, 32), (64, 3, 8, 8), stride=8),
    Geometry((2, 5, 9, 7), (6, 5, 3, 3), padding=1),
    Geometry((2, 64, 50), (64, 64, 3), padding=1),
    Geometry((2, 64, 60), (64, 1, 4), padding=3, groups=64),
    Geometry((1, 32, 6, 8, 8), (64, 32, 3, 3, 3), padding=1),
)

_ATEN: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolutions(device: str, geometries: Sequence[Geometry] = GEOMETRIES, asked: Asked = ONCE) -> Iterator[Checked]:
    """Forward, the gradient of the input and of the weight, with rows of pixels and with rows of channels."""
    for geometry in geometries:
        for dtype in DTYPES:
            for precision in ("ieee", "tf32") if dtype is torch.float32 else (None,):
                for is_channels_last in (False, True):
                    for case in _of_convolution(geometry, dtype, precision, is_channels_last, device, asked.seed):
                        yield from every_config(case, device, asked=asked)


def _of_convolution(
    g: Geometry, dtype: torch.dtype, precision: str | None, is_channels_last: bool, device: str, seed: int = 0
) -> Iterator[Case]:
    generator, dims = torch.Generator().manual_seed(seed), len(g.input) - 2

    def made(shape: Sequence[int]) -> Tensor:
        x = torch.randn(shape, generator=generator).to(dtype)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if is_channels_last else x

    aten = _ATEN[dims]
    x, weight = made(g.input), made(g.weight)
    settings = (*g.lists, g.groups)
    grad = made(aten(x.to("meta"), weight.to("meta"), None, *settings).shape)
    x64, weight64, grad64 = x.double(), weight.double(), grad.double()
    there = [t.to(device) for t in (grad, x, weight)]
    asked = (*settings, PRECISIONS[precision])

    def gradient(place: int) -> Tensor:
        wanted = [place == 0, place == 1, False]
        zeros = [0] * dims
        found = torch.ops.aten.convolution_backward(
            grad64, x64, weight64, None, *g.lists, False, zeros, g.groups, wanted
        )
        return found[place]

    ops, is_tf32 = torch.ops.tk, precision == "tf32"
    what = f"{list(g.input)} and {list(g.weight)}, {precision or dtype}"
    settled = dict(stride=g.stride, padding=g.padding, dilation=g.dilation, groups=g.groups)
    forward = partial(
        getattr(ops, f"conv{dims}d").default, there[1], there[2], None, *settings, 0, PRECISIONS[precision]
    )
    yield Case(f"tk.conv{dims}d", what, forward, lambda: aten(x64, weight64, None, *settings), is_tf32,
               given=given(there[1:], settled))  # fmt: skip
    for place, op in enumerate((ops.conv_input_grad, ops.conv_weight_grad)):
        run = partial(op.default, *there, *asked)
        yield Case(f"tk.{op.__name__}", what, run, partial(gradient, place), is_tf32, given=given(there, settled))


# --- Generated ops ---

ROWS = (40, 1024, 20_000)  # how long those of the widest tensor are, since configs are for some lengths
# For configs that take none of those: whole vectors, and whole vectors and one element, on each side of what two, three
# and four blocks hold.
MORE_ROWS = tuple(
    n + odd
    for n in (4, 8, 16, 112, 272, 400, 656, 912, 1536, 2560, 3584, 5120, 7168, 10_240, 14_336, 100_000)
    for odd in (0, 1)
)
SIZE, ALIGNED_SIZE, LEADING, MOST_ELEMENTS = 40, 48, (3, 5), 1 << 22
TALL = 17, 4096  # rows of few others, and how long they are, which is where columns are reduced in parts


def generated_ops(device: str, asked: Asked = ONCE) -> Iterator[Checked]:
    """Checks generated ops, of the package and of users: for every choice of dtypes and flags, against the recorded
    graph in float64."""
    for name in register.names():
        op = register.find(name)
        assert op is not None
        try:
            signature = inputs.signature_of(op)
        except (errors.Error, ValueError) as error:
            yield Checked(name, "", problem=f"{NOT_RUN}{error}")
            continue
        has_leading = any(t.leading for t in signature.tensors.values())
        for dtypes, flags in inputs.kinds(op):
            ran: dict[int, bool] = {}
            for n in (*ROWS, *MORE_ROWS):
                is_more = n in MORE_ROWS
                row = _row_of(signature, n)
                if is_more and (all(ran.values()) or not (row or has_leading)):
                    break
                leading = () if not has_leading else LEADING if row else (LEADING[0], n)
                known = dict.fromkeys(signature.letters, _beside(n, signature)) | row
                example = Example(op, signature, dtypes, leading, known, flags, places=2)
                yield from _example(example, device, ran, is_more, asked)
            if has_leading and row and not all(ran.values()):  # rows that lie as columns do
                known = dict.fromkeys(signature.letters, SIZE) | _row_of(signature, TALL[1])
                example = Example(op, signature, dtypes, TALL[:1], known, flags, places=2)
                yield from _example(example, device, ran, True, asked, turned=True)


def _beside(n: int, signature: Signature) -> int:
    """The size of all other letters, so that no tensor is large: aligned beside aligned rows, for kernels that ask it
    of every tensor."""
    size = SIZE if n % 16 else ALIGNED_SIZE
    others = max(1, len(inputs.widest(signature).sizes) - 1)
    return size if n <= SIZE else min(size, int((MOST_ELEMENTS / n) ** (1 / others)))


def _row_of(signature: Signature, n: int) -> dict[str, int]:
    last = inputs.widest(signature).sizes[-1:]
    return {letter: n for letter in last if isinstance(letter, str)}


def _example(
    example: Example, device: str, ran: dict[int, bool], only_new: bool, asked: Asked, turned: bool = False
) -> Iterator[Checked]:
    """Checks an example with every config that fits. ran: whether a config has run, in calls of the same dtypes and
    flags. only_new: with those alone that have not. turned: of tensors whose last dimension is not the one that is
    contiguous."""
    torch.manual_seed(asked.seed)  # of each call by itself, since others may be left out
    try:
        args = example.arguments(device)
        if turned:
            args = [x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in args]
        described = describe(generated.call, example, args)
    except (*_WRONG, TypeError) as error:
        yield Checked(example.op.name, str(example), problem=f"{NOT_RUN}{error}")
        return
    rows = [] if described is None else capi.candidates(described.problem)
    references = generated.References(example, args)
    if described is None and device == "cpu":
        yield from _of_example(references, -1, example.op.name, "ATen", device, asked)
    numbers = {row.config: row for row in rows if row.fits}
    for row in rows:
        ran.setdefault(row.config, False)
        if row.config not in numbers and not only_new:
            yield Checked(row.kernel_name, row.config_name, problem=f"{NOT_RUN}{row.failed_constraint}")
    for number, row in numbers.items():
        if not (only_new and ran[number]):
            ran[number] = True
            yield from _of_example(references, number, row.kernel_name, row.config_name, device, asked)


def _of_example(
    references: generated.References, number: int, kernel: str, config: str, device: str, asked: Asked
) -> Iterator[Checked]:
    """What is wrong is an error larger than ATen's by half. Nothing where the run is not asked for."""
    about = Checked(kernel, config, function=str(references.example), seed=asked.seed)
    if asked.wants(about.name):
        run = partial(generated.results, references.example, references.args, number)
        yield repeated(about, run, partial(_judged, references), device, asked)


def _judged(references: generated.References, found: Sequence[Tensor]) -> tuple[float, tuple[Elements, ...]]:
    worst, wrong = 0.0, []
    for i, (x, one) in enumerate(zip(found, references.of_each, strict=True)):
        error = one.error_of(x) / 2
        worst = max(worst, error)
        if not error <= 1.0 and (where := elements(i, x, one.exact, 2 * one.allowed)):
            wrong.append(where)
    return worst, tuple(wrong)
