"""Trace: a declared function -> its graphs.

Each choice of dtypes (and of bools) is traced once, with a symbol for every size and every number. Two graphs come of
it: the *recorded* one, of the ATen ops as the function called them, which the CPU path interprets; and the *core* one,
in place forms made functional and everything taken apart that the lowering has no rule of its own for.

``...`` is traced as one dimension, ``leading``. So that this says nothing about the function that is not so, the
recorded graph is held against the function itself with two leading dimensions, on small numbers.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table, get_decompositions
from torch._dynamo.source import ConstantSource
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import infer_size, is_contiguous_or_false, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from tk.codegen.errors import TraceError, needs_a_number, where
from tk.codegen.tracing import combine, constants, effects, guards, random, special
from tk.codegen.tracing.replaced import replacement
from tk.generated.signature import DTYPES, NumberSpec, Signature, TensorSpec

LEADING = "leading"
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

aten = torch.ops.aten


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

    def size(self, value: Any) -> sympy.Expr:
        """A size or an integer as an expression of letters and int parameters."""
        if isinstance(value, torch.SymInt | torch.SymFloat):
            value = value.node.expr
        return sympy.sympify(value).xreplace(self.symbols).xreplace(self.equal)

    def arguments_read(self) -> list[str]:
        """The tensors that the results depend on, by more than their shapes."""
        found: list[str] = []
        pending, seen = [*self.new, *self.mutated.values()], set()
        while pending:
            node = pending.pop()
            if node in seen or not (_is_tensor(node) or isinstance(node.meta.get("val"), tuple | list)):
                continue
            seen.add(node)
            if node.op == "placeholder":
                found.append(node.meta["param"])
            pending += node.all_input_nodes
        return found

    def size_list(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        return tuple(self.size(s) for s in node.meta["val"].shape)


def letter(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def number(name: str, kind: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True) if kind == "int" else sympy.Symbol(name, real=True)


def trace_all(fn: Callable[..., Any], signature: Signature) -> list[Trace]:
    """Every dtype assignment, and of each every value of the flags. Raises TraceError."""
    return [trace(fn, signature, d, f) for d in signature.assignments() for f in flag_values(signature)]


def flag_values(signature: Signature) -> list[dict[str, bool]]:
    """Every value of the bools."""
    values = itertools.product((False, True), repeat=len(signature.flags))
    return [dict(zip(signature.flags, v, strict=True)) for v in values]


def trace(fn: Callable[..., Any], signature: Signature, dtypes: Mapping[str, str], flags: Mapping[str, bool]) -> Trace:
    """Raises TraceError for what cannot be traced, with the line of `fn` at fault."""
    arguments = _Arguments(signature, dtypes, getattr(fn, "sizes", ()))
    if hasattr(fn, "see"):
        fn.see(arguments.sizes)
    lines = _Lines(fn, arguments)

    def flat(*args: Any) -> Any:
        named = {**dict(zip(arguments.names, args, strict=True)), **flags}
        with random.drawing(signature, named), lines, combine.replaced(fn):
            return fn(**random.own(fn, named))

    with effects.refused(fn), _explaining(fn, lines, arguments), arguments.mode, torch.enable_grad():
        recorded = make_fx(flat, tracing_mode="real", decomposition_table=random.decompositions())(*arguments.values)
        _tag_lines(recorded, lines)
        _refuse_items(recorded, fn)
        outputs, structure = _outputs(recorded)
        core, new, mutated = _to_core(recorded, arguments)
    checks = tuple(guards.checks(arguments, recorded, fn))
    guards.refuse_unknown_sizes(arguments, new, fn)
    nodes = _record(recorded, arguments.names, lines.constant)
    equal = guards.equal_sizes(arguments)
    result = Trace(signature, dtypes, flags, core, nodes, new, mutated, structure, checks, arguments.symbols, equal)
    if not outputs and not mutated:
        raise TraceError(f"{where(fn)}: the function returns no tensor and changes none of its arguments")
    if any(spec.leading for spec in signature.tensors.values()):
        _check_leading(fn, signature, result, recorded)
    return result


def trace_backward(
    fn: Callable[..., Any], signature: Signature, dtypes: Mapping[str, str], flags: Mapping[str, bool]
) -> Trace:
    """The gradients of `fn` with respect to its floating-point tensors, as autograd has them.

    The graph's arguments are ``grad_0`` …, one for each floating-point result, and then those of `fn`: what the forward
    worked out is worked out again, since reading it again would take longer. Its results are the gradients, in the
    order of the tensors. The trace's signature has all arguments; the caller drops those that are not read."""
    arguments = _Arguments(signature, dtypes)
    lines = _Lines(fn, arguments)
    own = list(arguments.names)
    wanted = [n for n in signature.tensors if DTYPES[_dtype_name(signature.tensors[n], dtypes)].is_floating_point]

    def run(args: Sequence[Any]) -> list[torch.Tensor]:
        named = {**dict(zip(own, args, strict=True)), **flags}
        with random.drawing(signature, named), lines, combine.replaced(fn):
            results, _ = tree_flatten(fn(**random.own(fn, named)))
        return [r for r in results if r is not None and r.dtype.is_floating_point]

    def joint(*args: Any) -> list[torch.Tensor]:
        grads, inputs = args[: len(args) - len(own)], list(args[len(args) - len(own) :])
        with torch.enable_grad():
            for i, name in enumerate(own):
                if name in wanted:
                    inputs[i] = inputs[i].detach().requires_grad_()
            results = run(inputs)
        sources = [inputs[own.index(n)] for n in wanted]
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
        found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]

    with _explaining(fn, lines, arguments), arguments.mode:
        grads = [torch.empty(r.shape, dtype=r.dtype, device="meta") for r in run(arguments.values)]
        arguments.names = [*(f"grad_{i}" for i in range(len(grads))), *own]
        arguments.values = [*grads, *arguments.values]
        recorded = make_fx(joint, tracing_mode="real", decomposition_table=random.decompositions())(*arguments.values)
        _tag_lines(recorded, lines)
        core, new, mutated = _to_core(recorded, arguments)
    if mutated:
        raise TraceError(f"{where(fn)}: a function that changes its arguments has no gradient; leave out grad=True")
    specs = {n: _grad_spec(arguments, g) for n, g in zip(arguments.names, grads, strict=False)}
    full = Signature({**specs, **signature.params}, signature.variables)
    checks = tuple(guards.of_sizes(arguments, fn))
    nodes = _record(recorded, arguments.names, lines.constant, is_backward=True)
    equal = guards.equal_sizes(arguments)
    return Trace(full, dtypes, flags, core, nodes, new, {}, len(new), checks, arguments.symbols, equal)


