"""Prints a pair's graphs as the device functions that attention kernels call (tk.kernels.attention.softmax).

A value has the shape that its indices ask for: b is a number, h one or [rows, 1], q_idx [rows, 1], kv_idx [1, columns],
the score [rows, columns]; the rest follows by broadcasting. Captured tensors are read within their bounds only: a lane
whose indices lie outside — of a position past the end, or masked, or the mod's mistake — reads NaN, or 0 of integers.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tk import errors
from tk.codegen.scalars import ANY_RULES, BOOL_RULES, FAST_RULES, FP64_RULES, INT_RULES, TL_DTYPES
from tk.flex.canonical import Graph
from tk.flex.trace import Traced
from tk.kernels.attention.entry import Mods
from tk.kernels.attention.problem import Capture

aten = torch.ops.aten

NAMES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_INDICES = ("b", "h", "q_idx", "kv_idx")

# ATen -> the scalar op of codegen's tables, where the names differ.
_OPS = {
    "true_divide": "div", "floor_divide": "floor_div", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "logical_and": "and", "logical_or": "or", "logical_xor": "xor", "bitwise_not": "bitwise_not", "logical_not": "not",
    "__and__": "and", "__or__": "or", "__xor__": "xor", "absolute": "abs", "negative": "neg", "greater": "gt",
    "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne", "special_expit": "sigmoid",
    "fix": "trunc", "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "__lshift__": "shl", "__rshift__": "shr",
    "sgn": "sign",
}  # fmt: skip
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGICAL = ("logical_and", "logical_or", "logical_xor", "logical_not")
# Of sizes and captured numbers.
_PYTHON = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=",
           "lt": "<", "le": "<=", "gt": ">", "ge": ">="}  # fmt: skip
_IMPORTS = {
    r"\blibdevice\.": "from triton.language.extra.cuda import libdevice",
    r"\bdevice\.": "from tk.codegen import device",
    r"\badd_gradient\(": "from tk.kernels.attention.gradients import add_gradient",
}
# tanh by exp2: off by 1e-7 at most, which is as good for a score, at a third of libdevice's time.
_SCORE_RULES = {**FAST_RULES, "tanh": "1.0 - 2.0 / (1.0 + tl.exp2({0} * 2.8853900817779268))",
                "exp": "tl.exp({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})"}  # fmt: skip


def captures_of(traced: Traced, gradients: bool = True) -> tuple[Capture, ...]:
    """A pair's captures as the kernels' records have them. Floats that the score reads from tensors have a gradient."""
    found = []
    for i, c in enumerate(traced.captures):
        if c.kind != "tensor":
            found.append(Capture(f"c{i}", c.kind))
            continue
        grad = gradients and c.of == "score" and c.dtype.is_floating_point
        found.append(Capture(f"c{i}", "tensor", NAMES[c.dtype], c.rank, grad))
    return tuple(found)


def mods_of(traced: Traced, backward: bool) -> Mods:
    """The printed functions of a pair. Raises tk.UnsupportedError for an op that kernels do not have."""
    captures = captures_of(traced)
    score = _forward(traced.score, captures, "score_mod") if traced.score is not None else ""
    mask = _forward(traced.mask, captures, "mask_mod") if traced.mask is not None else ""
    grad = _joint(traced.score, captures) if backward and traced.score is not None else ""
    text = score + mask + grad
    imports = [line for pattern, line in _IMPORTS.items() if re.search(pattern, text)]
    return Mods(score, mask, grad, tuple(imports))


@dataclass
class Value:
    """text: a name or literal. dtype: None for Python's own numbers. deps: the indices (or "score") it varies with."""

    text: str
    dtype: torch.dtype | None
    deps: frozenset[str] = frozenset()


@dataclass
class Read:
    """One aten.index of a captured tensor: where it reads, and whether that is inside."""

    capture: Capture
    offset: str  # of the tensor's own strides
    dense: str  # of a dense copy
    inside: str
    deps: frozenset[str]


