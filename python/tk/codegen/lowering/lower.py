"""Lower: a core graph -> the kernels of one plan.

Every node becomes a :class:`~tk.codegen.lowering.lazy.Lazy`, a tensor that can be read at an index. Outputs share a
launch where they run over the same axes; reductions that are read anywhere else are kept in scratch memory by an
earlier launch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.utils._pytree import tree_flatten

from tk.codegen import index as ix
from tk.codegen.comparisons import sums_compared
from tk.codegen.errors import TraceError, reported
from tk.codegen.ir import (
    INTS,
    IR_DTYPES,
    Axis,
    Buffer,
    Builder,
    Kernel,
    axis_symbol,
)
from tk.codegen.lowering.lazy import (
    Domain,
    Emitter,
    Fold,
    Index,
    Lazy,
    Missing,
    Node,
    Scan,
    Scatter,
    Stored,
    buffer_of,
    is_axis,
)
from tk.codegen.tracing.trace import Trace

if TYPE_CHECKING:
    from tk.codegen.lowering.split import Splitter
    from tk.codegen.lowering.walk import Walker

# --- Which kernels ---


@dataclass
class Seed:
    """A tensor to store. layout: for each of its dimensions the axis, None where the size is 1. puts: the tensor is
    this one's source, and is put into the buffer. after: what must have been stored before. alone: only pointwise
    kernels of its own level may have it. backwards: the reduced axis runs against the dimension. limited: the axis is
    longer than the dimension, of which it has the first part."""

    tensor: Lazy
    buffer: Buffer
    domain: Domain = field(default_factory=lambda: Domain((), ()))
    layout: tuple[str | None, ...] = ()
    needs: list[Node] = field(default_factory=list)
    level: int = 0
    puts: Scatter | None = None
    after: list[Seed] = field(default_factory=list)
    alone: bool = False
    backwards: bool = False
    limited: bool = False

    @property
    def index(self) -> Index:
        found = [sympy.Integer(0) if a is None else axis_symbol(a) for a in self.layout]
        if self.backwards:
            d = self.layout.index("r0")
            found[d] = self.tensor.shape[d] - 1 - found[d]
        return tuple(found)

    def emit(self, emitter: Emitter, store: bool = True) -> None:
        if self.puts is not None:
            emitter.put(self.puts, self.buffer, self.index)
            return
        if not self.limited:
            self._emit(emitter, store)
            return
        size = self.tensor.shape[self.layout.index("r0")]
        with emitter.where(emitter.op("lt", "i1", emitter.index(axis_symbol("r0")), emitter.index(size))):
            self._emit(emitter, store)

    def _emit(self, emitter: Emitter, store: bool) -> None:
        emitter.storing = self.tensor
        value = emitter.read(self.tensor, self.index)
        if store:
            emitter.store(self.buffer, self.index, value)


@dataclass(frozen=True)
class Replaced:
    """How nodes are read. splitter: puts others in their place. once: those that no launch but the one that stores
    them works out."""

    splitter: Splitter | Walker | None = None
    once: frozenset[Node] = frozenset()

    def emitter(self, axes: Mapping[str, Axis], stored: Mapping[int, Buffer] | None = None) -> Emitter:
        return Emitter(Builder(axes), stored or {}, self.splitter, self.once)


def kernels(name: str, seeds: Sequence[Seed], splitter: Splitter | Walker | None = None) -> list[Kernel]:
    """The launches that store all seeds, in order. Raises TraceError."""
    once: frozenset[Node] = frozenset()
    while True:
        copies = [Seed(s.tensor, s.buffer) for s in seeds]
        found, made = _kernels(name, copies, Replaced(splitter, once))
        counts = Counter(node for in_kernel in made for node in set(in_kernel.values()))
        more = {one for kernel, in_kernel in zip(found, made, strict=True) for n in sums_compared(kernel)
                if (one := in_kernel.get(n)) is not None and counts[one] > 1} - once  # fmt: skip
        if not more:
            return found
        once |= more


def _kernels(name: str, seeds: Sequence[Seed], how: Replaced) -> tuple[list[Kernel], list[dict[int, Node]]]:
    """And for each what it works out itself, by value."""
    everything, stored = _with_scratch(seeds, how)
    groups = _group(everything)
    found, made = [], []
    for i, group in enumerate(groups):
        emitter = how.emitter(group[0].domain.axes([seed.tensor for seed in group]), stored)
        for seed in group:
            seed.emit(emitter)
        assert not emitter.missing
        found.append(emitter.builder.finish(name if len(groups) == 1 else f"{name}_{i}"))
        made.append(emitter.made)
    return found, made


def _with_scratch(seeds: Sequence[Seed], how: Replaced) -> tuple[list[Seed], dict[int, Buffer]]:
    """All seeds, those of scratch memory included, with their domains and levels."""
    stored: dict[int, Buffer] = {}
    by_node: dict[int, Seed] = {}
    pending, everything = [], []
    for seed in seeds:
        # What is returned as it is scattered needs no scratch memory.
        if isinstance(seed.tensor, Scatter) and id(seed.tensor) not in stored:
            stored[id(seed.tensor)] = seed.buffer
            by_node[id(seed.tensor)], *first = _put_seeds(seed.tensor, seed.buffer)
            pending += [*first, by_node[id(seed.tensor)]]
        else:
            pending.append(seed)
    while pending:
        seed = pending.pop(0)
        everything.append(seed)
        _place(seed, how)
        for node in seed.needs:
            if id(node) not in stored:
                merged = isinstance(node, Scan) and node.is_unfinished
                buffer = Buffer(f"scratch{len(stored)}", "scratch", node.dtype, node.shape, merged=merged)
                stored[id(node)] = buffer
                made = _seeds_of(node, buffer)
                by_node[id(node)] = made[0]
                pending += reversed(made)

    def level(seed: Seed) -> int:
        return 1 + max((level(s) for s in (*seed.after, *(by_node[id(n)] for n in seed.needs))), default=-1)

    for seed in everything:
        seed.level = level(seed)
    return everything, stored


def _seeds_of(node: Node, buffer: Buffer) -> list[Seed]:
    """What writes a node into its buffer, the last first."""
    if isinstance(node, Scatter):
        return _put_seeds(node, buffer)
    if isinstance(node, Stored):
        assert node.operand is not None
        return [Seed(node.operand, buffer)]
    return [Seed(node, buffer)]


def _put_seeds(node: Scatter, buffer: Buffer) -> list[Seed]:
    """[what puts the source into the buffer, what writes the base there first]; the latter is left out where the
    buffer is the base."""
    assert node.base is not None and node.source is not None
    put = Seed(node.source, buffer, puts=node, alone=True)
    own = buffer_of(node.base)
    if own is not None and own.name == buffer.name:
        return [put]
    first = Seed(node.base, buffer, alone=True)
    put.after.append(first)
    return [put, first]


def _place(seed: Seed, how: Replaced) -> None:
    """Choose the seed's domain: that of the reduction it reads at its own place, if there is one."""
    if isinstance(seed.tensor, Fold):
        seed.domain, places = seed.tensor.domain, iter(range(len(seed.tensor.shape)))
        seed.layout = ("w0", *(None if s == 1 else f"r{next(places)}" for s in seed.tensor.shape[1:]))
        seed.needs = _needs(seed, how)
        return
    dims = [d for d, s in enumerate(seed.tensor.shape) if s != 1]
    if seed.alone:
        return _place_alone(seed, dims, how)
    axes = {f"x{d}": Axis(f"x{d}", seed.tensor.shape[d]) for d in dims}
    probe = how.emitter(axes)
    index = tuple(axis_symbol(f"x{d}") if d in dims else sympy.Integer(0) for d in range(len(seed.tensor.shape)))
    probe.read(seed.tensor, index)
    own = [m for m in probe.missing if m.node not in how.once or m.node is seed.tensor]
    candidates = [c for missing in own if (c := _candidate(seed.tensor, missing))]
    best = max(candidates, key=lambda c: (candidates.count(c), len(c[1])), default=(tuple(dims), (), (), False))
    kept, along, node_sizes, seed.backwards = best
    sizes = [seed.tensor.shape[d] for d in along] or list(node_sizes)
    seed.limited = bool(along) and any(not ix.same(a, b) for a, b in zip(sizes, node_sizes, strict=True))
    sizes = list(node_sizes) if seed.limited else sizes
    seed.domain = Domain(tuple(seed.tensor.shape[d] for d in kept), tuple(sizes))
    names = {**{d: f"a{i}" for i, d in enumerate(kept)}, **{d: f"r{i}" for i, d in enumerate(along)}}
    seed.layout = tuple(names.get(d) for d in range(len(seed.tensor.shape)))
    seed.needs = _needs(seed, how)


