"""A mod's recorded graph in one spelling: equal mods give equal graphs, whatever they are called and capture.

Dead and repeated nodes go; nodes stand in the order in which the result needs them; ways of writing the same thing
(``new_ones``, ``full``, ``torch.tensor``; ``x[i][j]``, ``x[i, j]``; ``+=``) become one, and what is equal by arithmetic
(normal.py).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tk.flex.tracing.normal import Normal, described
from tk.flex.tracing.record import Recorder, ones

aten = torch.ops.aten

_VIEWS = {"alias", "lift_fresh", "lift", "expand", "view", "_unsafe_view", "reshape", "squeeze", "view_as", "expand_as"}
_ALIASES = {*_VIEWS, "clone", "lift_fresh_copy"}  # of one value
_CONSTANT = {"new_ones": 1, "ones": 1, "ones_like": 1, "new_zeros": 0, "zeros": 0, "zeros_like": 0}
_FILLED = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}  # which argument is the value


@dataclass(frozen=True)
class Read:
    """A capture of a graph. leaf: its place among what the mod read while it was traced, or of a number that is made
    of several, an expression of these (normal.py)."""

    leaf: Any
    kind: str
    dtype: torch.dtype
    rank: int
    name: str


@dataclass(frozen=True, eq=False)
class Graph:
    """A canonical torch.fx graph.

    Its placeholders are the mod's own arguments (``score``, ``b``, ``h``, ``q_idx``, ``kv_idx``: float32, and int32),
    and ``c0``, ``c1``, …: captures. Its nodes are calls of ATen overloads and, between captured numbers, of functions
    of ``operator`` and ``aten.sym_size.int``. Each has in ``meta``: ``kind`` ("tensor", "int", "float"), ``dtype``,
    and, of a captured tensor, ``rank``; every other value is 0-d. A captured tensor of one dimension and more is read
    by ``aten.index.Tensor(c0, [i, j])`` with an index for each dimension, below 0 from the end; and by sym_size.
    first: the number of its first capture, in the pair's."""

    graph: fx.Graph
    reads: tuple[Read, ...]
    first: int = 0

    @property
    def result(self) -> fx.Node:
        return next(n for n in self.graph.nodes if n.op == "output").args[0]

    @property
    def arguments(self) -> list[fx.Node]:
        """The mod's own, all of them, read or not."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and "capture" not in n.meta]

    @property
    def captures(self) -> list[fx.Node]:
        """``meta["capture"]`` is the number among the pair's captures."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and "capture" in n.meta]

    @property
    def is_trivial(self) -> bool:
        """Whether it leaves every score as it is, or masks nothing."""
        result = self.result
        if result.op == "placeholder":
            return result.name == "score"
        return _is_full(result, True)

    @property
    def text(self) -> str:
        """One line for each node; what the fingerprint is of."""
        return "".join(f"{_line(n)}\n" for n in self.graph.nodes)

    def renumbered(self, first: int) -> Graph:
        """The graph with its captures counted from `first`."""
        if first == self.first:
            return self
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            made[node] = graph.node_copy(node, lambda n: made[n])
            made[node].meta = dict(node.meta)
            if "capture" in node.meta:
                made[node].meta["capture"] = number = node.meta["capture"] - self.first + first
                made[node].target = made[node].name = f"c{number}"
        return Graph(graph, self.reads, first)

    def __str__(self) -> str:
        return self.text


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_spelled(node.args[0])}"
    kind = _dtype_name(node.meta["dtype"]) if node.meta["kind"] == "tensor" else node.meta["kind"]
    if node.op == "placeholder":
        rank = f"[{node.meta['rank']}]" if node.meta.get("rank") else ""
        return f"{node.name}: {kind}{rank}"
    name = target_name(node.target)
    inside = [_spelled(a) for a in node.args] + [f"{k}={_spelled(v)}" for k, v in sorted(node.kwargs.items())]
    return f"{node.name}: {kind} = {name}({', '.join(inside)})"


def target_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target)
    return f"{target.__module__.lstrip('_')}.{target.__name__}"  # of operator or torch