def _dtype_name(spec: TensorSpec, dtypes: Mapping[str, str]) -> str:
    return dtypes.get(spec.dtype, spec.dtype)


def _grad_spec(arguments: _Arguments, grad: torch.Tensor) -> TensorSpec:
    """As a declaration would have it, with the dtype that it has here."""
    sizes = [sympy.sympify(s.node.expr if isinstance(s, torch.SymInt) else s) for s in grad.shape]
    sizes = [s.xreplace(arguments.symbols).xreplace(guards.equal_sizes(arguments)) for s in sizes]
    leading = bool(sizes) and sizes[0] == letter(LEADING)
    declared = [str(s) if s.is_Symbol else int(s) if s.is_Integer else s for s in sizes[leading:]]
    return TensorSpec(DTYPE_NAMES[grad.dtype], tuple(declared), leading)


# --- Arguments ---


class _Arguments:
    """Fake tensors with a symbol for each letter, and a symbol for each float and int. more: sizes of what is no
    argument."""

    def __init__(self, signature: Signature, dtypes: Mapping[str, str], more: Sequence[str] = ()):
        self.env = ShapeEnv(duck_shape=False)
        self.mode = _mode(self.env)
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        letters = (*signature.letters, *([LEADING] if _has_leading(signature) else []), *more)
        self.hints = {name: 1680 * p for name, p in zip(letters, _PRIMES, strict=False)}
        self.sizes = {name: self._size(name) for name in letters}
        self.names = [n for n in signature.params if n not in signature.flags]
        self.values = [self._value(n, signature.params[n], dtypes, self.sizes) for n in self.names]

    def _size(self, name: str) -> Any:
        source, hint = ConstantSource(name), self.hints[name]
        symbol = self.env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        self.symbols[symbol] = letter(name)
        return self.env.create_symintnode(symbol, hint=hint, source=source)

    def _value(self, name: str, spec: Any, dtypes: Mapping[str, str], sizes: Mapping[str, Any]) -> Any:
        if isinstance(spec, TensorSpec):
            assert not spec.is_list, "a function of lists is traced with the tensors of one place"
            shape = [sizes[LEADING] for _ in range(spec.leading)] + spec.shape(sizes)
            with self.mode:
                # A meta tensor: decompositions ask for the device, and the CPU's are not those of a GPU.
                return torch.empty(shape, dtype=DTYPES[dtypes.get(spec.dtype, spec.dtype)], device="meta")
        assert isinstance(spec, NumberSpec)
        with self.env.ignore_fresh_unbacked_symbols():
            is_int = spec.kind == "int"
            value = self.env.create_unbacked_symint() if is_int else self.env.create_unbacked_symfloat()
        self.symbols[value.node.expr] = number(name, spec.kind)
        return value


