"""Trace: a declared function -> its graphs.

Each choice of dtypes (and of bools) is traced once, with a symbol for every size and every number. Two graphs come of
it: the *recorded* one, of the ATen ops as the function called them, which the CPU path interprets; and the *core* one,
in place forms made functional and everything taken apart that the lowering has no rule of its own for.

The recorded graph is held against the function itself, on small numbers: so that nothing is kept of the trace that is
no call's, and, as ``...`` is traced as one dimension, ``leading``, with two of them too.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from tk.codegen import ir
from tk.codegen.errors import SideEffect, TraceError, where
from tk.codegen.tracing import combine, eager, effects, guards, random, reads, saved, shapes, slices, special
from tk.codegen.tracing.arguments import DTYPE_NAMES, LEADING, Arguments, orders
from tk.codegen.tracing.core import is_tensor, outputs_of, to_core
from tk.codegen.tracing.lines import Lines, explaining, refuse_items, tag_lines
from tk.codegen.tracing.recorded import record
from tk.generated.signature import DTYPES, NumberSpec, Signature, TensorSpec


@dataclass
class Trace:
    """One choice of dtypes and flags.

    core: placeholders are the parameters less the flags. new: its nodes that the op returns; mutated: parameter -> the
    node that holds its new contents. structure: None for one tensor, else how many are returned in a tuple."""

    signature: Signature
    dtypes: Mapping[str, str]
    flags: Mapping[str, bool]
    core: fx.GraphModule
    recorded: list[dict[str, Any]]
    new: tuple[fx.Node, ...]
    mutated: Mapping[str, fx.Node]
    structure: int | None
    checks: tuple[guards.Check, ...]
    symbols: Mapping[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    equal: Mapping[sympy.Expr, sympy.Symbol] = field(default_factory=dict)  # by the checks
    hints: Mapping[sympy.Symbol, int] = field(default_factory=dict)  # what the letters were while torch traced
    pieces: Mapping[sympy.Symbol, sympy.Expr] = field(
        default_factory=dict
    )  # how many elements slices have, and where they begin

    @property
    def label(self) -> str:
        """The choice, as a word."""
        flags = [f"{'' if on else 'not_'}{name}" for name, on in self.flags.items()]
        return "_".join([*self.dtypes.values(), *flags]) or "only"

    def size(self, value: Any) -> sympy.Expr:
        """A size or an integer as an expression of letters and int parameters."""
        if isinstance(value, torch.SymInt | torch.SymFloat):
            value = value.node.expr
        return sympy.sympify(value).xreplace(self.symbols).xreplace(self.equal)

    def begin(self, size: sympy.Expr, bound: Any) -> sympy.Symbol | None:
        """The letter for where a slice by sizes begins, if there is one."""
        if not isinstance(bound, sympy.Expr) or bound.is_Integer:
            return None
        definition = slices.place(slices.of_any_size(size), slices.of_any_size(bound))
        return next((piece for piece, d in self.pieces.items() if d == definition), None)

    def is_negative(self, size: sympy.Expr) -> bool:
        """Whether a size is negative. Where the letters leave it open, torch decided at the hints, and its guard is a
        check of the op."""
        known = size.is_negative
        return bool(size.xreplace(self.hints).is_negative if known is None else known)

    def arguments_read(self) -> list[str]:
        """The tensors that the results depend on, by more than their shapes."""
        found: list[str] = []
        pending, seen = [*self.new, *self.mutated.values()], set()
        while pending:
            node = pending.pop()
            if node in seen or not (is_tensor(node) or isinstance(node.meta.get("val"), tuple | list)):
                continue
            seen.add(node)
            if node.op == "placeholder":
                found.append(node.meta["param"])
            pending += node.all_input_nodes
        return found

    def size_list(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        return tuple(self.size(s) for s in node.meta["val"].shape)

    def sizes(self) -> Iterator[tuple[sympy.Expr, int | None]]:
        """The sizes of every tensor, of all slices and of the checks, each with its line where it has one."""
        yield from ((e, None) for e in (*self.pieces.values(), *(check.zero for check in self.checks)))
        for node in self.core.graph.nodes:
            if is_tensor(node):
                yield from ((size, node.meta.get("line")) for size in self.size_list(node))


def trace_all(fn: Callable[..., Any], signature: Signature, ruled: frozenset[str]) -> list[Trace]:
    """Every dtype assignment, and of each every value of the flags. ruled: the names of the ops that the lowering has
    rules for, which are left whole. Raises TraceError."""
    return [trace(fn, signature, d, f, ruled) for d in signature.assignments() for f in flag_values(signature)]


def flag_values(signature: Signature) -> list[dict[str, bool]]:
    """Every value of the bools."""
    values = itertools.product((False, True), repeat=len(signature.flags))
    return [dict(zip(signature.flags, v, strict=True)) for v in values]


_Asked = Callable[[Callable[..., Any], Signature, Mapping[str, str], Mapping[str, bool], frozenset[str]], Trace]
_InOneOrder = Callable[
    [
        Callable[..., Any], Signature, Mapping[str, str], Mapping[str, bool], frozenset[str], slices.Slices,
        Sequence[str],
    ],
    Trace,
]  # fmt: skip


def _in_any_order(trace: _InOneOrder) -> _Asked:
    """Traces a function in the first order of the sizes in which it can be. What it asked of them is a check of the
    op."""

    @wraps(trace)
    def tried(
        fn: Callable[..., Any],
        signature: Signature,
        dtypes: Mapping[str, str],
        flags: Mapping[str, bool],
        ruled: frozenset[str],
    ) -> Trace:
        first: TraceError | None = None
        for order in orders(signature):

            def in_order(made: slices.Slices, is_copied: bool, order: Sequence[str] = order) -> Trace:
                with shapes.copying(is_copied):
                    return trace(fn, signature, dtypes, flags, ruled, made, order)

            try:
                with suppress(shapes.Written):
                    return slices.traced(partial(in_order, is_copied=True))
                return slices.traced(partial(in_order, is_copied=False))
            except (random.NeedsSeed, SideEffect):
                raise
            except TraceError as error:
                first = first or error
        assert first is not None
        raise first

    return tried


@_in_any_order
def trace(
    fn: Callable[..., Any],
    signature: Signature,
    dtypes: Mapping[str, str],
    flags: Mapping[str, bool],
    ruled: frozenset[str],
    made: slices.Slices,
    order: Sequence[str],
) -> Trace:
    """Raises TraceError for what cannot be traced, with the line of `fn` at fault."""
    arguments = Arguments(signature, dtypes, getattr(fn, "sizes", ()), made, order)
    if hasattr(fn, "see"):
        fn.see(arguments.sizes)
    lines = Lines(fn, arguments)

    def flat(*args: Any) -> Any:
        named = {**dict(zip(arguments.names, args, strict=True)), **flags}
        with (
            reads.unchanged(fn),
            reads.refused(fn),
            random.drawing(signature, named),
            special.shapes_of_norms(),
            lines,
            combine.replaced(fn),
        ):
            return fn(**random.own(fn, named))

    own_error = partial(eager.error_of, fn, signature, dtypes, flags)
    with effects.refused(fn), explaining(fn, lines, arguments, own_error), arguments.mode, torch.enable_grad():
        recorded = make_fx(flat, tracing_mode="real", decomposition_table=random.decompositions())(*arguments.values)
        arguments.n_asked = len(arguments.env.guards)
        tag_lines(recorded, lines)
        refuse_items(recorded, fn)
        outputs, structure = outputs_of(recorded)
        core, new, mutated = to_core(recorded, arguments, ruled)
    shapes.check_written(recorded)
    checks = tuple(guards.checks(arguments, recorded, fn))
    guards.refuse_unknown_sizes(arguments, new, fn)
    with explaining(fn, lines, arguments, own_error):
        nodes = record(recorded, arguments.names, lines.constant, _combined(ruled))
    result = Trace(signature, dtypes, flags, core, nodes, new, mutated, structure, checks, **_of_sizes(arguments))
    guards.refuse_sizes_of_floats(result.sizes(), fn)
    if not outputs and not mutated:
        raise TraceError(f"{where(fn)}: the function returns no tensor and changes none of its arguments")
    _check_run(fn, signature, result, recorded)
    return result


@_in_any_order
def trace_backward(
    fn: Callable[..., Any],
    signature: Signature,
    dtypes: Mapping[str, str],
    flags: Mapping[str, bool],
    ruled: frozenset[str],
    made: slices.Slices,
    order: Sequence[str],
) -> Trace:
    """The gradients of `fn` with respect to its floating-point tensors, as autograd has them.

    The graph's arguments are ``grad_0`` …, one for each floating-point result, ``result_0`` …, the results themselves,
    and then those of `fn`: what the forward worked out and no result holds is worked out again, since reading it would
    take longer. Its results are the gradients, in the order of the tensors. The trace's signature has all arguments;
    the caller drops those that are not read."""
    arguments = Arguments(signature, dtypes, slices=made, order=order)
    lines = Lines(fn, arguments)
    own = list(arguments.names)
    wanted = [n for n in signature.tensors if DTYPES[_dtype_name(signature.tensors[n], dtypes)].is_floating_point]

    def run(args: Sequence[Any]) -> list[torch.Tensor]:
        named = {**dict(zip(own, args, strict=True)), **flags}
        with random.drawing(signature, named), special.shapes_of_norms(), lines, combine.replaced(fn):
            results, _ = tree_flatten(fn(**random.own(fn, named)))
        return [r for r in results if r is not None]

    def joint(*args: Any) -> list[torch.Tensor]:
        """The gradients, and the results behind them."""
        grads, inputs = args[: len(args) - len(own)], list(args[len(args) - len(own) :])
        with torch.enable_grad():
            for i, name in enumerate(own):
                if name in wanted:
                    inputs[i] = inputs[i].detach().requires_grad_()
            results = run(inputs)
        sources = [inputs[own.index(n)] for n in wanted]
        floats = [r for r in results if r.dtype.is_floating_point]
        pairs = [(r, g) for r, g in zip(floats, grads, strict=True) if r.requires_grad]
        if not pairs:  # comparisons, and what is rounded: no gradient gets through
            return [*(torch.zeros_like(s) for s in sources), *results]
        found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        return [*(torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)), *results]

    own_error = partial(eager.error_of, fn, signature, dtypes, flags, is_differentiated=True)
    with explaining(fn, lines, arguments, own_error), arguments.mode:
        floats = [r for r in run(arguments.values) if r.dtype.is_floating_point]
        grads = [torch.empty(r.shape, dtype=r.dtype, device="meta") for r in floats]
        if not wanted:
            raise TraceError(
                f"{where(fn)}: no parameter is a floating-point tensor, so it has no gradient; leave out grad=True"
            )
        arguments.names = [*(f"grad_{i}" for i in range(len(grads))), *own]
        arguments.values = [*grads, *arguments.values]
        recorded = make_fx(joint, tracing_mode="real", decomposition_table=random.decompositions())(*arguments.values)
        arguments.n_asked = len(arguments.env.guards)
        tag_lines(recorded, lines)
        outputs = saved.read_results(recorded, saved.split_results(recorded, len(wanted)), len(grads))
        arguments.names[len(grads) : len(grads)] = map(saved.name, range(len(outputs)))
        if taken := next((n for n in own if n in arguments.names[: -len(own)]), None):
            raise TraceError(f"{where(fn)}: the gradient's op has an argument {taken} of its own; rename the parameter")
        arguments.values[len(grads) : len(grads)] = outputs
        core, new, _ = to_core(recorded, arguments, ruled)
    shapes.check_written(recorded)
    specs = {n: _result_spec(arguments, x) for n, x in zip(arguments.names, [*grads, *outputs], strict=False)}
    full = Signature({**specs, **signature.params}, signature.variables)
    checks = tuple(guards.of_sizes(arguments, fn))
    nodes = record(recorded, arguments.names, lines.constant, _combined(ruled), is_backward=True)
    return Trace(full, dtypes, flags, core, nodes, new, {}, len(new), checks, **_of_sizes(arguments))


def _of_sizes(arguments: Arguments) -> dict[str, Any]:
    """What a Trace says of its letters."""
    return dict(
        symbols=arguments.symbols, equal=guards.equal_sizes(arguments), hints=arguments.hints,
        pieces=arguments.slices.pieces,
    )  # fmt: skip


def _dtype_name(spec: TensorSpec, dtypes: Mapping[str, str]) -> str:
    return dtypes.get(spec.dtype, spec.dtype)


def _result_spec(arguments: Arguments, result: torch.Tensor) -> TensorSpec:
    """The spec of a result, or of its gradient, as a declaration would have it, with the dtype that it has here."""
    sizes = [sympy.sympify(s.node.expr if isinstance(s, torch.SymInt) else s) for s in result.shape]
    sizes = [s.xreplace(arguments.symbols).xreplace(guards.equal_sizes(arguments)) for s in sizes]
    leading = bool(sizes) and sizes[0] == ir.LEADING
    declared = [str(s) if s.is_Symbol else int(s) if s.is_Integer else s for s in sizes[leading:]]
    return TensorSpec(DTYPE_NAMES[result.dtype], tuple(declared), leading)


# --- The combine function of a scan ---


def scalars(number: int, dtypes: Sequence[str], ruled: frozenset[str]) -> Trace:
    """The trace of combine function `number` on single elements, a0, a1, … and b0, b1, …, of these dtypes (the
    signature's names)."""
    function = combine.FUNCTIONS[number]

    def on_scalars(**values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function.fn(*([values[f"{side}{i}"] for i in range(len(dtypes))] for side in "ab")))

    params = {f"{side}{i}": TensorSpec(dtype, ()) for side in "ab" for i, dtype in enumerate(dtypes)}
    found = trace(on_scalars, Signature(params, {}), {}, {}, ruled)
    if found.structure != len(dtypes) or any(n.meta["val"].dim() for n in found.new):
        raise TraceError(f"the combine function of {len(dtypes)} elements must return as many")
    return found


def _combined(ruled: frozenset[str]) -> Callable[[int, Sequence[str]], str]:
    """The graph of a combine function as the function wrote it, in JSON."""
    return lambda number, dtypes: json.dumps(scalars(number, dtypes, ruled).recorded)


# --- The function itself ---


def _check_run(fn: Callable[..., Any], signature: Signature, found: Trace, recorded: fx.GraphModule) -> None:
    """Holds the recorded graph against the function, on small numbers of the CPU. "..." is one dimension in the
    graph: whether the function agrees is seen with two."""
    has_leading = any(spec.leading for spec in signature.tensors.values())
    for leading, error in (((6,), _DEPENDS), ((2, 3), _LEADING))[: 1 + has_leading]:
        for named in _numbers(signature, found, leading):
            if (agrees := _agrees(fn, signature, found, recorded, named, leading)) is not None:
                if not agrees:
                    raise TraceError(f"{where(fn)}: {error}")
                break


_DEPENDS = (
    "what the function computes depends on something that no kernel knows: the class of an argument, such as "
    "isinstance(n, int), a number or a size as a text, an error that it catches, or a generator that is not torch's. "
    "It is not what the function computes of tensors of the CPU"
)
_LEADING = (
    "what the function computes depends on how many dimensions '...' stands for. Count dimensions from the end, and "
    "treat the leading ones alike"
)


def _numbers(signature: Signature, found: Trace, leading: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Arguments of sizes at which the op's checks hold."""
    for factor, order in itertools.product((2, 4), orders(signature)):
        sizes = {name: factor * (i + 2) for i, name in enumerate(order)}
        values = {**sizes, LEADING: math.prod(leading)}
        if all(_size(check.zero, found, values) == 0 for check in found.checks):
            yield eager.numbers(signature, found.dtypes, found.flags, sizes, leading=leading)


def _size(expr: sympy.Expr, found: Trace, values: Mapping[str, int]) -> sympy.Expr:
    expr = sympy.sympify(expr).subs(found.pieces)
    return expr.subs({symbol: values[symbol.name] for symbol in expr.free_symbols if symbol.name in values})


def _agrees(
    fn: Callable[..., Any], signature: Signature, found: Trace, recorded: fx.GraphModule, named: dict[str, Any],
    leading: Sequence[int],
) -> bool | None:  # fmt: skip
    """Whether the recorded graph, of one leading dimension, computes what the function does; None where the CPU has no
    such op for these dtypes, or the indices or numbers are out of range."""
    graph = [_of_one(x, signature.params[name], leading) for name, x in named.items() if name not in found.flags]
    own = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in named.items()}
    try:
        with (
            warnings.catch_warnings(),  # the trace has given them
            reads.unchanged(fn), random.drawing(signature, own), Lines(fn), random.Eager(), combine.replaced(fn),
            special.shapes_of_norms(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            expected, _ = tree_flatten(fn(**random.own(fn, own)))
        actual, _ = tree_flatten(fx.Interpreter(_on_cpu(recorded)).run(*graph))
    except TraceError:
        raise
    except (RuntimeError, IndexError, ValueError, NotImplementedError, ArithmeticError):
        return None
    if any(vars(x) for x in own.values() if isinstance(x, torch.Tensor)):
        raise TraceError(f"{where(fn)}: it assigns an attribute of an argument, which no kernel does")
    written = zip((x for name, x in own.items() if name not in found.flags), graph, strict=True)
    pairs = [*zip(expected, actual, strict=True), *((a, b) for a, b in written if isinstance(a, torch.Tensor))]
    return all(_agree(a, b) for a, b in pairs if a is not None)


def _of_one(x: Any, spec: TensorSpec | NumberSpec, leading: Sequence[int]) -> Any:
    """An argument with one leading dimension."""
    if isinstance(spec, NumberSpec):
        return x
    return x.clone().flatten(0, len(leading) - 1) if spec.leading else x.clone()


def _on_cpu(graph: fx.GraphModule) -> fx.GraphModule:
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        clone = new.node_copy(node, lambda n: values[n])
        if "device" in clone.kwargs:
            clone.kwargs = {**clone.kwargs, "device": torch.device("cpu")}
        values[node] = clone
    return fx.GraphModule(graph, new)


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    flat = a.reshape(b.shape).double(), b.double()
    return torch.allclose(*flat, rtol=1e-2, atol=1e-2, equal_nan=True)
