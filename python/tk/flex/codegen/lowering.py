"""Lowers a mod's graph, or its derivative, by the rules of tk.codegen: what `@tk.op` takes of single values, mods take.

A mod is a function of 0-d tensors. It is traced once more with torch's decompositions, for the derivative through
autograd, and each op of the core graph becomes values of the loop-level IR. An argument of the mod is an axis there, so
that a value's axes say what it varies with. Numbers and sizes are tensors of the dtype that torch would give them where
they stand.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions

from tk import errors
from tk.aot.errors import BuildError
from tk.aot.spec import REDUCED_FLOATS
from tk.codegen import passes
from tk.codegen.ir import COMPARE, FLOATS, IR_DTYPES, TEST, Axis, Builder, Kernel, value_symbol, values_in
from tk.codegen.lowering.graph import Call, op_name
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.lowering.rules import RULED, RULES
from tk.codegen.tracing.core import decompositions
from tk.codegen.tracing.lines import nodes_after
from tk.flex.tracing.canonical import Graph

aten = torch.ops.aten

RESULT = "result"
_ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx", "grad")


def forward(graph: Graph) -> Kernel:
    """Stores the graph's result as `result`, of its own dtype but 16-bit floats as fp32."""
    return _Lowering(graph).kernel(derivative=False)


def derivative(graph: Graph, captures: Sequence[str]) -> Kernel:
    """Stores the gradient of the score as `result`; and into each of `captures`, where it is read, what is to be added
    to its gradient there. All in fp32; for `grad`, the gradient of what the graph gives."""
    return _Lowering(graph).kernel(derivative=True, captures=captures)


def check(graph: Graph, with_derivative: bool) -> None:
    """Raises tk.UnsupportedError for what kernels do not have."""
    forward(graph)
    if with_derivative and any(n.name == "score" for n in graph.arguments):
        derivative(
            graph, sorted({f"c{n.meta['capture']}" for n in graph.captures if n.meta["dtype"].is_floating_point})
        )


class _Scalars:
    """What tk.codegen's rules ask of a graph, where everything is 0-d."""

    @property
    def trace(self) -> _Scalars:
        return self

    def shape(self, val: Tensor) -> Index:
        return ()

    def size(self, x: Any) -> sympy.Expr:
        return sympy.sympify(x)


@dataclass
class _Read:
    """A read of a captured tensor, at an index of numbers and values. node: in the mod's graph."""

    node: fx.Node
    source: fx.Node
    at: tuple[Any, ...]

    @property
    def buffer(self) -> str:
        return f"c{self.source.meta['capture']}"