def _place_alone(seed: Seed, dims: Sequence[int], how: Replaced) -> None:
    """At its own dimensions: a put is of every element of its kernel's axes, and nothing may come too late."""
    seed.domain = Domain(tuple(seed.tensor.shape[d] for d in dims), ())
    seed.layout = tuple(f"a{dims.index(d)}" if d in dims else None for d in range(len(seed.tensor.shape)))
    probe = how.emitter(seed.domain.axes())
    seed.emit(probe)
    seed.needs = list(dict.fromkeys(m.node for m in probe.missing))


def _needs(seed: Seed, how: Replaced) -> list[Node]:
    """What it reads that is not worked out at its own place."""
    emitter = how.emitter(seed.domain.axes([seed.tensor]))
    seed.emit(emitter, store=False)
    return list(dict.fromkeys(m.node for m in emitter.missing))


def _candidate(tensor: Lazy, missing: Missing) -> tuple[Any, ...] | None:
    """(kept dimensions, reduced dimensions, sizes of the reduced, whether they run backwards) under which `node` is
    computed in the same kernel."""
    node, at = missing.node, missing.index
    if isinstance(node, Scatter | Stored | Fold) or (missing.masked and _is_shorter(tensor, node, at)):
        return None
    if isinstance(node, Scan):
        return _scan_candidate(tensor, node, at)
    own = [i for i, s in zip(at, node.shape, strict=True) if s != 1]
    if not all(is_axis(i) for i in own) or len(set(own)) != len(own) or not node.sizes:
        return None
    kept = tuple(sorted(int(i.name[1:]) for i in own))
    rest = tuple(d for d, s in enumerate(tensor.shape) if s != 1 and d not in kept)
    if not rest:
        return kept, (), node.sizes, False
    if not kept:  # one program would write the whole tensor
        return None
    if len(rest) != len(node.sizes) or not all(
        ix.same(tensor.shape[d], s) for d, s in zip(rest, node.sizes, strict=True)
    ):
        return None
    return kept, rest, node.sizes, False


