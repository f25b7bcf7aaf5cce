"""What a generated op computes on the CPU: its recorded graph, run node by node with ATen ops (docs/packs.md).

The graph was recorded with one leading dimension where the signature has "...": so the tensors of a call are seen.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk.generated import random
from tk.generated.problem import DTYPES, NAMES, Call
from tk.generated.records import GeneratedOp, Result


def _divided(a: float, b: float) -> float:
    """The quotient as a kernel has it, which raises nothing: a variance of one element divides by 0."""
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1, b) if a and a == a else math.nan


# What a graph may call besides ATen: arithmetic on sizes and numbers, and picking one of several results.
_PYTHON: Mapping[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "pow", "neg", "getitem",
                 "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_")
} | {
    f"torch.{name}": getattr(torch, name)
    for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite")
} | {
    "operator.truediv": _divided,
}  # fmt: skip

# ATen ops that reach beyond the tensors they are given.
_REFUSED = ("from_file", "set_", "_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index",
            "_unsafe_masked_index_put_accumulate")  # fmt: skip


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """topk that takes the first of equal ones, as the kernels do; which ATen takes is open."""
    values, indices = torch.sort(x, stable=True, dim=dim, descending=largest)
    return (values, indices) if x.dim() == 0 else (values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """index_put that keeps the last of several elements for one place, as the deterministic kernels do. ATen's threads
    take turns."""
    given = [(d, index) for d, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for _, index in given))
    n = math.prod(shape)
    if accumulate or n < 2 or any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return torch.ops.aten.index_put(x, indices, values, accumulate)
    place, places = torch.zeros(shape, dtype=torch.int64, device=x.device), 1
    for d, index in given:
        size = x.shape[d]
        place, places = place * size + torch.where(index < 0, index + size, index), places * size
    place, number = place.reshape(-1), torch.arange(n, device=x.device)
    last = number.new_zeros(places).scatter_reduce(0, place, number, "amax").gather(0, place)
    dims = [d for d, _ in given]
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    others = [x.shape[d] for d in range(x.dim()) if d not in dims]
    wanted = [*others[:first], *shape, *others[first:]]
    each = values.expand(wanted).reshape([*others[:first], n, *others[first:]]).index_select(first, last)
    return torch.ops.aten.index_put(x, indices, each.reshape(wanted))


def _associative_scan(xs: Sequence[Tensor], combine: str, dim: int) -> list[Tensor]:
    """Every element takes in the one 1, 2, 4, … places before it. combine: a recorded graph of a0, a1, …, b0, b1, …"""
    nodes, found, step = json.loads(combine), list(xs), 1
    n = found[0].shape[dim] if found[0].dim() else 1
    while step < n:
        before = {f"a{i}": x.narrow(dim, 0, n - step) for i, x in enumerate(found)}
        more = {f"b{i}": x.narrow(dim, step, n - step) for i, x in enumerate(found)}
        both = evaluate(nodes, before | more, "associative_scan", found[0].device)
        found = [torch.cat([x.narrow(dim, 0, step), y], dim) for x, y in zip(found, both, strict=True)]
        step *= 2
    return found


def _view(x: Tensor, size: Sequence[int]) -> Tensor:
    """view that copies where it must: when a graph was traced tensors were dense, so that every shape was a view."""
    return x.reshape(size)


def _constant(values: Sequence[Any], sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(sizes)


_OURS: Mapping[str, Callable[..., Any]] = {
    "tk.constant": _constant,
    "aten.index_put.default": _index_put,
    "aten.topk.default": _topk,
    "aten.view.default": _view,
    "tk.associative_scan": _associative_scan,
}


# Of these ATen has no derivative; autograd, where it is asked for one, takes them apart itself.
_TAKEN_APART = frozenset(
    f"aten.{name}.default"
    for name in ("_fused_rms_norm_backward", "logit_backward", "mish_backward", "native_dropout_backward",
                 "native_group_norm_backward", "silu_backward")
)  # fmt: skip


def run(call: Call) -> list[Tensor]:
    """The outputs of a call on the CPU, allocated as its kernels would; what is written in place is written. Below
    autograd and autocast, which have had their say of the op."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        return _run(call)


