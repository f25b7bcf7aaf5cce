"""What stands at a generated op's Autograd key, behind the gate of csrc/ops/gate.h.

A gradient is right or refused: of the first order by the op that the pack has for it, or by a formula
(tk.generated.gradients); beyond that, and in forward mode, by ATen, which differentiates the recorded graph. That is
run when such a derivative is asked for, not before: the values themselves are the kernels'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from tk import errors, parallel
from tk.generated import gradients, interpret, lists
from tk.generated.problem import BY_NUMBER, Call
from tk.generated.records import GeneratedOp
from tk.ops import _register

Find = Callable[[str], "GeneratedOp | None"]  # an op of a loaded pack


def kernel_of(op: GeneratedOp, find: Find) -> Callable[..., Any] | None:
    """``kernel(keyset, *args, **kwargs)``; None for an op whose results have no gradient, since they are integers."""
    formula = gradients.FORMULAS.get(op.name)
    if op.backward or formula:
        return _kernel(op, lambda: _of_formula(op, find, formula))
    if op.name in gradients.BY_GRAPH or _is_backward(op, find):
        return _kernel(op, lambda: _of_graph(op))
    return _refusing(op) if _may_give_floats(op) else None


def returned(outputs: Sequence[Tensor]) -> Any:
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def listed(value: Any) -> tuple[Tensor, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)


def n_returned(op: GeneratedOp) -> int:
    return op.n_results - op.n_saved


def _kernel(op: GeneratedOp, make: Callable[[], Any]) -> Callable[..., Any]:
    """Autograd's kernel, as tk.ops._register makes it: a function that stands once per level of torch.func's
    transforms, and nothing at all where nothing needs a gradient. make: at the first call, for the twin is defined with
    the gate."""
    public = getattr(torch.ops.tk, op.name).default
    function = cache(make)
    n = n_returned(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(public, args, kwargs)
        if _register.has_tangent(args):
            return returned(_by_aten(op, args))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if not torch._C._are_functorch_transforms_active():
                return returned(function().apply(keyset, *args)[:n])
            if op.n_saved:
                return returned(_by_aten(op, args))  # further levels would see the twin, which has no formula
            with _register.single_level():
                return returned(function().apply(keyset, *args)[:n])
        return _register.below_autograd(public, keyset, *args)

    return kernel


def _by_aten(op: GeneratedOp, args: Sequence[Any]) -> list[Tensor]:
    """The op in ATen's words, which have gradients and tangents. What is returned is no view of an argument."""
    if op.name in gradients.IN_ATEN:
        return list(listed(gradients.IN_ATEN[op.name](*args)))
    _require_graph(op, "formula for forward-mode automatic differentiation or a transform")
    return [x.clone() for x in interpret.differentiable(Call(op, args))[: n_returned(op)]]


def _require_graph(op: GeneratedOp, what: str) -> None:
    if not (op.name in gradients.FORMULAS or op.name in gradients.BY_GRAPH or op.meta.get("differentiable")):
        raise NotImplementedError(
            f"tk.{op.name} has no {what}: its function is not differentiated as its recorded graph would be (it may "
            "have a torch.autograd.Function of its own), or its pack was built by an older tk"
        )


# --- By the gradient's own op, or a formula ---


def _of_formula(op: GeneratedOp, find: Find, formula: gradients.Formula | None) -> Any:
    """formula: of an op whose backward is no op of its own. What is called below autograd is the twin where more is
    saved than returned."""
    public = getattr(torch.ops.tk, op.name).default
    below = getattr(torch.ops.tk, f"_{op.name}").default if op.n_saved else public
    backward_op = cache(lambda: _backward_of(op, find))
    dependencies = cache(lambda: _dependencies(op))

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        outputs = listed(_register.below_formula(below, keyset, *args))
        if formula is None:
            _save(ctx, op, dependencies(), args, outputs)
        else:
            formula[0](ctx, args, returned(outputs))
        return outputs

    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = _gradients(ctx, op, backward_op, grads) if formula is None else formula[1](ctx, *grads)
        return (None, *found)

    return _function(op, forward, backward)


def _function(op: GeneratedOp, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    name = "Tk" + "".join(part.capitalize() for part in op.name.split("_"))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (_SingleLevelFunction,), methods)  # its metaclass names the graph's node


