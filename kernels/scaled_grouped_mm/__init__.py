"""The products of groups of rows (kernels/grouped_mm/) of float8 operands with scales.

op.py      the op and its problem; imports no Triton
family.py  FAMILY: a kernel in plain Triton for every GPU with float8; one for Hopper, where the operands suit TMA
"""
