"""What a model computes itself and an op of tk in one launch: RMS norms, activations, gated feed-forward layers, rotary
positions. It is known by what it computes, never by its name: its graph is traced and compared with the op's.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tk.dropin.functions.activations import GEGLU, GELU, SILU, SWIGLU
from tk.dropin.functions.norms import RMS_NORM
from tk.dropin.functions.tables import ROPE
from tk.dropin.graph import graph_of
from tk.dropin.replacement import Replacement, StandIn
from tk.dropin.target import Target

__all__ = ["Activation", "Gated", "activation", "activation_forward", "gated", "gated_forward"]
__all__ += ["rms_norm_eps", "rms_norm_forward", "rope_stand_in"]


# --- RMS norms ---


def rms_norm_eps(module: nn.Module) -> float | None:
    """The eps of a module whose forward is an RMS norm of the last dimension times its only parameter; else None."""
    names = [name for name, _ in module.named_parameters()]
    if len(names) != 1 or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    weight = module.get_parameter(names[0])
    if weight.dim() != 1 or not weight.is_floating_point():
        return None

    def forward(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(module, {names[0]: weight}, (x,))

    examples = (torch.ones(3, weight.shape[0], dtype=torch.bfloat16), torch.ones(weight.shape[0], dtype=torch.bfloat16))
    graph = graph_of(forward, examples)
    if graph is None or len(graph.added) != 1:
        return None
    (eps,) = graph.added
    forms = (_rounded_before_the_weight, _rounded_after_the_weight, _widened_by_the_root)
    return eps if any(graph == graph_of(partial(form, eps), examples) for form in forms) else None


def _rounded_before_the_weight(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    return weight * _normalised(x, eps).to(x.dtype)


def _rounded_after_the_weight(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    return (weight * _normalised(x, eps)).to(x.dtype)


def _widened_by_the_root(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    """T5's."""
    return weight * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def rms_norm_forward(target: Target, eps: float, parameter: str) -> FunctionType:
    takes, call = RMS_NORM.taken_on(target, in_pieces=True), RMS_NORM.call

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and not kwargs:
            (x,), weight = args, getattr(self, parameter)
            shape = weight.shape
            if takes(x, shape, weight) and x.dtype is weight.dtype:
                return call(x, shape, weight, eps)
        return type(self).forward(self, *args, **kwargs)

    return target.site(forward, _as_written)  # type: ignore[return-value]


