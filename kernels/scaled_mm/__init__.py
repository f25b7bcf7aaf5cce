"""scaled_mm: out = activation(scale_a * scale_b * (a @ b) + bias) of float8 operands.

family.py           FAMILY: all kernels, and which of them tests and PTX take
op.py               the op and its problem
pointer.py          plain Triton: every GPU with float8, any strides and sizes; what it shares with scaled_grouped_mm
tma.py              Hopper, where the operands suit TMA: descriptors from the host, or made on the device
tma_plans.py        its plans and grid
cluster_split_k.py  Hopper, few rows
"""
