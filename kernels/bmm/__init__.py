"""bmm and baddbmm: out[i] = activation(alpha * a[i] @ b[i] + beta * bias[i]).

family.py   FAMILY: all kernels, and which of them tests and PTX take
op.py       the op and its problem
pointer.py  plain Triton: every GPU and any strides, and everywhere what is small
tma.py      Hopper, where the operands suit TMA; tma_plans.py its plans and grid
"""
