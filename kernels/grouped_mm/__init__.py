"""grouped_mm: a product for each group of a ragged dimension, whose ends are on the device.

family.py   FAMILIES: of ragged rows (grouped_mm) and of a ragged inner size (grouped_mm_inner)
op.py       the ops and their problems
pointer.py  plain Triton: every GPU and any strides
tma.py      Hopper, ragged rows, where the operands suit TMA
"""
