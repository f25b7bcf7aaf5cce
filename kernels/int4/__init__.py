"""int4_mm and uint4x2_mixed_mm: out = activation(a @ weight + bias), whose weight is packed two values to a byte.

    family.py      FAMILIES: all kernels, and which of them tests and PTX take
    op.py          the ops of the core and their problem
    unpack.py      the device functions that turn words and bytes into weights
    gemv.py        up to four rows, without tensor cores
    tile.py        more rows: the weight's tile is the left operand of tensor cores; whole, and split over K
    general.py     every layout, every alignment
    dequantize.py  the weight itself, for so many rows that a product of its own is faster

Nothing is imported here: op.py can be read without Triton, which is how ``tk tune`` names what it measured.
"""
