"""Trace: a score_mod and a mask_mod -> their graphs, in one spelling, and a fingerprint.

    pair = trace.pair(score_mod, mask_mod)
    pair.fingerprint, pair.score, pair.mask, pair.captures

A graph is of ATen ops on 0-d tensors. What a mod captures, tensors and numbers alike, are arguments of it: their
values, sizes and names are no part of the fingerprint; their dtypes and ranks are. Bools, strings, dtypes and None are
structure, and so is a number that the mod decides by or that leaves torch (``range(n)``, ``math.sqrt(x)``).

Tracing takes milliseconds and happens once for a mod's code and the kinds of what it reads (reads.py); after that
:func:`pair` takes microseconds, also for a closure that was made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.flex.tracing import reads, record, states
from tk.flex.tracing.canonical import Graph, Read, canonical
from tk.flex.tracing.canonical import parse as parse_graph
from tk.flex.tracing.normal import evaluator
from tk.flex.tracing.numbers import Decides
from tk.flex.tracing.record import Recorder

__all__ = ["Capture", "Graph", "Pair", "Traced", "pair"]

_BREAK = "; "  # of lines, in an op's argument: Inductor writes such texts into comments of one line
_HEAD, _MASK = "tk flex 3\nscore\n", "mask\n"  # with the version of the spelling: graphs of another must not meet
_INDICES = ("b", "h", "q_idx", "kv_idx")
_WANTED = {"score_mod": ("score", *_INDICES), "mask_mod": _INDICES}
_IDENTITY = "is"  # among what is structure: which captured tensors are one
_MAX_TRACES = 64  # of one code: past that the oldest go

Mod = Callable[..., Any]


@dataclass(frozen=True)
class Capture:
    """What a mod reads besides its arguments: an argument of the pair's ops.

    kind: "tensor", "int" or "float". dtype: a tensor's own; int64 and float64 for numbers. rank: 0 for numbers.
    of: "score" or "mask". name: as the mod calls it, for messages. value: what it is in this call."""

    kind: str
    dtype: torch.dtype
    rank: int
    of: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Traced:
    """What a pair is without the values of its captures. text: the whole of it, which :func:`parse` reads."""

    score: Graph | None
    mask: Graph | None
    captures: tuple[Capture, ...]
    fingerprint: str
    text: str

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Which captures can have a gradient: floating-point tensors that the score reads."""
        found = [c.of == "score" and c.kind == "tensor" and c.dtype.is_floating_point for c in self.captures]
        return tuple(i for i, has_gradient in enumerate(found) if has_gradient)

    @cached_property
    def differentiable_tensors(self) -> tuple[int, ...]:
        """:attr:`differentiable` among the captured tensors alone, numbered without the numbers."""
        tensors = [i for i, c in enumerate(self.captures) if c.kind == "tensor"]
        return tuple(place for place, i in enumerate(tensors) if i in self.differentiable)

    def by_kind(self, values: Sequence[Any]) -> tuple[list[Tensor], list[float], list[int]]:
        """The captures' values as the ops take them: tensors, floats and ints."""
        tensors: list[Tensor] = []
        floats: list[float] = []
        ints: list[int] = []
        for capture, value in zip(self.captures, values, strict=True):
            kind = capture.kind
            (tensors if kind == "tensor" else ints if kind == "int" else floats).append(value)
        return tensors, floats, ints

    def values_of(self, tensors: Sequence[Any], floats: Sequence[Any], ints: Sequence[Any]) -> list[Any]:
        """:meth:`by_kind` undone."""
        by_kind = {"tensor": iter(tensors), "float": iter(floats), "int": iter(ints)}
        return [next(by_kind[c.kind]) for c in self.captures]


class Pair:
    """A score_mod and a mask_mod, traced: `traced`, and the values of its captures in that order."""

    __slots__ = ("traced", "values")

    def __init__(self, traced: Traced, values: tuple[Any, ...]):
        self.traced = traced
        self.values = values

    @property
    def score(self) -> Graph | None:
        """Placeholders: score, b, h, q_idx, kv_idx, and those of :attr:`captures` that it reads. None: the score."""
        return self.traced.score

    @property
    def mask(self) -> Graph | None:
        """Placeholders: b, h, q_idx, kv_idx, and those of :attr:`captures` that it reads. None: nothing is masked."""
        return self.traced.mask

    @property
    def captures(self) -> list[Capture]:
        """All captures: those of the score graph first, in each by first use."""
        held = zip(self.traced.captures, self.values, strict=True)
        return [Capture(c.kind, c.dtype, c.rank, c.of, c.name, value) for c, value in held]

    @property
    def fingerprint(self) -> str:
        """64 hex digits: of the graphs, and of the captures' kinds, dtypes and ranks."""
        return self.traced.fingerprint

    def __repr__(self) -> str:
        return f"Pair({self.fingerprint[:16]}: {self.traced.score or 'score'}, {self.traced.mask or 'no mask'})"