@dataclass
class Printer:
    captures: Sequence[Capture]
    prefix: str = "t"
    lines: list[str] = field(default_factory=list)
    values: dict[fx.Node, Value] = field(default_factory=dict)
    reads: dict[fx.Node, Read] = field(default_factory=dict)

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def unpack(self) -> None:
        """The names of the captures' arguments, from the tuple."""
        names = [n for c in self.captures for n in argument_names(c)]
        for i, name in enumerate(names):
            self.line(f"{name} = captures[{i}]")

    # --- Nodes ---

    def of(self, x: Any) -> Value:
        if isinstance(x, fx.Node):
            return self.values[x]
        return Value(literal(x), None)

    def placeholder(self, node: fx.Node) -> None:
        if "capture" not in node.meta:
            self.values[node] = Value(node.name, node.meta["dtype"], frozenset([node.name]))
            return
        c = self.captures[node.meta["capture"]]
        if c.kind == "tensor" and c.rank == 0:
            self.line(f"{c.name}_value = tl.load({c.name})")
            self.values[node] = Value(f"{c.name}_value", node.meta["dtype"])
        elif c.kind == "float":
            self.values[node] = Value(c.name, torch.float32)
        else:
            self.values[node] = Value(c.name, torch.int64)

    def call(self, node: fx.Node) -> None:
        name = f"{self.prefix}{len(self.values)}"
        if node.target is aten.index.Tensor:
            self.values[node] = self._index(node, name)
        elif not isinstance(node.target, torch._ops.OpOverload):
            self.values[node] = self._python(node, name)
        else:
            self.values[node] = self._aten(node, name)

    def _python(self, node: fx.Node, name: str) -> Value:
        target = getattr(node.target, "__name__", str(node.target))
        args = [self.of(a) for a in node.args]
        if target in ("sym_float", "_sym_float"):
            self.line(f"{name} = {cast(args[0], torch.float32)}")
            return Value(name, torch.float32)
        if target == "neg":
            self.line(f"{name} = -{args[0].text}")
            return Value(name, args[0].dtype)
        if target not in _PYTHON:
            raise unsupported(node)
        self.line(f"{name} = {args[0].text} {_PYTHON[target]} {args[1].text}")
        is_float = target == "truediv" or torch.float32 in (args[0].dtype, args[1].dtype)
        return Value(name, torch.float32 if is_float else torch.int64)

    def _aten(self, node: fx.Node, name: str) -> Value:
        op, dtype = node.target.overloadpacket.__name__, dtype_of(node)  # type: ignore[union-attr]
        if op == "sym_size":
            capture = self.captures[node.args[0].meta["capture"]]  # type: ignore[union-attr]
            return Value(f"{capture.name}_size_{node.args[1]}", torch.int64)
        args = [self.of(a) for a in node.args if not isinstance(a, list | tuple)]
        deps = frozenset().union(*(a.deps for a in args)) if args else frozenset()
        if op in ("full", "scalar_tensor"):
            value = self.of(node.args[1] if op == "full" else node.args[0])
            text = f"tl.full((), {value.text}, {tl_dtype(dtype)})" if value.dtype is None else cast(value, dtype)
        elif op in ("_to_copy", "convert_element_type"):
            text = cast(args[0], dtype)
        else:
            text = self._pointwise(node, op, args, dtype)
        self.line(f"{name} = {text}")
        return Value(name, dtype, deps)

    def _pointwise(self, node: fx.Node, op: str, args: list[Value], dtype: torch.dtype) -> str:
        if op == "where":
            return f"tl.where({args[0].text}, {cast(args[1], dtype)}, {cast(args[2], dtype)})"
        if op == "masked_fill":
            return f"tl.where({args[1].text}, {cast(args[2], dtype)}, {cast(args[0], dtype)})"
        if op in _LOGICAL:
            args = [Value(cast(a, torch.bool), torch.bool, a.deps) for a in args]
            return rule(node, _OPS[op], torch.bool).format(*(a.text for a in args))
        name = _OPS.get(op, op)
        if name in _COMPARE:
            common = result_dtype(args)
            return ANY_RULES[name].format(*(cast(a, common) for a in args))
        work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        operands = [cast(a, work) for a in args]
        text = self._composed(node, name, operands, work)
        return text if work == dtype else f"({text}).to({tl_dtype(dtype)})"

    def _composed(self, node: fx.Node, op: str, operands: list[str], dtype: torch.dtype) -> str:
        """An op that is made of others, or a row of the tables."""

        def table(name: str, *of: str) -> str:
            return rule(node, name, dtype).format(*of)

        if op in ("add", "sub") and (alpha := node.kwargs.get("alpha", 1)) != 1:
            operands = [operands[0], f"({operands[1]} * {self.of(alpha).text})"]
        if op == "rsub":
            return table("sub", operands[1], operands[0])
        if op == "div" and (mode := node.kwargs.get("rounding_mode")) is not None:
            return table("floor_div" if mode == "floor" else "trunc_div", *operands)
        if op in ("clamp", "clamp_min", "clamp_max"):
            given = list(node.args[1:]) + [None]
            low = node.kwargs.get("min", given[0]) if op != "clamp_max" else None
            high = node.kwargs.get("max", given[1] if op == "clamp" else given[0]) if op != "clamp_min" else None
            text = operands[0]
            for bound, name in ((low, "maximum"), (high, "minimum")):
                text = text if bound is None else table(name, text, cast(self.of(bound), dtype))
            return text
        if op == "pow":
            exponent = node.args[1]
            if exponent == 2:
                return f"{operands[0]} * {operands[0]}"
            if exponent == 0.5:
                return table("sqrt", operands[0])
        if op == "square":
            return f"{operands[0]} * {operands[0]}"
        if op == "relu":
            return table("maximum", operands[0], "0")
        if op == "bitwise_not" and dtype == torch.bool:
            op = "not"
        return table(op, *operands)

    # --- Captured tensors ---

    def _index(self, node: fx.Node, name: str) -> Value:
        read = self._read(node, name)
        self.reads[node] = read
        c = read.capture
        missing = 'float("nan")' if c.dtype.startswith(("fp", "bf")) else "0"
        self.line(f"{name} = tl.load({c.name} + {read.offset}, mask={read.inside}, other={missing})")
        return Value(name, dtype_of(node), read.deps)

    def _read(self, node: fx.Node, name: str) -> Read:
        source, indices = node.args
        c = self.captures[source.meta["capture"]]  # type: ignore[union-attr]
        offset, dense, inside = "", "", []
        deps: frozenset[str] = frozenset()
        for d, index in enumerate(indices):  # type: ignore[arg-type]
            at, size = self.of(index), f"{c.name}_size_{d}"
            deps |= at.deps
            text = f"{name}_{d}"
            if isinstance(index, fx.Node) and index.name in _INDICES:
                self.line(f"{text} = {at.text}")
            elif at.dtype is None:
                self.line(f"{text} = tl.full((), {at.text}, tl.int32){f' + {size}' if index < 0 else ''}")
            else:
                self.line(f"{text} = {cast(at, torch.int64) if at.dtype == torch.int64 else cast(at, torch.int32)}")
                self.line(f"{text} = tl.where({text} < 0, {text} + {size}, {text})")
                inside.append(f"({text} >= 0)")
            inside.append(f"({text} < {size})")
            wide = f"tl.cast({text}, tl.int64)"
            offset += f"{' + ' if d else ''}{wide} * {c.name}_stride_{d}"
            dense = f"({dense}) * {size} + {wide}" if d else wide
        return Read(c, offset, dense, " & ".join(inside), deps)


