"""``b2b_gemm``: two products with a pointwise function between them.

    order "left":  f(a @ b) @ c
    order "right": a @ f(b @ c)

Where it pays, one kernel computes both products, and what stands between them never reaches memory (kernels/b2b/).
Otherwise two products are called. Both ways sum in float32, apply f to the float32 sums and round its result to the
operands' dtype. The op is for inference and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.library import Library

from tk import errors, missing
from tk.heuristics.described import multiprocessors
from tk.ops import _register, product
from tk.ops._register import Record
from tk.ops.product import ACTIVATIONS

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker

__all__ = ["b2b_gemm"]

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_library.define(
    "b2b_gemm(Tensor a, Tensor b, Tensor c, bool right=False, int activation=0, str f='', float[] floats=[], "
    "SymInt[] ints=[], int way=-1) -> Tensor"
)
_b2b_gemm = torch.ops.tk.b2b_gemm.default
_mm = torch.ops.tk.mm.default

Function = Callable[[Tensor], Tensor]
WAYS = {None: -1, "two_products": 0, "fused": 1}


def b2b_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    order: Literal["left", "right"] = "left",
    f: str | Function = "none",
    way: Literal["fused", "two_products"] | None = None,
) -> Tensor:
    """Computes ``f(a @ b) @ c``, or with order "right" ``a @ f(b @ c)``.

    The operands have one dtype and device, and any strides. They are bfloat16, float16 or float32 (on the CPU also
    float64). float32 is always two products.

    Args:
        a: ``[M, K]``.
        b: ``[K, P]``.
        c: ``[P, N]``.
        order: which product comes first: "left" or "right".
        f: the name of an activation (none, relu, gelu, gelu_tanh, silu), or a pointwise function of one tensor. On CUDA
            a function needs a pack. Register it with :func:`tk.b2b.register` in the file that ``tk build`` reads, or
            let the first call build it (``tk.config.build_missing``). Numbers that it captures may change from call to
            call.
        way: "fused" for one kernel, "two_products", or None for what is expected to be faster.

    Returns:
        ``[M, N]``, row-major, of the operands' dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or order, f or way is none of these.
        NotImplementedError: an operand requires a gradient.
        tk.VariantNotFoundError: no loaded pack has a kernel of f, or way is "fused" and the inner size is past 256.
        tk.UnsupportedError: tk has no kernels for the dtype, or no kernel can compute f.
    """
    if order not in ("left", "right"):
        raise ValueError(f"tk.b2b_gemm: order is {order!r}, must be 'left' or 'right'")
    if way not in tuple(WAYS):
        raise ValueError(f"tk.b2b_gemm: way is {way!r}, must be 'fused', 'two_products' or None")
    activation, text, floats, ints = _function(f)
    try:
        return _b2b_gemm(a, b, c, order == "right", activation, text, floats, ints, WAYS[way])
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "b2b_gemm", optional=(), a=a, b=b, c=c) from None


def _function(f: Any) -> tuple[int, str, list[float], list[int]]:
    if isinstance(f, str):
        if f not in ACTIVATIONS:
            raise ValueError(f"tk.b2b_gemm: f is {f!r}, must be a function or one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[f], "", [], []
    from tk.b2b import function

    traced, values = function.traced_function(f, "tk.b2b_gemm")
    numbers = list(zip(traced.captures, values, strict=True))
    return (
        0,
        traced.text,
        [v for c, v in numbers if c.kind == "float"],
        [v for c, v in numbers if c.kind == "int"],
    )


# --- Which way ---

_FUSED_DTYPES = (torch.bfloat16, torch.float16)
MOST_INNER = 256  # kernels/b2b/op.py

# Estimates from the roofline of an H100: operations and bytes per nanosecond, and nanoseconds per launch.
_OF_A_TILE, _OF_A_PRODUCT, _MEMORY, _LAUNCH = 3_000, 600_000, 4_000, 3_000


def fused_time(M: int, N: int, K: int, P: int, multiprocessors: int) -> float:
    """The predicted time, in nanoseconds, of f(a @ b) @ c in one kernel, with a [M, K] and c [P, N].

    Every tile of columns computes a @ b again.
    """
    size = 64 if max(K, N) <= 64 else 128
    block_k = size if size >= K else 256
    rows = 128 if block_k <= 128 else 64
    programs = -(-M // rows) * -(-N // size)
    return _LAUNCH + -(-programs // multiprocessors) * 2 * rows * P * (block_k + size) / _OF_A_TILE


def two_products_time(M: int, N: int, K: int, P: int, itemsize: int, is_function: bool) -> float:
    """The predicted time, in nanoseconds, of two products.

    A function that is no activation runs between them as ATen ops in float32.
    """

    def one(m: int, n: int, k: int) -> float:
        return _LAUNCH + max(2 * m * n * k / _OF_A_PRODUCT, (m * n + m * k + k * n) * itemsize / _MEMORY)

    between = _LAUNCH + M * P * (8 + 2 * itemsize) / _MEMORY if is_function else 0.0
    return one(M, P, K) + between + one(M, N, P)


def is_fused(a: Tensor, b: Tensor, c: Tensor, is_function: bool, way: int) -> bool:
    """Whether one kernel computes the left form f(a @ b) @ c."""
    M, K, P, N = *a.shape, *c.shape
    if way == 0 or a.dtype not in _FUSED_DTYPES:
        return False
    if way == 1 or K > MOST_INNER:
        return way == 1
    fused = fused_time(M, N, K, P, multiprocessors(a.device))
    return fused < two_products_time(M, N, K, P, a.element_size(), is_function)


# --- Kernels ---


def _check(a: Tensor, b: Tensor, c: Tensor) -> None:
    for name, t in (("a", a), ("b", b), ("c", c)):
        torch._check_value(
            t.dim() == 2,
            lambda: f"tk.b2b_gemm: {name} must have 2 dimensions, is {list(t.shape)}",  # noqa: B023
        )
        if t.device != a.device:  # a kernel would say so, but is not asked yet
            _register.refuse_devices("b2b_gemm", (a, b, c), {})
    product.check_product("b2b_gemm", b.shape[0], a=a, b=b)
    product.check_product("b2b_gemm", c.shape[0], b=b, c=c)


def _check_dtype(a: Tensor) -> None:
    wide = (torch.float32, torch.float64) if a.device.type == "cpu" else (torch.float32,)
    if a.dtype not in (*_FUSED_DTYPES, *wide):
        raise errors.UnsupportedError(
            f"tk.b2b_gemm: a is {a.dtype}; bfloat16, float16 and float32 are supported, and float64 on the CPU"
        )


def _fake(a: Tensor, b: Tensor, c: Tensor, *args: Any) -> Tensor:
    _check(a, b, c)
    return a.new_empty(a.shape[0], c.shape[1])


def _between(x: Tensor, y: Tensor, activation: int, f: str, numbers: Sequence[Any]) -> Tensor:
    """Computes f(x @ y), rounded once."""
    if not f:
        return _mm(x, y, None, activation)
    from tk.b2b import function

    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    return function.apply(f, numbers, _mm(x, y, None, 0, wide)).to(x.dtype)


def _two_products(a: Tensor, b: Tensor, c: Tensor, right: bool, *function: Any) -> Tensor:
    if right:
        return _mm(a, _between(b, c, *function))
    return _mm(_between(a, b, *function), c)


def _numbers(f: str, floats: Sequence[float], ints: Sequence[int]) -> list[Any]:
    """The captured numbers in the order in which f reads them."""
    if not f:
        return []
    from tk.flex.tracing import trace

    held = {"float": iter(floats), "int": iter(ints)}
    return [next(held[capture.kind]) for capture in trace.parse(f).captures]


def _cpu(a: Tensor, b: Tensor, c: Tensor, right: bool = False, activation: int = 0, f: str = "",
         floats: Sequence[float] = (), ints: Sequence[int] = (), way: int = -1) -> Tensor:  # fmt: skip
    _check(a, b, c)
    _check_dtype(a)
    return _two_products(a, b, c, right, activation, f, _numbers(f, floats, ints))


def _cuda(a: Tensor, b: Tensor, c: Tensor, right: bool = False, activation: int = 0, f: str = "",
          floats: Sequence[float] = (), ints: Sequence[int] = (), way: int = -1) -> Tensor:  # fmt: skip
    _check(a, b, c)
    _check_dtype(a)
    own = _own(f, a.dtype, a.device.index)
    # a @ f(b @ c) is (f(c.t() @ b.t()) @ a.t()).t().
    x, y, z = (c.t(), b.t(), a.t()) if right else (a, b, c)
    is_empty = 0 in (*x.shape, *z.shape)
    if not is_empty and is_fused(x, y, z, bool(f), way):
        numbers = [*floats, int(right), *(ints if f else (activation,))]
        try:
            result = own(x, y, z, *numbers)
        except (RuntimeError, ValueError) as error:  # a pack may have f for other dtypes only
            if not f or not missing.is_for(error):
                raise
            _build(f, a.dtype, a.device.index)
            result = own(x, y, z, *numbers)
        return result.t() if right else result
    return _two_products(a, b, c, right, activation, f, _numbers(f, floats, ints))


def _build(f: str, dtype: torch.dtype, device: int) -> None:
    """Builds and loads a pack with f, for a CUDA device as the core numbers them.

    Raises tk.VariantNotFoundError if it cannot be built.
    """
    from tk.b2b import function
    from tk.flex.tracing import trace

    traced = trace.parse(f)
    # A call in float32 is two products and needs no kernel. What it builds serves calls in bfloat16.
    source = function.source_of(traced, dtype if dtype in _FUSED_DTYPES else torch.bfloat16)
    missing.load(function.op_name(traced), source, device)


def _own(f: str, dtype: torch.dtype, device: int) -> Any:
    """The op of a loaded pack that has f between its products.

    Where the user asked for it (``tk.config.build_missing``), a missing op is built. Otherwise this raises
    tk.VariantNotFoundError.
    """
    if not f:
        return torch.ops.tk.b2b_fused.default
    from tk.b2b import function
    from tk.flex.tracing import trace

    name = function.op_name(trace.parse(f))
    packet = getattr(torch.ops.tk, name, None)
    if packet is None and missing.is_wanted():
        _build(f, dtype, device)
        packet = getattr(torch.ops.tk, name, None)
    if packet is None:
        raise errors.VariantNotFoundError(
            f"tk.b2b_gemm: no loaded pack has a kernel of this f ({name}). Announce it in a file with "
            "tk.b2b.register(f, dtypes=…), build it once, on any machine with the build extra:\n"
            "    tk build FILE.py -o f.tkpack\nand load it with tk.load_pack('f.tkpack'), or by TK_PACK_PATH; or let "
            "tk do so, with tk.config.build_missing()."
        )
    return packet.default


_register.register_fake("b2b_gemm", _fake, _library)
_library.impl("b2b_gemm", _cpu, "CPU")
_library.impl("b2b_gemm", _cuda, "CUDA")
_library.impl("b2b_gemm", _register.inference_only(_b2b_gemm), "Autograd", with_keyset=True)
_register.autocast("b2b_gemm")


# --- What else is known of it ---


def _dims(right: bool, **_: Any) -> str:
    return "mk,k_,_p->mp" if right else "m_,_n,np->mp"


def _calls(t: Maker) -> Iterator[Call]:
    args = t(16 * t.n, 8 * t.c), t(8 * t.c, 16 * t.c), t(16 * t.c, 8 * t.c)
    yield t.call("b2b_gemm", *args, torchs=lambda a, b, c: a @ b @ c)


_register.record("b2b_gemm", Record(_dims, calls=_calls), b2b_gemm)
