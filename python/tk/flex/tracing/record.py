"""Records which ATen ops a mod does, without a value to do them on.

A mod's arguments and the tensors it captures are :class:`Value`: a dtype and a number of dimensions; numbers it
captures, and sizes, are symbols (numbers.py). What a mod does with them goes into a torch.fx graph as it reaches ATen.
torch's own tracer does the same and more, but it brings in a compiler and an algebra system, and takes a second to be
imported and a tenth of one for each mod.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tk.flex.tracing.numbers import SYMBOLS, symbol

aten = torch.ops.aten
_SIZE = 2  # of captured tensors while they are traced; nothing may depend on it
_DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
})  # fmt: skip

Size = tuple[fx.Node, int, str, int | None]
"""Of a captured tensor: its node, the dimension, what holds it (reads.Reads), and its value where this is structure."""


class ControlFlow(Exception):
    """The mod asks for the value of a tensor."""


class Refused(Exception):
    """Another thing that no graph can hold."""


class Value(Tensor):
    """A tensor of which nothing is known but its dtype and how many dimensions it has.

    held: one of them, full of ones. node: what it is in the graph. constant: what it holds, where this does not depend
    on what the mod is given. sizes: where it is a captured tensor, or was read from one by its first dimensions.
    source: where it is a captured tensor, this tensor, the variable that holds it, its name, and who notes reads."""

    held: Tensor
    node: fx.Node
    constant: Tensor | None
    sizes: tuple[Size, ...] | None
    source: tuple[Tensor, str, str, Any] | None

    @staticmethod
    def __new__(
        cls, data: Tensor, node: fx.Node, constant: Tensor | None = None, sizes: tuple[Size, ...] | None = None
    ) -> Value:
        make: Any = torch.Tensor._make_wrapper_subclass
        self: Value = make(cls, data.shape, dtype=data.dtype, device="cpu")
        self.held, self.node, self.constant, self.sizes, self.source = data, node, constant, sizes, None
        return self

    def __getattr__(self, attribute: str) -> Any:
        """What a user has set on a captured tensor; and _is_param, which isinstance asks for a Parameter."""
        source = self.__dict__.get("source")
        if attribute == "_is_param":
            return source is not None and _is_parameter(source)
        if source is None or attribute.startswith("__"):
            raise AttributeError(attribute)
        return asked(source, attribute)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        raise Refused(
            "makes a text of a tensor, as to print or to log it, which no kernel does: leave it to the caller"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Refused(f"keeps a tensor of its arguments past its end, and calls {func} on it")


def _is_parameter(source: tuple[Tensor, str, str, Any]) -> bool:
    tensor, variable, name, reads = source
    found = isinstance(tensor, torch.nn.Parameter)
    return bool(reads.stand_in(found, f"isinstance({variable}, Parameter)", name))


def asked(source: tuple[Tensor, str, str, Any], attribute: str) -> Any:
    """An attribute of a captured tensor, which is guarded by value."""
    tensor, variable, name, reads = source
    with reads.outside():
        if not hasattr(tensor, attribute):
            reads.lacks(variable, attribute)
        found = getattr(tensor, attribute)
    return reads.stand_in(found, f"{variable}.{attribute}", f"{name}.{attribute}")


def is_on_host(x: Tensor) -> bool:
    """Whether it is one number that can be had without waiting for a device. (vmap's are many.)"""
    return x.dim() == 0 and x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_number(x: Tensor) -> bool:
    """Whether a captured tensor is a number, as torch takes it beside tensors of any device. One with a gradient, or of
    bool, is a tensor that the call moves to the query's device."""
    is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.dtype is not torch.bool
    return is_plain and not x.requires_grad and is_on_host(x)


def number_of(source: tuple[Tensor, str, str, Any]) -> Any:
    """What a captured 0-d tensor holds: a captured number. torch.compile hands floats to a mod in this way; there the
    tensor has no value yet, and only its kind counts."""
    tensor, variable, name, reads = source
    has_value = type(tensor) in (Tensor, torch.nn.Parameter)
    with reads.outside():
        held = tensor.item() if has_value else ones(tensor.dtype, ()).item()
    found = reads.stand_in(held, f"{variable}.item()", name)
    if not has_value and not isinstance(found, SYMBOLS):
        reads.refuse(f"decides by {name}, whose value torch.compile does not know")
    return found


class Recorder(TorchDispatchMode):
    """The graph of what is done while it is entered.

    Attributes:
        graph: of calls of ATen overloads and, between numbers, of ``operator``'s and torch's functions. Each node has
            a stand-in of its result in ``meta["val"]``.
        constants: the tensors that its get_attr nodes name.
        asked_device: the mod has asked for the device of a tensor that it makes or is given, and got `device`.
        failure: the first :class:`Decides`, :class:`ControlFlow` or :class:`Refused` that was raised: the mod may have
            caught it.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.asked_device = torch.device(device), False
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.failure: Exception | None = None

    # --- What a mod is given ---

    def tensor(
        self, name: str, dtype: torch.dtype, rank: int = 0, variable: str = "", known: Mapping[int, int] | None = None
    ) -> Value:
        """A placeholder. variable: that holds it. known: the sizes that are structure, by dimension."""
        node = self.graph.placeholder(name)
        sizes = tuple([(node, d, size_variable(variable, d), (known or {}).get(d)) for d in range(rank)])
        node.meta["val"] = made = Value(ones(dtype, (_SIZE,) * rank), node, sizes=sizes)
        return made

    def number(self, name: str, is_int: bool, variable: str) -> torch.SymInt | torch.SymFloat:
        """A placeholder."""
        return symbol(self, self.graph.placeholder(name), int if is_int else float, variable)

    def size(self, size: Size) -> int | torch.SymInt:
        """A size as the mod sees it."""
        node, d, variable, known = size
        if known is not None:
            return known
        return symbol(self, self.graph.call_function(aten.sym_size.int, (node, d)), int, variable)

    def filled(self, source: tuple[Tensor, str, str, Any]) -> Value:
        """A 0-d tensor of a captured number."""
        tensor, _, name, reads = source
        number = number_of(source)
        value, held = number, None
        if isinstance(number, SYMBOLS):
            value = number.node.value
        else:  # it is structure
            with reads.outside():
                held = torch.full((), number, dtype=tensor.dtype)
        node = self.graph.call_function(aten.full.default, ([], value), {"dtype": tensor.dtype})
        node.meta["val"] = made = Value(ones(tensor.dtype, ()), node, held, ())
        made.source, node.meta["captured"] = source, name
        return made

    # --- What it does ---

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo would be imported to be skipped, so it is not."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.log_sigmoid_forward.default:  # of two results, one for its derivative
            with self:
                x = args[0]
                return torch.clamp(x, max=0.0) - torch.log1p(torch.exp(-torch.abs(x))), torch.zeros_like(x)
        if (dtype := _scaled_dtype(func, args, kwargs)) is not None:
            with self:
                return func(*_scaled(func, args, kwargs["alpha"], dtype))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.fail(Refused(f"draws random numbers (aten.{func.overloadpacket.__name__}); capture them"))
        call = _Call(self, func, args, kwargs)
        if _asks_for_data(func):
            return self._asked(func, call)
        found = call.read()
        if found is None:
            found = call.result()
        node = self.graph.call_function(func, call.node_args, call.node_kwargs)
        node.meta["line"] = line_of(sys._getframe())
        constant = func(*call.constant_args, **call.constant_kwargs) if call.is_constant else None
        return self._result(found, node, call, constant)

    def constant(self, value: Tensor) -> Value:
        """A tensor that the mod did not get from us."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = held = value.detach().clone()
        node = self.graph.create_node("get_attr", name)
        made = Value(ones(value.dtype, tuple(value.shape)), node, held.clone())
        node.meta["val"] = made
        return made

    def _asked(self, func: OpOverload, call: _Call) -> Any:
        if not call.is_constant:
            self.fail(ControlFlow(f"{func} asks for the value of a tensor"))
        return func(*call.constant_args, **call.constant_kwargs)

    def _result(self, found: Any, node: fx.Node, call: _Call, constant: Any) -> Any:
        if isinstance(found, Tensor):
            self.check_dtype(found.dtype, f"makes a tensor by aten.{call.func.overloadpacket.__name__}")
            value = call.given.get(id(found)) if call.func._schema.is_mutable else None
            if value is None:
                value = Value(ones(found.dtype, tuple(found.shape)), node, constant, call.sizes)
            else:  # written in place
                value.node, value.constant = node, constant
            node.meta["val"] = Value(value.held, node)
            return value
        if isinstance(found, list | tuple):
            node.meta["val"] = None
            parts = [(x, self.graph.call_function(operator.getitem, (node, i))) for i, x in enumerate(found)]
            return type(found)([self._result(x, part, call, constant and constant[i])
                                for i, (x, part) in enumerate(parts)])  # fmt: skip
        node.meta["val"] = found
        return found

    # --- What it must not ---

    def check_dtype(self, dtype: torch.dtype, what: str) -> None:
        if dtype not in _DTYPES:
            known = ", ".join(sorted(str(d).removeprefix("torch.") for d in _DTYPES))
            self.fail(Refused(f"{what} of {str(dtype).removeprefix('torch.')}; mods take {known}"))

    def fail(self, error: Exception) -> NoReturn:
        if self.failure is None:
            self.failure = error
        raise error


_FLEX = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OWN = (os.path.dirname(torch.__file__) + os.sep, _FLEX + os.sep)


def is_own(file: str) -> bool:
    """Whether a file is torch's or tk.flex's, so that no line of it is the mod's."""
    return file.startswith(_OWN)


def line_of(frame: types.FrameType | None) -> str | None:
    """file:line of the innermost frame that is neither torch's nor tk's."""
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


def size_variable(variable: str, d: int) -> str:
    """What holds a size of the tensor that `variable` holds."""
    return f"{variable}.shape[{d}]"


class _Call:
    """An op's arguments in three spellings: as they are in the graph, as tensors of ones, and where all are constants,
    as these. given: the values among them, by the ids of their tensors of ones. sizes: of the result."""

    def __init__(self, recorder: Recorder, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.recorder, self.func = recorder, func
        self.given: dict[int, Value] = {}
        self.sizes: tuple[Size, ...] | None = None
        self.is_constant: bool | None = None  # None: takes no tensors, so that it is a factory
        self.args = _mapped(args, self._value)
        self.kwargs = {k: self._value(_known(x) if k == "alpha" else x) for k, x in kwargs.items()}
        self.node_args, self.node_kwargs = _mapped(self.args, _node_of), _mapped(self.kwargs, _node_of)
        self.constant_args: Any = None
        self.constant_kwargs: Any = None
        if self.is_constant:
            self.constant_args = _mapped(self.args, _constant_of)
            self.constant_kwargs = _mapped(self.kwargs, _constant_of)

    def _value(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if not isinstance(x, Value):
                x = self.recorder.constant(x)
            self.is_constant = x.constant is not None and self.is_constant is not False
        elif isinstance(x, torch.SymBool):
            x = x.node.known()  # a bool is structure
        elif isinstance(x, SYMBOLS):
            if self.func.overloadpacket.__name__.rstrip("_") not in _TAKE_NUMBERS:
                return x.node.known()
            self.is_constant = False
        return x

    def read(self) -> Tensor | None:
        """The result of a read by the first dimensions: the indices, which may be known, need not be in bounds."""
        if self.func is aten.select.int and self.args[1] == 0:
            count = 1
        elif self.func is aten.index.Tensor and all(isinstance(i, Value) and _is_index(i) for i in self.args[1]):
            count = len(self.args[1])
        else:
            return None
        source = self.args[0]
        self.sizes = source.sizes and source.sizes[count:]
        return ones(source.dtype, tuple(source.held.shape[count:]))

    def result(self) -> Any:
        """The op's result for tensors of ones."""
        try:
            return self._tried("cpu", torch.clone if self.func._schema.is_mutable else None)
        except (RuntimeError, IndexError) as error:  # it is not there for this dtype, or not for ones
            if any(x.dim() for x in self.given.values()):
                name = self.func.overloadpacket.__name__
                raise Refused(f"uses aten.{name} on a whole tensor; work it out before and capture it") from error
            if not any(x.dtype in (torch.float16, torch.bfloat16) for x in self.given.values()):
                raise
            return self._tried("meta", lambda x: x.to("meta"))

    def _tried(self, device: str, prepared: Callable[[Tensor], Tensor] | None) -> Any:
        self.given = {}

        def held(x: Any) -> Any:
            if isinstance(x, Value):
                made = prepared(x.held) if prepared else x.held
                self.given[id(made)] = x
                return made
            return x.node.kind(1) if isinstance(x, SYMBOLS) else x  # dtypes do not hang on a number's value

        args, kwargs = _mapped(self.args, held), _mapped(self.kwargs, held)
        if _takes_device(self.func):
            kwargs["device"] = device
        return self.func(*args, **kwargs)


# What is a number of the call there may be a tensor as well. Elsewhere it is structure.
_TAKE_NUMBERS = frozenset({
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "eq", "ne", "lt",
    "le", "gt", "ge", "where", "clamp", "clamp_min", "clamp_max", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "__and__", "__or__", "__xor__", "full",
    "new_full", "full_like", "scalar_tensor", "masked_fill", "fill", "lerp", "xlogy", "copysign", "select", "index",
})  # fmt: skip


def _known(x: Any) -> Any:
    """A number's value, which is structure then."""
    return x.node.known() if isinstance(x, SYMBOLS) else x


def _mapped(x: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(x, tuple):
        return tuple([_mapped(y, fn) for y in x])
    if isinstance(x, list):
        return [_mapped(y, fn) for y in x]
    if isinstance(x, dict):
        return {k: _mapped(y, fn) for k, y in x.items()}
    return fn(x)


def _node_of(x: Any) -> Any:
    if isinstance(x, Value):
        return x.node
    return x.node.value if isinstance(x, SYMBOLS) else x


def _constant_of(x: Any) -> Any:
    return x.constant if isinstance(x, Value) else x


@functools.lru_cache(maxsize=256)
def ones(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ones that stands for one of this dtype and shape."""
    with torch._C._DisableTorchDispatch():  # this is no doing of the mod's
        return torch.ones((), dtype=dtype, device="cpu").expand(shape)


@functools.cache
def _asks_for_data(func: OpOverload) -> bool:
    if func is aten.index.Tensor:  # of bools alone
        return False
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@functools.cache
def _takes_device(func: OpOverload) -> bool:
    return any(a.name == "device" for a in func._schema.arguments)


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether autograd would have taken it apart: where autograd is off, it comes whole."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


_ADDS = ("add", "add_", "sub", "sub_", "rsub")


def _scaled_dtype(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """That of a + alpha * b, where alpha can be a factor like any other: a number of the call, or one that a compiler
    has spelled out of it. None where it is something else, or torch takes it for no number: a float for integers."""
    alpha, name = kwargs.get("alpha"), func.overloadpacket.__name__
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | torch.SymInt | torch.SymFloat):
        return None
    if name not in _ADDS or len(args) != 2 or len(kwargs) != 1:
        return None
    dtype = args[0].dtype if name.endswith("_") else torch.result_type(*(_plain(x) for x in args))
    is_legal = dtype.is_floating_point or (isinstance(alpha, int | torch.SymInt) and dtype is not torch.bool)
    return dtype if is_legal else None


def _scaled(func: OpOverload, args: Sequence[Any], alpha: Any, dtype: torch.dtype) -> list[Any]:
    operands, which = list(args), 0 if func.overloadpacket.__name__ == "rsub" else 1
    if isinstance(operands[which], Tensor):  # torch scales what is of the result's dtype already
        operands[which] = operands[which].to(dtype)
    operands[which] = operands[which] * alpha
    return operands


def _plain(x: Any) -> Any:
    return x.held if isinstance(x, Value) else x.node.kind(1) if isinstance(x, SYMBOLS) else x


# --- What does not reach ATen as it stands ---


class Spelling(TorchFunctionMode):
    """``table[h, q_idx]`` as an op, where torch itself would read the indices out; sizes as numbers of the call; one
    device for all that a mod makes, since its graph has none."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, Value):
            if func is Tensor.__getitem__:
                keys = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(_is_index(k) for k in keys) and 0 < len(keys) <= x.dim():
                    return _indexed(x, keys)
            elif x.dim() and func in _SIZES:
                return _SIZES[func](x, self.recorder, *args[1:], **(kwargs or {}))
            elif func in _PROPERTIES:
                if x.source is None:
                    self.recorder.fail(Refused(f"asks for {_PROPERTIES[func]} of a tensor that it makes or is given"))
                return asked(x.source, _PROPERTIES[func])
            elif func in _METHODS:
                if x.source is None:
                    self.recorder.fail(Refused(f"asks for {func.__name__}() of a tensor that it makes or is given"))
                return x.source[3].stand_in(func(x.source[0]), f"{x.source[1]}.{func.__name__}()", x.source[2])
            elif func == _DEVICE:
                if x.source is not None:
                    return asked(x.source, "device")
                self.recorder.asked_device = True
                return self.recorder.device
            elif func is Tensor.item and x.source is not None and is_on_host(x.source[0]):
                return number_of(x.source)
            elif func in _DATA:
                self.recorder.fail(ControlFlow(f"{func.__name__} asks for the value of a tensor"))
        kwargs = {k: "cpu" if k == "device" else x for k, x in (kwargs or {}).items()}
        return func(*[torch.device("cpu") if isinstance(a, torch.device) else a for a in args], **kwargs)


def _is_index(key: Any) -> bool:
    if isinstance(key, Tensor):
        return key.dim() == 0 and not key.dtype.is_floating_point and key.dtype is not torch.bool
    return isinstance(key, int | torch.SymInt) and not isinstance(key, bool)


def _indexed(x: Tensor, keys: Sequence[Any]) -> Tensor:
    for key in keys:
        if not isinstance(key, Tensor):
            key = torch.scalar_tensor(key, dtype=torch.int64, device="cpu")
        x = aten.index.Tensor(x, [key])
    return x


def _sizes(x: Value, recorder: Recorder) -> tuple[Size, ...]:
    if x.sizes is None:
        recorder.fail(Refused("asks for the size of a whole tensor that it makes; work it out before and capture it"))
    return x.sizes


def _shape(x: Value, recorder: Recorder) -> tuple[Any, ...]:
    return tuple([recorder.size(n) for n in _sizes(x, recorder)])


def _size(x: Value, recorder: Recorder, dim: int | None = None) -> Any:
    return _shape(x, recorder) if dim is None else recorder.size(_sizes(x, recorder)[dim])


def _numel(x: Value, recorder: Recorder) -> Any:
    return functools.reduce(operator.mul, _shape(x, recorder))


def _length(x: Value, recorder: Recorder) -> int:
    return int(_size(x, recorder, 0))


def _no_layout(x: Value, recorder: Recorder, *_: Any) -> NoReturn:
    recorder.fail(Refused("asks for a stride or the bytes of a captured tensor, which may change with every call"))


_TENSOR: Any = Tensor
_SIZES: dict[Any, Callable[..., Any]] = {
    _TENSOR.shape.__get__: _shape, Tensor.size: _size, Tensor.numel: _numel, Tensor.nelement: _numel,
    torch.numel: _numel, Tensor.__len__: _length, Tensor.stride: _no_layout, _TENSOR.nbytes.__get__: _no_layout,
}  # fmt: skip
_DATA = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
# What a captured tensor tells of itself, guarded by value.
_ASKED = (
    "requires_grad", "is_leaf", "grad_fn", "grad", "is_cuda", "is_cpu", "is_meta", "_version", "retains_grad",
    "output_nr", "_base",
)  # fmt: skip
_PROPERTIES: dict[Any, str] = {getattr(_TENSOR, n).__get__: n for n in _ASKED}
_METHODS = frozenset({
    Tensor.is_inference, Tensor.is_contiguous, Tensor.storage_offset, Tensor.is_pinned, Tensor.get_device,
})  # fmt: skip
_DEVICE = _TENSOR.device.__get__
