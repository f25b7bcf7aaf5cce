"""``tk.use``: which modules of a model run through tk, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tk
from tk.dropin import recognise, speed
from tk.dropin.functions import DTYPES, Target, is_served, stand_ins
from tk.dropin.redirect import Redirector, is_redirected, mark
from tk.dropin.report import Record, Report, Swap

__all__ = ["use"]


def use(model: nn.Module, *, only_faster: bool = True) -> Report:
    """Lets a model run through tk's ops, in place: linear layers, products, convolutions, norms, activations, softmax,
    embeddings and attention, where tk takes the call and was measured to be no slower. The rest is left alone.

        with tk.use(model) as report:
            y = model(x)
        print(report)

    What is replaced is the ``forward`` of single instances (and methods that it calls): parameters, buffers,
    state_dict, hooks and classes stay as they are. Each call is looked at: what tk does not take, or takes longer for,
    runs as it did. It holds for the device that the model is on; moved later, it runs as before. Left alone are modules
    with hooks, tied or shared parameters, parametrisations, parameters that are no plain tensors, and what is compiled
    to TorchScript or wrapped by FSDP.

    Args:
        model: in training mode or not, on the CPU or a GPU.
        only_faster: False takes all that there are kernels for. (On the CPU that is so in any case.)

    Returns:
        A record for each module, which prints as a table. ``report.undo()`` restores the model, and so does the end of
        ``with``. Modules that already run through tk are left alone.

    Raises:
        TypeError: model is no torch.nn.Module.
        tk.UnsupportedError: it is on a device that is neither the CPU nor a CUDA GPU.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tk.use: model must be a torch.nn.Module, is {type(model).__name__}")
    return _use(model, _target(model, only_faster))


def _use(model: nn.Module, target: Target) -> Report:
    walk = _Walk(model, target)
    swaps: list[Swap] = []
    records = []
    for path, module in model.named_modules():
        if (found := walk.decide(path, module)) is not None:
            record, methods = found
            records.append(record)
            swaps += [Swap(module, name, MethodType(mark(f), module)) for name, f in methods.items()]
    for swap in swaps:
        swap.do()
    return Report(records, swaps)


def _target(model: nn.Module, only_faster: bool) -> Target:
    tensors = (t for tensors in (model.parameters(), model.buffers()) for t in tensors)
    device = next((t.device for t in tensors), torch.device("cpu"))
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return Target("cuda", f"sm_{major}{minor}", only_faster)
    if device.type in ("cpu", "meta"):
        return Target("cpu", "cpu", only_faster)
    raise tk.UnsupportedError(f"tk.use: the model is on {device}; it must be on the CPU or a CUDA GPU")


@dataclass(frozen=True)
class _Found:
    """What could stand in the place of a module's methods, and the ops that it would call."""

    ops: tuple[str, ...] = ()
    methods: Mapping[str, FunctionType] = field(default_factory=dict)
    reason: str | None = None


