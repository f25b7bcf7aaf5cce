"""The families of attention: an op and its gradients' for each pair of mods in the wheel (pairs.py)."""

from tk.flex.codegen.family import families
from tk.kernels.attention.pairs import pairs

FAMILIES = [family for traced, wanted in pairs() for family in families(traced, wanted)]