def _mode(env: ShapeEnv) -> FakeTensorMode:
    """Says of a view of what is dense nothing but its sizes, where these hold whatever the letters are.

    Torch's own looks for dimensions that can be split and merged, and asks on its way which size is a multiple of which
    other: questions that such a view does not depend on, and whose answers would become checks of the op."""
    found = FakeTensorMode(shape_env=env)
    theirs = found.dispatch

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.view.default, aten._unsafe_view.default) and not kwargs and _is_always_legal(*args):
            x, shape = args[0], infer_size(args[1], args[0].numel())
            return x.as_strided(shape, make_contiguous_strides_for(shape))
        return theirs(func, types, args, kwargs)

    # The instance's own: for a class derived from it torch has no rules of higher-order operators.
    found.dispatch = dispatch  # type: ignore[method-assign]
    return found


def _is_always_legal(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether a dense tensor of several dimensions has these sizes instead, whatever its own are."""
    if x.dim() < 2 or len(shape) < 2 or not is_contiguous_or_false(x):
        return False
    given = [n for n in shape if not (isinstance(n, int) and n == -1)]
    count, total = (math.prod(n.node.expr if isinstance(n, torch.SymInt) else n for n in s) for s in (given, x.shape))
    inferred = sympy.cancel(total / sympy.sympify(count))
    return inferred == 1 if len(given) == len(shape) else sympy.denom(inferred) == 1


def _has_leading(signature: Signature) -> bool:
    return any(spec.leading for spec in signature.tensors.values())


# --- Which line of the function ---


class _Lines(TorchFunctionMode):
    """Remembers, for every node that is traced, the line of the user's file that asked for it, and which nodes are
    constants to a gradient: what the function detaches, and what it computes where gradients are off."""

    def __init__(self, fn: Callable[..., Any], arguments: _Arguments | None = None):
        super().__init__()
        self.fn, self.arguments = fn, arguments
        self.file = fn.__code__.co_filename
        self.line: int | None = None
        self.of: dict[str, int] = {}
        self.constant: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.line = self._find() or self.line
        mode = get_proxy_mode()
        graph = mode.tracer.graph if mode else None
        last = graph._root.prev if graph is not None else None
        if self.arguments and func in _ROW_BY_ROW and isinstance(args[0].shape[0], torch.SymInt):
            size = args[0].shape[0].node.expr.xreplace(self.arguments.symbols)
            raise TraceError(needs_a_number(self.fn, self.line, size))
        if self.arguments and func in _SPLITS:
            self._refuse_uncounted_pieces(*args, **(kwargs or {}))
        if self.arguments and (constant := constants.made(func, args, kwargs or {})) is not None:
            result = constant
        else:
            kwargs = kwargs or {}
            captured: list[tuple[torch.Tensor, torch.Tensor]] = []
            if self.arguments:
                (args, kwargs), captured = constants.lifted((args, kwargs))
            func = replacement(func, (*args, *kwargs.values()))
            result = func(*args, **kwargs)
            for x, stand_in in captured:
                if stand_in._version:
                    raise effects.changed(self.fn, x, self.line)
        self._refuse_dtypes(result)
        self._refuse_fixed_sizes()
        if graph is not None and last is not None:
            made = [node.name for node in _nodes_after(graph, last)]
            if self.line is not None:
                self.of.update(dict.fromkeys(made, self.line))
            if func in _DETACHING or not torch.is_grad_enabled():
                self.constant.update(made)
        return result

    def _refuse_dtypes(self, result: Any) -> None:
        """What no kernel has, complex numbers above all."""
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.dtype not in DTYPE_NAMES:
                raise TraceError(
                    f"{where(self.fn, self.line)}: a tensor of {str(x.dtype).removeprefix('torch.')}, a dtype that no "
                    f"kernel has; there are {', '.join(str(d).removeprefix('torch.') for d in DTYPE_NAMES)}"
                )

    def _refuse_uncounted_pieces(self, x: torch.Tensor, length: Any, dim: int = 0, **_: Any) -> None:
        """At once: torch would make thousands of them."""
        assert self.arguments is not None
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 1
        if isinstance(length, int) and isinstance(size, torch.SymInt):
            size = size.node.expr.xreplace(self.arguments.symbols)
            raise TraceError(
                f"{where(self.fn, self.line)}: split of a dimension of size {size} into pieces of {length}: how many "
                f"there are depends on {size}, and an op has as many results whatever the sizes. Declare the size as a "
                "number, or use chunk, which counts the pieces"
            )

    def _refuse_fixed_sizes(self) -> None:
        """At once: a loop over as many rows as a size stands for would take minutes to trace."""
        if self.arguments is None:
            return
        for symbol, named in self.arguments.symbols.items():
            hint = self.arguments.hints.get(str(named), -1)
            if self.arguments.env.replacements.get(symbol) == hint:
                raise TraceError(needs_a_number(self.fn, self.line, named))

    def _find(self) -> int | None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return frame.f_lineno
            frame = frame.f_back
        return None


_DETACHING = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_SPLITS = (torch.split, torch.Tensor.split, torch.functional.split, torch.unsafe_split, torch.Tensor.unsafe_split)
_ROW_BY_ROW = (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind)


def _nodes_after(graph: fx.Graph, last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node is not graph._root:
        yield node
        node = node.next


def _tag_lines(graph: fx.GraphModule, lines: _Lines) -> None:
    for node in graph.graph.nodes:
        if node.name in lines.of:
            node.meta["line"] = lines.of[node.name]


def _refuse_items(recorded: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """A kernel has numbers of the call alone."""
    for node in recorded.graph.nodes:
        if node.target is aten._local_scalar_dense.default:
            raise TraceError(
                f"{where(fn, node.meta.get('line'))}: a number made of a tensor's contents (item, float, int); leave "
                "it a tensor of no dimensions"
            )


@contextmanager
def _explaining(fn: Callable[..., Any], lines: _Lines, arguments: _Arguments) -> Iterator[None]:
    """An exception of the function or of torch's, with the line of the function, and without what torch logs of it."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    except TraceError as error:
        if type(error) is not TraceError or lines.file in str(error):
            raise
        raise TraceError(f"{where(fn, _line_of(error, lines.file) or lines.line)}: {error}") from None
    except Exception as error:
        line = _line_of(error, lines.file) or lines.line
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in first or "data dependent" in first:
            first = (
                "control flow that depends on the contents of a tensor or on a number given at run time. Write it with "
                "torch.where, or make the number a bool parameter"
            )
        if "convert all Tensors to FakeTensors" in first:
            first = "a tensor that is not among the function's parameters: an op reads what it is given; make it one"
        for symbol, named in arguments.symbols.items():
            first = re.sub(rf"\b{symbol}\b", str(named), first)
        raise TraceError(f"{where(fn, line)}: {first}") from error
    finally:
        logging.disable(before)


def _line_of(error: BaseException, file: str) -> int | None:
    found, tb = None, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == file:
            found = tb.tb_lineno
        tb = tb.tb_next
    return found


# --- The core graph ---

# Ops that the lowering takes as they are, although a decomposition exists.
_DIRECT = (
    aten._to_copy,
    aten.mean,
    aten.var,
    aten.var_mean,
    aten.cumsum,
    aten.embedding,
    aten.embedding_dense_backward,
    aten.index_add,  # decomposed into index_put, which counts from the end too
    aten.index_copy,
)
_FURTHER = (
    aten._softmax, aten._log_softmax, aten.gelu, aten.gelu_backward, aten.native_layer_norm,
    aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.std, aten.std_mean,
    aten.linalg_vector_norm, aten.addcmul, aten.addcdiv, aten.lerp, aten.logaddexp, aten.logaddexp2,
    aten.silu, aten.silu_backward, aten.mish, aten.softplus, aten.hardswish, aten.hardsigmoid, aten.hardtanh,
    aten.elu, aten.leaky_relu, aten.glu, aten.logit, aten.threshold, aten.heaviside, aten.xlogy, aten.sinc,
    aten.nan_to_num, aten.isneginf, aten.isposinf, aten.rsub, aten.square, aten.deg2rad, aten.rad2deg, aten.frac,
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.softshrink, aten.hardshrink, aten.celu, aten.selu,
    aten._prelu_kernel, aten.special_entr, aten.special_xlog1py, aten.special_log_ndtr, aten.huber_loss,
    aten.smooth_l1_loss, aten.mse_loss, aten.nll_loss_forward, aten.nll_loss_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward,
)  # fmt: skip


# Products of matrices stay what they are, so that they can be refused by name.
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "_addmm_activation")


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's core ones, and whatever else torch or Inductor has for an op without a rule."""
    from torch._inductor.decomposition import decompositions as of_inductor

    from tk.codegen.lowering.rules import RULES

    table = {**core_aten_decompositions(), **get_decompositions(_FURTHER)}
    for op, rule in (*decomposition_table.items(), *of_inductor.items()):
        if isinstance(op, OpOverload) and op._schema.name.replace("::", ".") not in RULES:
            table.setdefault(op, rule)
    direct = {getattr(packet, name) for packet in _DIRECT for name in packet.overloads()}
    products = {op for op in table if isinstance(op, OpOverload) and op._schema.name.removeprefix("aten::") in PRODUCTS}
    return {**{op: rule for op, rule in table.items() if op not in direct | products}, **special.DECOMPOSITIONS}


