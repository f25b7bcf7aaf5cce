"""What torch took for granted of sizes while it traced: a check of the op, or a reason to refuse the function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod, ToFloat

from tk.codegen.errors import TraceError, needs_a_number, where
from tk.codegen.tracing.arguments import Arguments
from tk.codegen.tracing.shapes import copied_where_torch_does
from tk.codegen.tracing.slices import OPEN, Decided, length, of_any_size, place

aten = torch.ops.aten


@dataclass(frozen=True)
class Check:
    """A size expression that must be 0 for the graph to say what the function does."""

    zero: sympy.Expr
    message: str


def checks(arguments: Arguments, recorded: fx.GraphModule, fn: Callable[..., Any]) -> Iterator[Check]:
    """All of them."""
    yield from of_sizes(arguments, fn)
    for kind in (_nonempty, _enough, _not_squeezed, _reached, _cut, _inferred):
        for check in kind(recorded, arguments):
            yield Check(check.zero, arguments.slices.said(check.message))


def of_sizes(arguments: Arguments, fn: Callable[..., Any]) -> Iterator[Check]:
    """Guards: a divisibility becomes a check of the op; a decision of the function's own about sizes is refused."""
    checks: dict[str, Check] = {}
    copied = copied_where_torch_does()
    is_copied = bool(copied)
    for n, guard in enumerate(arguments.env.guards):
        expr = _of_integers(guard.expr.xreplace(arguments.symbols))
        location: Any = guard.sloc.framework_loc
        if _is_of_strides(location) or (n >= arguments.n_asked and _is_of_cpp(location, expr)):
            continue
        if arguments.slices.of(expr) and not isinstance(expr, sympy.Ne) and not _is_divisibility(expr):
            raise Decided(f"{where(fn)}: holds only where {arguments.slices.said(str(expr))}")
        if is_copied and isinstance(expr, sympy.Ne):
            unequal = sympy.Max(0, 1 - sympy.Max(expr.lhs - expr.rhs, expr.rhs - expr.lhs))
            checks.setdefault(str(expr), Check(unequal, f"{expr.lhs} must not be {expr.rhs}: {_MAY_BE_A_VIEW}"))
            continue
        is_own = getattr(location, "filename", "") == fn.__code__.co_filename
        if isinstance(expr, sympy.Eq):
            if expr.lhs.is_Symbol and expr.rhs == arguments.hints.get(expr.lhs):
                raise TraceError(needs_a_number(fn, location.lineno if is_own else None, expr.lhs))
            if expr.lhs.is_Symbol and (expr.rhs.is_Symbol or expr.rhs.is_Integer):
                raise TraceError(
                    f"{where(fn, location.lineno if is_own else None)}: holds only where {expr.lhs} == {expr.rhs}; "
                    "declare the sizes so, with equal letters or a number"
                )
            zero = _divisibility(expr)
            if zero is not None:
                checks.setdefault(str(zero), Check(zero, f"{zero.args[0]} must be a multiple of {zero.args[1]}"))
            else:
                for check in _equality(expr, location):
                    checks.setdefault(check.message, check)
            continue
        if not is_own and isinstance(expr, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
            excess = _excess(expr)
            if not excess.is_nonpositive:
                checks.setdefault(str(expr), Check(sympy.Max(0, excess), f"{expr} must hold"))
        if is_own:
            raise TraceError(
                f"{where(fn, location.lineno)}: control flow that depends on a size ({expr}). One kernel serves every "
                "size: declare two ops, or fix the size with a number"
            )
    for size in dict.fromkeys(sympy.sympify(n.node.expr).xreplace(arguments.symbols) for n in copied):
        short = sympy.Max(0, 2 - of_any_size(size))
        checks[f"{size} > 1"] = Check(short, f"{size} must be at least 2: {_MAY_BE_A_VIEW}")
    for check in (*checks.values(), *_asked(arguments)):
        yield Check(check.zero, arguments.slices.said(check.message))


def _equality(expr: sympy.Eq, location: Any) -> Iterator[Check]:
    """The check that two sizes are equal. Where one is 1 torch may broadcast it, which is said: no other call is
    refused with those words."""
    message = f"{expr.lhs} must be equal to {expr.rhs}"
    unequal = _unless_empty(expr) * (expr.lhs - expr.rhs)
    if not _is_of_broadcast(location):
        yield Check(unequal, message)
        return
    left_is_one, right_is_one = (_is_one(of_any_size(size)) for size in expr.args)
    yield Check(unequal * (1 - left_is_one) * (1 - right_is_one), message)
    yield Check(unequal * (left_is_one + right_is_one), f"{message}: {_BROADCAST}")


def _is_one(size: sympy.Expr) -> sympy.Expr:
    """1 where the size is 1, else 0."""
    return sympy.Max(0, 2 - size, evaluate=False) * sympy.Min(size, 1, evaluate=False)


_BROADCAST = "torch would broadcast the one of size 1, which takes an op that is declared with that size as a number"
_MAY_BE_A_VIEW = "a reshape may be a view there, and is written"


def _asked(arguments: Arguments) -> Iterator[Check]:
    """What functions of torch's refuse sizes for. Torch's own guards are none: to it every size is 2 at least."""
    for size, least, of in dict.fromkeys(arguments.asked):
        short = sympy.Max(0, least - of_any_size(sympy.sympify(size).xreplace(arguments.symbols)))
        if short != 0:
            yield Check(short, f"{size.xreplace(arguments.symbols)} must be at least {least}: {of}")


_NEED_AN_ELEMENT = (aten.amax, aten.amin, aten.argmax, aten.argmin, aten.max, aten.min, aten.aminmax)


def _nonempty(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """ATen refuses the largest of no elements."""
    for node in recorded.graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in _NEED_AN_ELEMENT:
            continue
        shape = node.args[0].meta["val"].shape
        named = dict(zip([a.name for a in node.target._schema.arguments], node.args, strict=False)) | node.kwargs
        dims = named.get("dim")
        if isinstance(dims, fx.Node) or "other" in named:
            continue
        if not shape:
            continue  # one element, along whichever dimension
        dims = range(len(shape)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        for d in dims:
            size = sympy.sympify(shape[d].node.expr if isinstance(shape[d], torch.SymInt) else shape[d])
            size = size.xreplace(arguments.symbols)
            # Letters count as positive for everything else; here they may be 0.
            if not size.is_Integer:
                yield Check(
                    sympy.Max(0, 1 - size, evaluate=False), f"{size} must not be 0: {_base(node)} of no elements"
                )


def _enough(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """Checks that no more is taken of a row than it has."""
    for node in recorded.graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in (aten.topk, aten.kthvalue):
            continue
        x, k = node.args[0].meta["val"], node.args[1]
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
        k, size = (sympy.sympify(_expr(n)).xreplace(arguments.symbols) for n in (k, x.shape[dim] if x.dim() else 1))
        low = sympy.Integer(1 if _base(node) == "kthvalue" else 0)
        for short in (k - size, low - k):
            if not short.is_nonpositive:
                message = f"{k} must be {low} to {size}: {_base(node)} along a dimension of size {size}"
                yield Check(sympy.Max(0, short, evaluate=False), message)


def _not_squeezed(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """A size that the call gives counts as none of 1 while torch traces, so that nothing is squeezed there."""
    for node in recorded.graph.nodes:
        if getattr(node.target, "overloadpacket", None) is not aten.squeeze:
            continue
        shape = node.args[0].meta["val"].shape
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", range(len(shape)))
        for d in [dims] if isinstance(dims, int) else dims:
            size = sympy.sympify(_expr(shape[d]) if shape else 1).xreplace(arguments.symbols)
            if arguments.slices.of(size):
                raise Decided(f"squeeze of a dimension of size {arguments.slices.said(str(size))}")
            if not size.is_Integer:
                yield Check(_is_one(size), f"{size} must not be 1: squeeze would leave out that dimension")


def _reached(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """A place that is a number lies in its dimension: while torch traces no size is less than 2."""
    for node in recorded.graph.nodes:
        if node.target is not aten.select.int or not isinstance(node.args[2], int):
            continue
        size, at = _size(node.args[0], node.args[1], arguments), node.args[2]
        least = at + 1 if at >= 0 else -at
        if not size.is_Integer:
            message = f"{size} must be at least {least}: select in a dimension of size {size}"
            yield Check(sympy.Max(0, least - size, evaluate=False), message)


def _cut(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """A slice has as many elements as the function was traced with, where it is traced with a number of them, or with
    as many as a dimension has that is large enough."""
    for node in recorded.graph.nodes:
        if node.target is not aten.slice.Tensor:
            continue
        bounds: Any = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
        dim, start, end, step = bounds
        if not all(n is None or isinstance(n, int) for n in (start, end, step)):
            yield from _cut_by_sizes(node, dim, (start, end), step, arguments)
            continue
        size, traced = _size(node.args[0], dim, arguments), _size(node, dim, arguments)
        has = length(of_any_size(size), start, end, step)
        if size.is_Integer or arguments.slices.of(traced) or has == of_any_size(traced):
            continue
        least = max(0 if n is None or n >= OPEN else n if n >= 0 else -n for n in (start, end))
        if not traced.is_Integer:
            least = (start or 0) - min(end or 0, 0)
        message = f"{size} must be at least {least}: slice in a dimension of size {size}"
        yield Check(has - of_any_size(traced), message)


def _cut_by_sizes(node: Any, dim: int, bounds: Sequence[Any], step: Any, arguments: Arguments) -> Iterator[Check]:
    """The same of a slice whose bounds are sizes: it begins and ends where torch has it while it traces."""
    size, traced = _size(node.args[0], dim, arguments), _size(node, dim, arguments)
    first, last = (
        of_any_size(sympy.sympify(e).xreplace(arguments.symbols)) if isinstance(e := _expr(b), sympy.Expr) else e
        for b in bounds
    )
    letters = set().union(*(b.free_symbols for b in (first, last) if isinstance(b, sympy.Expr)))
    if not isinstance(step, int) or not {of_any_size(s) for s in arguments.hints} >= letters:
        return
    if size.is_Integer or arguments.slices.of(traced):
        return
    has = length(of_any_size(size), first, last, step)
    wrong = [has - of_any_size(traced)]
    if isinstance(first, sympy.Expr):
        begin = _as_traced(first, of_any_size(size), arguments)
        wrong.append(place(of_any_size(size), first) - begin)
    for zero in wrong:
        if zero != 0:
            yield Check(
                zero,
                f"a slice of a dimension of size {size} must have {traced} elements, as it has where sizes are large",
            )


def _as_traced(bound: sympy.Expr, size: sympy.Expr, arguments: Arguments) -> sympy.Expr:
    """The place where torch lets a slice begin, at the sizes with which it traces."""
    hints = {of_any_size(s): n for s, n in arguments.hints.items()}
    at, end = bound.subs(hints), size.subs(hints)
    if at < 0:
        return sympy.Integer(0) if at < -end else bound + size
    return size if at > end else bound


def _inferred(recorded: fx.GraphModule, arguments: Arguments) -> Iterator[Check]:
    """Torch refuses a view of no elements with a -1 beside a size of 0: any number would do for it."""
    for node in recorded.graph.nodes:
        if node.target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            continue
        shape = [_expr(n) for n in node.args[1]]
        if -1 not in shape:
            continue
        for size in (sympy.sympify(n).xreplace(arguments.symbols) for n in shape if n != -1):
            if not size.is_Integer:
                message = f"{size} must not be 0: a view with a -1, which any number would do for"
                yield Check(sympy.Max(0, 1 - of_any_size(size)), message)


def _size(node: fx.Node, dim: int, arguments: Arguments) -> sympy.Expr:
    return sympy.sympify(_expr(node.meta["val"].shape[dim])).xreplace(arguments.symbols)


def _expr(n: Any) -> Any:
    n = n.meta["val"] if isinstance(n, fx.Node) else n
    return n.node.expr if isinstance(n, torch.SymInt) else n


def _base(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _is_of_strides(location: Any) -> bool:
    """Whether torch only asked how a tensor lies in memory: a kernel reads by index, so the answer says nothing."""
    file, name = getattr(location, "filename", ""), getattr(location, "name", "")
    is_of_common = file.endswith("torch/_prims_common/__init__.py") and name != "infer_size"
    return is_of_common or (file.endswith("torch/_refs/__init__.py") and name == "lerp")


_BROADCASTING = ("_broadcast_shapes", "broadcast_shapes", "broadcast_tensors", "infer_size", "should_expand")


def _is_of_broadcast(location: Any) -> bool:
    """Whether torch asked while it broadcast one tensor to another."""
    file, name = getattr(location, "filename", ""), getattr(location, "name", "")
    return name in _BROADCASTING and not file.endswith("torch/_prims_common/__init__.py")  # which infers a -1


def _is_of_cpp(location: Any, expr: Any) -> bool:
    """Whether torch's C++ compared sizes. Where a graph is made functional it does so to find out how tensors lie in
    memory; by then the function has been asked its own questions."""
    file = getattr(location, "filename", "")
    is_cpp = file.endswith(("torch/_ops.py", "torch/_subclasses/functional_tensor.py"))
    return is_cpp and not isinstance(expr, sympy.Eq)


def _unless_empty(expr: Any) -> sympy.Expr:
    """0 where something is divided into pieces of no elements, of which there are as many as the function asks for; 1
    elsewhere."""
    pieces = [part.args[1] for part in expr.atoms(FloorDiv) if not part.args[1].is_Integer]
    return sympy.prod([sympy.Min(1, n, evaluate=False) for n in pieces])


def equal_sizes(arguments: Arguments) -> dict[sympy.Expr, sympy.Symbol]:
    """Expressions that the checks make equal to a letter."""
    found = {}
    for guard in arguments.env.guards:
        expr = guard.expr.xreplace(arguments.symbols)
        if isinstance(expr, sympy.Eq) and not _is_of_strides(guard.sloc.framework_loc):
            for a, b in ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs)):
                if a.is_Symbol and not b.is_Symbol and not b.is_number:
                    found[b] = a
    return found


def _of_integers(expr: Any) -> Any:
    """The expression in integers, where torch compares a count less a correction in floating point."""
    floats = {x: sympy.Integer(int(x)) for x in expr.atoms(sympy.Float) if float(x).is_integer()}
    return expr.xreplace(floats).replace(ToFloat, lambda x: x) if floats or expr.has(ToFloat) else expr


def _excess(expr: Any) -> sympy.Expr:
    """The amount by which the smaller side of a comparison is too large."""
    small, large = (expr.lhs, expr.rhs) if isinstance(expr, sympy.Le | sympy.Lt) else (expr.rhs, expr.lhs)
    return small - large + (1 if isinstance(expr, sympy.Lt | sympy.Gt) else 0)


def _divisibility(expr: sympy.Eq) -> sympy.Expr | None:
    for side, other in ((expr.lhs, expr.rhs), (expr.rhs, expr.lhs)):
        if other == 0 and isinstance(side, Mod | PythonMod):
            return side
        for part in sympy.preorder_traversal(side):  # n == k * (n // k)
            if isinstance(part, FloorDiv) and part.args[0] == other and sympy.expand(part * part.args[1] - side) == 0:
                return Mod(other, part.args[1], evaluate=False)
    return None


def _is_divisibility(expr: Any) -> bool:
    return isinstance(expr, sympy.Eq) and _divisibility(expr) is not None


def refuse_unknown_sizes(arguments: Arguments, new: Sequence[fx.Node], fn: Callable[..., Any]) -> None:
    for node in new:
        sizes = [s for s in node.meta["val"].shape if isinstance(s, torch.SymInt)]
        unknown = [s for s in sizes if s.node.expr.free_symbols - set(arguments.symbols)]
        if unknown:
            raise TraceError(f"{where(fn, node.meta.get('line'))}: the size of a result depends on a tensor's contents")


_OF_FLOATS = ("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "Float")


def refuse_sizes_of_floats(sizes: Iterable[tuple[sympy.Expr, int | None]], fn: Callable[..., Any]) -> None:
    """Such as int(), round() and math.ceil() make. sizes: what is worked out of them, with the lines that need it."""
    for size, line in sizes:
        if any(type(part).__name__ in _OF_FLOATS for part in sympy.preorder_traversal(size)):
            raise TraceError(
                f"{where(fn, line)}: a size is worked out in floating point, which no kernel does. Work it out in "
                "integers (x.shape[-1] // 2, not int(x.shape[-1] * 0.5); size=, not scale_factor=), or declare it as a "
                "number"
            )