class _Lowering:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.reads = [r for n in graph.graph.nodes if (r := _read_of(n)) is not None]
        self.inputs = [n for n in graph.graph.nodes if _is_input(n)]
        self.emitter = Emitter(Builder({n: Axis(n, sympy.Integer(1)) for n in _ARGUMENTS}))
        self.lazy: dict[fx.Node, Lazy] = {}  # of the mod's graph

    def kernel(self, derivative: bool, captures: Sequence[str] = ()) -> Kernel:
        wanted = [r for r in self.reads if r.buffer in captures] if derivative else []
        core = self._traced(derivative, wanted)
        found = self._lowered(core)
        result, grads = found[0], found[1 : 1 + len(wanted)]
        for r, lazies in zip(self.reads, _by_length(found[1 + len(wanted) :], self.reads), strict=True):
            values = iter(lazies)
            r.at = tuple(next(values) if isinstance(i, fx.Node) else i for i in r.at)
        self._store(result, RESULT, "fp32" if derivative else None)
        for r, grad in zip(wanted, grads, strict=True):
            self._store(grad, r.buffer, "fp32", self._index(r))
        return _simplified(self.emitter.builder.finish("mod"))

    def _store(self, lazy: Lazy | None, buffer: str, dtype: str | None, index: Index = ()) -> None:
        e = self.emitter
        if lazy is None and buffer != RESULT:
            return
        value = e.constant(0.0, "fp32") if lazy is None else e.read(lazy, ())
        dtype = dtype or ("fp32" if e.dtype(value) in REDUCED_FLOATS else e.dtype(value))
        e.builder.add("store", dtype, e.cast(value, dtype), buffer=buffer, index=index)

    # --- The core graph ---

    def _traced(self, derivative: bool, wanted: Sequence[_Read]) -> fx.Graph:
        """Its results: that of the mod, or the gradients of the score and of `wanted`; then all reads' indices."""
        from torch.fx.experimental.proxy_tensor import make_fx

        score = next((n for n in self.graph.arguments if n.name == "score"), None)

        def run(grad: Tensor, *args: Tensor) -> list[Tensor | None]:
            held = dict(zip(self.inputs, args, strict=True))
            if not derivative:
                values = evaluate(self.graph, held)
                return [values[self.graph.result], *self._indices(values)]
            assert score is not None
            sources = [score, *(r.node for r in wanted)]
            with torch.enable_grad():
                for n in sources:
                    held[n] = held[n].detach().requires_grad_()
                values = evaluate(self.graph, held)
                result = values[self.graph.result]
                found: Sequence[Tensor | None] = [None] * len(sources)
                if result.requires_grad:
                    found = torch.autograd.grad(result.float(), [held[n] for n in sources], grad, allow_unused=True)
            return [*found, *(i.detach() for i in self._indices(values))]

        # Meta tensors: decompositions ask for the device, and the CPU's are not those of a GPU.
        examples = [torch.empty((), dtype=self._dtype(n, derivative), device="meta") for n in self.inputs]
        try:
            made = make_fx(run, decomposition_table=_decompositions(), tracing_mode="fake")(
                torch.empty((), device="meta"), *examples
            )
        except (RuntimeError, NotImplementedError) as error:  # autograd has no formula
            what = "has no gradient" if derivative else "cannot be taken apart"
            raise errors.UnsupportedError(f"a mod {what}: {str(error).strip().splitlines()[0]}") from error
        made.graph.eliminate_dead_code()
        return made.graph

    def _indices(self, values: Mapping[fx.Node, Any]) -> list[Tensor]:
        return [values[i] for r in self.reads for i in r.at if isinstance(i, fx.Node)]

    def _dtype(self, node: fx.Node, derivative: bool) -> torch.dtype:
        """A node's dtype. Of a derivative, what is read of 16 bits is fp32, so that its gradient is."""
        if node.meta["kind"] != "tensor":
            return torch.float32 if node.meta["kind"] == "float" else torch.int64
        dtype = node.meta["dtype"]
        is_narrow = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if derivative and is_narrow and _read_of(node) is not None else dtype

    # --- Values ---

    def _lowered(self, core: fx.Graph) -> list[Lazy | None]:
        values: dict[fx.Node, Any] = {}
        inputs = iter([None, *self.inputs])
        for node in core.nodes:
            if node.op == "placeholder":
                source = next(inputs)
                made = self._axis("grad", "fp32") if source is None else self._input(source)
                dtype = IR_DTYPES[node.meta["val"].dtype]
                values[node] = made if made.dtype == dtype else _as(made, dtype)
            elif node.op == "call_function":
                values[node] = _by_rule(node, values)
            elif node.op == "output":
                return [None if n is None else values[n] for n in node.args[0]]
            else:
                raise _unsupported(node, "makes a tensor of its own; capture it")
        raise AssertionError("a graph without an output")

    def _input(self, node: fx.Node) -> Lazy:
        read = next((r for r in self.reads if r.node is node), None)
        if read is not None:
            dtype = IR_DTYPES[node.meta["dtype"]]
            return Lazy(
                (), dtype, lambda e, i: e.builder.add("load", dtype, buffer=read.buffer, index=self._index(read))
            )
        if node.target is aten.sym_size.int:
            source, d = node.args
            return self._number(f"c{source.meta['capture']}_size_{d}", "i64")  # type: ignore[union-attr]
        if "capture" in node.meta:
            return self._number(f"c{node.meta['capture']}", "fp32" if node.meta["kind"] == "float" else "i64")
        return self._axis(node.name, IR_DTYPES[node.meta["dtype"]])

    def _axis(self, name: str, dtype: str) -> Lazy:
        symbol = sympy.Symbol(name) if dtype == "fp32" else self.emitter.builder.axes[name].symbol
        return Lazy((), dtype, lambda e, i: e.builder.add("index", dtype, data=symbol))

    def _number(self, name: str, dtype: str) -> Lazy:
        return Lazy((), dtype, lambda e, i: e.builder.add("number", dtype, data=name))

    def _index(self, read: _Read) -> Index:
        return tuple(
            value_symbol(self.emitter.read(i, ())) if isinstance(i, Lazy) else sympy.Integer(i) for i in read.at
        )


