"""Where an op of tk is not slower than what it replaces, as measured.

The figures are those of benchmarks/results (docs/benchmarks.md), against eager torch of the same call. An op, dtype or
architecture that nothing was measured of is not listed, and left to torch unless ``tk.use(only_faster=False)``. A line
per finding: to serve more, measure, and add a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tk.ops.product import allows_tf32

__all__ = ["Bands", "Rule", "attention", "convolution", "convolution_op", "describe", "find", "holds", "product"]
__all__ += ["serves_training"]

Bands = tuple[tuple[int, int | None], ...]  # from, to (None: no end), both included

ALL: Bands = ((1, None),)
NONE: Bands = ()


@dataclass(frozen=True)
class Rule:
    """size: what the bands are of. forward: where calls that need no gradient are served; training: where those are
    that do, by the time of forward and backward. why: the ratios, eager's time over tk's."""

    size: str
    forward: Bands
    training: Bands
    why: str


# Products: a line of one order, dtype and pitch ("aligned": rows of 128 bytes or a multiple).
_H200: Mapping[str, Rule] = {
    "linear 16-bit aligned": Rule(
        "rows",
        ((1, 64), (2049, None)),
        ((2049, None),),
        "≤ 16: 1.08, ≤ 64: 1.03, ≤ 2048: 0.96 to 1.00, above: 1.03 to 1.05",
    ),
    "linear 16-bit": Rule("rows", ((1, 16),), NONE, "≤ 16: 1.11, above: 0.77 to 0.94"),
    "linear tf32 aligned": Rule("rows", ALL, ((257, None),), "1.01 to 1.14"),
    "linear tf32": Rule("rows", ((1, 16), (257, None)), NONE, "≤ 16: 1.07, ≤ 64: 0.97, above: 1.01"),
    "mm 16-bit aligned": Rule(
        "rows", ((1, 64), (2049, None)), ((2049, None),), "≤ 64: 1.02, ≤ 2048: 0.97 to 1.00, above: 1.02 to 1.06"
    ),
    "mm 16-bit": Rule("rows", ((1, 16),), NONE, "≤ 16: 1.08, above: 0.75 to 0.94"),
    "mm tf32 aligned": Rule("rows", ((257, None),), ((257, None),), "≤ 256: 0.90 to 1.00, above: 1.01 to 1.15"),
    # Against cuDNN with benchmark on: networks' layers channels-last and contiguous, then random ones. Gradients: 0.95.
    "conv 16-bit": Rule("channels", ALL, NONE, "1.21 and 1.32, random 1.05 and 1.10"),
    "conv 16-bit groups": Rule("channels of a group", ((8, None),), NONE, "1.12 and 1.24, fewer: 0.79 and 1.23"),
    # Attention: what F.scaled_dot_product_attention takes of itself is cuDNN's.
    "sdpa 16-bit causal 128": Rule(
        "rows", ((1024, None),), NONE, "1.08 to 1.16; fewer rows 0.94; backward 0.46 to 0.96"
    ),
    "rms_norm": Rule("columns", ALL, ALL, "1.72, backward 1.48"),
    "layer_norm": Rule("columns", ALL, ALL, "2.01, backward 1.23"),
    "softmax": Rule("columns", ALL, ALL, "2.60, backward 2.02"),
    "log_softmax": Rule("columns", ((384, None),), ((384, None),), "2.22, at 235 columns 0.47, backward 1.03"),
    "gelu": Rule("columns", ALL, ALL, "1.27, backward 1.16"),
    "silu": Rule("columns", ALL, ALL, "1.02, backward 1.02"),
    "swiglu": Rule("columns", ALL, ALL, "1.54, backward 2.21"),
}
MEASURED: Mapping[str, Mapping[str, Rule]] = {"sm_90": _H200}

_16_BITS = (torch.bfloat16, torch.float16)


def find(arch: str, line: str) -> Rule | None:
    return MEASURED.get(arch, {}).get(line)


def serves_training(arch: str, op: str) -> bool:
    """Whether there is any call of an op that needs a gradient and is served."""
    rules = MEASURED.get(arch, {}).items()
    return any(rule.training for line, rule in rules if line.partition(" ")[0] == op)


def product(op: str, dtype: torch.dtype, *pitches: int) -> str:
    """The line of a product. pitches: elements from row to row of its operands, or what stands for that."""
    if dtype not in _16_BITS and not allows_tf32():
        return f"{op} float32"
    kind, step = ("16-bit", 64) if dtype in _16_BITS else ("tf32", 32)
    return f"{op} {kind} aligned" if all(p % step == 0 for p in pitches) else f"{op} {kind}"


def convolution_op(spatial: int) -> str:
    return "conv" if spatial > 1 else "conv1d"


def convolution(spatial: int, dtype: torch.dtype, groups: int) -> str:
    """The line of a convolution in so many dimensions; images and videos are what was measured."""
    op = convolution_op(spatial)
    return f"{op} {'16-bit' if dtype in _16_BITS else 'float32'}{'' if groups == 1 else ' groups'}"


def attention(dtype: torch.dtype, kind: str, head_dim: int) -> str:
    """The line of scaled_dot_product_attention. kind: "full", "causal", or its mask's: "bool", "bias"."""
    return f"sdpa {'16-bit' if dtype in _16_BITS else 'float32'} {kind} {head_dim}"


def holds(rule: Rule, needs_gradient: bool, size: Any) -> bool:
    """Whether a call of this size is served. While a program is exported a size may be unknown; then it is served where
    all that it can be is, since a program has no guards."""
    bands = rule.training if needs_gradient else rule.forward
    if bands is ALL or bands == ALL:
        return True
    if torch.compiler.is_exporting():
        return _holds_for_certain(bands, size)
    return any(low <= size and (high is None or size <= high) for low, high in bands)


def _holds_for_certain(bands: Bands, size: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return any(known(size >= low) and (high is None or known(size <= high)) for low, high in bands)


def describe(rule: Rule) -> str:
    """For which calls it holds; "" for all."""
    forward, training = _bands(rule.size, rule.forward), _bands(rule.size, rule.training)
    if forward == training:
        return forward
    return "; ".join(filter(None, [forward, f"with gradients {training or 'all'}"]))


def _bands(size: str, bands: Bands) -> str:
    if bands == ALL:
        return ""
    parts = [f"≥ {low}" if high is None else f"≤ {high}" if low <= 1 else f"{low} to {high}" for low, high in bands]
    return f"{size} {' or '.join(parts)}" if parts else "never"