class _Tagging(fx.Interpreter):
    """Runs the recorded graph; every core node remembers the recorded one that it comes of."""

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        last = graph._root.prev
        try:
            return super().run_node(n)
        finally:
            for node in _nodes_after(graph, last):
                node.meta.setdefault("line", n.meta.get("line"))
                node.meta.setdefault("is_cast", n.target is aten._to_copy.default)


def _outputs(graph: fx.GraphModule) -> tuple[list[fx.Node], int | None]:
    """The nodes that are returned, and how: None for a single tensor."""
    (value,) = next(n for n in graph.graph.nodes if n.op == "output").args
    flat, _ = tree_flatten(value)
    if wrong := [x for x in flat if x is not None and not (isinstance(x, fx.Node) and _is_tensor(x))]:
        raise TraceError(f"the function returns {wrong[0]!r}; it may return a tensor, a tuple of tensors, or None")
    nodes = [x for x in flat if x is not None]
    if isinstance(value, fx.Node):
        return nodes, None
    return nodes, len(nodes)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _to_core(
    recorded: fx.GraphModule, arguments: _Arguments
) -> tuple[fx.GraphModule, tuple[fx.Node, ...], dict[str, fx.Node]]:
    """Functional, and of core ops only."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    n_new = len(_outputs(recorded)[0])

    def functional(*args: Any) -> Any:
        with FunctionalTensorMode():
            wrapped = [FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in args]
            flat, _ = tree_flatten(_Tagging(recorded).run(*wrapped))
        outputs = [_unwrapped(x) for x in flat if x is not None]
        return [*outputs, *(_unwrapped(x) for x in wrapped if isinstance(x, FunctionalTensor))]

    def plain(*args: Any) -> Any:
        flat, _ = tree_flatten(_Tagging(recorded).run(*args))
        return [*(x for x in flat if x is not None), *(x for x in args if isinstance(x, torch.Tensor))]

    def traced(run: Callable[..., Any]) -> fx.GraphModule:
        return make_fx(run, tracing_mode="real", decomposition_table=decompositions())(*arguments.values)

    # Making in-place forms functional doubles the time of a trace, and few functions, or decompositions, have any.
    core = traced(functional if _writes(recorded) else plain)
    if _writes(core):
        core = traced(functional)
    results = next(n for n in core.graph.nodes if n.op == "output").args[0]
    placeholders = [n for n in core.graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, arguments.names, strict=True):
        node.meta["param"] = name
    tensors = [n for n in placeholders if _is_tensor(n)]
    mutated = {
        param.meta["param"]: node for param, node in zip(tensors, results[n_new:], strict=True) if param is not node
    }
    return core, tuple(results[:n_new]), mutated


def _writes(graph: fx.GraphModule) -> bool:
    """Whether any node changes what another has made."""
    ops = (n.target for n in graph.graph.nodes if isinstance(n.target, OpOverload))
    return any(op._schema.is_mutable for op in ops)


def _unwrapped(x: Any) -> Any:
    from torch._subclasses.functional_tensor import FunctionalTensor

    if not isinstance(x, FunctionalTensor):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x.elem)


# --- Leading dimensions ---


def _check_leading(fn: Callable[..., Any], signature: Signature, found: Trace, recorded: fx.GraphModule) -> None:
    """ "..." is one dimension in the graph: whether the function agrees is seen on small numbers, with two of them."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: 2 * (i + 2) for i, name in enumerate(signature.letters)}
    many, one = [], []
    for name, spec in signature.params.items():
        if isinstance(spec, NumberSpec):
            value: Any = found.flags.get(name, 1 if spec.kind == "int" else 0.5)
            many.append(value)
            one += [] if name in found.flags else [value]
            continue
        shape = spec.shape(sizes)
        dtype = DTYPES[found.dtypes.get(spec.dtype, spec.dtype)]
        x = torch.randn([2, 3, *shape] if spec.leading else shape, generator=generator).to(dtype)
        many.append(x)
        one.append(x.clone().flatten(0, 1) if spec.leading else x.clone())
    try:
        named = dict(zip(signature.params, many, strict=True))
        with random.drawing(signature, named), _Lines(fn), random.Eager(), combine.replaced(fn):
            expected, _ = tree_flatten(fn(**random.own(fn, named)))
        actual, _ = tree_flatten(fx.Interpreter(_on_cpu(recorded)).run(*one))
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return  # the CPU has no such op for this dtype, or the indices or numbers are out of range
    if not all(_agree(a, b) for a, b in zip(expected, actual, strict=True) if a is not None):
        raise TraceError(
            f"{where(fn)}: what the function computes depends on how many dimensions '...' stands for. Count "
            "dimensions from the end, and treat the leading ones alike"
        )


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