def _as_written(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


# --- Activations ---


@dataclass(frozen=True)
class Activation:
    """arguments: of the function, after the input."""

    replacement: Replacement
    arguments: tuple[str, ...] = ()


def activation(module: nn.Module) -> Activation | None:
    """What a module without parameters computes of each element, where tk has it."""
    if next(module.parameters(), None) is not None or getattr(module, "inplace", False):
        return None
    x = (torch.ones(3, 8, dtype=torch.bfloat16),)
    graph = graph_of(module, x)
    if graph is None:
        return None
    return next((found for found, function in _ACTIVATIONS if graph == graph_of(function, x)), None)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


_ACTIVATIONS: Sequence[tuple[Activation, Callable[..., Any]]] = (
    (Activation(SILU), F.silu),
    (Activation(GELU), F.gelu),
    (Activation(GELU, ("tanh",)), partial(F.gelu, approximate="tanh")),
    (Activation(GELU, ("tanh",)), _gelu_tanh),
    (Activation(GELU), _gelu_erf),
    (Activation(SILU), lambda x: x * torch.sigmoid(x)),
)


def activation_forward(target: Target, found: Activation) -> FunctionType:
    takes, call, more = found.replacement.taken_on(target), found.replacement.call, found.arguments

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and not kwargs and takes(args[0], *more):
            return call(args[0], *more)
        return type(self).forward(self, *args, **kwargs)

    return target.site(forward, _as_written)  # type: ignore[return-value]


# --- Gated feed-forward layers ---


@dataclass(frozen=True)
class Gated:
    """``down(activation(gate(x)) * up(x))``, the names of its submodules. arguments: of the activation."""

    replacement: Replacement
    gate: str
    activation: str
    up: str
    down: str
    arguments: tuple[str, ...] = ()


_GATED = {SILU: SWIGLU, GELU: GEGLU}


class _Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def gated(module: nn.Module) -> Gated | None:
    children = dict(module.named_children())
    if len(children) != 4:
        return None
    try:
        nodes = list(_Leaves().trace(module).nodes)
    except Exception:  # whatever a model's own code raises when it is given no tensor
        return None
    others = [n.op for n in nodes if n.op != "call_module"]
    if len(nodes) != 7 or others != ["placeholder", "call_function", "output"]:
        return None
    x, down = nodes[0], nodes[-1].args[0]
    product = _argument(down)
    if not isinstance(product, fx.Node) or product.target is not operator.mul:
        return None
    for activated, up in (product.args, product.args[::-1]):
        gate = _argument(activated)
        if _argument(gate) is x and _argument(up) is x:
            names = [_called(n) for n in (gate, activated, up, down)]
            found = activation(children[names[1]]) if children.keys() == set(names) else None
            if found is None:
                return None
            return Gated(_GATED[found.replacement], names[0], names[1], names[2], names[3], found.arguments)
    return None


def _called(node: Any) -> str:
    return str(node.target)


def _argument(node: Any) -> Any:
    """The only argument of a call of a submodule."""
    is_call = isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1 and not node.kwargs
    return node.args[0] if is_call else None


def gated_forward(target: Target, found: Gated) -> FunctionType:
    takes, call, more = found.replacement.taken_on(target), found.replacement.call, found.arguments

    def as_written(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    def multiplied(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        return call(gate, up, *more) if takes(gate, up, *more) else activation(gate) * up

    multiply = target.site(multiplied, as_written)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        gate, up = getattr(self, found.gate)(*args, **kwargs), getattr(self, found.up)(*args, **kwargs)
        return getattr(self, found.down)(multiply(getattr(self, found.activation), gate, up))

    return forward  # type: ignore[return-value]


# --- Rotary positions ---


@dataclass(frozen=True)
class _Rotation:
    """formula: as models write it. repeats: whether a table has each value twice, where the elements of its pair are:
    the formula reads both, the op one."""

    formula: Callable[[Tensor, Tensor, Tensor, Tensor], Any]
    repeats: Callable[[Tensor], bool]
    interleaved: bool


def rope_stand_in(target: Target, model: nn.Module, function: FunctionType) -> StandIn | None:
    """The stand-in for a ``function(q, k, cos, sin)`` that rotates halves or neighbours, in a model whose tables have a
    value for each pair; else None."""
    q, k, table = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8), torch.ones(1, 3, 8)
    examples = (q, k, table, table)
    graph = graph_of(function, examples)
    found = next((r for r in _ROTATIONS if graph is not None and graph == graph_of(r.formula, examples)), None)
    if found is None or not _makes_pairs(model, found.repeats):
        return None
    takes, call, interleaved = ROPE.taken_on(target, in_pieces=True), ROPE.call, found.interleaved

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and takes(q, k, cos, sin, interleaved):
            return call(q, k, cos, sin, interleaved)
        return function(q, k, cos, sin, *args, **kwargs)

    return StandIn(ROPE, target.site(rotate, function), function)


def _rotated_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def _rotated_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cohere's."""

    def half(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


_ROTATIONS = (
    _Rotation(_rotated_halves, lambda t: torch.equal(*t.chunk(2, -1)), False),
    _Rotation(_rotated_neighbours, lambda t: torch.equal(t[..., ::2], t[..., 1::2]), True),
)


def _makes_pairs(model: nn.Module, repeats: Callable[[Tensor], bool]) -> bool:
    """Whether the tables of all modules that make some (known by their ``inv_freq``) do so. A copy of each is asked."""
    frequencies = [(m, getattr(m, "inv_freq", None)) for m in model.modules()]
    makers = [(m, f.device) for m, f in frequencies if isinstance(f, Tensor)]
    return bool(makers) and all(_makes(m, device, repeats) for m, device in makers)


def _makes(maker: nn.Module, device: torch.device, repeats: Callable[[Tensor], bool]) -> bool:
    try:
        x, positions = torch.zeros(1, 1, device=device), torch.arange(5, device=device)[None]
        tables = copy.deepcopy(maker)(x, positions)
        return len(tables) == 2 and all(map(repeats, tables))
    except Exception:  # a table of another kind, with other arguments
        return False
