"""``tk.use``: which modules of a model run through tk, and why the others do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tk
from tk._arguments import flag
from tk.dropin import recognise, whole
from tk.dropin.decisions import Root, asking, skipping
from tk.dropin.functions import stand_ins
from tk.dropin.functions.norms import RMS_NORM
from tk.dropin.functions.tables import ROPE
from tk.dropin.measured import Table, Whole, load, save
from tk.dropin.redirect import Redirector, is_redirected, mark, own_method
from tk.dropin.replacement import Replacement
from tk.dropin.report import Record, Report, Swap
from tk.dropin.sample import Recording, batches_of, unchanged
from tk.dropin.target import DTYPES, Target, dtype_name
from tk.parallel import is_distributed

__all__ = ["use"]


def use(model: nn.Module, *, sample: Any = None, only_faster: bool = True) -> Report:
    """Lets a model run through tk's ops, in place: linear layers, products, convolutions, norms, activations, softmax,
    embeddings and attention, where tk takes the call and was measured to be no slower. The rest is left alone.

        with tk.use(model) as report:
            y = model(x)
        print(report)

    What is replaced is the ``forward`` of single instances (and methods that it calls): parameters, buffers,
    state_dict, hooks and classes stay as they are. Each call is looked at: what tk does not take, or takes longer for,
    runs as it did. It holds for the device that the model is on; moved later, it runs as before. Left alone are modules
    with hooks, tied or shared parameters, parametrisations, parameters that are no plain tensors, and what is compiled
    to TorchScript or wrapped by FSDP. Small calls, which the host takes longer for than the GPU, run through tk in CUDA
    graphs and compiled models alone.

    With a sample the model is run on it, and each kind of call is timed both ways on this machine: on the host and on
    the device, without gradients and, where an argument needs one, with the backward pass. What wins is kept by classes
    of calls, in the user's cache, where later calls of ``tk.use`` find it too. Then the model itself is timed both
    ways; where it is slower than it was, it runs as it is written. After that it is as it was before, its buffers, mode
    and gradients too, and so are the generators of random numbers.

    Args:
        model: in training mode or not, on the CPU or a GPU.
        sample: a tensor, a tuple of arguments or a dict of keywords that the model takes, or a function that returns
            one of these, which is called three times.
        only_faster: False takes all that there are kernels for. (On the CPU that is so in any case.)

    Returns:
        A record for each module, which prints as a table. ``report.undo()`` restores the model, and so does the end of
        ``with``. Modules that already run through tk are left alone.

    Raises:
        TypeError: model is no torch.nn.Module, or sample none of the above.
        ValueError: there is a sample, and only_faster is False: then nothing is left to be chosen. Or a parameter is
            not initialised yet.
        Exception: what the model raises of the sample. The model is left as it was.
        tk.UnsupportedError: it is on a device that is neither the CPU nor a CUDA GPU.
    """
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type)
        given = f"the class {model.__name__}: make one first" if is_class else type(model).__name__
        raise TypeError(f"tk.use: model must be a torch.nn.Module, is {given}")
    device, target = _device(model), _target(model, flag("use", "only_faster", only_faster))
    if sample is None:
        if not only_faster or device.type == "meta":  # where nothing is computed, no time decides
            return _use(model, target)
        kept = load(device)
        found = kept.models.get(whole.name_of(model), {})
        return _use(model, replace(target, measured=Table(kept.calls.values())), found.values())
    if not only_faster:
        raise ValueError("tk.use: with a sample, what is faster is measured: leave only_faster out")
    recording, batches = _measure(model, target, sample, device)
    target = replace(target, measured=Table(save(device, recording.found.values()).calls.values()))
    if wholes := _measure_whole(model, target, recording, batches, device):
        save(device, models={whole.name_of(model): wholes})
    return _use(model, target, wholes, recording)


def _use(
    model: nn.Module, target: Target, wholes: Collection[Whole] = (), recording: Recording | None = None
) -> Report:
    records, swaps = _swapped(model, target, wholes, recording)
    measured = (recording.found.values(), wholes) if recording else ()
    return Report(records, swaps, *measured)


def _swapped(
    model: nn.Module, target: Target, wholes: Collection[Whole], recording: Recording | None
) -> tuple[list[Record], list[Swap]]:
    root = Root(w.kind for w in wholes if w.is_slower)
    walk = _Walk(model, replace(target, root=root), recording)
    records, swaps = _walked(model, walk)
    if target.only_faster:
        swaps = [Swap(module, name, _skipping(module, name, method.__func__, root)) for module, name, method in swaps]
        if any(swap.module is not model for swap in swaps) and walk.may_touch(model):
            swaps = _asking(model, swaps, root)
    swaps += [_replicating(module) for module in {id(s.module): s.module for s in swaps}.values()]
    for swap in swaps:
        swap.do()
    return records, swaps


def _walked(model: nn.Module, walk: _Walk) -> tuple[list[Record], list[Swap]]:
    swaps: list[Swap] = []
    records = []
    for path, module in model.named_modules():
        if (found := walk.decide(path, module)) is not None:
            record, methods = found
            records.append(record)
            swaps += [Swap(module, name, MethodType(mark(f), module)) for name, f in methods.items()]
    return records, swaps


def _skipping(module: nn.Module, name: str, ours: Callable[..., Any], root: Root) -> MethodType:
    return MethodType(mark(skipping(ours, getattr(type(module), name), root)), module)


def _asking(model: nn.Module, swaps: list[Swap], root: Root) -> list[Swap]:
    """The swaps with one of the model's own forward, which asks for all of its modules at once."""
    own = next((s for s in swaps if s.module is model and s.name == "forward"), None)
    ours = type(model).forward if own is None else own.method.__func__
    asks = Swap(model, "forward", MethodType(mark(asking(ours, root)), model))
    return [*(s for s in swaps if s is not own), asks]