def argument_names(c: Capture) -> list[str]:
    """As Problem.capture_args has them."""
    if c.kind != "tensor":
        return [c.name]
    return [c.name, *(f"{c.name}_size_{d}" for d in range(c.rank)), *(f"{c.name}_stride_{d}" for d in range(c.rank))]


def _forward(graph: Graph, captures: Sequence[Capture], name: str) -> str:
    printer = Printer(captures)
    printer.unpack()
    value = _print_nodes(printer, graph)
    arguments = ", ".join([*(["score"] if name == "score_mod" else []), *_INDICES, "captures"])
    if name == "score_mod":
        text = cast(value, torch.float32)
        if "score" not in value.deps and not {"q_idx", "kv_idx"} <= value.deps:
            text = f"tl.where(score == score, {text}, {text})"  # of the score's shape
        result = text
    else:
        result = cast(value, torch.bool)
        if not value.deps & {"q_idx", "kv_idx", "h"}:
            result = f"(kv_idx >= 0) & {result}"
    lines = "\n".join(printer.lines)
    return f"@triton.jit\ndef {name}({arguments}):\n{lines}\n    return {result}\n"


def _print_nodes(printer: Printer, graph: Graph) -> Value:
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if node.meta.get("rank", 0) == 0:
                printer.placeholder(node)
        elif node.op == "call_function":
            printer.call(node)
    return printer.of(graph.result)


