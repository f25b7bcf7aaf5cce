"""Runs Gluon kernels on the CPU, for tests: Triton's interpreter does not take them.

The modules of a kernel are executed as plain Python, with what they import of Triton replaced: tensors are numpy
arrays, each warp-specialised partition is a thread, barriers count arrivals and bytes in phases as mbarrier does, and a
wait that is not answered is an error. Loads come when they are asked for, later or sooner; products are worked out as
late as a wait allows, from what is in shared memory then, and cannot be read before.

So this shows wrong coordinates and phases, deadlocks, buffers that are given back too soon, missing waits, reads of
shared memory that nothing has written (NaN) and addresses out of bounds. It does not show missing fences.
"""

from __future__ import annotations

import builtins
import copy
import importlib.util
import inspect
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE = 20.0  # seconds until a wait is a deadlock


# --- Tensors ---


def raw(x: Any) -> Any:
    return x.a if isinstance(x, T) else x


def _divide(a: Any, b: Any) -> Any:
    """Of integers, towards 0."""
    q = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((np.asarray(a) < 0) != (np.asarray(b) < 0), -q, q)


class T:
    """A tensor, or a number that is known at run time only."""

    a: Any

    def __init__(self, a: Any):
        self.a = np.asarray(a)

    shape = property(lambda self: list(self.a.shape))
    type = property(lambda self: types.SimpleNamespace(layout=None))
    dtype = property(lambda self: self.a.dtype.type)

    def to(self, dtype: Any) -> T:
        return T(self.a.astype(dtype))

    def __bool__(self) -> bool:
        return bool(self.a)

    def __index__(self) -> int:
        return int(self.a)

    def __getitem__(self, key: Any) -> T:
        return T(self.a[key])

    def reshape(self, shape: Sequence[int]) -> T:
        return T(self.a.reshape([int(n) for n in shape]))

    def permute(self, order: Sequence[int]) -> T:
        return T(self.a.transpose(order))


def _operator(f: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    return lambda x, y: T(f(x.a, raw(y))), lambda x, y: T(f(raw(y), x.a))


for _name, _f in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": _divide,
    "mod": lambda a, b: a - _divide(a, b) * b, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift, "rshift": np.right_shift,
}.items():  # fmt: skip
    _forward, _reverse = _operator(_f)
    setattr(T, f"__{_name}__", _forward)
    setattr(T, f"__r{_name}__", _reverse)
for _name, _f in {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
                  "ne": np.not_equal}.items():  # fmt: skip
    setattr(T, f"__{_name}__", _operator(_f)[0])
T.__neg__ = lambda x: T(-x.a)


class Pointer:
    """memory: all elements from the address on."""

    def __init__(self, memory: np.ndarray, offset: Any = 0):
        self.memory, self.offset = memory, np.asarray(offset)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(
            element_ty=types.SimpleNamespace(primitive_bitwidth=8 * self.memory.dtype.itemsize)
        )

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + raw(other))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        mask = np.broadcast_to(np.asarray(raw(mask), bool), np.broadcast(self.offset, np.asarray(raw(mask))).shape)
        offset = np.broadcast_to(self.offset, mask.shape)
        used = offset[mask]
        assert used.size == 0 or (used.min() >= 0 and used.max() < self.memory.size), "an address out of bounds"
        return np.where(mask, offset, 0), mask


def load(pointer: Pointer, mask: Any = True, other: Any = 0, **_: Any) -> T:
    places, mask = pointer.places(mask)
    return T(np.where(mask, pointer.memory[places], np.asarray(raw(other), pointer.memory.dtype)))


def store(pointer: Pointer, x: Any, mask: Any = True, **_: Any) -> None:
    places, mask = pointer.places(mask)
    x = np.broadcast_to(raw(x), np.broadcast(places, np.asarray(raw(x))).shape)
    places, mask = np.broadcast_to(places, x.shape), np.broadcast_to(mask, x.shape)
    pointer.memory[places[mask]] = x[mask]