# --- The recorded graph, as JSON ---


def _record(
    graph: fx.GraphModule, names: Sequence[str], constant: Collection[str], is_backward: bool = False
) -> list[dict[str, Any]]:
    """Nodes in order: {"name", "op", "args", "kwargs"}; "input" nodes name their parameter.

    The graph may be differentiated, so a detach stands behind what is constant to a gradient, and nowhere else: those
    with which autograd keeps what its own backward reads are left out."""
    if is_backward:
        _drop_detaches(graph, constant)
    live = _live(graph)
    found: list[dict[str, Any]] = []
    renamed: dict[str, str] = {}
    inputs = iter(names)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found.append(dict(name=node.name, op="input", args=[next(inputs)], kwargs={}))
        elif node in live:
            args = node.args if node.op != "output" else (node.args[0],)
            if node.target == torch.ops.tk_trace.associative_scan.default:
                xs, number, dim = node.args
                args = (xs, combine.record(number, [DTYPE_NAMES[x.meta["val"].dtype] for x in xs]), dim)
            if node.target == torch.ops.tk_trace.constant.default:
                args = (*constants.record(node.args[0]), torch.device("meta"))
            found.append(
                dict(
                    name=node.name,
                    op=_target_name(node),
                    args=_json(list(args), renamed),
                    kwargs=_json(dict(node.kwargs), renamed),
                )
            )
            if node.name in constant and _carries_gradients(node):
                renamed[node.name] = f"{node.name}_constant"
                found.append(dict(name=renamed[node.name], op=_DETACH, args=[{"ref": node.name}], kwargs={}))
    return found


