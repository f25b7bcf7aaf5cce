"""Rules that say where an op of tk was measured to be no slower than what it replaces.

The figures are those of benchmarks/results (docs/benchmarks.md), against eager torch of the same call. A kind of call,
a dtype or an architecture that nothing was measured of has no rule, and is left to torch unless
``tk.use(only_faster=False)``. The rules stand with the function that they are of (``functions/``): to serve more,
measure, and add a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ALL", "IF_LARGE", "NONE", "SIXTEEN_BITS", "Bands", "Rule", "Rules", "Speed", "memory_us", "tensor_core_us"]

IF_LARGE = "eagerly if large"  # a small call is tk's in a CUDA graph alone

Bands = tuple[tuple[int, int | None], ...]  # from, to (None: no end), both included

ALL: Bands = ((1, None),)
NONE: Bands = ()

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rule:
    """size: what the bands are of. forward: where calls that need no gradient are served; training: where those are
    that do, by the time of forward and backward. why: the ratios, eager's time over tk's."""

    size: str
    forward: Bands
    training: Bands
    why: str

    def holds(self, needs_gradient: bool, size: Any) -> bool:
        """Whether a call of this size is served. While a program is exported a size may be unknown; then it is served
        where all that it can be is, since a program has no guards."""
        bands = self.training if needs_gradient else self.forward
        if bands is ALL or bands == ALL:
            return True
        if torch.compiler.is_exporting():
            return _holds_for_certain(bands, size)
        return any(low <= size and (high is None or size <= high) for low, high in bands)

    def describe(self) -> str:
        """Says for which calls it holds; "" for all."""
        forward, training = _bands(self.size, self.forward), _bands(self.size, self.training)
        if forward == training:
            return forward
        return "; ".join(filter(None, [forward, f"with gradients {training or 'all'}"]))


Rules = Mapping[str, Mapping[str, Rule]]  # by architecture, and there by the kind of call


# --- What a call takes at least on an H200, microseconds ---


def memory_us(*args: Any, **kwargs: Any) -> float:
    """All tensors are read, and a result as large as the largest is written."""
    sizes = [x.numel() * x.element_size() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return (sum(sizes) + max(sizes, default=0)) / 4.0e6


def tensor_core_us(multiplications: float) -> float:
    """The least time of 16-bit products; others take longer."""
    return multiplications / 4.0e8


def _of_any_module(module: nn.Module, dtype: torch.dtype) -> str:
    return ""


@dataclass(frozen=True)
class Speed:
    """What was measured of a function.

    rules: of the kind "" where all calls are of one. kind_of: the kind of the
    calls that a module makes, with parameters of this dtype. assumes: what `kind_of` takes for granted, since no module
    says it. under_autocast: whether autocast decides what is computed in, as of products.
    least_us: how long a call must take the device, without and with the backward pass, to hide what tk takes the host
    longer than torch does. That was 30 and 290 µs on a busy host of an H200, and the calls around it have to be longer
    than the host as well. device_us: what the GPU takes at least for a call without the backward pass, with torch's
    arguments.
    """

    rules: Rules = field(default_factory=dict)
    kind_of: Callable[[nn.Module, torch.dtype], str] = _of_any_module
    assumes: str = ""
    under_autocast: bool = False
    least_us: tuple[float, float] = (100.0, 600.0)
    device_us: Callable[..., float] = memory_us

    def find(self, arch: str, module: nn.Module, dtype: torch.dtype) -> tuple[Rule | None, str]:
        """The rule of a module's calls, and the condition under which it is that one: weights in float32 are multiplied
        in 16 bits under autocast."""
        rules = self.rules.get(arch, {})
        rule = rules.get(self.kind_of(module, dtype))
        if rule is None and dtype is torch.float32 and self.under_autocast:
            return rules.get(self.kind_of(module, torch.bfloat16)), "under autocast alone"
        return rule, self.assumes


def _holds_for_certain(bands: Bands, size: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return any(known(size >= low) and (high is None or known(size <= high)) for low, high in bands)


def _bands(size: str, bands: Bands) -> str:
    if bands == ALL:
        return ""
    parts = [f"≥ {low}" if high is None else f"≤ {high}" if low <= 1 else f"{low} to {high}" for low, high in bands]
    return f"{size} {' or '.join(parts)}" if parts else "never"