def _replicating(module: nn.Module) -> Swap:
    return Swap(module, _replicate_for_data_parallel.__name__, MethodType(_replicate_for_data_parallel, module))


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """nn.DataParallel's copy, of which the methods are those of the copy."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in vars(replica).items():
        if isinstance(value, MethodType) and is_redirected(value.__func__):
            vars(replica)[name] = MethodType(value.__func__, replica)
    return replica


def _measure(
    model: nn.Module, target: Target, sample: Any, device: torch.device
) -> tuple[Recording, Sequence[whole.Batch]]:
    """What was measured call by call, and what the model was run on."""
    batches, made = batches_of(sample), []
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise ValueError(f"tk.use: {lazy[0]} is not initialised: run the model once before it is measured")
    recording = Recording(device)
    with _sampling(model, device):
        walk = _Walk(model, replace(target, measured=recording))
        paths = {id(module): path for path, module in model.named_modules()}
        _, swaps = _walked(model, walk)
        for module, name, method in swaps:
            at = recording.at(paths[id(module)], method.__func__)
            Swap(module, name, MethodType(mark(at), module)).do()  # type: ignore[arg-type]
        for args, kwargs in batches:
            model(*args, **kwargs)
            made.append((args, kwargs))
    return recording, made


def _measure_whole(
    model: nn.Module, target: Target, recording: Recording, batches: Sequence[whole.Batch], device: torch.device
) -> Sequence[Whole]:
    """Nothing of a model without a forward that asks for all of its modules."""
    with _sampling(model, device):
        _, swaps = _swapped(model, target, (), recording)
        if not any(swap.module is model and swap.name == "forward" for swap in swaps):
            return []
        return whole.measure(model, swaps, batches)


@contextmanager
def _sampling(model: nn.Module, device: torch.device) -> Iterator[None]:
    on_gpu = device if device.type == "cuda" else -1
    # Compiled parts run as they are written: what is timed is calls.
    with unchanged(model, device), torch.compiler.set_stance("force_eager"), torch.cuda.device(on_gpu):
        yield


def _device(model: nn.Module) -> torch.device:
    tensors = (t for tensors in (model.parameters(), model.buffers()) for t in tensors)
    return next((t.device for t in tensors), torch.device("cpu"))


def _target(model: nn.Module, only_faster: bool) -> Target:
    device = _device(model)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return Target("cuda", f"sm_{major}{minor}", only_faster)
    if device.type in ("cpu", "meta"):
        return Target("cpu", "cpu", only_faster)
    raise tk.UnsupportedError(f"tk.use: the model is on {device}; it must be on the CPU or a CUDA GPU")


@dataclass(frozen=True)
class _Found:
    """What could stand in the place of a module's methods, and what it would replace."""

    replaced: tuple[Replacement, ...] = ()
    methods: Mapping[str, FunctionType] = field(default_factory=dict)
    reason: str | None = None