def pair(score_mod: Mod | None, mask_mod: Mod | None, whole: bool = False) -> Pair:
    """Traces what was not traced yet. A score_mod that gives -inf where a condition does not hold is a mask as well,
    unless there is another. whole: it stays a score_mod, as it must where a block mask has lists, of which the blocks
    called full are not masked.

    Raises:
        TypeError: no function, another number of parameters, or a result of another dtype or shape than a mod's.
        tk.UnsupportedError: control flow on tensors, or an op that no kernel can have. The message has the mod's line.
    """
    mask, mask_values = _mod(mask_mod, "mask_mod") if mask_mod is not None else (_NOTHING, ())
    score, score_values = _NOTHING, ()
    if score_mod is not None:
        score, leaves = _known(score_mod, "score_mod")
        if score.parts is not None and mask.graph is None and not whole:
            score, mask = score.parts
            mask_values = _picked(mask, leaves, score_mod, "score_mod")
        score_values = _picked(score, leaves, score_mod, "score_mod")
    found = _pairs.get((id(score), id(mask)))
    if found is None:
        found = _joined(score, mask)
    return Pair(found, score_values + mask_values)


# --- One mod ---


@dataclass(frozen=True, eq=False)
class _Mod:
    """A trace of one mod. pick: what the graph reads of the tensors and numbers that `match` gives, in its order.
    numbers: the variables of numbers that are run-time arguments. parts: of a score_mod that masks, the score and the
    mask."""

    graph: Graph | None
    captures: tuple[Capture, ...]
    match: Callable[[Any], tuple[Any, ...] | None]
    pick: tuple[Callable[[Sequence[Any]], Any], ...]
    numbers: frozenset[str] = frozenset()
    parts: tuple[_Mod, _Mod] | None = None


_NOTHING = _Mod(None, (), lambda fn: (), ())
_lock = threading.RLock()
_traces: dict[tuple[Any, str], tuple[_Mod, ...]] = {}
_pairs: dict[tuple[int, int], Traced] = {}
_by_text: dict[str, Traced] = {}
_kept: list[_Mod] = []  # those in _pairs: their ids must stay theirs


def _mod(fn: Mod, kind: str) -> tuple[_Mod, tuple[Any, ...]]:
    known, leaves = _known(fn, kind)
    return known, _picked(known, leaves, fn, kind)


def _known(fn: Mod, kind: str) -> tuple[_Mod, Sequence[Any]]:
    """Its trace, and the tensors and numbers that it reads now."""
    anchor = reads.anchor(fn)
    for known in _traces.get((anchor, kind), ()):
        leaves = known.match(fn)
        if leaves is not None:
            return known, leaves
    with _lock:
        made = _trace(fn, kind)
        _traces[anchor, kind] = (made, *_traces.get((anchor, kind), ()))[:_MAX_TRACES]
    leaves = made.match(fn)
    if leaves is None:
        raise errors.Error(f"{described(fn, kind)} changes what it reads while it is traced")
    return made, leaves