def _save(
    ctx: Any, op: GeneratedOp, dependencies: Dependencies, args: Sequence[Any], outputs: Sequence[Tensor]
) -> None:
    """What :func:`_gradients` reads. Which arguments that is, is the same for all calls of the op."""
    kept, others, kept_outputs = _kept_of(op)
    names, tensors = [], []
    numbers, unsaved = {}, {}
    for name, i in kept:
        x = args[i]
        if isinstance(x, Tensor):
            names.append(name)
            tensors.append(x)
        else:
            numbers[name] = x
    for name, i in others:
        x = args[i]
        if isinstance(x, Tensor):
            unsaved[name] = _described(x)
        else:
            numbers[name] = x
    for name, i in kept_outputs:
        names.append(name)
        tensors.append(outputs[i])
    ctx.names, ctx.numbers, ctx.unsaved = names, numbers, unsaved
    ctx.mode = args[-1]
    ctx.n_args = len(args)
    ctx.save_for_backward(*tensors)
    if without := _without_gradient(ctx, dependencies, outputs):
        ctx.mark_non_differentiable(*without)
    ctx.set_materialize_grads(False)  # what is undefined is then None: see _gradients
    ctx.results = [_described(x) for x in outputs]


Dependencies = tuple[tuple[int, ...], ...]