class _Walk:
    """Over one model."""

    def __init__(self, model: nn.Module, target: Target, recording: Recording | None = None):
        self._target, self._recording = target, recording
        self._redirector = Redirector(stand_ins(target))
        self._shared = _shared_parameters(model)
        self._device_type = _device(model).type
        self._closed: dict[str, str] = {}  # paths below which nothing is touched, and why
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._redirect_rotations(model)

    def decide(self, path: str, module: nn.Module) -> tuple[Record, Mapping[str, FunctionType]] | None:
        """None for a container that computes nothing itself."""
        reason = self._why_untouched(path, module)
        found = self._find(module, is_touched=reason is None)
        has_children = next(module.children(), None) is not None
        if not found.replaced and has_children and not module._parameters and path not in self._closed:
            return None
        reason = reason or found.reason or self._why_torch(found.replaced, module) or self._why_slower(path)
        is_replaced = reason is None
        record = Record(
            path,
            type(module).__name__,
            ", ".join(r.op for r in found.replaced) or None,
            is_replaced,
            self._when(found.replaced, module) if reason is None else reason,
        )
        return record, found.methods if is_replaced else {}

    # --- What must stay as it is ---

    def may_touch(self, model: nn.Module) -> bool:
        """Whether the model's own forward may be another."""
        return self._why_untouched("", model) is None and own_method(type(model), "forward") is not None

    def _why_untouched(self, path: str, module: nn.Module) -> str | None:
        for above, why in self._closed.items():
            if path.startswith(f"{above}." if above else ""):
                return f"below {above or 'the model'}, which is {why}"
        reason: str | None
        if (reason := _why_closed(module)) is not None:
            self._closed[path] = reason
            return reason
        if _is_set(module, "forward"):
            return _why_own(module, "forward")
        if hooks := [name for name in _HOOKS if not all(map(_is_of_torch, _hooks(module, name)))]:
            return f"has a {hooks[0].replace('_', ' ')}"
        for name, parameter in module.named_parameters(recurse=False):
            if (reason := self._why_not_of(name, parameter, path)) is not None:
                return reason
        return None

    def _why_not_of(self, name: str, parameter: nn.Parameter, path: str) -> str | None:
        if isinstance(parameter, UninitializedParameter):
            return f"{name} is not initialised; run the model once before"
        is_wrapped = is_traceable_wrapper_subclass(parameter) or is_traceable_wrapper_subclass(parameter.data)
        if is_wrapped and not is_distributed(parameter):
            kind = parameter if is_traceable_wrapper_subclass(parameter) else parameter.data
            return f"{name} is a {type(kind).__name__}, no plain tensor"
        own = f"{path}.{name}" if path else name
        if others := [other for other in self._shared.get(id(parameter), ()) if other != own]:
            return f"{name} is shared with {others[0]}"
        if parameter.device.type != self._device_type:
            return f"{name} is on {parameter.device}, the model on {self._device_type}"
        if parameter.dtype not in DTYPES:
            return (
                f"{name} is {dtype_name(parameter.dtype)}; there are kernels for {', '.join(map(dtype_name, DTYPES))}"
            )
        return None

    # --- What could run through tk ---

    def _find(self, module: nn.Module, is_touched: bool) -> _Found:
        """is_touched: False where only what could be replaced is asked for."""
        is_own = is_touched and not type(module).__module__.startswith("torch.")
        if is_own and (found := self._recognised(module)) is not None:
            return found
        named = self._redirector.methods(module)
        methods = {name: f for name, f in named.items() if self._redirector.replaced(f)}
        replaced = tuple(dict.fromkeys(r for f in methods.values() for r in self._redirector.replaced(f)))
        if is_own and not replaced and (activation := self._activation(module)) is not None:
            return activation
        if not replaced:
            return _Found(reason=_reason_of(module))
        if not is_touched:
            return _Found(replaced)
        if own := [name for name in methods if _is_set(module, name)]:
            return _Found(replaced, reason=_why_own(module, own[0]))
        try:
            return _Found(replaced, {name: self._redirector.copy(f) for name, f in methods.items()})
        except ValueError as error:
            return _Found(replaced, reason=str(error))

    def _recognised(self, module: nn.Module) -> _Found | None:
        if RMS_NORM.is_there() and (eps := recognise.rms_norm_eps(module)) is not None:
            (parameter,) = module._parameters
            return _Found((RMS_NORM,), {"forward": recognise.rms_norm_forward(self._target, eps, parameter)})
        gated = recognise.gated(module)
        if gated is None or not gated.replacement.is_there():
            return None
        if self._why_untouched(".", module.get_submodule(gated.activation)) is not None:
            return None  # its hooks would not be called
        return _Found((gated.replacement,), {"forward": recognise.gated_forward(self._target, gated)})

    def _activation(self, module: nn.Module) -> _Found | None:
        found = recognise.activation(module) if next(module.children(), None) is None else None
        if found is None or not found.replacement.is_there():
            return None
        return _Found((found.replacement,), {"forward": recognise.activation_forward(self._target, found)})

    def _redirect_rotations(self, model: nn.Module) -> None:
        if not ROPE.is_there():
            return
        methods = [f for m in model.modules() for f in self._redirector.methods(m).values()]
        for function in self._redirector.helpers(methods):
            arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
            if not {"cos", "sin"} <= set(arguments):
                continue
            if (stand_in := recognise.rope_stand_in(self._target, model, function)) is not None:
                self._redirector.add(stand_in)

    # --- Whether it should ---

    def _why_torch(self, found: tuple[Replacement, ...], module: nn.Module) -> str | None:
        """Why all that it calls would be left to torch in every call."""
        if self._target.device_type == "cpu" and self._target.serves_all:
            return None
        reasons = [r.why_left(self._target, module, self._dtype_of(module)) for r in found]
        return None if None in reasons else "; ".join(dict.fromkeys(r for r in reasons if r))

    def _why_slower(self, path: str) -> str | None:
        """Why a module is left that made no call in the sample that tk is faster at."""
        made = self._recording.calls.get(path) if self._recording else None
        passes = [p for call in made or () for _, p in self._recording.found[call].passes]  # type: ignore[union-attr]
        if not passes or any(p.wins_ever for p in passes):
            return None
        ratios = sorted(p.ratio for p in passes)
        span = f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(ratios) > 1 else "")
        return f"measured: torch is faster (its time over tk's is {span})"

    def _when(self, found: tuple[Replacement, ...], module: nn.Module) -> str:
        notes = [(r.op, r.when(self._target, module, self._dtype_of(module))) for r in found]
        return "; ".join(f"{op}: {note}" if len(notes) > 1 else note for op, note in notes if note)

    def _dtype_of(self, module: nn.Module) -> torch.dtype:
        return next((p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()), self._dtype)