def _as(x: Lazy, dtype: str) -> Lazy:
    return Lazy((), dtype, lambda e, i: e.cast(e.read(x, ()), dtype))


def _by_length(flat: Sequence[Any], reads: Sequence[_Read]) -> list[list[Any]]:
    found, rest = [], list(flat)
    for r in reads:
        n = sum(isinstance(i, fx.Node) for i in r.at)
        found.append(rest[:n])
        rest = rest[n:]
    return found


def _by_rule(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What is written in place is the result from then on: make_fx has seen to it."""
    name = op_name(node.target)
    args: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    if name == "operator.getitem":
        return args[0][0][args[0][1]]
    rule: Callable[..., Any] | None = RULES.get(name if name.endswith("__") else name.removesuffix("_"))
    val = node.meta.get("val")
    if rule is None or (isinstance(val, Tensor) and val.dim()):
        raise _unsupported(node, f"uses {name}, which attention kernels do not have")
    try:
        return rule(Call(_Scalars(), node), *args[0], **args[1])  # type: ignore[arg-type]
    except BuildError as error:
        raise _unsupported(node, f"uses {name}: {error}") from None


def _unsupported(node: fx.Node, message: str) -> errors.UnsupportedError:
    line = node.meta.get("line")
    return errors.UnsupportedError(f"{line}: a mod {message}" if line else f"a mod {message}")


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Those of tk.codegen, and of what autograd alone calls."""
    shrink = {aten.hardshrink_backward.default: _shrink_backward, aten.softshrink_backward.default: _shrink_backward}
    zero = {aten._efficientzerotensor.default: torch.zeros}
    return {**get_decompositions([aten.ldexp]), **decompositions(RULED), **shrink, **zero}


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad)


def _read_of(node: fx.Node) -> _Read | None:
    """A captured tensor of no dimensions is read as well."""
    if node.target is aten.index.Tensor:
        source, at = node.args
        return _Read(node, source, tuple(at))  # type: ignore[arg-type]
    if node.op == "placeholder" and "capture" in node.meta and node.meta["kind"] == "tensor":
        return None if node.meta.get("rank") else _Read(node, node, ())
    return None


def _is_input(node: fx.Node) -> bool:
    """Whether a node is an input of the core graph."""
    if node.op == "placeholder":
        return not node.meta.get("rank")
    return node.target is aten.index.Tensor or node.target is aten.sym_size.int


# --- What the mod does, on tensors ---


def evaluate(graph: Graph, held: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any]:
    """The graph's values, with tensors in the place of its inputs."""
    values: dict[fx.Node, Any] = dict(held)
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in values:
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            args = fx.node.map_arg(node.args, lambda n: values[n])
            values[node] = _NUMBERS[node.target.__name__](*args)
        elif node.target is aten.full.default:
            values[node] = _full(node, values)
        else:
            values[node] = _tagged(node, values)
    return values


