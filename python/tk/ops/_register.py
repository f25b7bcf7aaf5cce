"""What every op registers besides its own formulas: fakes, vmap, autocast, and how ``out`` behaves.

The ops are defined in C++; an op ``f`` has an ``out`` overload. At their Autograd keys stands a gate in C++
(csrc/ops/gate.h), since a Python kernel there would cost every call microseconds: where no gradient is at stake it goes
straight to the kernel, else to ``_f_autograd``, where the formula is registered here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library
from torch.utils._pytree import tree_leaves

from tk import _library, errors

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker
    from tk.tune.products import Drawn, Draws

_implementations = Library("tk", "IMPL")  # keeps what is registered alive


class Tuning(NamedTuple):
    """How ``tk tune`` makes problems of an op, and calls it.

    sizes: the names of a problem's sizes. draw: these sizes, and the fields of ``Drawn`` besides them. inputs: of a
    call, its result last. call: of a problem, its inputs and the number of a config. reference: what torch makes of the
    same inputs but the result. ways: fields of ``Drawn``, in each of which sizes that are given are timed.
    """

    sizes: tuple[str, ...]
    draw: Callable[[Draws], tuple[tuple[int, ...], Mapping[str, Any]]]
    inputs: Callable[[Drawn], tuple[Tensor, ...]]
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    ways: tuple[Mapping[str, Any], ...] = ({"order": "nn"}, {"order": "nt"})


class Record(NamedTuple):
    """What the package knows of a hand-written op besides what is registered for it.

    dims: how it may be sharded over the GPUs of a device mesh: a text of its dimensions (tk.parallel.rules), or what
    makes one of the call's arguments. in_aten: the op of the same arguments made of ATen's, which forward mode
    differentiates. kernels_of: the op whose kernels it runs, where these are another's. calls: right calls, of what
    makes their arguments. more_calls: for ``tk verify`` alone, which reach kernels that ``calls`` do not.
    """

    dims: str | Callable[..., str]
    in_aten: Callable[..., Tensor] | None = None
    kernels_of: str | None = None
    calls: Callable[[Maker], Iterator[Call]] | None = None
    more_calls: Callable[[Maker], Iterator[Call]] | None = None
    tuning: Tuning | None = None


# By op, in the order in which tk imports them.
RECORDS: dict[str, Record] = {}


def record(name: str, known: Record, wrapper: Callable[..., Any] | None = None) -> None:
    """Keeps what is known of an op. ``torch.ops.tk.<name>`` gets the wrapper's docstring."""
    RECORDS[name] = known
    if wrapper is not None:
        getattr(torch.ops.tk, name).__doc__ = wrapper.__doc__


def overloads(name: str) -> tuple[Any, Any]:
    """``torch.ops.tk.<name>`` and its ``out``, None where it has none."""
    packet = getattr(torch.ops.tk, name)
    return packet.default, getattr(packet, "out", None)


def fake(name: str, allocate: Callable[..., Tensor]) -> None:
    """``allocate`` makes an empty result from all of an op's arguments; it serves the op and its ``out``."""
    op, op_out = overloads(name)

    def fake_op(*args: Any, **kwargs: Any) -> Tensor:
        return allocate(*with_defaults(op, args, kwargs))

    def fake_out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        expected = fake_op(*args, **kwargs)
        if (refused := errors.not_dense(name, "out", out)) is not None:
            raise refused
        if expected.shape != out.shape and out.numel() == 0:  # as the kernels do, and ATen
            out.resize_(expected.shape)
        torch._check_value(
            expected.shape == out.shape,
            lambda: f"tk.{name}: out is {list(out.shape)}, must be {list(expected.shape)}; it is not resized",
        )
        torch._check_value(
            expected.dtype == out.dtype,
            lambda: f"tk.{name}: out is {_text(out.dtype)}, must be {_text(expected.dtype)}",
        )
        return out

    register_fake(name, fake_op, _implementations)
    if op_out is not None:
        register_fake(f"{name}.out", fake_out, _implementations)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def register_fake(name: str, fake: Callable[..., Any], library: Library) -> None:
    """``torch.library.register_fake`` without its search for the caller's source through all modules, which would be
    most of the time of a process's first call; where this torch does not take the source, with it."""
    source = f"{fake.__code__.co_filename}:{fake.__code__.co_firstlineno}"
    checked = _on_one_device(name, fake)
    try:
        torch._library.simple_registry.singleton.find(f"tk::{name}").fake_impl.register(checked, source, lib=library)
    except (AttributeError, TypeError):
        torch.library.register_fake(f"tk::{name}", checked, lib=library)


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake that refuses what its kernels would. torch hands it real tensors too where one beside them is of the meta
    device: what it allocates would then be taken for a result."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        devices = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if len(devices) > 1:
            refuse_devices(name, args, kwargs)
        return fake(*args, **kwargs)

    return checked


