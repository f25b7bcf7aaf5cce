"""Bundles of arguments that kernels of all products take. Pointers are no part of them: a batch, or a group, moves
those on."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Size(NamedTuple):
    """Of a product [M, K] x [K, N]; where operands trade places (swap-AB), of the product as it is then."""

    M: Any
    N: Any
    K: Any


class Strides(NamedTuple):
    """Of a [M, K] and b [K, N]."""

    am: Any
    ak: Any
    bk: Any
    bn: Any


class Epilogue(NamedTuple):
    """activation(alpha * acc + beta * bias): all but the bias itself. has_bias: 0 or 1."""

    stride_bias_m: Any
    stride_bias_n: Any
    alpha: Any
    beta: Any
    activation: Any
    has_bias: Any


class Scales(NamedTuple):
    """Of float8 operands: one for each row and each column of the product."""

    rows: Any
    cols: Any


class ScaledEpilogue(NamedTuple):
    """activation(scales * acc + bias): all but scales and bias. A stride of 0: one scale for all. The bias is one for
    each column of the op's result."""

    stride_scale_rows: Any
    stride_scale_cols: Any
    stride_bias: Any
    activation: Any
    has_bias: Any


@dataclass(frozen=True)
class PointerTile:
    """Of the kernels in plain Triton. EVEN_K: BLOCK_K divides what a program sums of K. GROUP_M: rows of tiles that are
    walked together."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN_K: bool
    ORDER: str
    PRECISION: str
    GROUP_M: int = 8