def _is_shorter(tensor: Lazy, node: Node, at: Index) -> bool:
    """Whether a dimension of the node that is read along one of the tensor's has another size, as pieces of a cat."""
    return any(is_axis(i) and not ix.same(tensor.shape[int(i.name[1:])], s)
               for d, (i, s) in enumerate(zip(at, node.shape, strict=True))
               if not (isinstance(node, Scan) and d == node.dim))  # fmt: skip


def _scan_candidate(tensor: Lazy, node: Scan, at: Index) -> tuple[Any, ...] | None:
    if node.is_unfinished and tensor is not node:
        return None
    size = node.sizes[0]
    mirrored = sympy.expand(size - 1 - at[node.dim])
    backwards = is_axis(mirrored)
    along = mirrored if backwards else at[node.dim]
    found = tuple(along if d == node.dim else i for d, i in enumerate(at) if i != 0 or d == node.dim)
    if not all(is_axis(i) for i in found) or len(set(found)) != len(found):
        return None
    dims = tuple(d for d, s in enumerate(tensor.shape) if s != 1)
    dim = int(along.name[1:])
    # Of what is sorted the first part may be all that is read.
    if not ix.same(tensor.shape[dim], size) and (node.op == "scan" or backwards):
        return None
    if {int(i.name[1:]) for i in found} != set(dims):
        return None
    return tuple(d for d in dims if d != dim), (dim,), node.sizes, backwards


