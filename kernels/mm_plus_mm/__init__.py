"""mm_plus_mm: out = activation(a @ b + c @ d + bias), both products in one accumulator.

family.py   FAMILY: all kernels, and which of them tests and PTX take
op.py       the op and its problem
pointer.py  plain Triton: every GPU and any strides
tma.py      Hopper, where the operands suit TMA
"""
