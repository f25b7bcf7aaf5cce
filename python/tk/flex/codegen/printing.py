"""Prints a pair's graphs as the device functions that attention kernels call (tk.kernels.attention.softmax).

A value has the shape that its indices ask for: b is a number, h one or [rows, 1], q_idx [rows, 1], kv_idx [1, columns],
the score [rows, columns]; the rest follows by broadcasting. Captured tensors are read within their bounds only: a lane
whose indices lie outside — of a position past the end, or masked, or the mod's mistake — reads NaN, or 0 of integers.

The functions are called by Triton's kernels and by Gluon's, whose tensors have layouts: so a constant is a cast number,
which takes the layout of what it stands beside.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tk.aot.spec import Bundle, Const
from tk.codegen import source
from tk.codegen.ir import COMPARE, FLOATS, Kernel, Value, values_in
from tk.codegen.printing.scalars import FAST_RULES, TL_DTYPES, expression
from tk.flex.codegen import lowering
from tk.flex.tracing.canonical import Graph
from tk.flex.tracing.trace import Traced
from tk.kernels.attention import bundles
from tk.kernels.attention.problem import Capture

NAMES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_INDICES = ("b", "h", "q_idx", "kv_idx")
_IMPORTS = {
    r"\blibdevice\.": "from triton.language.extra.cuda import libdevice",
    r"\bdevice\.": "from tk.codegen import device",
    r"\badd_gradient\(": "from tk.kernels.attention.gradients import add_gradient",
    r"\bload_integers\(": "from tk.kernels.attention.operands import load_integers",
    r"\bload_pairs\(": "from tk.kernels.attention.operands import load_pairs",
}
# tanh by exp2: off by 1e-7 at most, which is as good for a score, at a third of libdevice's time.
_SCORE_RULES = {**FAST_RULES, "tanh": "1.0 - 2.0 / (1.0 + tl.exp2({0} * 2.8853900817779268))",
                "sin": "tl.sin({0})", "cos": "tl.cos({0})"}  # fmt: skip
_INFIX = frozenset({"add", "sub", "mul", *COMPARE})
_NAMED = ("constant", "number", "index")  # written where they are used


class Functions(NamedTuple):
    """The device functions of a pair of mods; None where there is none."""

    SCORE: Any
    MASK: Any
    SCORE_GRAD: Any


@dataclass(frozen=True)
class Mods:
    """The printed functions of a pair: texts of `score_mod`, `mask_mod` and `score_grad`, "" where there is none, and
    import lines that they need.

    score_grad(score, b, h, q_idx, kv_idx, captures, grads, grad, keep, Q_AXIS, WITH_CAPTURES) -> gradient of
    score; grads are a scale, and for each captured tensor the buffer into which it adds the gradient (gradients.py), or
    the gradient itself, where no other score has a part in an element's."""

    score: str = ""
    mask: str = ""
    score_grad: str = ""
    imports: tuple[str, ...] = ()

    def functions(self, name: str) -> Functions:
        """The functions of a module `name` that has nothing else."""
        texts = dict(score_mod=self.score, mask_mod=self.mask, score_grad=self.score_grad)
        head = "\n".join(["import triton", "import triton.language as tl", *self.imports])
        text = f'"""{name}: printed by {__name__}."""\n\n{head}\n\n\n' + "\n\n".join(filter(None, texts.values()))
        return Functions(*(getattr(source.module(name, text), f) if texts[f] else None for f in texts))

    def bundle(self, name: str, captures: Bundle) -> bundles.Mods:
        """The bundle for a kernel's launch: the functions, and what they read."""
        score, mask, score_grad = map(Const, self.functions(name))
        return bundles.Mods(score, mask, score_grad, captures, Const(None), bundles.NOTHING)


def captures_of(traced: Traced, gradients: bool = True) -> tuple[Capture, ...]:
    """A pair's captures as the kernels' records have them. Floats that the score reads from tensors have a gradient."""
    found = []
    for i, c in enumerate(traced.captures):
        if c.kind != "tensor":
            found.append(Capture(f"c{i}", c.kind))
            continue
        grad = gradients and c.of == "score" and c.dtype.is_floating_point
        is_per_score = grad and traced.score is not None and _is_per_score(traced.score, i)
        keys = _keys_of(traced, i) if c.dtype != torch.int64 else None  # operands.load_integers reads those
        found.append(Capture(f"c{i}", "tensor", NAMES[c.dtype], c.rank, grad, is_per_score, keys))
    return tuple(found)


