"""``int4_mm`` and ``uint4x2_mixed_mm``: products with a weight of four-bit values, two values in a byte.

    weight[k, n] = (value[k, n] - zeros[k // group_size, n]) * scales[k // group_size, n]

The value of an even k is the low nibble of ``b[k // 2, n]``, and that of an odd k the high nibble. The ops are for
inference and have no gradient. The kernels are declared in kernels/int4/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tk import errors
from tk.ops import _register, product
from tk.ops._register import Record, Tuning
from tk.ops.product import Activation

if TYPE_CHECKING:
    from tk.cli._calls import Call, Maker
    from tk.tune.products import Drawn, Draws

__all__ = ["int4_from_torch", "int4_mm", "pack_int4", "uint4x2_mixed_mm", "unpack_int4"]

_int4_mm, _int4_mm_out = _register.overloads("int4_mm")
_uint4x2_mixed_mm, _uint4x2_mixed_mm_out = _register.overloads("uint4x2_mixed_mm")


def int4_mm(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int = 128,
    *,
    bias: Tensor | None = None,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    config: str | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(a @ ((value - zeros) * scales) + bias)``.

    A scale and a zero serve `group_size` values of k in a column. Sums are float32. Where tensor cores multiply, a
    weight is rounded once to a's dtype. On CUDA a result that reads an infinite activation, scale or zero may be NaN
    where torch has an infinity. :func:`int4_from_torch` converts the weights of ``torch.ops.aten._weight_int4pack_mm``.

    Args:
        a: ``[..., K]``, bfloat16 or float16 (on the CPU also float32 and float64), with any strides.
        b: uint8 ``[K / 2, N]``, as :func:`tk.pack_int4` makes it. Row-major with N a multiple of 16 is fastest.
        scales: ``[K / group_size, N]``, of a's dtype.
        zeros: likewise. None stands for 8.
        group_size: 32, 64, 128 or K. It must divide K.
        bias: ``[N]``, or None.
        activation: as in :func:`tk.mm`.
        out_dtype: the result's dtype: that of a (the default) or float32.
        config: as in :func:`tk.mm`.
        out: as in :func:`tk.mm`.

    Returns:
        ``[..., N]``, or ``out``.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or group_size is none of these.
        NotImplementedError: an argument requires a gradient.
        tk.UnsupportedError: tk has no kernels for the dtype.
    """
    try:
        settings = product.settings("int4_mm", a, activation, out_dtype, None, config)
        if out is not None:
            return _int4_mm_out(a, b, scales, zeros, group_size, bias, *settings, out=out)
        return _int4_mm(a, b, scales, zeros, group_size, bias, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(
            error, "int4_mm", optional=("zeros", "bias"), a=a, b=b, scales=scales, zeros=zeros, bias=bias, out=out
        ) from None


def uint4x2_mixed_mm(
    a: Tensor,
    b: Tensor,
    *,
    activation: Activation = "none",
    out_dtype: torch.dtype | None = None,
    config: str | int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes ``activation(a @ (value - 8))``: :func:`tk.int4_mm` without scales, zeros and bias.

    The arguments, the result and the errors are those of :func:`tk.int4_mm`.
    """
    try:
        settings = product.settings("int4_mm", a, activation, out_dtype, None, config)
        if out is not None:
            return _uint4x2_mixed_mm_out(a, b, *settings, out=out)
        return _uint4x2_mixed_mm(a, b, *settings)
    except (RuntimeError, AttributeError) as error:
        raise product.explained(error, "uint4x2_mixed_mm", optional=(), a=a, b=b, out=out) from None


# --- Packing ---


def pack_int4(q: Tensor) -> Tensor:
    """Packs values of four bits, two along K into a byte. The value of the even k is in the low nibble.

    Args:
        q: uint8 ``[K, N]``, with values from 0 to 15 and an even K.

    Returns:
        uint8 ``[K / 2, N]``.

    Raises:
        TypeError: q is not a tensor.
        ValueError: q has another dtype or rank, an odd K, or a value past 15.
    """
    _check_tensor("pack_int4", "q", q)
    if q.dtype is not torch.uint8 or q.dim() != 2 or q.shape[0] % 2:
        raise ValueError(f"tk.pack_int4: q is {q.dtype} {list(q.shape)}, must be uint8 [K, N] with an even K")
    if q.numel() and not q.is_meta and int(q.max()) > 15:
        raise ValueError(f"tk.pack_int4: q has {int(q.max())}; values are 0 to 15")
    return q[::2] | (q[1::2] << 4)


def unpack_int4(p: Tensor) -> Tensor:
    """Unpacks what :func:`pack_int4` packed.

    Args:
        p: uint8 ``[K / 2, N]``.

    Returns:
        uint8 ``[K, N]``, with values from 0 to 15.

    Raises:
        TypeError: p is not a tensor.
        ValueError: p has another dtype or rank.
    """
    _check_tensor("unpack_int4", "p", p)
    if p.dtype is not torch.uint8 or p.dim() != 2:
        raise ValueError(f"tk.unpack_int4: p is {p.dtype} {list(p.shape)}, must be uint8 [K / 2, N]")
    return torch.stack((p & 15, p >> 4), 1).flatten(0, 1)


def int4_from_torch(packed: Tensor, scales_and_zeros: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Converts a weight of ``torch.ops.aten._weight_int4pack_mm`` into the arguments of :func:`int4_mm`.

    torch's weight is (value - 8) * scale + zero. So tk's zeros are 8 - zero / scale, rounded to the scales' dtype. A
    scale of 0 leaves only torch's zero, which has no such form.

    Args:
        packed: CUDA's layout, int32 ``[N / 8, K / (16 t), 32, t / 2]``, where t is the inner_k_tiles that it was packed
            with: 2, 4 or 8. Or the CPU's layout, uint8 ``[N, K / 2]``.
        scales_and_zeros: ``[K / group_size, N, 2]``.
        group_size: the number of values of k that share a scale and a zero.

    Returns:
        ``(b, scales, zeros)``: uint8 ``[K / 2, N]``, and two tensors ``[K / group_size, N]`` of the scales' dtype.

    Raises:
        TypeError: an argument is not a tensor, or group_size is not an int.
        ValueError: shapes do not match, or a scale is 0 where its zero is not.
    """
    _check_tensor("int4_from_torch", "packed", packed)
    _check_tensor("int4_from_torch", "scales_and_zeros", scales_and_zeros)
    if type(group_size) is not int:
        raise TypeError(f"tk.int4_from_torch: group_size must be an int, is {group_size!r}")
    if packed.device != scales_and_zeros.device:
        raise ValueError(
            f"tk.int4_from_torch: packed is on {packed.device}, scales_and_zeros on {scales_and_zeros.device};"
            " both must be on one device"
        )
    values = _values_of_cuda(packed) if packed.dim() == 4 else _values_of_cpu(packed)
    K, N = values.shape
    expected = [K // group_size if group_size > 0 else 0, N, 2]
    if list(scales_and_zeros.shape) != expected or K % group_size:
        raise ValueError(
            f"tk.int4_from_torch: scales_and_zeros is {list(scales_and_zeros.shape)}, must be [K / group_size, N, 2], "
            f"{expected}: packed is {list(packed.shape)}, K {K}, N {N}, group_size {group_size}"
        )
    scales, zeros = scales_and_zeros.unbind(-1)
    if not scales.is_meta and bool(((scales == 0) & (zeros != 0)).any()):
        raise ValueError("tk.int4_from_torch: a scale is 0 where its zero is not; such a group has no zero point")
    points = torch.where(scales == 0, 8.0, 8 - zeros.double() / scales.double())
    return pack_int4(values), scales.contiguous(), points.to(scales.dtype)


def _check_tensor(function: str, name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"tk.{function}: {name} must be a Tensor, is {type(x).__name__}")
    if (refused := errors.not_dense(function, name, x)) is not None:
        raise refused


def _values_of_cpu(packed: Tensor) -> Tensor:
    """Unpacks the CPU's layout, uint8 [N, K / 2], into [K, N].

    The layout has blocks of columns, of which the last may be narrower, and in each block a line for every k. The
    blocks' width, and which columns share a byte, depend on the CPU's vectors. So torch packs the numbers of the
    columns, and their places show the layout.
    """
    if packed.dtype is not torch.uint8 or packed.dim() != 2:
        raise ValueError(
            f"tk.int4_from_torch: packed is {packed.dtype} {list(packed.shape)}, must be int32 [N / 8, K / (16 t), 32, "
            "t / 2] of CUDA, or uint8 [N, K / 2] of the CPU"
        )
    N, K = packed.shape[0], 2 * packed.shape[1]
    flat, values = packed.flatten(), torch.empty(K, N, dtype=torch.uint8, device=packed.device)
    widest = _cpu_block()
    for first in range(0, N, widest):
        width = min(widest, N - first)
        block = _nibbles(flat[first * K // 2 : (first + width) * K // 2].view(K, width // 2))
        values[:, first + _cpu_columns(width).to(packed.device)] = block
    return values


def _nibbles(packed: Tensor) -> Tensor:
    """Splits the bytes of the last dimension into nibbles, low ones first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@cache
def _cpu_block() -> int:
    """The number of columns in a block: 64 with AVX-512, 32 without.

    torch packs a line of zeros (k = 0) and a line of ones (k = 1). The zeros that come first are a block's line.
    """
    lines = torch.arange(2, dtype=torch.int32).repeat(64, 1)
    return int((_packed_by_cpu(lines).flatten().cumsum(0) == 0).sum()) * 2


@cache
def _cpu_columns(width: int) -> Tensor:
    """The column of a block that each nibble of a line belongs to."""
    columns = torch.arange(width, dtype=torch.int32)[:, None].repeat(1, 2)
    low, high = (_nibbles(_packed_by_cpu(x).view(2, -1)[0]) for x in (columns % 16, columns // 16))
    return low.long() + 16 * high.long()


def _packed_by_cpu(q: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)


def _values_of_cuda(packed: Tensor) -> Tensor:
    """[K, N] of int32 [N / 8, K / (16 t), 32, t / 2]. A word of lane l, column l // 4 of eight, has of two neighbouring
    tiles of 16 k those that the lane's registers of a matrix product hold, (l % 4) * 2 + {0, 1, 8, 9} of each. They are
    in the order of nibbles 0, 4, 1, 5, 2, 6, 3, 7, so that a conversion takes two at once."""
    if packed.dtype is not torch.int32 or packed.shape[2] != 32 or packed.shape[3] not in (1, 2, 4):
        raise ValueError(
            f"tk.int4_from_torch: packed is {packed.dtype} {list(packed.shape)}, must be int32 [N / 8, K / (16 t), 32, "
            "t / 2] with t of 2, 4 or 8, or uint8 [N, K / 2]"
        )
    n_tiles, outer, _, pairs = packed.shape
    shifts = torch.tensor([4 * i for i in (0, 4, 1, 5, 2, 6, 3, 7)], device=packed.device)
    nibbles = (packed.long()[..., None] >> shifts & 15).to(torch.uint8)
    # [n tile, outer, column, quarter, pair of tiles, tile, upper half of k, k of two]
    apart = nibbles.view(n_tiles, outer, 8, 4, pairs, 2, 2, 2)
    # k = ((outer, pair, tile), half, quarter, k of two); n = (n tile, column)
    return apart.permute(1, 4, 5, 6, 3, 7, 0, 2).reshape(outer * pairs * 32, n_tiles * 8)


# --- Shapes, and what is refused ---


def _check_packed(op: str, a: Tensor, b: Tensor) -> None:
    product.check_rank(op, 2, b=b)
    torch._check_value(b.dtype == torch.uint8, lambda: f"tk.{op}: b is {b.dtype}, must be uint8")
    torch._check_value(a.dim() >= 1, lambda: f"tk.{op}: a must have at least 1 dimension, has none")
    torch._check_value(
        a.shape[-1] == 2 * b.shape[0],
        lambda: f"tk.{op}: a is {a.shape}, b is {b.shape}, must be [K / 2, N]: two values to a byte",
    )


def _fake(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    bias: Tensor | None,
    *settings: Any,
) -> Tensor:
    _check_packed("int4_mm", a, b)
    K = a.shape[-1]
    torch._check_value(
        group_size in (32, 64, 128) or group_size == K,
        lambda: f"tk.int4_mm: group_size is {group_size}, must be 32, 64, 128 or K, which is {K}",
    )
    for name, t in (("scales", scales), ("zeros", zeros)):
        if t is None:
            continue
        product.check_same("int4_mm", **{"a": a, name: t})
        torch._check_value(
            t.dim() == 2 and t.shape[0] * group_size == K and t.shape[1] == b.shape[1],
            lambda: f"tk.int4_mm: {name} is {t.shape}, must be [K / group_size, N]",  # noqa: B023
        )
    return product.empty(a, (*a.shape[:-1], b.shape[1]), *settings)


def _fake_plain(a: Tensor, b: Tensor, *settings: Any) -> Tensor:
    _check_packed("uint4x2_mixed_mm", a, b)
    return product.empty(a, (*a.shape[:-1], b.shape[1]), *settings)


product.register_for_inference("int4_mm", _fake)
product.register_for_inference("uint4x2_mixed_mm", _fake_plain)


# --- What else is known of them ---


def _values(t: Maker) -> Tensor:
    return (torch.arange(32 * t.n * 16 * t.n, device=t.device) % 16).to(torch.uint8).reshape(32 * t.n, 16 * t.n)


def _calls(t: Maker) -> Iterator[Call]:
    n, bf16 = t.n, torch.bfloat16
    q = _values(t)
    yield t.call("int4_mm", t(4 * n, 32 * n, dtype=bf16), pack_int4(q), t(n, 16 * n, dtype=bf16), None, 32)
    yield t.call("pack_int4", q)
    yield t.call("unpack_int4", pack_int4(q))
    of_torch = torch.zeros(1, 4, 32, 1, dtype=torch.int32, device=t.device)
    yield t.call("int4_from_torch", of_torch, torch.ones(4, 8, 2, device=t.device), 32)


def _calls_of_few_rows(t: Maker) -> Iterator[Call]:
    """There are kernels by the number of rows."""
    packed = pack_int4(_values(t))
    for rows in (1, 2, 12, 100):
        a, scales = (t(*shape, dtype=torch.bfloat16) for shape in ((rows, 32 * t.n), (t.n // 4, 16 * t.n)))
        yield t.call("int4_mm", a, packed, scales, None, 128)


def _plain_calls(t: Maker) -> Iterator[Call]:
    yield t.call("uint4x2_mixed_mm", t(4 * t.n, 32 * t.n, dtype=torch.bfloat16), pack_int4(_values(t)))


def _draw(d: Draws) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    m = d.size(1, 127, 1)
    n, k = (d.size(1024, 16384, d.choice((128, 256, 512))) for _ in range(2))
    return (m, n, k), {"order": "nn", "group": d.choice((32, 64, 128, 128, k))}


def _inputs(d: Drawn) -> tuple[Tensor, ...]:
    b = torch.randint(256, (d.k // 2, d.n), device=d.device, dtype=torch.uint8)
    scales = (torch.rand(d.k // d.group, d.n, device=d.device) / 8 + 0.05).bfloat16()
    zeros = torch.randint(4, 12, scales.shape, device=d.device).bfloat16()
    return d.matrix(d.m, d.k), b, scales, zeros, d.empty(d.m, d.n)


def _timed(d: Drawn, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor, out: Tensor, config: int = -1) -> Tensor:
    return _int4_mm_out(a, b, scales, zeros, d.group, None, 0, None, -1, config, 0, out=out)


def _reference(a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = 2 * b.shape[0] // scales.shape[0]
    values = unpack_int4(b).float()
    weight = (values - zeros.float().repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)
    return a @ weight.bfloat16()


_RECORD = Record(
    "..._,_n,_n,_n->...n",
    calls=_calls,
    more_calls=_calls_of_few_rows,
    tuning=Tuning(("m", "n", "k"), _draw, _inputs, _timed, _reference, ({"order": "nn", "group": 128},)),
)
_register.record("int4_mm", _RECORD, int4_mm)
_register.record(
    "uint4x2_mixed_mm", Record("..._,_n->...n", kernels_of="int4_mm", calls=_plain_calls), uint4x2_mixed_mm
)
