"""scaled_grouped_mm: the products of groups of rows (kernels/grouped_mm/) of float8 operands with scales.

family.py   FAMILY: all kernels, and which of them tests and PTX take
op.py       the op and its problem
pointer.py  plain Triton: every GPU with float8, any strides
tma.py      Hopper, where the operands suit TMA
"""