def _picked(mod: _Mod, leaves: Sequence[Any], fn: Mod, kind: str) -> tuple[Any, ...]:
    try:
        values = tuple([_plain(pick(leaves)) for pick in mod.pick])
    except (ArithmeticError, ValueError, TypeError) as error:  # of what is made of captured numbers
        raise ValueError(f"{described(fn, kind)}: of the numbers that it captures: {error}") from None
    for value in values:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"{described(fn, kind)}: captures {value}, which 64 bits do not hold")
    return values


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's, which torch's ops take everywhere."""
    if type(value) in (int, float) or isinstance(value, Tensor | torch.SymInt | torch.SymFloat):
        return value
    return int(value) if reads.is_int(value) else float(value)


def tensors_of(fn: Mod | None) -> list[Tensor]:
    """The tensors that a mask_mod captures."""
    return [] if fn is None else [x for x in _mod(fn, "mask_mod")[1] if isinstance(x, Tensor)]


def structure_of(fn: Mod | None) -> Any:
    """What a mask_mod is without the tensors that it captures: equal for equal masks."""
    if fn is None:
        return None
    made, values = _mod(fn, "mask_mod")
    return id(made), tuple(x for x in values if not isinstance(x, Tensor))


def with_tensors(fn: Mod | None, tensors: Sequence[Any]) -> Mod | None:
    """A mask_mod with others in the place of :func:`tensors_of`."""
    if fn is None or not tensors:
        return fn
    made, values = _mod(fn, "mask_mod")
    if all(a is b for a, b in zip(tensors, (x for x in values if isinstance(x, Tensor)), strict=True)):
        return fn
    found = made.graph.reads if made.graph is not None else ()
    places = [r.leaf for r, x in zip(found, values, strict=True) if isinstance(x, Tensor)]
    wanted = dict(zip(places, tensors, strict=True))
    seen: list[None] = []

    def leaf(value: Any, name: str, variable: str) -> Any:
        is_tensor = isinstance(value, Tensor) and not record.is_number(value)
        if not is_tensor and variable not in made.numbers:
            return value
        seen.append(None)
        return wanted.get(len(seen) - 1, value)

    return reads.Reads(leaf).stand_in(fn, "f", getattr(fn, "__name__", type(fn).__name__))


def _joined(score: _Mod, mask: _Mod) -> Traced:
    captures = (*score.captures, *mask.captures)
    n_score = len(score.captures)
    second = mask.graph.renumbered(n_score) if mask.graph is not None else None
    text = f"{_HEAD}{score.graph.text if score.graph else ''}{_MASK}{second.text if second else ''}"
    made = Traced(score.graph, second, captures, _digest(text), text.replace("\n", _BREAK))
    with _lock:
        _by_text.setdefault(made.text, made)
        _kept.extend((score, mask))
        return _pairs.setdefault((id(score), id(mask)), made)


def parse(text: str) -> Traced:
    """The pair of :attr:`Traced.text`. Captures go by their numbers. Raises ValueError."""
    found = _by_text.get(text)
    if found is None:
        if not is_text(text):
            raise ValueError(f"tk.flex: no pair of mods, or of another version of tk: {text[:40]!r}")
        lines = text.replace(_BREAK, "\n")
        score, mask = (parse_graph(t) if t else None for t in lines.removeprefix(_HEAD).split(_MASK, 1))
        captures = [_capture(r, "score_mod") for r in (score.reads if score else ())]
        if mask is not None:
            mask = Graph(mask.graph, mask.reads, len(captures))
            captures += [_capture(r, "mask_mod") for r in mask.reads]
        found = Traced(score, mask, tuple(captures), _digest(lines), text)
        with _lock:
            found = _by_text.setdefault(text, found)
    return found


def is_text(text: str) -> bool:
    """Whether it is of this spelling's version."""
    lines = text.replace(_BREAK, "\n")
    return lines.startswith(_HEAD) and _MASK in lines


def _digest(lines: str) -> str:
    return hashlib.sha256(lines.encode()).hexdigest()


