"""A core graph as lazy tensors, node by node, by the rules that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils._pytree import tree_flatten

from tk.codegen import unsupported
from tk.codegen.errors import TraceError, reported
from tk.codegen.ir import INTS, IR_DTYPES, Buffer
from tk.codegen.lowering.lazy import Emitter, Index, Lazy
from tk.codegen.tracing.trace import Trace

Rule = Callable[..., Any]


class LazyGraph:
    """The lazy tensors of a core graph. rules: by the names of ops. deterministic: no result may depend on the order in
    which programs run. rounded: sums of 16-bit floats at indices are, by every addition."""

    def __init__(self, trace: Trace, rules: Mapping[str, Rule], deterministic: bool = False, rounded: bool = False):
        self.trace = trace
        self.rules = rules
        self.deterministic = deterministic
        self.rounded = rounded
        self.params: dict[str, Buffer] = {}
        self.values: dict[fx.Node, Any] = {}
        self.known: dict[Any, Any] = {}
        needed = _reached([*trace.new, *trace.mutated.values()])
        for node in trace.core.graph.nodes:
            if node.op == "placeholder":
                # A backward leaves out an argument of which only sizes are read, which others have too.
                is_there = node.meta["param"] in trace.signature.params
                if is_there and (node in needed or node.meta["param"] in trace.mutated):
                    self.values[node] = self._placeholder(node)
            elif node in needed:
                self.values[node] = self._node(node)

    @property
    def is_backward(self) -> bool:
        """Whether it is a gradient's: its first arguments are those of the results."""
        return "grad_0" in self.trace.signature.params

    def tensor(self, node: fx.Node) -> Lazy:
        value = self.values[node]
        assert isinstance(value, Lazy), f"{node} is no tensor"
        return value

    def output_buffer(self, position: int, node: fx.Node) -> Buffer:
        val = node.meta["val"]
        shape = self.shape(val)
        leading = bool(shape) and shape[0] == sympy.Symbol("leading", integer=True, positive=True)
        return Buffer(f"out{position}", "output", IR_DTYPES[val.dtype], shape, leading)

    def mutated_buffer(self, param: str) -> Buffer:
        return self.params[param]

    def shape(self, val: torch.Tensor) -> Index:
        return tuple(self.trace.size(s) for s in val.shape)

    def _placeholder(self, node: fx.Node) -> Any:
        name, val = node.meta["param"], node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return self.trace.size(val)
        spec = self.trace.signature.tensors[name]
        kind = "mutated" if name in self.trace.mutated else "input"
        buffer = Buffer(name, kind, IR_DTYPES[val.dtype], self.shape(val), spec.leading)
        self.params[name] = buffer
        return Lazy(buffer.sizes, buffer.dtype, lambda e, i: e.load(buffer, i))

    def _node(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt | torch.SymFloat | int | float):
            return self.trace.size(val)
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])
        name = op_name(node.target)
        rule = self.rules.get(name)
        if rule is None:
            raise TraceError(f"{self.where(node)}: {unsupported.message(name)}")
        key = self._key(node, args)
        try:
            with reported(f"{self.where(node)}: {name}"):
                if key not in self.known:
                    self.known[key] = rule(Call(self, node), *args[0], **args[1])
                return self.known[key]
        except TraceError as error:
            raise type(error)(f"{self.where(node)}: {error}") from None

    def _key(self, node: fx.Node, args: Any) -> Any:
        """Equal for nodes that are the same function of the same operands, which so become one tensor."""
        leaves, spec = tree_flatten(args)
        plain = tuple((type(x), repr(x) if isinstance(x, float) else x) for x in leaves)  # -0.0 is none of 0.0
        return node.target, spec, plain, bool(node.meta.get("is_cast"))

    def where(self, node: fx.Node) -> str:
        line = node.meta.get("line")
        return f"line {line}" if line else f"{node.name}"


def _reached(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def op_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return f"{getattr(target, '__module__', '').lstrip('_')}.{target.__name__}"


@dataclass
class Call:
    """One node under its rule: what torch says of the result."""

    graph: LazyGraph
    node: fx.Node

    @property
    def val(self) -> Any:
        return self.node.meta["val"]

    @property
    def shape(self) -> Index:
        return self.graph.shape(self.val)

    @property
    def dtype(self) -> str:
        return IR_DTYPES[self.val.dtype]

    @property
    def is_cast(self) -> bool:
        """A conversion that the function wrote, not one that a decomposition did."""
        return bool(self.node.meta.get("is_cast"))

    def size(self, x: Any) -> sympy.Expr:
        return self.graph.trace.size(x)

    def is_negative(self, size: sympy.Expr) -> bool:
        return self.graph.trace.is_negative(size)

    def promoted(self, *args: Any) -> str:
        """The dtype in which torch compares or computes these arguments of the node."""
        flat = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        plain = [1.0 if isinstance(a, torch.SymFloat) else 1 if isinstance(a, torch.SymInt) else a for a in flat]
        kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
        return IR_DTYPES[elementwise_dtypes(*plain, type_promotion_kind=kind)[1]]


def operand(x: Any, shape: Index, dtype: str) -> Callable[[Emitter, Index], int]:
    """Reads a tensor that broadcasts to `shape`, or a number, as `dtype`."""
    if not isinstance(x, Lazy):
        return lambda e, i: _scalar(e, x, dtype)
    offset = len(shape) - len(x.shape)
    is_one = [s == 1 and shape[d + offset] != 1 for d, s in enumerate(x.shape)]

    def read(e: Emitter, index: Index) -> int:
        own = tuple(sympy.Integer(0) if one else i for one, i in zip(is_one, index[offset:], strict=True))
        return e.cast(e.read(x, own), dtype)

    return read


def _scalar(e: Emitter, x: Any, dtype: str) -> int:
    if isinstance(x, sympy.Expr) and not x.is_number:
        return e.number(x, dtype)
    value = float(x) if isinstance(x, sympy.Expr) and not x.is_Integer else x
    if isinstance(value, float) and dtype in INTS and not math.isfinite(value):
        raise TraceError(f"{value} as {dtype}")
    return e.constant(value, dtype)