def _spelled(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    return repr(value)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Read back ---

_MODULES = {"aten": aten, "operator": operator, "torch": torch}
_PLACEHOLDER = re.compile(r"(\w+): (\w+)(?:\[(\d+)\])?")
_CALL = re.compile(r"(\w+): (\w+) = (.+)")
_KINDS = {"int": torch.int64, "float": torch.float64}


def parse(text: str, first: int = 0) -> Graph:
    """The graph of :attr:`Graph.text`, its captures counted from `first`. Their names are lost. Raises ValueError."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    reads: list[Read] = []
    for line in text.splitlines():
        if line.startswith("return "):
            graph.output(known[line.removeprefix("return ")])
        elif found := _PLACEHOLDER.fullmatch(line):
            node = graph.placeholder(found[1])
            node.meta = _meta_named(found[2]) | ({"rank": int(found[3])} if found[3] else {})
            if found[1].startswith("c"):
                node.meta["capture"] = int(found[1][1:])
                reads.append(Read(len(reads), node.meta["kind"], node.meta["dtype"], int(found[3] or 0), found[1]))
            known[found[1]] = node
        elif found := _CALL.fullmatch(line):
            target, args, kwargs = _parsed_call(found[3], known)
            node = graph.create_node("call_function", target, args, kwargs, name=found[1])
            node.meta = _meta_named(found[2])
            known[found[1]] = node
        else:
            raise ValueError(f"no line of a mod's graph: {line!r}")
    return Graph(graph, tuple(reads), first)


def _meta_named(name: str) -> dict[str, Any]:
    if name in _KINDS:
        return {"kind": name, "dtype": _KINDS[name]}
    return {"kind": "tensor", "dtype": getattr(torch, name)}


def _parsed_call(text: str, known: Mapping[str, fx.Node]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"no call: {text!r}")
    module, *path = ast.unparse(call.func).split(".")
    target: Any = _MODULES[module]
    for attribute in path:
        target = getattr(target, attribute)
    args = tuple(_parsed_value(a, known) for a in call.args)
    return target, args, {str(k.arg): _parsed_value(k.value, known) for k in call.keywords}


def _parsed_value(node: ast.expr, known: Mapping[str, fx.Node]) -> Any:
    if isinstance(node, ast.List):
        return [_parsed_value(x, known) for x in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_parsed_value(node.operand, known)
    if isinstance(node, ast.Name):
        if node.id in known:
            return known[node.id]
        return float(node.id) if node.id in ("inf", "nan") else getattr(torch, node.id)
    return ast.literal_eval(node)


def canonical(
    recorded: Recorder,
    names: tuple[Sequence[str], Sequence[str]],
    refused: Callable[[str, str | None], Exception],
) -> list[Graph]:
    """The mod's; and of a score_mod that masks, the graphs of its score and its mask. names: of the mod's arguments and
    of what it read. refused: makes the error for a message."""
    return _Canonical(recorded, names, refused).graphs()


class _Canonical:
    """Rewrites values first, by node of the recorded graph, and numbers those that the result needs afterwards."""

    def __init__(self, recorded: Recorder, names: Any, refused: Callable[[str, str | None], Exception]):
        self.recorded = recorded
        self.arguments, self.leaves = names
        self.make_error = refused
        self.work = fx.Graph()
        self.made: dict[fx.Node, Any] = {}
        self.known: dict[Any, fx.Node] = {}
        self.numbers: dict[Any, fx.Node] = {}
        self.memory: dict[fx.Node, fx.Node] = {}  # of a view, and of what is written in place: whose it is
        self.line: str | None = None  # of the mod, that asked for what is made

    def graphs(self) -> list[Graph]:
        result: Any = None
        nodes = _needed(self.recorded.graph)
        for i, node in enumerate(n for n in self.recorded.graph.nodes if n.op == "placeholder"):
            self.made[node] = self._placeholder(i, node)
        for node in nodes:
            self.line = node.meta.get("line", self.line)
            if node.op == "output":
                result = self._of(node.args[0])
            elif node.op == "get_attr":
                self.made[node] = self._constant(node)
            elif node.op == "call_function":
                self.made[node] = self._call(node)
        normal = Normal(self._node, self._number)
        normal.rewrite(list(self.work.nodes))
        whole = normal.made[result]
        found = [self._numbered(whole)]
        score, allowed = normal.without_mask(whole)
        if allowed is not None:
            found += [self._numbered(score), self._numbered(allowed, is_mask=True)]
        return found

    def refused(self, message: str) -> Exception:
        return self.make_error(message, self.line)

    # --- Values ---

    def _of(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda n: self.made[n])

    def _placeholder(self, i: int, node: fx.Node) -> fx.Node:
        own = i < len(self.arguments)
        made = self.work.placeholder(self.arguments[i] if own else f"leaf{i - len(self.arguments)}")
        made.meta = _meta(node.meta["val"])
        if not own:
            made.meta["leaf"] = i - len(self.arguments)
            if made.meta["kind"] == "tensor" and made.meta["dtype"] == torch.int32:
                made.meta["dtype"] = torch.int64  # kernels read either: what a mod makes of them fits 32 bits
        return made

    def _constant(self, node: fx.Node) -> fx.Node:
        value = self.recorded.constants[str(node.target)]
        if value.dim() != 0:
            raise self.refused("makes a tensor of its own; capture it")
        return self._full(value.item(), value.dtype)

    def _full(self, value: Any, dtype: torch.dtype) -> fx.Node:
        if not isinstance(value, fx.Node):
            value = torch.tensor(value, dtype=dtype).item()
        return self._node(aten.full.default, ([], value), {"dtype": dtype}, {"kind": "tensor", "dtype": dtype})

    def _call(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(node.target, OpOverload) or node.target is aten.sym_size.int:
            meta = _meta(value)
            module = getattr(node.target, "__module__", "").lstrip("_")
            if node.target is not aten.sym_size.int and module not in ("operator", "torch"):
                name = node.target.__name__  # type: ignore[union-attr]
                raise self.refused(f"uses {name} on captured numbers; work it out before and capture it")
            if meta["kind"] == "bool":
                raise self.refused("compares captured numbers; capture the result, a bool")
            return self._node(node.target, self._of(node.args), self._of(node.kwargs), meta)
        packet = node.target.overloadpacket.__name__
        args = self._of(node.args)
        meta = _widened(_meta(value), packet, args)
        if packet in ("index", "select"):
            return self._index(node, packet, args, meta)
        if meta.get("rank"):
            raise self.refused(
                f"uses aten.{packet} on a whole tensor; only single values are read inside a mod: index it with "
                "b, h, q_idx or kv_idx (or numbers made of them), and work out other things before and capture them"
            )
        if packet in _CONSTANT:
            return self._full(_CONSTANT[packet], meta["dtype"])
        if packet in _FILLED:
            return self._full(args[_FILLED[packet]], meta["dtype"])
        if packet in _VIEWS or packet == "detach":
            self.memory[node] = self._memory_of(node)
        if packet in _ALIASES:
            return args[0]
        if packet == "_to_copy":
            return self._cast(args[0], meta["dtype"])
        if packet == "masked_fill":
            x, is_filled, value = args
            value = (
                value
                if isinstance(value, fx.Node) and value.meta["kind"] == "tensor"
                else self._full(value, x.meta["dtype"])
            )
            value = self._cast(value, x.meta["dtype"])
            return self._node(aten.where.self, (is_filled, value, x), {}, meta)
        return self._pointwise(node, packet, args, meta)

    def _index(self, node: fx.Node, packet: str, args: Any, meta: dict[str, Any]) -> fx.Node:
        if packet == "select":
            if args[1] != 0:
                raise self.refused("indexes a dimension that is not the first; give the indices from the front")
            indices = [args[2]]
        else:
            indices = list(args[1])
        indices = [self._scalar_index(i) for i in indices]
        source = args[0]
        if source.target is aten.index.Tensor:
            indices = [*source.args[1], *indices]
            source = source.args[0]
        if source.op != "placeholder" or None in indices:
            raise self.refused("indexes something that is no captured tensor, or not from the front")
        return self._node(aten.index.Tensor, (source, indices), {}, meta)

    def _scalar_index(self, index: Any) -> Any:
        """A number instead of a 0-d tensor that holds it."""
        if isinstance(index, fx.Node) and index.target is aten.full.default:
            return index.args[1]
        return index

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        if x.meta["dtype"] == dtype:
            return x
        return self._node(aten._to_copy.default, (x,), {"dtype": dtype}, {"kind": "tensor", "dtype": dtype})

    def _pointwise(self, node: fx.Node, packet: str, args: Any, meta: dict[str, Any]) -> fx.Node:
        target: Any = node.target
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise self.refused(f"draws random numbers (aten.{packet}); capture them")
        if packet == "_local_scalar_dense":
            raise self.refused("reads a number out of a tensor (.item(), int(), float()); use the 0-d tensor itself")
        if any(isinstance(x, fx.Node) and x.meta.get("rank") for x in _flat(args)):
            raise self.refused(f"uses aten.{packet} on a whole tensor; work it out before and capture it")
        if packet.endswith("_") and target._schema.is_mutable:
            return self._in_place(node, packet, args, meta)
        if target._schema.is_mutable or len(target._schema.returns) != 1:
            raise self.refused(f"uses {target}, which no kernel has")
        if (simpler := _simpler(packet, args)) is not None:
            return simpler
        kwargs = {k: v for k, v in self._of(node.kwargs).items() if k not in ("device", "layout", "pin_memory")}
        return self._node(target, args, kwargs, meta)

    def _in_place(self, node: fx.Node, packet: str, args: Any, meta: dict[str, Any]) -> fx.Node:
        """``x.add_(y)`` as the new value of x, and of all that shares its memory."""
        plain = _functional(node.target, packet)
        if plain is None:
            raise self.refused(f"uses {node.target}, which no kernel has")
        self.memory[node] = written = self._memory_of(node)
        name = written.meta.get("captured")
        if "leaf" in getattr(self.made[written], "meta", {}):
            name = self.leaves[self.made[written].meta["leaf"]]
        if name is not None:
            raise self.refused(f"writes {name}, which it captures (aten.{packet}); write to a .clone()")
        dtype = meta["dtype"]
        made = self._node(plain, args, self._of(node.kwargs), {**meta, "dtype": _result_dtype(plain, args, dtype)})
        made = self._cast(made, dtype)
        for old in self.made:
            if self.memory.get(old, old) is written:
                self.made[old] = made
        return made

    def _memory_of(self, node: fx.Node) -> fx.Node:
        """Whose memory its first argument is."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return self.memory.get(source, source)

    def _node(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        """Equal calls are one."""
        key = (target, _hashable(args), _hashable(kwargs), meta.get("dtype"))
        if key not in self.known:
            node = self.work.call_function(target, args, dict(kwargs))
            node.meta = {"line": self.line, **meta}
            self.known[key] = node
        return self.known[key]

    def _number(self, expression: Any, kind: str) -> fx.Node:
        """A capture that the call works out."""
        key = (kind, _hashable(expression))
        if key not in self.numbers:
            dtype = torch.int64 if kind == "int" else torch.float64
            leaf = expression[1] if expression[0] == "leaf" else expression
            self.numbers[key] = node = self.work.placeholder(f"number{len(self.numbers)}")
            node.meta = {"kind": kind, "dtype": dtype, "leaf": leaf}
        return self.numbers[key]

    # --- Order and names ---

    def _numbered(self, result: fx.Node, is_mask: bool = False) -> Graph:
        """A new graph of what the result needs, operands first, from left to right. is_mask: it has no score."""
        order: list[fx.Node] = []
        _visit(result, set(), order)
        leaves = [n for n in order if "leaf" in n.meta]
        graph, made = fx.Graph(), {}
        own = (n for n in self.work.nodes if n.op == "placeholder" and "leaf" not in n.meta)
        for node in (n for n in own if not (is_mask and n.name == "score")):
            made[node] = graph.placeholder(node.target)
            made[node].meta = dict(node.meta)
        for number, node in enumerate(leaves):
            made[node] = graph.placeholder(f"c{number}")
            made[node].meta = {k: v for k, v in node.meta.items() if k != "leaf"} | {"capture": number}
        count = 0
        for node in order:
            if node in made:
                continue
            made[node] = graph.node_copy(node, lambda n: made[n])
            made[node].name = f"t{count}"
            made[node].meta = dict(node.meta)
            count += 1
        graph.output(made[result])
        return Graph(graph, tuple(self._read(n) for n in leaves))

    def _read(self, node: fx.Node) -> Read:
        leaf = node.meta["leaf"]
        return Read(leaf, node.meta["kind"], node.meta["dtype"], node.meta.get("rank", 0), self._name(leaf))

    def _name(self, leaf: Any) -> str:
        return described(leaf, self.leaves) if isinstance(leaf, tuple) else self.leaves[leaf]


def _needed(graph: fx.Graph) -> list[fx.Node]:
    """Its nodes without those that nothing comes of: that the result does not need, and that write nothing."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed or _acts(node.target):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in needed]


def _acts(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


def _visit(node: fx.Node, seen: set[fx.Node], order: list[fx.Node]) -> None:
    stack: list[tuple[fx.Node, bool]] = [(node, False)]
    while stack:
        current, is_done = stack.pop()
        if is_done:
            order.append(current)
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((x, False) for x in reversed(current.all_input_nodes))


def _widened(meta: dict[str, Any], packet: str, args: Any) -> dict[str, Any]:
    """The meta of what is made of an int32 capture, which stands as int64."""
    if meta["dtype"] != torch.int32 or packet == "_to_copy":
        return meta
    tensors = [x for x in _flat(args if packet != "index" else args[0]) if isinstance(x, fx.Node)]
    is_wide = any(x.meta["kind"] == "tensor" and x.meta["dtype"] == torch.int64 for x in tensors)
    return meta | {"dtype": torch.int64} if is_wide else meta


def _meta(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        meta = {"kind": "tensor", "dtype": value.dtype}
        return meta | {"rank": value.dim()} if value.dim() else meta
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        return {"kind": "int", "dtype": torch.int64}
    if isinstance(value, torch.SymFloat | float):
        return {"kind": "float", "dtype": torch.float64}
    return {"kind": "bool", "dtype": torch.bool}


def _simpler(packet: str, args: Sequence[Any]) -> fx.Node | None:
    """``x & True``, ``x | False``: torch's own and_masks and or_masks begin so."""
    if packet in ("bitwise_and", "logical_and", "bitwise_or", "logical_or") and len(args) == 2:
        neutral = packet.endswith("and")
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            both = isinstance(one, fx.Node) and isinstance(other, fx.Node)
            if (
                both
                and one.target is aten.full.default
                and one.args[1] is neutral
                and other.meta["dtype"] == torch.bool
            ):
                return other
    return None


def _functional(target: Any, packet: str) -> OpOverload | None:
    """``add.Tensor`` of ``add_.Tensor``."""
    plain = getattr(aten, packet[:-1], None)
    for name in (target._overloadname, f"Tensor_{target._overloadname}"):  # pow has the second
        found = getattr(plain, name, None)
        if found is not None and str(found._schema.arguments[0].type) == "Tensor":
            return found
    return None


def _is_full(x: Any, value: Any) -> bool:
    return isinstance(x, fx.Node) and x.target is aten.full.default and x.args[1] is value


def _result_dtype(op: OpOverload, args: Sequence[Any], default: torch.dtype) -> torch.dtype:
    """The dtype that an op on 0-d tensors gives."""

    def example(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        kind = x.meta["kind"]
        return ones(x.meta["dtype"], ()) if kind == "tensor" else {"int": 1, "float": 1.0}[kind]

    result = op(*(example(x) for x in args))
    return result.dtype if isinstance(result, torch.Tensor) else default


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [y for x in value for y in _flat(x)]
    return [value]


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_hashable(v) for v in value)
    return (type(value), repr(value) if isinstance(value, float) else value)