class _Walk:
    """Over one model."""

    def __init__(self, model: nn.Module, target: Target):
        self._target = target
        self._redirector = Redirector(stand_ins(target))
        self._shared = _shared_parameters(model)
        self._closed: dict[str, str] = {}  # paths below which nothing is touched, and why
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._redirect_rotations(model)

    def decide(self, path: str, module: nn.Module) -> tuple[Record, Mapping[str, FunctionType]] | None:
        """None for a container that computes nothing itself."""
        reason = self._why_untouched(path, module)
        found = self._find(module, is_touched=reason is None)
        has_children = next(module.children(), None) is not None
        if not found.ops and has_children and not module._parameters and path not in self._closed:
            return None
        reason = reason or found.reason or self._why_torch(found.ops, module)
        is_replaced = reason is None
        record = Record(
            path,
            type(module).__name__,
            ", ".join(found.ops) or None,
            is_replaced,
            self._when(found.ops, module) if reason is None else reason,
        )
        return record, found.methods if is_replaced else {}

    # --- What must stay as it is ---

    def _why_untouched(self, path: str, module: nn.Module) -> str | None:
        for above, why in self._closed.items():
            if path.startswith(f"{above}." if above else ""):
                return f"below {above or 'the model'}, which is {why}"
        reason: str | None
        if (reason := _why_closed(module)) is not None:
            self._closed[path] = reason
            return reason
        if "forward" in vars(module):
            return _why_own(module, "forward")
        if hooks := [name for name in _HOOKS if getattr(module, f"_{name}s", None)]:
            return f"has a {hooks[0].replace('_', ' ')}"
        for name, parameter in module.named_parameters(recurse=False):
            if (reason := self._why_not_of(name, parameter, path)) is not None:
                return reason
        return None

    def _why_not_of(self, name: str, parameter: nn.Parameter, path: str) -> str | None:
        if isinstance(parameter, UninitializedParameter):
            return f"{name} is not initialised; run the model once before"
        if is_traceable_wrapper_subclass(parameter) or is_traceable_wrapper_subclass(parameter.data):
            kind = parameter if is_traceable_wrapper_subclass(parameter) else parameter.data
            return f"{name} is a {type(kind).__name__}, no plain tensor"
        own = f"{path}.{name}" if path else name
        if others := [other for other in self._shared.get(id(parameter), ()) if other != own]:
            return f"{name} is shared with {others[0]}"
        if parameter.device.type != self._target.device_type:
            return f"{name} is on {parameter.device}, the model on {self._target.device_type}"
        if parameter.dtype not in DTYPES:
            return f"{name} is {_name(parameter.dtype)}; there are kernels for {', '.join(map(_name, DTYPES))}"
        return None

    # --- What could run through tk ---

    def _find(self, module: nn.Module, is_touched: bool) -> _Found:
        """is_touched: False where only the ops are asked for."""
        is_own = is_touched and not type(module).__module__.startswith("torch.")
        if is_own and (found := self._recognised(module)) is not None:
            return found
        named = self._redirector.methods(module)
        methods = {name: f for name, f in named.items() if self._redirector.ops(f)}
        ops = tuple(dict.fromkeys(op for f in methods.values() for op in self._redirector.ops(f)))
        if is_own and not ops and (activation := self._activation(module)) is not None:
            return activation
        if not ops:
            return _Found(reason="calls nothing by its name that tk has")
        if not is_touched:
            return _Found(ops)
        if own := [name for name in methods if name in vars(module)]:
            return _Found(ops, reason=_why_own(module, own[0]))
        try:
            return _Found(ops, {name: self._redirector.copy(f) for name, f in methods.items()})
        except ValueError as error:
            return _Found(ops, reason=str(error))

    def _recognised(self, module: nn.Module) -> _Found | None:
        if tk.functional.find("rms_norm") is not None and (eps := recognise.rms_norm_eps(module)) is not None:
            (parameter,) = module._parameters
            return _Found(("rms_norm",), {"forward": recognise.rms_norm_forward(self._target, eps, parameter)})
        gated = recognise.gated(module)
        if gated is None or tk.functional.find(gated.op) is None:
            return None
        if self._why_untouched(".", module.get_submodule(gated.activation)) is not None:
            return None  # its hooks would not be called
        return _Found((gated.op,), {"forward": recognise.gated_forward(self._target, gated)})

    def _activation(self, module: nn.Module) -> _Found | None:
        found = recognise.activation(module) if next(module.children(), None) is None else None
        if found is None or tk.functional.find(found.op) is None:
            return None
        return _Found((found.op,), {"forward": recognise.activation_forward(self._target, found)})

    def _redirect_rotations(self, model: nn.Module) -> None:
        if tk.functional.find("rope") is None:
            return
        methods = [f for m in model.modules() for f in self._redirector.methods(m).values()]
        for function in self._redirector.helpers(methods):
            arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
            if not {"cos", "sin"} <= set(arguments):
                continue
            if (stand_in := recognise.rope_stand_in(self._target, model, function)) is not None:
                self._redirector.add(function, stand_in)

    # --- Whether it should ---

    def _why_torch(self, ops: tuple[str, ...], module: nn.Module) -> str | None:
        """Why all of its ops would be left to torch in every call."""
        if self._target.device_type == "cpu" and self._target.serves_all:
            return None
        reasons = [self._why_torch_has(op, module) for op in ops]
        return None if None in reasons else "; ".join(dict.fromkeys(r for r in reasons if r))

    def _why_torch_has(self, op: str, module: nn.Module) -> str | None:
        dtype = self._dtype_of(module)
        if not self._target.serves_all and self._rule(op, module)[0] is None:
            return f"{op}: nothing measured says that it is as fast ({_name(dtype)}, {self._target.arch})"
        if self._target.device_type == "cuda" and not _has_kernel(op, module, dtype):
            return f"{op}: no loaded pack has a kernel for it"
        return None

    def _when(self, ops: tuple[str, ...], module: nn.Module) -> str:
        if self._target.serves_all:
            return ""
        notes = []
        for op in ops:
            rule, condition = self._rule(op, module)
            note = "left to torch" if rule is None else "; ".join(filter(None, [condition, speed.describe(rule)]))
            if note:
                notes.append(f"{op}: {note}" if len(ops) > 1 else note)
        return "; ".join(notes)

    def _rule(self, op: str, module: nn.Module) -> tuple[speed.Rule | None, str]:
        """And the condition under which it is that one: weights in float32 are multiplied in 16 bits under autocast."""
        dtype = self._dtype_of(module)
        if op == "sdpa":  # a module does not say its mask or head size
            return speed.find(self._target.arch, speed.attention(dtype, "causal", 128)), "causal, head size 128"
        rule = self._rule_of(op, module, dtype)
        if rule is None and dtype is torch.float32 and op in (*_PRODUCTS, *_CONVOLUTIONS):
            return self._rule_of(op, module, torch.bfloat16), "under autocast alone"
        return rule, ""

    def _rule_of(self, op: str, module: nn.Module, dtype: torch.dtype) -> speed.Rule | None:
        line = op
        if op in _PRODUCTS:
            weight = getattr(module, "weight", None)
            k = weight.shape[1] if op == "linear" and isinstance(weight, torch.Tensor) and weight.dim() == 2 else 0
            line = speed.product("linear" if op == "linear" else "mm", dtype, k)
        elif op in _CONVOLUTIONS:
            line = speed.convolution(_CONVOLUTIONS.index(op) + 1, dtype, getattr(module, "groups", 1))
        return speed.find(self._target.arch, line)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return next((p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()), self._dtype)