def _reads_of(graph: Graph | None, number: int) -> list[list[Any]]:
    """The indices of each read of a captured tensor. What is equal is one node (canonical.py), so one read is one."""
    source = next((n for n in graph.captures if n.meta["capture"] == number), None) if graph is not None else None
    reads = [] if source is None else [n for n in source.users if n.target is torch.ops.aten.index.Tensor]
    return [list(n.args[1]) for n in reads]  # type: ignore[arg-type]


def _keys_of(traced: Traced, number: int) -> int | None:
    """The dimension of a captured tensor in which every read is at kv_idx, while another's index varies with q_idx."""
    found: set[int | None] = set()
    for at in _reads_of(traced.score, number) + _reads_of(traced.mask, number):
        deps = [_arguments_in(i) for i in at]
        keys = [d for d, names in enumerate(deps) if "kv_idx" in names]
        is_plain = len(keys) == 1 and at[keys[0]].op == "placeholder" and any("q_idx" in names for names in deps)
        found.add(keys[0] if is_plain else None)
    return found.pop() if len(found) == 1 else None


def _arguments_in(index: Any) -> set[Any]:
    """Which of a mod's arguments an index is worked out from."""
    if not isinstance(index, torch.fx.Node):
        return set()
    return {index.target}.union(*map(_arguments_in, index.all_input_nodes))


def _is_per_score(score: Graph, number: int) -> bool:
    """Whether each score reads an element of its own of a captured tensor: at one place, whose indices have every
    position among them."""
    reads = _reads_of(score, number)
    return len(reads) == 1 and {getattr(i, "target", None) for i in reads[0]} >= set(_INDICES)


def mods_of(traced: Traced, backward: bool) -> Mods:
    """The printed functions of a pair. Raises tk.UnsupportedError for an op that kernels do not have."""
    captures = captures_of(traced)
    score = _forward(traced.score, captures, "score_mod") if traced.score is not None else ""
    mask = _forward(traced.mask, captures, "mask_mod") if traced.mask is not None else ""
    grad = _derivative(traced.score, captures) if backward and traced.score is not None else ""
    text = score + mask + grad
    imports = [line for pattern, line in _IMPORTS.items() if re.search(pattern, text)]
    return Mods(score, mask, grad, tuple(imports))


def _forward(graph: Graph, captures: Sequence[Capture], name: str) -> str:
    printer = Printer(lowering.forward(graph), captures, has_pairs=True)
    result = printer.run()
    value, deps = printer.named(result), result.axes
    if name == "score_mod":
        text = printer.cast(result, "fp32")
        if "score" not in deps and not {"q_idx", "kv_idx"} <= deps:
            text = f"tl.where(score == score, {text}, {text})"  # of the score's shape
    else:
        text = value if deps & {"q_idx", "kv_idx", "h"} else f"(kv_idx >= 0) & {value}"
    score = ["score"] if name == "score_mod" else []
    arguments = ", ".join([*score, *_INDICES, "captures", "PAIRS: tl.constexpr = False"])
    return _function(name, arguments, [*printer.lines, f"return {text}"])


def _derivative(graph: Graph, captures: Sequence[Capture]) -> str:
    """score_grad: the derivative of the score, and what is added to captured tensors' gradients where they are read."""
    printer = Printer(lowering.derivative(graph, [c.name for c in captures if c.grad]), captures, has_pairs=False)
    result = printer.run()
    text = printer.named(result)
    if not result.axes & {"score", "grad"}:
        text = f"tl.where(score == score, {text}, {text})"  # of the score's shape
    arguments = ", ".join(
        ["score", *_INDICES, "captures", "grads", "grad", "keep", "Q_AXIS: tl.constexpr", "WITH_CAPTURES: tl.constexpr"]
    )
    return _function("score_grad", arguments, [*printer.lines, f"return tl.where(keep, {text}, 0.0)"])


