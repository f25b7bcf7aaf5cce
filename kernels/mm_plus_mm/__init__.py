"""out = activation(a @ b + c @ d + bias), both products in one accumulator.

op.py      the op and its problem; imports no Triton
family.py  FAMILY: a kernel in plain Triton for every GPU and any strides; one for Hopper, where the operands suit TMA
"""