def _without_gradient(ctx: Any, dependencies: Dependencies, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The results that have no gradient in this call: integers, and what depends on no argument that needs one, as the
    sum that add_rms_norm returns does not depend on the weight."""
    found = [x for x in outputs if not x.is_floating_point()]
    if dependencies:
        needed = ctx.needs_input_grad[1:]
        for x, params in zip(outputs, dependencies, strict=True):
            for i in params:  # any() takes three times as long
                if needed[i]:
                    break
            else:
                if x.is_floating_point():
                    found.append(x)
    return found


def _dependencies(op: GeneratedOp) -> Dependencies:
    """For each result the places of the params that it depends on. Nothing where each result depends on all of them, so
    that no call need ask."""
    if not op.meta.get("differentiable"):  # the function's own derivative is not that of its graph
        return ()
    places = {p.name: i for i, p in enumerate(op.params) if "tensor" in p.kind}
    found: list[set[int]] = [set() for _ in op.results]
    for graph in op.meta["graphs"]:
        values: dict[str, set[int]] = {}
        for node in graph["nodes"]:
            args, name = node["args"], node["op"].split(".")[1:2]
            if node["op"] == "input":
                values[node["name"]] = {places[args[0]]} if args[0] in places else set()
            elif node["op"] == "output":
                results = args[0] if isinstance(args[0], list) else args
                for of_result, result in zip(found, results, strict=True):
                    of_result.update(*(values[ref] for ref in interpret.references(result)))
            elif name in (["detach"], ["sym_size"]):
                values[node["name"]] = set()
            else:
                names = interpret.references((args, node["kwargs"]))
                values[node["name"]] = set().union(*(values[ref] for ref in names))
    is_all = all(of_result == {*places.values()} for of_result in found)
    return () if is_all else tuple(tuple(sorted(of_result)) for of_result in found)


Named = tuple[tuple[str, int], ...]  # a name, and the place in a list


@cache
def _kept_of(op: GeneratedOp) -> tuple[Named, Named, Named]:
    """The params that the backward reads, the others, and the outputs that it reads."""
    backward = op.meta["backward"]
    # What is only saved may need them all.
    inputs = range(len(op.params)) if op.n_saved else backward["saved_inputs"]
    named = [(p.name, i) for i, p in enumerate(op.params)]
    kept = tuple(named[i] for i in inputs)
    others = tuple(x for x in named if x not in kept)
    return kept, others, tuple((f"result_{i}", i) for i in backward["saved_outputs"])


def _backward_of(op: GeneratedOp, find: Find) -> tuple[GeneratedOp, Any]:
    name = op.meta["backward"]["op"]
    found = find(name)
    if found is None:
        raise errors.PackError(f"tk.{op.name}: no loaded pack has {name}, which works out its gradient")
    return found, getattr(torch.ops.tk, name).default


def _gradients(ctx: Any, op: GeneratedOp, backward_op: Callable[[], Any], grads: Sequence[Any]) -> list[Any]:
    """The names of the backward op's arguments say what they are: a param of the forward op, result_<i> for a result
    that was saved, grad_<i> for the gradient of the i-th returned floating-point output."""
    given = next((g for g in grads if g is not None), None)
    if given is None:
        return [None] * ctx.n_args
    backward, overload = backward_op()
    saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | ctx.numbers
    # A second derivative goes through what was only saved.
    if op.n_saved and any(g is not None for g in grads[n_returned(op) :]):
        return _of_given_outputs(ctx, op, saved, grads)
    floats = [i for i, (_, dtype) in enumerate(ctx.results[: n_returned(op)]) if dtype.is_floating_point]
    missing = {f"grad_{n}": ctx.results[i] for n, i in enumerate(floats) if grads[i] is None}
    if missing and op.meta.get("differentiable") and not all(_zeros_do(backward, name) for name in missing):
        return _of_given_outputs(ctx, op, saved, grads)
    known = {f"grad_{n}": grads[i] for n, i in enumerate(floats)}
    if missing:
        known |= {name: parallel.full(given, shape, 0, dtype) for name, (shape, dtype) in missing.items()}
    known |= saved
    try:
        args = [known[p.name] for p in backward.params]
    except KeyError:
        unknown = [p.name for p in backward.params if p.name not in known]
        raise errors.PackError(
            f"tk.{op.name}: its backward {backward.name} takes {', '.join(unknown)}; there are {', '.join(known)}"
        ) from None
    found = listed(overload(*args, -1, ctx.mode))
    out: list[Any] = [None] * ctx.n_args
    for index, grad in zip(op.meta["backward"]["grads"], found, strict=True):
        if ctx.needs_input_grad[1 + index]:
            out[index] = grad
    return out


def _of_given_outputs(ctx: Any, op: GeneratedOp, saved: Mapping[str, Any], grads: Sequence[Any]) -> list[Any]:
    """Gradients by the recorded graph, from those results alone that have one: zeros for the others would not do, since
    0 · inf is none. Of what the backward does not read, and so was not saved, any value does."""
    given = next(g for g in grads if g is not None)
    known = {name: parallel.full(given, (), 0, dtype).expand(shape) for name, (shape, dtype) in ctx.unsaved.items()}
    named = {**saved, **known}
    args = [named[p.name] for p in op.params]
    return _vjp(op, [*args, -1, ctx.mode], grads, ctx.needs_input_grad[1:])


def _described(x: Tensor) -> tuple[Sequence[Any], torch.dtype]:
    return x.shape, x.dtype


# What makes zeros of zeros, whatever the other arguments are.
_LINEAR = frozenset({
    "_to_copy", "_unsafe_view", "add", "alias", "clone", "detach", "expand", "flip", "mean", "neg", "permute",
    "reshape", "select", "select_backward", "slice", "slice_backward", "split", "squeeze", "sub", "sum", "t",
    "transpose", "unsqueeze", "view", "where",
})  # fmt: skip


@cache
def _zeros_do(backward: GeneratedOp, grad: str) -> bool:
    """Whether zeros for this gradient are nothing but added to what comes of the others."""
    return all(_only_adds(graph["nodes"], grad) for graph in backward.meta["graphs"])


def _only_adds(nodes: Sequence[Mapping[str, Any]], grad: str) -> bool:
    zeros: set[str] = set()
    for node in nodes:
        if node["op"] in ("input", "output"):
            zeros |= {node["name"]} if node["args"] == [grad] else set()
            continue
        tensors = set(interpret.references((node["args"], node["kwargs"])))
        name = node["op"].split(".")[1]
        if name == "sym_size" or not zeros.intersection(tensors):
            continue
        if name not in _LINEAR:
            return False
        if name not in ("add", "sub") or zeros.issuperset(tensors):
            zeros.add(node["name"])
    return True


# --- By the recorded graph ---


def _is_backward(op: GeneratedOp, find: Find) -> bool:
    forward = find(op.name.removesuffix("_backward")) if op.name.endswith("_backward") else None
    return forward is not None and forward.backward == op.name


def _of_graph(op: GeneratedOp) -> Any:
    public = getattr(torch.ops.tk, op.name).default
    dependencies = cache(lambda: _dependencies(op))

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        outputs = listed(_register.below_formula(public, keyset, *args))
        ctx.others = [None if isinstance(x, Tensor) else x for x in args]
        ctx.is_tensor = [isinstance(x, Tensor) for x in args]
        ctx.save_for_backward(*(x for x in args if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*_without_gradient(ctx, dependencies(), outputs))
        return outputs

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if is_one else x for is_one, x in zip(ctx.is_tensor, ctx.others, strict=True)]
        return (None, *_vjp(op, args, grads, ctx.needs_input_grad[1:]))

    return _function(op, forward, backward)


def _vjp(op: GeneratedOp, args: Sequence[Any], grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Any]:
    """The gradient for each argument that needs one, as ATen has it, of the results that have one themselves.
    torch.func's, since what autograd saved belongs to any level of its transforms; its results are differentiable
    wherever gradients are on."""
    _require_graph(op, "gradient")
    wanted = [i for i, is_needed in enumerate(needed) if is_needed]
    given_grads = [i for i, g in enumerate(grads) if g is not None]
    if not given_grads:
        return [None] * len(args)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(args)
        for i, x in zip(wanted, inputs, strict=True):
            given[i] = x
        outputs = interpret.differentiable(Call(op, given))
        return tuple(outputs[i] for i in given_grads)

    try:
        _, pull_back = torch.func.vjp(run, *(args[i] for i in wanted))[:2]
        found = pull_back(tuple(grads[i] for i in given_grads))
    except RuntimeError as error:
        raise _not_implemented(op, error) from None
    out: list[Any] = [None] * len(args)
    for i, grad in zip(wanted, found, strict=True):
        out[i] = grad
    return out


def _not_implemented(op: GeneratedOp, error: RuntimeError) -> RuntimeError:
    """ATen says of a derivative that it lacks that it is not implemented, some as a RuntimeError."""
    if isinstance(error, NotImplementedError) or "is not implemented" not in str(error):
        return error
    return NotImplementedError(f"tk.{op.name}: {error}")


# --- Ops without a gradient ---


def _may_give_floats(op: GeneratedOp) -> bool:
    """Whether results may be floats, without looking at a call's arguments."""
    known = [result.dtype.value for result in op.results]
    return any(p.mutated for p in op.params) or any(d is None or _is_float(d) for d in known)


def _is_float(dtype: int) -> bool:
    return BY_NUMBER[dtype].is_floating_point


def _gives_floats(op: GeneratedOp, args: Sequence[Any]) -> bool:
    if any(p.mutated and x.is_floating_point() for p, x in zip(op.params, args, strict=False)):
        return True
    call = Call(op, args)
    return any(_is_float(int(call.evaluate(result.dtype))) for result in op.results)


def _refusing(op: GeneratedOp) -> Callable[..., Any]:
    public = getattr(torch.ops.tk, op.name).default
    refuse = _register.inference_only(public, _advice(op))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(public, args, kwargs)
        if _register.is_at_stake(args) and not _gives_floats(op, args):
            with torch.no_grad():
                return _register.below_autograd(public, keyset, *args)
        for p, x in zip(op.params, args, strict=False):
            if p.mutated and isinstance(x, Tensor) and x.is_leaf and x.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"tk.{op.name}: a leaf Variable that requires grad is being used in an in-place operation, which "
                    f"writes {p.name}; call it under torch.no_grad()"
                )
        return refuse(keyset, *args)

    return kernel


def _advice(op: GeneratedOp) -> str:
    if any(p.mutated for p in op.params):
        return "return what it writes in place, with @tk.op(grad=True, ...)"
    return "" if op.is_of_package else "declare its function with @tk.op(grad=True, ...) and build it again"


def refuse_lists(op: GeneratedOp, args: Sequence[Any]) -> None:
    """Raises NotImplementedError where a gradient is at stake for one of the tensors of lists."""
    if _register.is_at_stake(tuple(lists.tensors_of(args))):
        raise NotImplementedError(_register.no_gradient(op.name))  # grad=True is refused for what writes in place


def refuse_transformed(op: GeneratedOp, args: Sequence[Any]) -> None:
    """Raises NotImplementedError for tensors of lists that a transform of torch.func has wrapped."""
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in lists.tensors_of(args)):
        raise NotImplementedError(
            f"tk.{op.name} takes lists of tensors and has neither a gradient nor a batching rule: it cannot be called "
            "on what torch.func (grad, vjp, jvp, vmap, ...) transforms. Call it outside of the transformed function"
        )