def _group(seeds: Sequence[Seed]) -> list[list[Seed]]:
    """Seeds of one domain and level share a launch, and so their reads; a pointwise one joins where its sizes fit.
    Sorted runs share it with other runs alone, since merges follow."""
    groups: dict[tuple[int, Domain, bool], list[Seed]] = {}
    alone = []
    for seed in seeds:
        if seed.domain.reduced:
            groups.setdefault((seed.level, seed.domain, _unfinished(seed)), []).append(seed)
        else:
            alone.append(seed)
    for seed in alone:
        if seed.alone or not _join(seed, groups):
            groups.setdefault((seed.level, seed.domain, False), []).append(seed)
    return [groups[key] for key in sorted(groups, key=lambda k: k[0])]


def _unfinished(seed: Seed) -> bool:
    """Whether the seed has sorted runs."""
    return isinstance(seed.tensor, Scan) and seed.tensor.is_unfinished


def _join(seed: Seed, groups: Mapping[tuple[int, Domain, bool], list[Seed]]) -> bool:
    for (level, domain, unfinished), members in groups.items():
        if level < seed.level or not domain.reduced or unfinished:
            continue
        axes = domain.axes()
        for layout in {m.layout for m in members if len(m.layout) == len(seed.layout) and "w0" not in m.layout}:
            sizes = [axes[a].size if a else sympy.Integer(1) for a in layout]
            if all(ix.same(a, b) for a, b in zip(sizes, seed.tensor.shape, strict=True)):
                seed.layout, seed.domain = layout, domain
                members.append(seed)
                return True
    return False


# --- From a graph to seeds ---


def lower(trace: Trace, name: str, splitter: Splitter | Walker | None = None,
          deterministic: bool = False) -> list[Kernel]:  # fmt: skip
    """Raises TraceError for an op without a rule, with the line that asked for it.

    deterministic: no result depends on the order in which programs run."""
    graph = Graph(trace, deterministic)
    seeds = [Seed(graph.tensor(node), graph.output_buffer(i, node)) for i, node in enumerate(trace.new)]
    changed = [Seed(graph.tensor(n), graph.mutated_buffer(p)) for p, n in trace.mutated.items()]
    found = kernels(name, [*seeds, *changed], splitter)
    if not trace.mutated or _in_place_is_safe(found):
        return found
    # What is still read elsewhere may not be overwritten: through scratch memory, and copied at the end.
    scratch = {p: Buffer(f"new_{p}", "scratch", graph.mutated_buffer(p).dtype, graph.mutated_buffer(p).sizes)
               for p in trace.mutated}  # fmt: skip
    first = kernels(name, [*seeds, *(Seed(graph.tensor(n), scratch[p]) for p, n in trace.mutated.items())], splitter)
    copies = [Seed(_stored(b), graph.mutated_buffer(p)) for p, b in scratch.items()]
    return [*first, *kernels(f"{name}_copy", copies)]


def _stored(buffer: Buffer) -> Lazy:
    return Lazy(buffer.sizes, buffer.dtype, lambda e, i: e.load(buffer, i))


def _in_place_is_safe(found: Sequence[Kernel]) -> bool:
    """Whether every argument that is written is read by earlier launches and the same only, and by that only at the
    place that it writes."""
    for i, kernel in enumerate(found):
        for store in (v for v in kernel.values if v.op == "store" and kernel.buffer(v.buffer).kind == "mutated"):
            for other in found[i:]:
                reads = [v for v in other.values if v.op == "load" and v.buffer == store.buffer]
                if reads and (other is not kernel or any(r.index != store.index for r in reads)):
                    return False
    return True


class Graph:
    """The lazy tensors of a core graph."""

    def __init__(self, trace: Trace, deterministic: bool = False):
        self.trace = trace
        self.deterministic = deterministic
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
        from tk.codegen.lowering.rules import RULES, refused

        args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.values[n])
        name = _op_name(node.target)
        rule = RULES.get(name)
        if rule is None:
            raise TraceError(f"{self.where(node)}: {refused.message(name)}")
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


def _op_name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return target._schema.name.replace("::", ".")
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return f"{getattr(target, '__module__', '').lstrip('_')}.{target.__name__}"


@dataclass
class Call:
    """One node under its rule: what torch says of the result."""

    graph: Graph
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
