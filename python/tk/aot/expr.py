"""Expressions as kernel files import them. They are also read at run time, so they live in :mod:`tk.expr`."""

from tk.expr import *  # noqa: F403
from tk.expr import DEVICE_FIELDS, MAX_STACK, OPCODES, __all__  # noqa: F401