def _function(name: str, arguments: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"@triton.jit\ndef {name}({arguments}):\n{body}\n"


def argument_names(c: Capture) -> list[str]:
    """The names of a capture's arguments, as Problem.captured has them."""
    if c.kind != "tensor":
        return [c.name]
    words = [f"{c.name}_words"] if c.has_two_widths else []
    return [
        c.name,
        *words,
        *(f"{c.name}_size_{d}" for d in range(c.rank)),
        *(f"{c.name}_stride_{d}" for d in range(c.rank)),
    ]


@dataclass
class Place:
    """The place at which a captured tensor is read. offsets: a term for each dimension, by the tensor's own strides;
    dense: the offset in a dense copy; bounds: of each dimension, comparisons that hold inside; deps: what it varies
    with."""

    offsets: list[str]
    dense: str
    bounds: list[list[str]]
    deps: frozenset[str]

    def offset(self, without: int | None = None) -> str:
        return " + ".join(text for d, text in enumerate(self.offsets) if d != without) or "0"

    def inside(self, without: int | None = None) -> str:
        """Empty where everything is."""
        return " & ".join(text for d, texts in enumerate(self.bounds) if d != without for text in texts)


@dataclass
class Printer:
    """A kernel of one mod as lines. has_pairs: whether the function has PAIRS. places: by the captured tensor and its
    indices."""

    kernel: Kernel
    captures: Sequence[Capture]
    has_pairs: bool
    lines: list[str] = field(default_factory=list)
    places: dict[Any, Place] = field(default_factory=dict)

    def run(self) -> Value:
        """The result."""
        self.approximable = lowering.approximable(self.kernel)
        names = [n for c in self.captures for n in argument_names(c)]
        text = "\n".join(f"{v}" for v in self.kernel.values)
        self.lines += [f"{name} = captures[{i}]" for i, name in enumerate(names) if self._is_read(name, text)]
        result: Value | None = None
        for v in self.kernel.values:
            if v.op == "store":
                source = self.kernel.value(v.args[0])
                if v.buffer == lowering.RESULT:
                    result = source
                else:
                    self._accumulate(v, source)
            elif v.op == "load":
                self._load(v)
            elif v.op not in _NAMED:
                self.lines.append(f"t{v.number} = {self._expression(v)}")
        assert result is not None
        return result

    def _is_read(self, name: str, text: str) -> bool:
        """Whether a text reads an argument of a capture: of a tensor that is read all, and others by name."""
        return re.search(rf"\b{name.partition('_')[0]}\b|\b{name}\b", text) is not None

    # --- Values ---

    def named(self, v: Value, plain: bool = False) -> str:
        """plain: a constant may be a Python number, which takes the dtype of what it stands beside."""
        if v.op == "constant":
            return literal(v.data, v.dtype, plain)
        if v.op == "number":
            return str(v.data)
        return str(v.data) if v.op == "index" else f"t{v.number}"

    def cast(self, v: Value, dtype: str) -> str:
        if v.op == "constant":
            return literal(v.data, dtype, False)
        text = self.named(v)
        if v.dtype == dtype:
            return text
        if v.dtype in FLOATS and dtype in ("u8", "i8", "i16"):  # by way of 64 bits, as C does it
            text = f"{text}.to(tl.int64)"
        return f"{text}.to({TL_DTYPES[dtype]})"

    def _expression(self, v: Value) -> str:
        args = [self.kernel.value(a) for a in v.args]
        if v.op == "cast":
            return self.cast(args[0], v.dtype)
        if v.op == "bitcast":
            return f"{self.named(args[0])}.to({TL_DTYPES[v.dtype]}, bitcast=True)"
        dtype = args[1].dtype if v.op == "where" else args[0].dtype
        may_be_plain = v.op in _INFIX and not all(a.op == "constant" for a in args)
        operands = [self.named(a, may_be_plain) for a in args]
        if v.number in self.approximable and v.op in _SCORE_RULES and dtype == "fp32":
            return _SCORE_RULES[v.op].format(*operands)
        return expression(v, operands, dtype)

    # --- Captured tensors ---

    def _load(self, v: Value) -> None:
        place = self._place(v)
        capture = next(c for c in self.captures if c.name == v.buffer)
        if capture.has_two_widths:
            inside = place.inside() or "tl.cast(True, tl.int1)"
            at = place.offset()
            self.lines.append(f"t{v.number} = load_integers({v.buffer}, {at}, {inside}, {v.buffer}_words)")
            return
        missing = _missing(v.dtype)
        mask = f", mask={place.inside()}, other={missing}" if place.bounds else ""
        lines = [f"t{v.number} = tl.load({v.buffer} + {place.offset()}{mask})"]
        if self.has_pairs and (d := capture.keys) is not None:
            row, inside = place.offset(without=d), place.inside(without=d)
            pairs = f"load_pairs({v.buffer}, {row}, kv_idx, {v.buffer}_size_{d}, {inside}, {missing})"
            lines = ["if PAIRS:", f"    t{v.number} = {pairs}", "else:", *(f"    {line}" for line in lines)]
        self.lines += lines

    def _place(self, v: Value) -> Place:
        key = (v.buffer, v.index)
        if key not in self.places:
            self.places[key] = self._new_place(v, f"{v.buffer}_at{len(self.places)}")
        return self.places[key]

    def _new_place(self, v: Value, name: str) -> Place:
        place = Place([], "0", [], frozenset())
        for d, index in enumerate(v.index):
            size, text = f"{v.buffer}_size_{d}", f"{name}_{d}"
            at = self.kernel.value(values_in(index)[0]) if values_in(index) else None
            bounds = []
            if at is None:
                self.lines.append(f"{text} = tl.cast({int(index)}, tl.int64){f' + {size}' if int(index) < 0 else ''}")
                bounds += [f"({text} >= 0)"] if int(index) < 0 else []
            elif at.op == "index":  # b, h, q_idx or kv_idx: not below 0
                self.lines.append(f"{text} = {at.data}")
            else:
                self.lines.append(f"{text} = {self.cast(at, at.dtype if at.dtype == 'i64' else 'i32')}")
                self.lines.append(f"{text} = tl.where({text} < 0, {text} + {size}, {text})")
                bounds.append(f"({text} >= 0)")
            bounds.append(f"({text} < {size})")
            wide = f"tl.cast({text}, tl.int64)"
            place.deps |= at.axes if at is not None else frozenset()
            place.bounds.append(bounds)
            place.offsets.append(f"{wide} * {v.buffer}_stride_{d}")
            place.dense = f"({place.dense}) * {size} + {wide}" if d else wide
        return place

    def _accumulate(self, v: Value, x: Value) -> None:
        """Adds x where a captured tensor is read: summed over what the place does not vary with, so that it is added to
        once. Where no other score reads there, x is written."""
        place = self._place(v)
        name = f"a{v.number}"
        captures = [c for c in self.captures if c.grad]
        number = [c.name for c in captures].index(v.buffer)
        if captures[number].is_per_score:
            inside = " & ".join(filter(None, ["keep", place.inside()]))
            at, value = f"grads[{number + 1}] + {place.dense}", f"tl.zeros_like(score) + {self.named(x)}"
            dtype = TL_DTYPES[captures[number].dtype]
            self.lines.append("if WITH_CAPTURES:")
            self.lines.append(f"    tl.store({at}, ({value}).to({dtype}), mask={inside})")
            return
        self.lines.append("if WITH_CAPTURES:")
        self.lines.append(f"    {name} = tl.where(keep, tl.zeros_like(score) + {self.named(x)}, 0.0)")
        over = [axis for axis, index in (("Q_AXIS", "q_idx"), ("1 - Q_AXIS", "kv_idx")) if index not in place.deps]
        if len(over) == 2:
            self.lines.append(f"    {name} = tl.sum(tl.sum({name}, 1), 0)")
        elif over:
            self.lines.append(f"    {name} = tl.sum({name}, {over[0]}, keep_dims=True)")
        inside = place.inside() or "tl.cast(True, tl.int1)"
        self.lines.append(f"    add_gradient(grads[{number + 1}], grads[0], {place.dense}, {name}, {inside})")


# --- Texts ---


def _missing(dtype: str) -> str:
    return 'float("nan")' if dtype in FLOATS else "0"


def literal(value: Any, dtype: str, plain: bool) -> str:
    """A constant of this dtype and value, that Triton and Gluon make alike."""
    if dtype == "fp64":
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        return f"tl.cast(tl.cast({bits}, tl.int64), tl.float64, bitcast=True)"
    if dtype in FLOATS:
        value = float(value)
        is_ordinary = math.isfinite(value) and (value == 0 or 2.0**-126 <= abs(value) <= (2 - 2**-23) * 2.0**127)
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        return f"({text})" if plain and is_ordinary else f"tl.cast({text}, {TL_DTYPES[dtype]})"
    if dtype == "i1":
        return f"tl.cast({bool(value)}, tl.int1)"
    return f"({int(value)})" if plain else f"tl.cast({int(value)}, {TL_DTYPES[dtype]})"