def described(fn: Any, kind: str) -> str:
    """A mod as a message names it: with its file and line."""
    code = getattr(getattr(fn, "func", fn), "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{kind} {name} ({code.co_filename}:{code.co_firstlineno})" if code else f"{kind} {name}"


# --- Tracing ---


class _World:
    """What a mod sees in one trace. constants: the variables of numbers and sizes that are structure. names: of what it
    reads. numbers: the variables of those that are run-time arguments."""

    def __init__(self, constants: frozenset[str], around: Mapping[Any, Any], device: str):
        self.constants = constants
        self.recorder = Recorder(device)
        is_grad = around[torch.is_grad_enabled]
        self.reads = reads.Reads(self.leaf, self.recorder.fail, lambda: _outside(is_grad), dict(around))
        self.reads.shares = _IDENTITY in constants
        self.names: list[str] = []
        self.numbers: set[str] = set()

    def arguments(self, kind: str) -> list[Tensor]:
        score = [self.recorder.tensor("score", torch.float32)] if kind == "score_mod" else []
        return [*score, *(self.recorder.tensor(name, torch.int32) for name in _INDICES)]

    def leaf(self, value: Any, name: str, variable: str) -> Any:
        place = f"leaf{len(self.names)}"
        if isinstance(value, Tensor):
            self.recorder.check_dtype(value.dtype, f"captures {name}")
            if record.is_number(value):
                return self.recorder.filled((value, variable, name, self.reads))
            made: Any = self.recorder.tensor(place, value.dtype, value.dim(), variable, self._sizes(value, variable))
            made.source = (value, variable, name, self.reads)
        elif variable in self.constants or reads.is_infinite(value):
            return value
        else:
            made = self.recorder.number(place, reads.is_int(value), variable)
            self.numbers.add(variable)
        self.names.append(name)
        return made

    def _sizes(self, value: Tensor, variable: str) -> dict[int, int]:
        known = {d: int(n) for d, n in enumerate(value.shape) if record.size_variable(variable, d) in self.constants}
        for d, n in known.items():
            self.reads.require(f"{record.size_variable(variable, d)} == {n}")
        return known


def _trace(fn: Mod, kind: str) -> _Mod:
    """Traces a mod, first with every number a run-time argument; those that it decides by become structure."""
    check_parameters(fn, kind)
    constants: frozenset[str] = frozenset()
    around = states.snapshot()
    while True:
        try:
            with _by_itself():
                return _trace_with(fn, kind, constants, around)
        except Decides as decides:
            if decides.variables <= constants:
                raise errors.Error(f"{described(fn, kind)} changes what it reads while it is traced") from None
            constants |= decides.variables


def _trace_with(fn: Mod, kind: str, constants: frozenset[str], around: Mapping[Any, Any]) -> _Mod:
    world, graphs = _graphs(fn, kind, constants, around, "cpu")
    if world.recorder.asked_device:  # it may hand it on, to what makes a tensor there
        _, others = _graphs(fn, kind, constants, around, "meta")
        if [(g.text, g.reads) for g in graphs] != [(g.text, g.reads) for g in others]:
            raise _refused(fn, kind, "decides by the device of a tensor that it makes or is given", None)
    match, numbers = world.reads.compiled(), frozenset(world.numbers)
    whole, *parts = (
        _of_graph(g, k, match, numbers) for g, k in zip(graphs, (kind, "score_mod", "mask_mod"), strict=False)
    )
    return replace(whole, parts=(parts[0], parts[1])) if parts else whole


def _graphs(
    fn: Mod, kind: str, constants: frozenset[str], around: Mapping[Any, Any], device: str
) -> tuple[_World, Sequence[Graph]]:
    world = _World(constants, around, device)
    recorder = world.recorder
    with _explaining(fn, kind, recorder), recorder, record.Spelling(recorder):
        arguments = world.arguments(kind)
        stand_in = world.reads.stand_in(fn, "f", getattr(fn, "__name__", type(fn).__name__))
        result = stand_in(*arguments)
        world.reads.check_unwritten()
        world.reads.check_functions()
        if world.reads.confuses_things():
            recorder.fail(Decides(frozenset([_IDENTITY])))
        world.reads.result(torch.get_default_dtype, (), "default_dtype", "torch.get_default_dtype")  # of 1.5, of q / k
        if recorder.failure is not None:  # and the mod caught it
            raise recorder.failure
    _check_result(fn, kind, result)
    recorder.graph.output(result.node if isinstance(result, record.Value) else recorder.constant(result).node)
    names = (("score", *_INDICES) if kind == "score_mod" else _INDICES, world.names)
    return world, canonical(recorder, names, lambda message, node: _refused(fn, kind, message, node))


def _of_graph(graph: Graph, kind: str, match: Any, numbers: frozenset[str]) -> _Mod:
    captures = tuple(_capture(r, kind) for r in graph.reads)
    pick = tuple(evaluator(r.leaf if isinstance(r.leaf, tuple) else ("leaf", r.leaf)) for r in graph.reads)
    if graph.is_trivial:
        return _Mod(None, (), match, (), numbers)
    return _Mod(graph, captures, match, pick, numbers)


@contextlib.contextmanager
def _outside(is_grad: bool) -> Iterator[None]:
    """Lets code run that is not the mod's and may make tensors: none of it is recorded."""
    with contextlib.ExitStack() as stack:
        if torch.utils._python_dispatch._len_torch_dispatch_stack():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(torch.set_grad_enabled(is_grad))
        yield


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    """Whatever the call that needs the trace stands in: a FakeTensorMode, a default device, inference mode, vmap."""
    with contextlib.ExitStack() as stack:
        if torch.utils._python_dispatch._len_torch_dispatch_stack():
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _capture(read: Read, kind: str) -> Capture:
    return Capture(read.kind, read.dtype, read.rank, kind.removesuffix("_mod"), read.name)


def check_parameters(fn: Any, kind: str) -> None:
    """Raises TypeError unless a function takes what a "score_mod" or a "mask_mod" is called with."""
    wanted = _WANTED[kind]
    if not callable(fn):
        raise TypeError(f"{kind} must be a function of ({', '.join(wanted)}), is {type(fn).__name__}")
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        signature = inspect.signature(target)
    except ValueError:
        return  # a builtin that does not tell
    try:
        signature.bind(*wanted)
    except TypeError:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        raise TypeError(
            f"{described(fn, kind)} must take ({', '.join(wanted)}); it takes {inspect.Signature(bare)}"
            f"{_hint(signature, kind)}"
        ) from None


def _hint(signature: inspect.Signature, kind: str) -> str:
    """What to write where the function is a mod of the other kind, by how many arguments it takes."""
    other = "mask_mod" if kind == "score_mod" else "score_mod"
    try:
        signature.bind(*_WANTED[other])
    except TypeError:
        return ""
    made = "tk.flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
    if other == "mask_mod":
        return f". A mask_mod does: tk.flex_attention(query, key, value, block_mask={made})"
    return ". A score_mod does: tk.flex_attention(query, key, value, score_mod=score_mod)"


def _check_result(fn: Any, kind: str, result: Any) -> None:
    what = f"{described(fn, kind)} returns"
    if not isinstance(result, Tensor):
        raise TypeError(
            f"{what} {type(result).__name__}; it must return a tensor: torch.where, comparisons, arithmetic"
        )
    if result.dim() != 0:
        raise TypeError(f"{what} a tensor of {result.dim()} dimensions; it must return one number for one score")
    if kind == "mask_mod" and result.dtype is not torch.bool:
        raise TypeError(f"{what} {_name(result.dtype)}; a mask must be bool (compare with != 0)")
    if kind == "score_mod" and not result.dtype.is_floating_point:
        raise TypeError(f"{what} {_name(result.dtype)}; a score must be floating-point")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- What is refused ---


class _explaining:
    """Errors of the mod, or of torch about it, with the mod's line."""

    def __init__(self, fn: Any, kind: str, recorder: Recorder):
        self.fn, self.kind, self.recorder = fn, kind, recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, errors.Error):
            return
        failure = self.recorder.failure or error  # torch may have made another of it on the way
        if isinstance(failure, Decides):
            raise failure from None
        if isinstance(failure, KeyError) and failure.args and isinstance(failure.args[0], Tensor):
            failure = record.Refused("looks up a tensor in a dict, where no two are equal; write tensor[index]")
        first = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
        if isinstance(failure, TypeError) and first.startswith("catching classes"):
            first = "catches an exception whose class has functions or attributes of its own; catch a plain one"
        if isinstance(failure, record.ControlFlow) and _is_in_numpy(failure):
            first = "NumPy is given a tensor, which has no numbers yet: call torch's function of that name"
        elif isinstance(failure, record.ControlFlow):
            first = (
                "control flow on a tensor (an if, a loop, or .item()): what holds for one score need not hold for the "
                "next; write it with torch.where, & and |"
            )
        raise _refused(self.fn, self.kind, first, _line(error)) from error


def _is_in_numpy(error: BaseException) -> bool:
    """Whether it was raised while a tensor was to become an array."""
    return any(frame.name in ("__array__", "numpy", "tolist") for frame in traceback.extract_tb(error.__traceback__))


def _line(error: BaseException) -> str | None:
    """file:line of the innermost frame that is neither torch's nor tk's."""
    found, tb = None, error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not record.is_own(file) and isinstance(tb, types.TracebackType):
            found = f"{file}:{tb.tb_lineno}"
        tb = tb.tb_next
    return found


def _refused(fn: Any, kind: str, message: str, line: str | None) -> errors.UnsupportedError:
    at = f"{line}: " if line else ""
    return errors.UnsupportedError(f"{at}{described(fn, kind)}: {message}")
