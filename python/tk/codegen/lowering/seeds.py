"""Which kernels: tensors to store, put together into the launches that store them.

Outputs share a launch where they run over the same axes; reductions that are read anywhere else are kept in scratch
memory by an earlier launch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from tk.codegen import index as ix
from tk.codegen.comparisons import sums_compared
from tk.codegen.ir import Axis, Buffer, Builder, Kernel, Value, axis_symbol
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
    Substitution,
    buffer_of,
    is_axis,
    scatter,
)
from tk.codegen.lowering.split import Splitter


@dataclass
class Seed:
    """A tensor to store. layout: for each of its dimensions the axis, None where the size is 1. puts: the tensor is
    this one's source, and is put into the buffer. after: what must have been stored before. alone: only pointwise
    kernels of its own level may have it. backwards: the reduced axis runs against the dimension. place: where it is
    stored, if the layout does not say so. limited: the dimension along which places may lie behind its end, where
    nothing is stored."""

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
    place: Index | None = None
    limited: int | None = None

    @property
    def index(self) -> Index:
        if self.place is not None:
            return self.place
        found = [sympy.Integer(0) if a is None else axis_symbol(a) for a in self.layout]
        if self.backwards:
            d = self.layout.index("r0")
            found[d] = self.tensor.shape[d] - 1 - found[d]
        return tuple(found)

    def emit(self, emitter: Emitter, store: bool = True) -> None:
        if self.puts is not None:
            emitter.put(self.puts, self.buffer, self.index)
            return
        if self.limited is None:
            self._emit(emitter, store)
            return
        at, size = self.index[self.limited], self.tensor.shape[self.limited]
        with emitter.where(emitter.op("lt", "i1", emitter.index(at), emitter.index(size))):
            self._emit(emitter, store)

    def _emit(self, emitter: Emitter, store: bool) -> None:
        emitter.storing = self.tensor
        value = emitter.read(self.tensor, self.index)
        if store:
            emitter.store(self.buffer, self.index, value)


# By level, domain, and whether they have sorted runs.
Groups = dict[tuple[int, Domain, bool], list[Seed]]


@dataclass(frozen=True)
class Replaced:
    """How nodes are read. splitter: puts others in their place. once: those that no launch but the one that stores
    them works out."""

    splitter: Substitution | None = None
    once: frozenset[Node] = frozenset()

    def emitter(self, axes: Mapping[str, Axis], stored: Mapping[int, Buffer] | None = None) -> Emitter:
        return Emitter(Builder(axes), stored or {}, self.splitter, self.once)


def kernels(name: str, seeds: Sequence[Seed], splitter: Substitution | None = None) -> list[Kernel]:
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
    """The kernels, and for each what it works out itself, by value."""
    everything, stored = _with_scratch(seeds, how)
    groups = _group(everything, how, stored)
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
    base, source = node.base, node.source
    assert base is not None and source is not None
    put = Seed(source, buffer, puts=node, alone=True)
    own = buffer_of(base)
    if own is not None and own.name == buffer.name:
        return [put]
    first = Seed(base, buffer, alone=True)
    if node.is_read_there:
        there = Lazy(source.shape, base.dtype, lambda e, i: e.read(base, node.place(e, i)))
        first = Seed(there, buffer, puts=scatter("same", base, there, node.place, node.keep), alone=True)
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
    if along and any(not ix.same(a, b) for a, b in zip(sizes, node_sizes, strict=True)):
        (seed.limited,) = along
    seed.domain = Domain(tuple(seed.tensor.shape[d] for d in kept), node_sizes)
    names = {**{d: f"a{i}" for i, d in enumerate(kept)}, **{d: f"r{i}" for i, d in enumerate(along)}}
    seed.layout = tuple(names.get(d) for d in range(len(seed.tensor.shape)))
    seed.needs = _needs(seed, how)


def _place_alone(seed: Seed, dims: Sequence[int], how: Replaced) -> None:
    """Gives a seed a kernel of its own dimensions: a put is of every element of its kernel's axes, and nothing may come
    too late."""
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
               for i, s in zip(at, node.shape, strict=True))  # fmt: skip


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
    # Of what is sorted the first part may be all that is read: everywhere, so it is no part that reads under a mask.
    if not ix.same(tensor.shape[dim], size) and (node.op == "scan" or backwards):
        return None
    if {int(i.name[1:]) for i in found} != set(dims):
        return None
    return tuple(d for d in dims if d != dim), (dim,), node.sizes, backwards


def _group(seeds: Sequence[Seed], how: Replaced, stored: Mapping[int, Buffer]) -> list[list[Seed]]:
    """Seeds of one domain and level share a launch, and so their reads; a pointwise one joins where its sizes fit, or
    where what it reads is read. Sorted runs share it with other runs alone, since merges follow."""
    groups: Groups = {}
    alone = []
    for seed in seeds:
        if seed.domain.reduced:
            groups.setdefault((seed.level, seed.domain, _unfinished(seed)), []).append(seed)
        else:
            alone.append(seed)
    for seed in alone:
        if seed.alone or not (_join(seed, groups) or _join_readers(seed, groups, how, stored)):
            groups.setdefault((seed.level, seed.domain, False), []).append(seed)
    return [groups[key] for key in sorted(groups, key=lambda k: k[0])]


def _unfinished(seed: Seed) -> bool:
    """Whether the seed has sorted runs."""
    return isinstance(seed.tensor, Scan) and seed.tensor.is_unfinished


def _join(seed: Seed, groups: Groups) -> bool:
    for (level, domain, unfinished), members in groups.items():
        if level < seed.level or not domain.reduced or unfinished:
            continue
        axes = domain.axes()
        known = {m.layout for m in members if m.place is None and "w0" not in m.layout}
        for layout in (one for one in known if len(one) == len(seed.layout)):
            sizes = [axes[a].size if a else sympy.Integer(1) for a in layout]
            if all(ix.same(a, b) for a, b in zip(sizes, seed.tensor.shape, strict=True)):
                seed.layout, seed.domain = layout, domain
                members.append(seed)
                return True
    return False


def _join_readers(seed: Seed, groups: Groups, how: Replaced, stored: Mapping[int, Buffer]) -> bool:
    """Join those that reduce what is worked out of the same reads: a bias' gradient, beside that of what it was added
    to. What other launches read must not come later."""
    own = how.emitter(seed.domain.axes(), stored)
    seed.emit(own)
    for (level, domain, unfinished), members in groups.items():
        is_late = level > seed.level and seed.buffer.kind == "scratch"
        if level < seed.level or is_late or unfinished or not (domain.kept and domain.reduced):
            continue
        axes = domain.axes([m.tensor for m in members])
        emitter = how.emitter(axes, stored)
        for m in members:
            m.emit(emitter)
        for mine, other in itertools.product(_loads(own), _loads(emitter)):
            if mine.buffer == other.buffer and (found := _stored_there(seed, mine, other, axes, how.splitter)):
                seed.place, seed.limited = found
                seed.domain = domain
                members.append(seed)
                return True
    return False


def _loads(emitter: Emitter) -> list[Value]:
    return [v for v in emitter.builder.values if v.op == "load"]


def _stored_there(
    seed: Seed, mine: Value, other: Value, axes: Mapping[str, Axis], splitter: Substitution | None
) -> tuple[Index, int | None] | None:
    """The place at which a launch that reads an element as `other` stores that of the seed that is worked out of it,
    and the dimension that is cut into parts; None where it does not come to each of them once."""
    place: list[sympy.Expr] = []
    limited, left = None, {a.name for a in axes.values() if not a.walk}
    for d, (name, size) in enumerate(zip(seed.layout, seed.tensor.shape, strict=True)):
        if name is None:
            place.append(sympy.Integer(0))
            continue
        if axis_symbol(name) not in mine.index:
            return None
        at = other.index[mine.index.index(axis_symbol(name))]
        used = [a for a in axes.values() if a.symbol in at.free_symbols]
        if not used or not left.issuperset(a.name for a in used):
            return None
        left -= {a.name for a in used}
        if not (at.is_Symbol and ix.same(used[0].size, size)):
            if not (isinstance(splitter, Splitter) and splitter.is_in_parts(at, used, size)):
                return None
            limited = d
        place.append(at)
    # What is cut whole into parts runs together in memory, and is read in vectors that a store would break.
    return None if left or all(d == limited for d, name in enumerate(seed.layout) if name) else (tuple(place), limited)
