"""What kernels take together, each as one parameter: what a launch brings, and what kernels pass on among themselves.

Triton flattens a bundle, so the order of fields and parameters is that of a kernel's arguments. Addresses, sizes and
strides are bundles of their own for that reason: a kernel puts a tensor together as ``Rows(tensors.query,
strides.query)``.
"""

from collections import namedtuple
from collections.abc import Mapping
from typing import Any, NamedTuple

# --- What a launch brings ---


class Lists(NamedTuple):
    """The addresses of one side's block lists, of partial and of full blocks."""

    counts: Any
    indices: Any
    full_counts: Any
    full_indices: Any


class Strides(NamedTuple):
    """Of a [batch, heads, rows, head size] tensor, in elements. d: a constant 1 where rows are contiguous."""

    b: Any
    h: Any
    n: Any
    d: Any


class RowStrides(NamedTuple):
    """Of a [batch, heads, rows] tensor."""

    b: Any
    h: Any
    n: Any


class ListStrides(NamedTuple):
    """Of counts [B, H, rows of blocks] and indices [B, H, rows of blocks, blocks]. B and H are sizes: one or all, and 0
    where there is no list."""

    counts_b: Any
    counts_h: Any
    counts_n: Any
    indices_b: Any
    indices_h: Any
    indices_n: Any
    indices_i: Any
    B: Any
    H: Any


class BlockStrides(NamedTuple):
    partial: Any
    full: Any


class Mask(NamedTuple):
    """The sizes of a block mask's blocks; without a block mask, keys in [q - band_left, q + band_right] are walked.
    band_exact: the mask is this band."""

    q_block: Any
    kv_block: Any
    band_left: Any
    band_right: Any
    band_exact: Any


class Mods(NamedTuple):
    """The device functions of a pair of mods, or None, and what they read: captures, and for the gradients of captured
    tensors grads (gradients.py). PAIRS: as softmax.py has it; None where nothing is read so."""

    SCORE: Any
    MASK: Any
    SCORE_GRAD: Any
    captures: Any
    PAIRS: Any
    grads: Any


def bundle(name: str, fields: Mapping[str, Any]) -> Any:
    """A NamedTuple of these fields, which are known to a program alone."""
    return namedtuple(name, fields)(*fields.values())  # type: ignore[misc]


NOTHING = bundle("Nothing", {})


# --- What kernels pass on ---


class Rows(NamedTuple):
    """A [batch, heads, rows, head size] tensor, from an address on: all of it, or of a head."""

    base: Any
    strides: Any


class Pages(NamedTuple):
    """Where pages of keys and values are; without a page table a page is a batch entry."""

    table: Any
    stride_b: Any
    stride_p: Any
    size: Any
    has_pages: Any


class BlockList(NamedTuple):
    """One list of a block mask."""

    counts: Any
    indices: Any
    strides: Any


class Positions(NamedTuple):
    """What mods are told of a tile of scores: b a number, h a number or a column, q_idx and kv_idx along its axes."""

    b: Any
    h: Any
    q_idx: Any
    kv_idx: Any