_HOOKS = ("forward_pre_hook", "forward_hook", "backward_pre_hook", "backward_hook")


def _hooks(module: nn.Module, name: str) -> Iterable[Any]:
    return (getattr(module, f"_{name}s", None) or {}).values()


def _is_of_torch(hook: Any) -> bool:
    """Whether torch's own engines put it there, which parallelise or shard a module around its forward."""
    function = inspect.unwrap(hook.func if isinstance(hook, partial) else hook)
    return getattr(function, "__module__", "").startswith("torch.distributed.")


def _why_closed(module: nn.Module) -> str | None:
    """Why a module is left with all modules below it; None where it is not."""
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


def _is_set(module: nn.Module, name: str) -> bool:
    """Whether a method stands in front of the class's. A used module that was pickled has the class's own there."""
    method = vars(module).get(name)
    if isinstance(method, MethodType) and method.__self__ is module and method.__func__ is getattr(type(module), name):
        return False
    return name in vars(module)


def _why_own(module: nn.Module, name: str) -> str:
    """Why a module is left whose method stands in front of the class's."""
    is_ours = is_redirected(getattr(vars(module)[name], "__func__", None))
    return "runs through tk already" if is_ours else f"its {name} was set on the instance"


def _reason_of(module: nn.Module) -> str:
    """Why a module is left that calls no function of tk's."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "tk.dropout draws other random numbers than torch's: call it where these may differ"
    return "calls nothing by its name that tk has"