def refuse_devices(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raises ValueError in the words of the kernels, which name the first tensor and the first that is elsewhere."""
    stem, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.tk, stem), overload or "default")._schema
    given = {**{a.name: x for a, x in zip(schema.arguments, args, strict=False)}, **kwargs}
    tensors = [
        (f"{argument}[{i}]" if isinstance(x, list | tuple) else argument, y)
        for argument, x in given.items()
        for i, y in enumerate(x if isinstance(x, list | tuple) else [x]) if isinstance(y, Tensor)
    ]  # fmt: skip
    first, x = tensors[0]
    other, y = next((argument, y) for argument, y in tensors if y.device != x.device)
    raise ValueError(f"tk.{stem}: {first} is on {x.device}, {other} on {y.device}; all tensors must be on one device")


def vmap(name: str, rule: Callable[..., tuple[Tensor, int]]) -> None:
    """``rule(op, info, in_dims, *args)``."""
    op, _ = overloads(name)

    def bound(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        args = with_defaults(op, args)
        return rule(op, info, (*in_dims, *(None,) * (len(args) - len(in_dims))), *args)

    torch.library.register_vmap(f"tk::{name}", bound)


class _Python(ctypes.Structure):
    """``tk_ops_python``: what of CPython lets the gate pass exceptions on."""

    _functions = (
        "PyErr_SetObject", "Py_IncRef", "Py_DecRef", "PyGILState_Ensure", "PyGILState_Release", "PyErr_SetString",
        "PyExc_NotImplementedError",
    )  # fmt: skip
    _fields_ = [(name, ctypes.c_void_p) for name in _functions]


@cache
def _gate() -> ctypes.PyDLL:
    """libtk_ops, called under the GIL."""
    library = ctypes.PyDLL(str(_library.directory() / "libtk_ops.so"))
    library.tk_ops_gate.argtypes = [ctypes.c_char_p]
    library.tk_ops_set_python.argtypes = [ctypes.POINTER(_Python)]
    library.tk_ops_set_python.restype = None
    library.tk_ops_python_failed.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_char_p]
    library.tk_ops_python_failed.restype = None
    addresses = (ctypes.cast(getattr(ctypes.pythonapi, f), ctypes.c_void_p) for f in _Python._functions)
    library.tk_ops_set_python(_Python(*addresses))
    return library


def at_autograd(name: str, kernel: Callable[..., Any], n_results: int = 1) -> None:
    """Registers ``kernel(keyset, *args, **kwargs)`` for calls that autograd may have to do with: behind the gate, or at
    the op itself where this torch does not tell what the gate asks. name: "mm", "mm.out"."""
    stem, _, overload = name.partition(".")
    twin, tracked = (f"{x}.{overload}" if overload else x for x in (f"_{stem}", f"_{stem}_autograd"))
    has_gate = _gate().tk_ops_gate(name.encode())
    _implementations.impl(twin, torch.library.fallthrough_kernel, "Autograd")
    if has_gate:
        _implementations.impl(tracked, _leaving_errors(kernel, n_results), "Autograd", with_keyset=True)
    else:
        _implementations.impl(name, kernel, "Autograd", with_keyset=True)


def at_autograd_of_tracers(name: str, kernel: Callable[..., Any]) -> None:
    """The kernel also where torch dispatches in Python, as it does while it traces with symbolic sizes: C++ would make
    a constant of a symbolic number."""
    op, _ = overloads(name)
    op.py_impl(torch._C.DispatchKey.Autograd)(partial(kernel, None))


def _leaving_errors(kernel: Callable[..., Any], n_results: int) -> Callable[..., Any]:
    """The kernel as the gate calls it: an exception is left with the gate, which raises it again."""

    def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(keyset, *args, **kwargs)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            _gate().tk_ops_python_failed(type(error), error, text.encode(errors="replace"))
        if n_results == 0:
            return None
        none = next(x for x in args if isinstance(x, Tensor))  # stands for no result: the gate drops it
        return none if n_results == 1 else (none,) * n_results

    return guarded


def below_autograd(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """keyset: of the call, None where torch dispatches in Python."""
    with torch._C._AutoDispatchBelowAutograd():
        if keyset is None:
            return op(*args, **kwargs)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def below_formula(op: Any, keyset: Any, *args: Any) -> Any:
    """:func:`below_autograd` for the forward of a formula, where torch has gradients and tangents off: they stay on for
    the levels of ``torch.func`` further out, and for autograd around them, which would else see constants."""
    if not torch._C._are_functorch_transforms_active():
        return below_autograd(op, keyset, *args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below_autograd(op, keyset, *args)


def autograd(name: str, setup: Callable[..., None], backward: Callable[..., Any]) -> None:
    """A gradient formula: ``setup(ctx, inputs, output)`` keeps what ``backward(ctx, grad)`` reads.

    As ``torch.library.register_autograd``, except that what it makes also works under ``torch.func`` transforms (it
    stands where ATen's own formulas do: once per level) and costs nothing when nothing needs a gradient.
    """
    op, _ = overloads(name)

    class Formula(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
            result = below_formula(op, keyset, *args)
            ctx.needs = ctx.needs_input_grad[1:]
            setup(ctx, with_defaults(op, args), result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, *backward(ctx, grad)

    Formula.__name__ = Formula.__qualname__ = f"Tk{name.capitalize()}"

    def kernel(keyset: Any, *args: Any) -> Tensor:
        if has_tangent(args):
            return _in_aten(name, with_defaults(op, args))
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if not torch._C._are_functorch_transforms_active():
                return Formula.apply(keyset, *args)  # type: ignore[attr-defined]
            with single_level():
                return Formula.apply(keyset, *args)  # type: ignore[attr-defined]
        return below_autograd(op, keyset, *args)

    at_autograd(name, kernel)


def _in_aten(name: str, args: tuple[Any, ...]) -> Tensor:
    """What forward mode differentiates."""
    in_aten = RECORDS[name].in_aten
    if in_aten is None:
        raise NotImplementedError(f"tk.{name} has no formula for forward-mode automatic differentiation")
    with torch._C._DisableAutocast():
        return in_aten(*args)


def inference_only(op: Any, advice: str = "") -> Callable[..., Any]:
    """What stands at the Autograd key of an op without a gradient: refuses where one is at stake. advice: how to get
    one."""
    name = op._schema.name.partition("::")[2]

    def refuse(keyset: Any, *args: Any) -> Any:
        if is_at_stake(args):
            raise NotImplementedError(no_gradient(name, advice))
        return below_autograd(op, keyset, *args)

    return refuse


def is_at_stake(args: tuple[Any, ...]) -> bool:
    """Whether a gradient or a tangent of the results is."""
    return has_tangent(args) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))


def no_gradient(name: str, advice: str = "") -> str:
    """advice: how to get one."""
    if advice:
        return (
            f"tk.{name} has no gradient: {advice}, or call it under torch.no_grad(), or detach its arguments where "
            "they need none."
        )
    return (
        f"tk.{name} has no gradient: it is for inference. Call it under torch.no_grad() or "
        "torch.inference_mode(), or detach its arguments."
    )


def has_tangent(args: tuple[Any, ...]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args)


def single_level() -> AbstractContextManager[Any]:
    """A context in which a formula stands for one level of a ``torch.func`` transform."""
    if not torch._C._are_functorch_transforms_active():
        return nullcontext()
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def with_defaults(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    """All arguments in their order: the dispatcher drops those at the end that are their defaults."""
    if (arguments := _arguments.get(op.name())) is None:
        arguments = _arguments[op.name()] = tuple((a.name, a.default_value) for a in op._schema.arguments)
    if not kwargs:
        return args if len(args) == len(arguments) else (*args, *(default for _, default in arguments[len(args) :]))
    return (*args, *(kwargs.get(name, default) for name, default in arguments[len(args) :]))


# By op, the arguments' names and defaults: torch makes objects for all of them whenever a schema is asked.
_arguments: dict[str, tuple[tuple[str, Any], ...]] = {}


def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Casts an argument of a product as autocast does."""
    is_eligible = (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device.type == device_type
        and value.dtype is not torch.float64
    )
    return value.to(dtype) if is_eligible else value


def autocast(name: str) -> None:
    """Runs the op in autocast's dtype, as ATen's products do. Like theirs, an ``out`` form is left alone."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _register_autocast(name, device_type, key)


def _register_autocast(name: str, device_type: str, key: str) -> None:
    op, _ = overloads(name)
    own_key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast_then_call(*args: Any, **kwargs: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            return op(
                *(cast(x, device_type, dtype) for x in args),
                **{k: cast(x, device_type, dtype) for k, x in kwargs.items()},
            )

    _implementations.impl(name, cast_then_call, key)


def out_form(name: str) -> None:
    """``out`` under autograd (refused, as ATen does) and functionalization (the op, whose result replaces ``out``)."""
    for twin in (name, f"_{name}"):
        _functionalize_out(twin)
    _, op_out = overloads(name)

    def refuse_gradients(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())
        ):
            raise RuntimeError(
                f"tk.{name}: functions with out=... arguments don't support automatic differentiation, but one of the "
                "arguments requires grad."
            )
        return below_autograd(op_out, keyset, *args, **kwargs)

    at_autograd(f"{name}.out", refuse_gradients)


def _functionalize_out(name: str) -> None:
    """What code generation does for ATen's out forms; ``py_functionalize_impl`` would import all of torch.compile."""
    op, _ = overloads(name)
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

    def unwrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or not torch._is_functional_tensor(x):
            return x
        torch._sync(x)
        return torch._from_functional_tensor(x)

    def functional(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            result = op(*map(unwrapped, args), **{k: unwrapped(x) for k, x in kwargs.items()})
        torch._functionalize_replace(out, result)
        torch._functionalize_commit_update(out)
        torch._functionalize_sync(out)
        return out

    _implementations.impl(f"{name}.out", functional, "Functionalize")