_DETACH = str(aten.detach.default)


def _drop_detaches(graph: fx.GraphModule, constant: Collection[str]) -> None:
    for node in graph.graph.nodes:
        if node.target is aten.detach.default and node.name not in constant:
            node.replace_all_uses_with(node.args[0])


def _carries_gradients(node: fx.Node) -> bool:
    return node.target is not aten.detach.default and _is_tensor(node) and node.meta["val"].is_floating_point()


def _live(graph: fx.GraphModule) -> set[fx.Node]:
    live: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        changes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        if node.op == "output" or changes or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


# Decompositions take for granted that their indices are in bounds; what runs the recorded graph checks them.
_CHECKED = {
    "aten._unsafe_index.Tensor": "aten.index.Tensor",
    "aten._unsafe_index_put.default": "aten.index_put.default",
}


def _target_name(node: fx.Node) -> str:
    if node.op == "output":
        return "output"
    if isinstance(node.target, OpOverload) and node.target.namespace == "tk_trace":
        return f"tk.{node.target._opname}"
    if isinstance(node.target, OpOverload):
        return _CHECKED.get(str(node.target), str(node.target))
    target: Any = node.target
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = "operator" if getattr(operator, target.__name__, None) is target else "torch"
    return f"{module}.{target.__name__}"


def _json(x: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(x, fx.Node):
        return {"ref": renamed.get(x.name, x.name)}
    if isinstance(x, tuple | list):
        return [_json(v, renamed) for v in x]
    if isinstance(x, dict):
        return {k: _json(v, renamed) for k, v in x.items() if k not in ("layout", "pin_memory")}
    if isinstance(x, torch.dtype):
        return {"dtype": DTYPE_NAMES[x]}
    if isinstance(x, torch.device):
        return {"device": "arguments"}
    if isinstance(x, torch.memory_format):
        return {"memory_format": str(x).removeprefix("torch.")}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": repr(x)}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise TraceError(f"an argument of type {type(x).__name__} cannot be recorded: {x!r}")