_PRODUCTS = ("linear", "mm", "addmm", "matmul")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_HOOKS = ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook")


def _why_closed(module: nn.Module) -> str | None:
    """Of a module that nothing below may be touched of either."""
    names = {cls.__name__ for cls in type(module).__mro__}
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled to TorchScript"
    if "FullyShardedDataParallel" in names:
        return "wrapped by FSDP"
    if isinstance(getattr(module, "parametrizations", None), nn.ModuleDict):
        return "parametrised"
    return None


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The paths of each parameter that has several."""
    paths: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    return {key: found for key, found in paths.items() if len(found) > 1}


def _why_own(module: nn.Module, name: str) -> str:
    """Of a method that stands in front of the class's."""
    is_ours = is_redirected(getattr(vars(module)[name], "__func__", None))
    return "runs through tk already" if is_ours else f"its {name} was set on the instance"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_kernel(op: str, module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a small call with the module's parameters would find one; True where no call can be told beforehand."""
    call = _example(op, module, dtype)
    return call is None or is_served(*call)


def _example(op: str, module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    weight = getattr(module, "weight", None)
    if op in ("gelu", "silu"):
        device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cuda")
        return getattr(tk, op), torch.empty(16, 128, dtype=dtype, device=device)
    if not isinstance(weight, torch.Tensor):
        return None
    if op == "linear" and weight.dim() == 2:
        return tk.linear, weight.new_empty(16, weight.shape[1]), weight, getattr(module, "bias", None)
    if op in ("rms_norm", "layer_norm"):
        return getattr(tk, op), weight.new_empty(16, *weight.shape), weight.shape, weight
    if op == "embedding" and weight.dim() == 2:
        return tk.embedding, torch.zeros(16, dtype=torch.int64, device=weight.device), weight
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sizes = [(k - 1) * d + 8 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        x = weight.new_empty(1, module.in_channels, *sizes)
        return getattr(tk, op), x, weight, module.bias, module.stride, 0, module.dilation, module.groups
    return None