# --- Shared memory, barriers, TMA ---


class Shared:
    def __init__(self, a: np.ndarray):
        self.a = a

    shape = property(lambda self: list(self.a.shape))
    dtype = property(lambda self: self.a.dtype.type)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.a.shape[0], "a stage that is not there"
        return Shared(self.a[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        assert 0 <= int(start) <= self.a.shape[dim] - length, "stages that are not there"
        return Shared(self.a[(builtins.slice(None),) * dim + (builtins.slice(int(start), int(start) + length),)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        view = self.a.reshape([int(n) for n in shape])
        assert np.shares_memory(view, self.a)
        return Shared(view)

    def reinterpret(self, shape: Sequence[int], layout: Any) -> Shared:
        return self.reshape(shape)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.a.transpose(order))

    def load(self, layout: Any) -> T:
        return T(self.a.copy())

    def store(self, x: T) -> None:
        assert x.a.shape == self.a.shape, (x.a.shape, self.a.shape)
        self.a[...] = x.a

    def gather(self, places: T, axis: int) -> T:
        assert self.a.ndim == 1 and axis == 0 and places.a.min() >= 0, "a place out of bounds"
        return T(self.a[places.a])

    def scatter(self, x: T, places: T, axis: int) -> None:
        assert self.a.ndim == 1 and axis == 0 and places.a.min() >= 0, "a place out of bounds"
        assert len(np.unique(places.a)) == places.a.size, "two elements for one place"
        self.a[places.a] = x.a


class Barrier:
    """Phases complete when `count` have arrived and all bytes that are expected have come."""

    changed = threading.Condition()
    failed = False

    def __init__(self) -> None:
        self.count = self.arrived = self.bytes = self.completed = 0

    def _update(self, arrivals: int, size: int) -> None:
        with Barrier.changed:
            self.arrived += arrivals
            self.bytes += size
            assert self.arrived <= self.count, "more arrivals than the barrier counts"
            if self.arrived == self.count and self.bytes == 0:
                self.completed += 1
                self.arrived = 0
                Barrier.changed.notify_all()

    def wait(self, phase: int) -> None:
        with Barrier.changed:
            done = Barrier.changed.wait_for(lambda: Barrier.failed or self.completed % 2 != phase, PATIENCE)
        assert done and not Barrier.failed, "a wait that nobody answers"


class Barriers:
    def __init__(self, n: int):
        self.all = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.all), "a barrier that is not there"
        return self.all[int(i)]


def _dawdle() -> None:
    if random.random() < 0.1:
        time.sleep(random.random() * 2e-4)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = int(count)


def _arrive(barrier: Barrier, count: int = 1, pred: Any = True, **_: Any) -> None:
    if pred:
        barrier._update(count, 0)


def _wait(barrier: Barrier, phase: Any) -> None:
    _dawdle()
    barrier.wait(int(phase))


MBARRIER = types.SimpleNamespace(
    allocate_mbarrier=lambda batch: Barriers(int(batch)), init=_init, arrive=_arrive, wait=_wait,
    expect=lambda barrier, size, pred=True: barrier._update(1, int(size)), MBarrierLayout=lambda *_: None,
)  # fmt: skip


class Descriptor:
    """A tensor map: loads read 0 outside, stores write nothing there."""

    def __init__(self, a: np.ndarray, block: Sequence[int]):
        self.a, self.block_shape, self.layout = a, list(block), None
        self.dtype = a.dtype.type
        self.nbytes_per_cta = int(np.prod(block)) * a.itemsize

    def box(self, at: Sequence[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What lies inside: of the tensor, and of the block."""
        starts = [int(raw(x)) for x in at]
        inside = [
            max(0, min(n, s + b) - max(s, 0)) for s, b, n in zip(starts, self.block_shape, self.a.shape, strict=True)
        ]
        of_tensor = tuple(slice(max(s, 0), max(s, 0) + n) for s, n in zip(starts, inside, strict=True))
        return of_tensor, tuple(slice(max(-s, 0), max(-s, 0) + n) for s, n in zip(starts, inside, strict=True))


def _tma_load(desc: Descriptor, at: Sequence[Any], barrier: Barrier, smem: Shared, **_: Any) -> None:
    of_tensor, of_block = desc.box(at)
    assert smem.shape == desc.block_shape
    smem.a[...] = np.nan  # while it is on its way
    _dawdle()
    block = np.zeros(desc.block_shape, desc.dtype)
    block[of_block] = desc.a[of_tensor]
    smem.a[...] = block
    barrier._update(0, -desc.nbytes_per_cta)


def _tma_store(desc: Descriptor, at: Sequence[Any], smem: Shared, **_: Any) -> None:
    of_tensor, of_block = desc.box(at)
    assert smem.shape == desc.block_shape
    desc.a[of_tensor] = smem.a[of_block]


class Im2colDescriptor:
    """A tensor map of images [N, ..., C]. A load takes pixels one after the other, by `steps` from `lower` to `upper`
    behind the image's last, then those of the next image."""

    def __init__(self, a: np.ndarray, block: Sequence[int], lower: Sequence[int], upper: Sequence[int],
                 steps: Sequence[int]):  # fmt: skip
        self.a, self.block_shape, self.layout = a, list(block), None
        self.lower, self.steps = list(lower), list(steps)
        self.last = [n - 1 + u for n, u in zip(a.shape[1:-1], upper, strict=True)]
        self.dtype = a.dtype.type
        self.nbytes_per_cta = int(np.prod(block)) * a.itemsize

    def gather(self, at: Sequence[int], offsets: Sequence[int]) -> np.ndarray:
        pixels, channels = self.block_shape
        result = np.zeros((pixels, channels), self.dtype)
        image, place, c = at[0], list(at[1:-1]), at[-1]
        assert all(lo <= p <= hi for lo, p, hi in zip(self.lower, place, self.last, strict=True))
        for row in range(pixels):
            read = [p + o for p, o in zip(place, offsets, strict=True)]
            if image < self.a.shape[0] and all(0 <= r < n for r, n in zip(read, self.a.shape[1:-1], strict=True)):
                found = self.a[(image, *read)][c : c + channels]
                result[row, : len(found)] = found
            for d in reversed(range(len(place))):
                place[d] += self.steps[d]
                if place[d] <= self.last[d]:
                    break
                place[d] = self.lower[d]
            else:
                image += 1
        return result


def _tma_load_im2col(
    desc: Im2colDescriptor, at: Sequence[Any], offsets: Sequence[Any], barrier: Barrier, smem: Shared, **_: Any
) -> None:
    offsets = [int(raw(x)) for x in offsets]
    assert smem.shape == desc.block_shape and min(offsets) >= 0
    smem.a[...] = np.nan  # while it is on its way
    _dawdle()
    smem.a[...] = desc.gather([int(raw(x)) for x in at], offsets)
    barrier._update(0, -desc.nbytes_per_cta)


TMA = types.SimpleNamespace(
    async_load=_tma_load, async_load_im2col=_tma_load_im2col, async_store=_tma_store, store_wait=lambda *_, **__: None
)


# --- Products ---


class Pending(T):
    """A product that has been issued. Its accumulator may be one, too."""

    def __init__(self, a: T | Shared, b: Shared, acc: T, use_acc: Any):
        self.operands = (a, b, acc if use_acc else None)
        self.of_shape = list(acc.shape)
        self.value: np.ndarray | None = None
        assert a.shape[1] == b.shape[0] and [a.shape[0], b.shape[1]] == self.of_shape

    def finish(self) -> None:
        a, b, acc = self.operands
        product = a.a.astype(np.float32) @ b.a.astype(np.float32)
        self.value = product if acc is None else product + acc.a

    shape = property(lambda self: self.of_shape)

    @property
    def a(self) -> np.ndarray:
        assert self.value is not None, "a product is read before it is waited for"
        return self.value


class Issued(threading.local):
    """A thread's products, in order."""

    def __init__(self) -> None:
        self.products: list[Pending] = []


ISSUED = Issued()


def _mma(a: T | Shared, b: Shared, acc: T, use_acc: Any = True, is_async: bool = False) -> T:
    product = Pending(a, b, acc, use_acc)
    ISSUED.products.append(product)
    return product if is_async else _mma_wait(0, [product])


def _mma_wait(keep: int, deps: Sequence[T]) -> Any:
    _dawdle()
    while len(ISSUED.products) > keep:
        ISSUED.products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


# --- The language ---


class _Anything:
    """Layouts and types: nobody looks into them."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class Grid(threading.local):
    """Which program this is."""

    program = 0
    programs = 1
    warps = 4


GRID = Grid()


def _specialize(functions: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    errors: list[BaseException] = []
    program, programs = GRID.program, GRID.programs

    def run(fn: Any, args: tuple[Any, ...]) -> None:
        GRID.program, GRID.programs = program, programs
        try:
            fn(*args)
        except BaseException as error:
            errors.append(error)
            with Barrier.changed:
                Barrier.failed = True
                Barrier.changed.notify_all()

    Barrier.failed = False
    threads = [threading.Thread(target=run, args=f) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _atomic_add(pointer: Pointer, x: int, **_: Any) -> T:
    before = load(pointer)
    store(pointer, before + x)
    return before


def _reduce(f: Any) -> Any:
    return lambda x, axis: T(f(x.a, axis=axis))


def _elementwise(f: Any) -> Any:
    def call(*args: Any) -> T:
        with np.errstate(all="ignore"):
            return T(f(*(raw(x) for x in args)))

    return call


def _full(shape: Sequence[int], x: Any, dtype: Any, layout: Any = None) -> T:
    return T(np.full([int(n) for n in shape], raw(x), dtype))


def _associative_scan(x: Any, axis: int, combine: Any) -> Any:
    """As of a tuple, so of one: each element and all before it."""
    parts = [x] if isinstance(x, T) else list(x)
    arrays = [np.moveaxis(p.a.copy(), axis, 0) for p in parts]
    for i in range(1, arrays[0].shape[0]):
        found = combine(*(T(a[i - 1]) for a in arrays), *(T(a[i]) for a in arrays))
        for a, new in zip(arrays, (found,) if isinstance(found, T) else found, strict=True):
            a[i] = new.a
    done = [T(np.moveaxis(a, 0, axis)) for a in arrays]
    return done[0] if isinstance(x, T) else tuple(done)


def _assembly(text: str, constraints: str, given: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> T:
    assert text == "prmt.b32 $0, $1, $2, $3;", text
    low, high, which = np.broadcast_arrays(*(np.asarray(raw(x)).astype(np.int64) & 0xFFFFFFFF for x in given))
    both, found = low | (high & 0xFFFFFFFF) << 32, np.zeros(low.shape, np.int64)
    for i in range(4):
        wanted = which >> 4 * i & 15
        byte = both >> 8 * (wanted & 7) & 255
        found |= np.where(wanted & 8, np.where(byte & 128, 255, 0), byte) << 8 * i
    return T(found.astype(np.uint32).view(np.int32).reshape(low.shape))


_PTX: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a, "shr": lambda a, n: a >> n, "shl": lambda a, n: a << n, "add": lambda a, b: a + b,
    "and": lambda a, b: a & b, "not": lambda a: ~a, "popc": np.bitwise_count,
}  # fmt: skip
_COMPARED: dict[str, Callable[..., Any]] = {"eq": np.equal, "ne": np.not_equal}


def _threadwise(text: Any, constraints: Any, given: Sequence[Any], result: Any, is_pure: bool) -> T:
    """Assembly of one tensor and shared memory. Neighbours are a warp's lanes, then a thread's registers, then warps:
    the layout of tk.codegen.radix.scatter_digits."""
    x, memory = given
    own = x.a.reshape(GRID.warps, -1, 32).astype(np.uint32)
    count = own.shape[1]
    outputs, inputs = [f"${i}" for i in range(count)], [f"${count + i}" for i in range(count)]
    threads = np.arange(GRID.warps * 32, dtype=np.uint32).reshape(-1, 32)
    registers = {
        "%tid.x": threads, "%lanemask_lt": (np.uint32(1) << threads % 32) - np.uint32(1), f"${2 * count}": threads * 0,
        **{name: own[:, i] for i, name in enumerate(inputs)},
    }  # fmt: skip
    words = memory.a.reshape(-1)

    def read(name: str) -> Any:
        return registers[name] if name in registers else threads * 0 + np.uint32(int(name, 0))

    for line in text((tuple(outputs),), (tuple(inputs), (f"${2 * count}",))).strip("{}\n ").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        operation, _, rest = line.strip().partition(" ")
        where = threads == threads
        if operation.startswith("@"):
            where = registers[operation.strip("@!")] != operation.startswith("@!")
            operation, _, rest = rest.partition(" ")
        kind, *more = operation.split(".")
        into, *names = (name.strip(" []") for name in rest.split(","))
        if kind == "st":
            places = registers[into][where] // 4
            assert len(np.unique(places)) == places.size, "two lanes for one place"
            words[places] = read(names[0])[where]
        elif kind == "ld":
            registers[into] = words[registers[names[0]] // 4].astype(np.uint32)
        elif kind == "setp":
            registers[into] = _COMPARED[more[0]](*map(read, names))
        elif kind == "vote":
            registers[into] = threads * 0 + (registers[names[0]] << threads % 32).sum(1, dtype=np.uint32)[:, None]
        elif kind != "bar":
            found = _PTX[kind](*map(read, names)).astype(np.uint32)
            registers[into] = found if where.all() else np.where(where, found, registers[into])
    return T(np.stack([registers[name] for name in outputs], 1).reshape(x.a.shape).astype(np.int32))


def _shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    a = np.empty([int(n) for n in shape], dtype)
    a[...] = np.nan if np.issubdtype(a.dtype, np.floating) else -(2**30)
    return Shared(a)


def _replaced(x: Any, changes: dict[str, Any]) -> Any:
    result = copy.copy(x)
    for name, value in changes.items():
        assert hasattr(result, name)
        setattr(result, name, value)
    return result


class Language(_Anything):
    constexpr = staticmethod(lambda x=None: x)
    float32, float16 = np.float32, np.float16
    int16, int32, int64 = np.int16, np.int32, np.int64
    load, store, atomic_add = staticmethod(load), staticmethod(store), staticmethod(_atomic_add)
    program_id = staticmethod(lambda axis: T(GRID.program if axis == 0 else 0))
    num_programs = staticmethod(lambda axis: T(GRID.programs if axis == 0 else 1))
    num_ctas = staticmethod(lambda: 1)
    num_warps = staticmethod(lambda: GRID.warps)
    arange = staticmethod(lambda low, high, layout=None: T(np.arange(low, high)))
    full = staticmethod(_full)
    zeros = staticmethod(lambda shape, dtype, layout=None: _full(shape, 0, dtype))
    to_tensor = staticmethod(lambda x: x if isinstance(x, T) else T(x))
    cast = staticmethod(lambda x, dtype: T(np.asarray(raw(x)).astype(dtype)))
    where, minimum, maximum = map(staticmethod, map(_elementwise, (np.where, np.minimum, np.maximum)))
    exp2, log2 = staticmethod(_elementwise(np.exp2)), staticmethod(_elementwise(np.log2))
    cdiv = staticmethod(lambda a, b: T(_divide(raw(a) + raw(b) - 1, raw(b))))
    max, sum = staticmethod(_reduce(np.max)), staticmethod(_reduce(np.sum))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    static_range = staticmethod(lambda *args: range(*args))
    barrier = staticmethod(lambda: None)
    associative_scan, inline_asm_elementwise = staticmethod(_associative_scan), staticmethod(_assembly)
    inline_asm = staticmethod(_threadwise)
    expand_dims = staticmethod(lambda x, axis: T(np.expand_dims(x.a, axis)))
    reshape = staticmethod(lambda x, shape: T(x.a.reshape(shape)))
    split = staticmethod(lambda x: (T(x.a[..., 0]), T(x.a[..., 1])))
    aggregate_replace = staticmethod(lambda x, **changes: _replaced(x, changes))
    allocate_shared_memory = staticmethod(_shared_memory)
    warp_specialize = staticmethod(_specialize)

    @staticmethod
    def static_assert(holds: Any, message: str = "") -> None:
        assert holds, message


def _aggregate(cls: type) -> type:
    names = list(cls.__annotations__)

    def init(self: Any, *args: Any) -> None:
        for name, x in zip(names, args, strict=True):
            setattr(self, name, x)

    cls.__init__ = init  # type: ignore[misc]
    return cls


# --- Modules ---

_LANGUAGE = Language()
_GLUON = types.SimpleNamespace(
    jit=lambda f: f, aggregate=_aggregate, constexpr_function=lambda f: f, language=_LANGUAGE
)
_TRITON = types.SimpleNamespace(
    jit=lambda f: f,
    constexpr_function=lambda f: f,
    cdiv=lambda a, b: -(-a // b),
    language=_LANGUAGE,
    experimental=types.SimpleNamespace(gluon=_GLUON),
)
_HOPPER = types.SimpleNamespace(
    mbarrier=MBARRIER, tma=TMA, warpgroup_mma=_mma, warpgroup_mma_wait=_mma_wait, fence_async_shared=lambda: None
)
_STUBS = {
    "triton.language": _LANGUAGE, "triton.experimental": _TRITON.experimental, "triton.experimental.gluon": _GLUON,
    "triton.experimental.gluon.language": _LANGUAGE, "triton.experimental.gluon.language.nvidia.hopper": _HOPPER,
}  # fmt: skip
_modules: dict[str, types.ModuleType] = {}


def _import(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if name == "triton" or (name.startswith("triton.") and not fromlist):
        return _TRITON
    if name.startswith("triton."):
        return _STUBS.get(name, _LANGUAGE)
    if name.startswith("tk.kernels.") and fromlist:
        return module(name)
    if name == "tk.codegen" and tuple(fromlist) == ("device",):
        return types.SimpleNamespace(device=module("tk.codegen.device"))
    return builtins.__import__(name, globals_, locals_, fromlist, level)


def module(name: str) -> types.ModuleType:
    """A module of kernels as plain Python."""
    if name not in _modules:
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        _modules[name] = _execute(name, Path(spec.origin).read_text(), spec.origin)
    return _modules[name]


def _execute(name: str, text: str, path: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    exec(compile(text, path, "exec"), made.__dict__)
    return made


def function(fn: Any) -> Any:
    """A device function, of tk.kernels or printed, as plain Python."""
    name = fn.fn.__module__
    if name.startswith("tk.kernels."):
        return getattr(module(name), fn.fn.__name__)
    path = inspect.getsourcefile(fn.fn)
    assert path
    return getattr(_execute(name, "".join(inspect.findsource(fn.fn)[0]), path), fn.fn.__name__)


def run(fn: Any, args: dict[str, Any], programs: int) -> None:
    """A Gluon kernel, one program after the other. args: by name; constants as they are, numbers as T, Pointers and
    Descriptors."""
    kernel = function(fn)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for program in range(programs):
            GRID.program, GRID.programs = program, programs
            kernel(**args)
    finally:
        sys.setswitchinterval(interval)