# --- The joint graph ---


def _joint(graph: Graph, captures: Sequence[Capture]) -> str:
    """score_grad: the derivative of the score, and what is added to captured tensors' gradients where they are read."""
    printer = Printer(captures)
    printer.unpack()
    _print_nodes(printer, graph)
    reads = [n for n in printer.reads if printer.reads[n].capture.grad]
    joint, inputs = trace_joint(graph, reads)
    second = Printer(captures, "j", printer.lines)
    for node, source in zip((n for n in joint.nodes if n.op == "placeholder"), inputs, strict=True):
        second.values[node] = _joint_input(printer, source)
    output: Sequence[Any] = ()
    for node in joint.nodes:
        if node.op == "call_function":
            second.call(node)
        elif node.op == "output":
            output = node.args[0]
    score = second.of(output[0]) if output[0] is not None else Value("0.0", None)
    grads = [c.name for c in captures if c.grad]
    for node, x in zip(reads, output[1:], strict=True):
        if x is not None:
            _accumulate(second, printer.reads[node], second.of(x), grads)
    text = cast(score, torch.float32)
    if "score" not in score.deps:
        text = f"tl.where(score == score, {text}, {text})"  # of the score's shape
    second.line(f"return tl.where(keep, {text}, 0.0)")
    arguments = ", ".join(
        ["score", *_INDICES, "captures", "grads", "grad", "keep", "Q_AXIS: tl.constexpr", "WITH_CAPTURES: tl.constexpr"]
    )
    lines = "\n".join(second.lines)
    return f"@triton.jit\ndef score_grad({arguments}):\n{lines}\n"


def _joint_input(printer: Printer, node: fx.Node | None) -> Value:
    """What is read is fp32 there, so that its gradient is."""
    if node is None:
        return Value("grad", torch.float32, frozenset(["score"]))
    value = printer.of(node)
    dtype = _example_dtype(node)
    return value if dtype == value.dtype else Value(f"({cast(value, dtype)})", dtype, value.deps)


def _accumulate(printer: Printer, read: Read, x: Value, grads: Sequence[str]) -> None:
    """Adds x where `read` reads: summed over what the place does not vary with, so that it is added to once."""
    name = f"{printer.prefix}a{len(printer.lines)}"
    number = grads.index(read.capture.name)
    printer.line("if WITH_CAPTURES:")
    printer.line(f"    {name} = tl.where(keep, tl.zeros_like(score) + {cast(x, torch.float32)}, 0.0)")
    over = [axis for axis, index in (("Q_AXIS", "q_idx"), ("1 - Q_AXIS", "kv_idx")) if index not in read.deps]
    if len(over) == 2:
        printer.line(f"    {name} = tl.sum(tl.sum({name}, 1), 0)")
    elif over:
        printer.line(f"    {name} = tl.sum({name}, {over[0]}, keep_dims=True)")
    printer.line(f"    add_gradient(grads[{number + 1}], grads[0], {read.dense}, {name}, {read.inside})")


def trace_joint(graph: Graph, reads: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node | None]]:
    """The graph of the score's derivative, and the nodes that its placeholders stand for (None: the gradient). Its
    outputs are the gradients of the score and of `reads`, None where there is none."""
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta.get("rank", 0) == 0]
    inputs += [n for n in graph.graph.nodes if n.op == "call_function" and _is_input(n)]
    score = next(n for n in graph.arguments if n.name == "score")

    def derivative(grad: torch.Tensor, *args: torch.Tensor) -> list[torch.Tensor | None]:
        held = dict(zip(inputs, args, strict=True))
        wanted = [score, *reads]
        with torch.enable_grad():
            for n in wanted:
                held[n] = held[n].detach().requires_grad_()
            result = _evaluate(graph, held)
            if not result.requires_grad:
                return [None] * len(wanted)
            found = torch.autograd.grad(result.float(), [held[n] for n in wanted], grad, allow_unused=True)
        return list(found)

    examples = [torch.zeros((), dtype=_example_dtype(n)) for n in inputs]
    made = make_fx(derivative, decomposition_table=_decompositions(), tracing_mode="fake")(torch.zeros(()), *examples)
    made.graph.eliminate_dead_code()
    for node in list(made.graph.nodes):  # what autograd leaves behind
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default, aten.clone.default,
                                                          aten.view.default, aten.expand.default):  # fmt: skip
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
    return made.graph, [None, *inputs]


