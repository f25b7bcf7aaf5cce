"""The functions that :func:`tk.use` replaces: a record for each, in the file of its family."""

from __future__ import annotations

from tk.dropin.functions import activations, attention, convolutions, norms, products, softmaxes, tables
from tk.dropin.replacement import Function, Replacement, StandIn
from tk.dropin.target import Target

__all__ = ["REPLACEMENTS", "stand_ins"]

_FAMILIES = (products, convolutions, norms, activations, softmaxes, tables, attention)
REPLACEMENTS = tuple(r for family in _FAMILIES for r in vars(family).values() if isinstance(r, Replacement))


def stand_ins(target: Target) -> dict[Function, StandIn]:
    """All stand-ins, by the function that they stand for. Left out are those whose ops are in no loaded pack, and
    functions that are not torch's own at this time."""
    found = (s for replacement in REPLACEMENTS if replacement.is_there() for s in replacement.stand_ins(target))
    return {stand_in.original: stand_in for stand_in in found}