def _run(call: Call) -> list[Tensor]:
    graph = graph_of(call)
    call.check_written()
    outputs = call.allocate()
    is_written = any(
        p.mutated and x.numel() for p, x in zip(call.op.tensors, call.tensors, strict=True) if x is not None
    )
    if not is_written and not any(out.numel() for out in outputs):
        return outputs  # no kernel runs, and some of the graph may not hold for no elements (a product's gradient)
    inputs = [Input(p.kind == "tensor" and p.leading, p.rank, p.mutated, x)
              for p, x in zip(call.op.params, call.args, strict=False)]  # fmt: skip
    seen = {p.name: x.seen for p, x in zip(call.op.params, inputs, strict=True)}
    found = evaluate(graph["nodes"], seen, call.op.name)
    for x in inputs:
        x.write_back()
    if len(found) != len(outputs):
        raise errors.PackError(f"tk.{call.op.name}: its graph has {len(found)} outputs, its pack says {len(outputs)}")
    taken = {_storage(x) for _, x in call.present}
    results = []
    for value, out in zip(found, outputs, strict=True):
        results.append(_fit(value, out, call, taken))
        taken.add(_storage(results[-1]))
    return results


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def seen(call: Call) -> dict[str, Any]:
    """The arguments as the graph sees them, by name: ``...`` as one dimension, and copies of what it writes."""
    return {
        p.name: Input(p.leading, p.rank, p.mutated, x.clone() if p.mutated else x).seen if p.kind == "tensor" else x
        for p, x in zip(call.op.params, call.args, strict=False)
    }


def aten(call: Call, exact: bool = False, arguments: Mapping[str, Any] | None = None) -> list[Tensor]:
    """The outputs of a call as ATen works them out on the call's own device, then the tensors written in place (copies:
    the call's are left alone). ``...`` is one dimension.

    exact: in fp64, whatever the function itself converts to: the reference that kernels are judged by. arguments: used
    instead of the call's own, as ``seen`` gives them; those of an exact evaluation in fp64."""
    nodes, given = graph_of(call)["nodes"], dict(seen(call) if arguments is None else arguments)
    if exact:
        nodes, given = in_fp64(nodes), {name: wide(x) for name, x in given.items()}
    found = evaluate(nodes, given, call.op.name, call.device)
    return [*found, *(given[p.name] for p in call.op.tensors if p.mutated)]


def differentiable(call: Call) -> list[Tensor]:
    """The outputs of a call by ATen ops that autograd sees, on the call's own device: they have gradients and tangents,
    and may be views of arguments."""
    if any(p.mutated for p in call.op.params):
        raise NotImplementedError(f"tk.{call.op.name} writes its arguments in place, of which there is no derivative")
    with torch._C._DisableAutocast():
        found = evaluate(graph_of(call)["nodes"], seen(call), call.op.name, call.device, take_apart=True)
    return [_with_leading(x, result, call) for x, result in zip(found, call.op.results, strict=True)]


def _with_leading(x: Tensor, result: Result, call: Call) -> Tensor:
    """An output of the graph, which has ``...`` as one dimension."""
    if result.leading is None:
        return x
    like, param = call.tensors[result.leading], call.op.tensors[result.leading]
    return x.reshape((*like.shape[: like.dim() - param.rank], *x.shape[1:]))


def wide(x: Any) -> Any:
    """A floating-point tensor in fp64; anything else as it is."""
    return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x


def in_fp64(x: Any) -> Any:
    """A recorded value with every floating-point dtype made fp64."""
    if isinstance(x, Mapping):
        wide = {key: "fp64" for key, name in x.items() if key == "dtype" and isinstance(name, str)
                and DTYPES[name].is_floating_point}  # fmt: skip
        return {key: in_fp64(value) for key, value in x.items()} | wide
    return list(map(in_fp64, x)) if isinstance(x, list) else x


def graph_of(call: Call) -> Mapping[str, Any]:
    """The recorded graph for a call's dtypes and flags: bools, and whether an optional tensor is there."""
    given = {p.name: NAMES.get(x.dtype, str(x.dtype)) for p, x in call.present}
    flags = {p.name: bool(x) for p, x in zip(call.op.params, call.args, strict=False) if p.kind == "bool"}
    are_there = {p.name: x is not None for p, x in zip(call.op.tensors, call.tensors, strict=True)}
    return graph_for(call.op, given, flags | are_there)


def graph_for(op: GeneratedOp, given: Mapping[str, str], flags: Mapping[str, bool]) -> Mapping[str, Any]:
    """given: the dtypes of the tensors that are there. flags: the values of bools, and whether a tensor is there.

    Raises ValueError for dtypes that no graph is of."""
    signature, graphs = op.meta["signature"], op.meta["graphs"]
    declared = {name: signature[name].partition("[")[0].strip() for name in given}
    for graph in graphs:
        has_dtypes = all(graph["dtypes"].get(dtype, dtype) == given[name] for name, dtype in declared.items())
        if has_dtypes and all(flags[name] == value for name, value in graph.get("flags", {}).items()):
            return graph
    accepted = "; ".join(", ".join(f"{k} {v}" for k, v in graph["dtypes"].items()) for graph in graphs)
    raise ValueError(
        f"tk.{op.name}: it is there for {accepted or 'fixed dtypes'}, not for "
        + ", ".join(f"{name} of {dtype}" for name, dtype in given.items())
    )


