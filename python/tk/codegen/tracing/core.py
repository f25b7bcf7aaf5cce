"""Makes of the graph of ATen ops as called the core one: functional, and taken apart into what has a rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table, get_decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_flatten

from tk.codegen.errors import TraceError
from tk.codegen.tracing import special
from tk.codegen.tracing.arguments import Arguments
from tk.codegen.tracing.lines import OpFailed, nodes_after

aten = torch.ops.aten

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
def decompositions(ruled: frozenset[str]) -> dict[Any, Callable[..., Any]]:
    """Torch's core ones, and whatever else torch or Inductor has for an op without a rule. ruled: the names of the ops
    that have one."""
    from torch._inductor.decomposition import decompositions as of_inductor

    table = {**core_aten_decompositions(), **get_decompositions(_FURTHER)}
    for op, rule in (*decomposition_table.items(), *of_inductor.items()):
        if isinstance(op, OpOverload) and op._schema.name.replace("::", ".") not in ruled:
            table.setdefault(op, rule)
    direct = {getattr(packet, name) for packet in _DIRECT for name in packet.overloads()}
    products = {op for op in table if isinstance(op, OpOverload) and op._schema.name.removeprefix("aten::") in PRODUCTS}
    return {**{op: rule for op, rule in table.items() if op not in direct | products}, **special.DECOMPOSITIONS}


class _Tagging(fx.Interpreter):
    """Runs the recorded graph; every core node remembers the recorded one that it comes of."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.extra_traceback = False  # it would write the node into the message of an exception

    def run_node(self, n: fx.Node) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        graph = mode.tracer.graph
        last = graph._root.prev
        try:
            return self._pieces(n) if n.target is aten.split.Tensor else super().run_node(n)
        except TraceError:
            raise
        except Exception as error:
            raise OpFailed(n) from error
        finally:
            for node in nodes_after(graph, last):
                node.meta.setdefault("line", n.meta.get("line"))
                node.meta.setdefault("is_cast", n.target is aten._to_copy.default)

    def _pieces(self, n: fx.Node) -> Any:
        """A split, with what the last piece has. Torch writes into it as if it were as large as the others, which holds
        for sizes that are multiples."""
        (x, size, *dims), named = self.fetch_args_kwargs_from_env(n)
        dim = dims[0] if dims else named.get("dim", 0)
        others = len(n.meta["val"]) - 1
        sizes = [size] * others + [x.shape[dim] - others * size]
        return list(self.call_function(aten.split_with_sizes.default, (x, sizes, dim), {}))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What torch does in place by a Python reference cannot be made functional where the reference converts its
        operands, as it does all of 16 bits: the result is copied instead."""
        if isinstance(target, OpOverload) and (plain := _out_of_place(target)):
            return args[0].copy_(plain(*args, **kwargs))
        return super().call_function(target, args, kwargs)


@cache
def _out_of_place(op: OpOverload) -> OpOverload | None:
    """The op that leaves its first argument as it is, of a pointwise one that writes it."""
    name = op._schema.name.removeprefix("aten::")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    overloads = [getattr(packet, n) for n in packet.overloads()] if packet else []
    is_pointwise = packet in _UNTAGGED or any(torch.Tag.pointwise in o.tags for o in overloads)
    return next((o for o in overloads if is_pointwise and _kinds(o) == _kinds(op)), None)


_UNTAGGED = (aten.floor_divide, aten.hardswish)  # pointwise, although torch does not say so


def _kinds(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def outputs_of(graph: fx.GraphModule) -> tuple[list[fx.Node], int | None]:
    """The nodes that are returned, and how: None for a single tensor."""
    (value,) = next(n for n in graph.graph.nodes if n.op == "output").args
    flat, _ = tree_flatten(value)
    if isinstance(value, dict):  # its tensors would come back without its keys
        raise TraceError("the function returns a dict; it may return a tensor, a tuple of tensors, or None")
    if wrong := [x for x in flat if x is not None and not (isinstance(x, fx.Node) and is_tensor(x))]:
        raise TraceError(f"the function returns {wrong[0]!r}; it may return a tensor, a tuple of tensors, or None")
    nodes = [x for x in flat if x is not None]
    if isinstance(value, fx.Node):
        return nodes, None
    return nodes, len(nodes)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def to_core(
    recorded: fx.GraphModule, arguments: Arguments, ruled: frozenset[str]
) -> tuple[fx.GraphModule, tuple[fx.Node, ...], dict[str, fx.Node]]:
    """Functional, and of core ops only: those that are `ruled`, and what torch takes nothing apart into."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    n_new = len(outputs_of(recorded)[0])

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
        return make_fx(run, tracing_mode="real", decomposition_table=decompositions(ruled))(*arguments.values)

    # Making in-place forms functional doubles the time of a trace, and few functions, or decompositions, have any.
    core = traced(functional if _writes(recorded) else plain)
    if _writes(core):
        core = traced(functional)
    results = next(n for n in core.graph.nodes if n.op == "output").args[0]
    placeholders = [n for n in core.graph.nodes if n.op == "placeholder"]
    for node, name in zip(placeholders, arguments.names, strict=True):
        node.meta["param"] = name
    tensors = [n for n in placeholders if is_tensor(n)]
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
