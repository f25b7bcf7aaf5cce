"""Modules that stand in for torch.nn's."""

from tk.nn.int4_linear import Int4Linear

__all__ = ["Int4Linear"]