def _full(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
    value, dtype = node.args[1], node.kwargs["dtype"]
    if isinstance(value, fx.Node):
        return values[value].to(dtype)
    return torch.full((), value, dtype=dtype, device="meta")  # type: ignore[arg-type]


def _tagged(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What the op gives; what is recorded of it has the mod's line. A conversion that the mod wrote rounds, others do
    not."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    last = mode.tracer.graph._root.prev if mode is not None else None
    result = _called(node, values)
    if mode is not None:
        for made in nodes_after(mode.tracer.graph, last):  # type: ignore[arg-type]
            made.meta["is_cast"] = node.target is aten._to_copy.default
            made.meta["line"] = node.meta.get("line")
    return result


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    numbers = [a for a in operands if a.meta["kind"] != "tensor"]
    if not numbers and packet is not aten.clamp:
        return packet(*fx.node.map_arg(node.args, lambda n: values[n]), **_kwargs(node, values))
    tensors = [values[a].dtype for a in operands if a.meta["kind"] == "tensor"]
    every = [*node.args, *node.kwargs.values()]
    has_floats = any(isinstance(a, float) or (isinstance(a, fx.Node) and a.meta["kind"] == "float") for a in every)
    dtype = _common(tensors, has_floats)

    def given(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return values[a] if a.meta["kind"] == "tensor" else _converted(values[a], dtype)
        is_number = isinstance(a, int | float) and not isinstance(a, bool)
        return torch.full((), a, dtype=dtype, device="meta") if is_number else a

    if packet is aten.clamp:  # it takes two numbers or two tensors, not one of each
        return aten.clamp.Tensor(*map(given, node.args), **{k: given(v) for k, v in node.kwargs.items()})
    return packet(*map(given, node.args), **_kwargs(node, values))


def _converted(number: Tensor, dtype: torch.dtype) -> Tensor:
    """A number that 32 bits do not hold is as far as they go: what is compared with it is within them."""
    if dtype == torch.int32 and number.dtype == torch.int64:
        number = number.clamp(-(2**31), 2**31 - 1)
    return number.to(dtype)


def _kwargs(node: fx.Node, values: Mapping[fx.Node, Any]) -> dict[str, Any]:
    return dict(fx.node.map_arg(node.kwargs, lambda n: values[n]))


def _common(tensors: Sequence[torch.dtype], has_floats: bool) -> torch.dtype:
    """What a number is converted to beside tensors of these dtypes."""
    if not tensors:
        return torch.float32 if has_floats else torch.int64
    found = tensors[0]
    for dtype in tensors[1:]:
        found = torch.promote_types(found, dtype)
    if has_floats and not found.is_floating_point:
        return torch.float32
    return torch.int64 if found == torch.bool else found


# Of sizes and captured numbers; integers are of 64 bits, and divided as Python does.
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": torch.abs,
    "truediv": lambda a, b: _tensor(a) / b, "floordiv": lambda a, b: torch.div(_tensor(a), b, rounding_mode="floor"),
    "mod": lambda a, b: torch.remainder(_tensor(a), b), "pow": lambda a, b: torch.pow(a, b),
    "and_": operator.and_, "or_": operator.or_, "xor": operator.xor,
    "lshift": lambda a, b: torch.bitwise_left_shift(_tensor(a), b),
    "rshift": lambda a, b: torch.bitwise_right_shift(_tensor(a), b),
    "sym_float": lambda a: a.to(torch.float32), "sym_min": lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
    "sym_max": lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
    **{f"_sym_{n}": (lambda f: lambda a: f(a.to(torch.float32)))(getattr(torch, n)) for n in (
        "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2",
    )},
}  # fmt: skip


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    return torch.full((), x, dtype=torch.float32 if isinstance(x, float) else torch.int64, device="meta")


# --- Of the values ---


def _simplified(kernel: Kernel) -> Kernel:
    for one in (passes.promote, passes.simplify, passes.drop_unused):
        kernel = one(kernel)
    return kernel


_STEPS = frozenset({
    "floor", "ceil", "trunc", "round", "sign", "fmod", "remainder", "floor_div", "trunc_div", *COMPARE, *TEST,
})  # fmt: skip


def approximable(kernel: Kernel) -> frozenset[int]:
    """fp32 values that need no correctly rounded functions: those of which no step is taken, as an index is made by."""
    exact: set[int] = set()
    for v in reversed(kernel.values):
        source = kernel.values[v.args[0]].dtype if v.args else ""
        takes_a_step = v.op in _STEPS or (v.op == "cast" and source in FLOATS and v.dtype not in FLOATS)
        if takes_a_step or v.number in exact:
            exact.update(v.args)
            exact.update(n for e in v.index for n in values_in(e))
    return frozenset(v.number for v in kernel.values if v.dtype == "fp32" and v.number not in exact)
