"""Random numbers of a seed: the same for every config, layout, device and run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tk import errors
from tk._arguments import flag, number, shape_of, whole
from tk.functional import _keys
from tk.functional._call import FLOATS, Config, needs, one_device, run, taken
from tk.generated import random

__all__ = ["dropout", "dropout_add", "rand", "randint", "randn"]

Seed = int | Tensor | None
Device = torch.device | str | int | None


@needs("dropout")
def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    seed: Seed = None,
    offset: int | None = None,
    config: Config = None,
) -> Tensor:
    """``x / (1 - p)``, and 0 with probability ``p``, as ``torch.nn.functional.dropout``; a NaN that is dropped is 0.
    https://jmlr.org/papers/v15/srivastava14a.html

    No mask is kept: the gradient draws again what the forward drew.

    Args:
        x: any shape, bfloat16, float16 or float32; float64 is ATen's, but for strict mode on CUDA.
        p: 0 to 1.
        training: False returns x.
        seed: an int of 64 bits, or a 0-d int64 tensor on the device of x, which a captured CUDA graph reads at every
            replay. Without it one is drawn on the device from torch's generator, so that torch.manual_seed fixes it and
            every replay has another.
        offset: of the first element in the seed's sequence; by default 0. The numbers of two calls with one seed
            overlap, unless their offsets are at least x.numel() apart.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: a ``p`` that is not 0 to 1. TypeError: a seed or an offset that is no int, nor a tensor as above.
        tk.UnsupportedError: another dtype, on CUDA.
    """
    is_taken = taken("dropout", x=x)
    if not _drops("dropout", p, training):
        return x
    key, first = _seed("dropout", seed, x.device), _offset("dropout", offset)
    if not is_taken:
        return random.Draws(key, first).dropout(x, p)
    return run("dropout", x, key, float(p), first, config=config)


@needs("dropout", "dropout_add")
def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    seed: Seed = None,
    offset: int | None = None,
    config: Config = None,
) -> Tensor:
    """``dropout(x, p) + residual``, of one shape (ValueError). Other arguments and errors as of
    :func:`dropout`."""
    is_taken = taken("dropout_add", x=x, residual=residual)
    if residual is None:
        raise TypeError("tk.dropout_add: residual must be a Tensor, is None")
    if x.shape != residual.shape:
        raise ValueError(
            f"tk.dropout_add: x and residual must have one shape, are {list(x.shape)} and {list(residual.shape)}"
        )
    one_device("dropout_add", x=x, residual=residual)
    if not _drops("dropout_add", p, training):
        return x + residual
    key, first = _seed("dropout_add", seed, x.device), _offset("dropout_add", offset)
    if not is_taken:
        return random.Draws(key, first).dropout(x, p) + residual
    return run("dropout_add", x, residual, key, float(p), first, config=config)


@needs("fill_uniform")
def rand(
    shape: Sequence[int],
    *,
    seed: Seed = None,
    offset: int | None = None,
    dtype: torch.dtype | None = None,
    device: Device = None,
    config: Config = None,
) -> Tensor:
    """Numbers from 0 to below 1, evenly spread, by Philox 4x32-10.

    Args:
        shape: of the result. Element i, counted row by row, is number offset + i of the seed's sequence.
        seed, offset: as of :func:`dropout`.
        dtype: by default torch's; 16 bits are numbers of their own, not float32 ones rounded.
        device: by default torch's.

    Raises:
        TypeError: a shape that is no tuple of ints, a dtype that is none. ValueError: a negative size, a dtype of
            integers.
    """
    return _filled("rand", "fill_uniform", shape, seed, offset, dtype, device, config)


@needs("fill_normal")
def randn(
    shape: Sequence[int],
    *,
    seed: Seed = None,
    offset: int | None = None,
    dtype: torch.dtype | None = None,
    device: Device = None,
    config: Config = None,
) -> Tensor:
    """Numbers of mean 0 and deviation 1, by Box and Muller's method of two that :func:`rand` has. Between devices they
    differ in the last places of a logarithm and a cosine. Arguments and errors as of :func:`rand`."""
    return _filled("randn", "fill_normal", shape, seed, offset, dtype, device, config)


def _filled(function: str, op: str, shape: Sequence[int], seed: Seed, offset: int | None, dtype: torch.dtype | None,
            device: Device, config: Config) -> Tensor:  # fmt: skip
    sizes, like = _sizes(function, shape), torch.empty(0, dtype=dtype, device=device)
    if not like.is_floating_point():
        raise ValueError(f"tk.{function}: dtype is {like.dtype}, must be a floating-point one; tk.randint has integers")
    key, first = _seed(function, seed, like.device), _offset(function, offset)
    if like.dtype not in FLOATS:
        if like.device.type != "cpu":
            raise errors.UnsupportedError(
                f"tk.{function}: {like.dtype} is there on the CPU only, out is on {like.device}"
            )
        draws = random.Draws(key, first)
        return draws.uniform(sizes, like.dtype) if function == "rand" else draws.normal(sizes, like.dtype)
    out = key.new_empty(sizes, dtype=like.dtype)  # in vmap with a seed for each of a batch, a tensor for each
    run(op, out, key, first, config=config)
    return out


@needs("fill_integers")
def randint(
    low: int,
    high: int,
    shape: Sequence[int],
    *,
    seed: Seed = None,
    offset: int | None = None,
    dtype: torch.dtype = torch.int64,
    device: Device = None,
    config: Config = None,
) -> Tensor:
    """Integers, ``low <= x < high``: of the range, which may be up to 2⁶³ - 1, the share that 64 random bits are.

    Args:
        dtype: int64; any other is converted to.

    Other arguments and errors as of :func:`rand`; ValueError for a range that is empty or larger.
    """
    low, high = whole("randint", "low", low), whole("randint", "high", high)
    if not 0 < high - low < 2**63:
        raise ValueError(f"tk.randint: low is {low} and high {high}; high must be larger, by less than 2**63")
    sizes, like = _sizes("randint", shape), torch.empty(0, dtype=torch.int64, device=device)
    key, first = _seed("randint", seed, like.device), _offset("randint", offset)
    out = key.new_empty(sizes)
    run("fill_integers", out, key, low, high, first, config=config)
    return out.to(dtype)


# --- Arguments ---


def _sizes(function: str, shape: Sequence[int]) -> tuple[int, ...]:
    sizes = shape_of(function, "shape", shape)
    if any(type(size) is int and size < 0 for size in sizes):
        raise ValueError(f"tk.{function}: shape is {list(sizes)}, must have no negative size")
    return sizes


def _drops(function: str, p: float, training: bool) -> bool:
    if not 0 <= number(function, "p", p) <= 1:
        raise ValueError(f"tk.{function}: p is {p}, must be 0 to 1")
    return flag(function, "training", training) and p > 0


def _seed(function: str, seed: Seed, device: torch.device) -> Tensor:
    """[], int64, on the device."""
    if seed is None:
        return _keys.draw(device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != device:
            raise ValueError(
                f"tk.{function}: a seed that is a tensor must be int64, of one element, on {device}; it is "
                f"{seed.dtype}, {list(seed.shape)}, on {seed.device}"
            )
        return seed.reshape(())
    if not -(2**63) <= whole(function, "seed", seed) < 2**64:
        raise ValueError(f"tk.{function}: seed is {seed}, must have 64 bits")
    return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)


def _offset(function: str, offset: int | None) -> int:
    if offset is not None and not 0 <= whole(function, "offset", offset) < 2**62:
        raise ValueError(f"tk.{function}: offset is {offset}, must be 0 to 2**62 - 1")
    return offset or 0