class Input:
    """An argument as the graph sees it: leading dimensions as one."""

    def __init__(self, has_leading: bool, rank: int, mutated: bool, value: Any):
        self.value, self.seen, self.mutated = value, value, mutated
        if has_leading:
            self.seen = value.reshape(-1 if value.numel() else math.prod(value.shape[: value.dim() - rank]),
                                      *value.shape[value.dim() - rank :])  # fmt: skip

    def write_back(self) -> None:
        if self.mutated and self.seen.untyped_storage().data_ptr() != self.value.untyped_storage().data_ptr():
            self.value.copy_(self.seen.reshape(self.value.shape))


def _fit(value: Tensor, out: Tensor, call: Call, taken: Collection[int]) -> Tensor:
    """The value itself where it is what the op returns; never a view of an argument, or of another result, in whose
    storages (taken) it may lie."""
    if value.dtype != out.dtype or value.numel() != out.numel():
        raise errors.PackError(
            f"tk.{call.op.name}: its graph makes {value.dtype} {list(value.shape)}, its pack says {out.dtype} "
            f"{list(out.shape)}"
        )
    is_view = _storage(value) in taken
    if value.shape == out.shape and value.stride() == out.stride() and not is_view:
        return value
    return out.copy_(value.reshape(out.shape))


_CPU = torch.device("cpu")


def evaluate(
    nodes: Sequence[Mapping[str, Any]],
    inputs: Mapping[str, Any],
    name: str,
    device: torch.device = _CPU,
    take_apart: bool = False,
) -> list[Tensor]:
    """Runs recorded nodes on a device. Raises tk.PackError for what is no graph.

    take_apart: also into ops of which ATen has the derivative."""
    values: dict[str, Any] = {}
    for node in nodes:
        if node["op"] == "output":
            outputs = _value(node["args"][0], values, device)
            return [x for x in (outputs if isinstance(outputs, list) else [outputs]) if x is not None]
        values[node["name"]] = evaluate_node(node, values, name, device, inputs, take_apart)
    raise errors.PackError(f"tk.{name}: its graph has no output")


def evaluate_node(
    node: Mapping[str, Any], values: Mapping[str, Any], name: str, device: torch.device,
    inputs: Mapping[str, Any] = MappingProxyType({}), take_apart: bool = False,
) -> Any:  # fmt: skip
    """One recorded node, of those before it."""
    args = [_value(x, values, device) for x in node.get("args", ())]
    kwargs = {key: _value(x, values, device) for key, x in node.get("kwargs", {}).items()}
    op, function = node["op"], None
    if take_apart:
        function = _parts(op) if op in _TAKEN_APART else None
        # Of a tensor without dimensions and a number torch.func gives a tangent in float64, where the number is taken
        # for a tensor.
        op = _OF_NUMBERS[op] if op in _OF_NUMBERS and not isinstance(args[1], Tensor) else op
    return (function or _function(op, inputs, name))(*args, **kwargs)


_OF_NUMBERS = {f"aten.{name}.Tensor": f"aten.{name}.Scalar" for name in ("add", "sub", "mul", "div")}


def _parts(op: str) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table  # it takes long to import

    return decomposition_table.get(getattr(torch.ops.aten, op.split(".")[1]).default)


def references(x: Any) -> Iterator[str]:
    """The values that a recorded argument names."""
    if isinstance(x, Mapping):
        yield from [x["ref"]] if "ref" in x else references(list(x.values()))
    elif isinstance(x, list | tuple):
        for item in x:
            yield from references(item)


def _function(op: str, inputs: Mapping[str, Any], name: str) -> Callable[..., Any]:
    if op == "input":
        return inputs.__getitem__
    if op in _PYTHON or op in _OURS:
        return _PYTHON.get(op) or _OURS[op]
    if op == "tk_random.bits.default":
        return random.bits
    if op == "higher_order.inline_asm_elementwise":
        return _inline_asm(name)
    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace == "aten" and packet not in _REFUSED:
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if found is not None:
            return found
    raise errors.UnsupportedError(f"tk.{name}: on the CPU its graph needs {op}, which torch {torch.__version__} lacks")


def _inline_asm(name: str) -> Callable[..., Any]:
    def call(*inputs: Tensor, **kwargs: Any) -> Tensor:
        if not inputs[0].is_cuda:
            raise errors.UnsupportedError(f"tk.{name}: it has inline PTX, which the CPU cannot run")
        from torch._higher_order_ops import inline_asm_elementwise

        return inline_asm_elementwise(*inputs, **kwargs)

    return call


_NAMED: Mapping[str, Callable[[str], Any]] = {
    "dtype": DTYPES.__getitem__,
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "float": float,  # inf, -inf and nan, which JSON lacks
}


def _value(x: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """An argument from its JSON. device: the call's."""
    if isinstance(x, list):
        return [_value(item, values, device) for item in x]
    if not isinstance(x, dict):
        return x
    for kind, name in x.items():
        if kind == "ref" and name in values:
            return values[name]
        if kind == "device":
            return device
        if kind in _NAMED:
            return _NAMED[kind](name)
    raise errors.PackError(
        f"{x} in a recorded graph is neither a value before it nor one of device, {', '.join(_NAMED)}"
    )
