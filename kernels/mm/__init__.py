"""mm, addmm and linear: out = activation(alpha * a @ b + beta * bias).

    family.py           FAMILY: all kernels, and which of them tests and PTX take
    op.py               the op and its problem
    pointer.py          plain Triton, every product on every GPU; split_k.py where there are few tiles
    gemv.py             a few rows without tensor cores
    tma.py              Hopper, where the operands suit TMA: persistent and stream-K; tma_plans.py its plans and grid
    cluster_split_k.py  Hopper, few rows: K split over the blocks of a cluster

Nothing is imported here: op.py can be read without Triton, which is how ``tk tune`` names what it measured.
"""