@functools.cache
def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())  # made anew, it takes a quarter of a second


def _is_input(node: fx.Node) -> bool:
    """Of the joint graph: what is read, and sizes."""
    return node.target is aten.index.Tensor or node.target is aten.sym_size.int


def _example_dtype(node: fx.Node) -> torch.dtype:
    """Numbers as tensors whose promotion is theirs: 0-d ones of 32 bits beside fp32 and int32; 16-bit floats: fp32."""
    if node.meta["kind"] == "tensor":
        dtype = node.meta["dtype"]
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return torch.float32 if node.meta["kind"] == "float" else torch.int32


def _evaluate(graph: Graph, held: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    values: dict[fx.Node, Any] = dict(held)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in values:
            continue
        args = fx.node.map_arg(node.args, lambda n: values[n])
        if node.target is aten.full.default:
            values[node] = torch.as_tensor(args[1]).to(dtype_of(node))
        elif node.target is aten.clamp.default and any(isinstance(x, torch.Tensor) for x in args[1:]):
            # It takes two numbers or two tensors, not one of each.
            values[node] = aten.clamp.Tensor(args[0], *(_as_tensor(x) for x in args[1:]))
        elif isinstance(node.target, torch._ops.OpOverload):
            values[node] = node.target.overloadpacket(*args, **node.kwargs)  # numbers are tensors here
        else:
            values[node] = node.target(*args)
    return values[graph.result]


def _as_tensor(x: Any) -> torch.Tensor | None:
    """Of a number, as _example_dtype has it."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    return torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else torch.int32)


# --- Texts ---


def dtype_of(node: fx.Node) -> torch.dtype:
    if "val" in node.meta:  # of a joint graph
        return node.meta["val"].dtype
    return node.meta["dtype"]


def tl_dtype(dtype: torch.dtype) -> str:
    return TL_DTYPES[NAMES[dtype]]


def literal(x: Any) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return f"({x!r})" if isinstance(x, int | float) and x < 0 else repr(x)


def cast(x: Value, dtype: torch.dtype) -> str:
    """Python's numbers take the dtype of what they stand beside."""
    if x.dtype is None or x.dtype == dtype:
        return x.text
    if dtype == torch.bool:
        return f"({x.text} != 0)"
    return f"{x.text}.to({tl_dtype(dtype)})"


def result_dtype(args: Sequence[Value]) -> torch.dtype:
    """Of a comparison: captured numbers and sizes are 64 bits wide, but weak beside tensors."""
    dtypes = [a.dtype for a in args if a.dtype is not None]
    strong = [d for a, d in zip([a for a in args if a.dtype is not None], dtypes, strict=True) if a.deps] or dtypes
    found = strong[0]
    for d in strong[1:]:
        found = torch.promote_types(found, d)
    if any(d.is_floating_point for d in dtypes) and not found.is_floating_point:
        found = torch.float32
    return found


def rule(node: fx.Node, op: str, dtype: torch.dtype) -> str:
    name = NAMES[dtype]
    tables: Callable[[], Sequence[Mapping[str, str]]] = lambda: (  # noqa: E731
        (FP64_RULES,) if name == "fp64" else (_SCORE_RULES,) if name == "fp32" else
        (BOOL_RULES, INT_RULES) if name == "i1" else (INT_RULES,)
    )  # fmt: skip
    for table in (ANY_RULES, *tables()):
        if op in table:
            return table[op]
    raise unsupported(node)


def unsupported(node: fx.Node) -> errors.UnsupportedError:
    return errors.UnsupportedError(f"a mod uses {node.target}, which attention kernels do not have")
