"""Convolutions themselves, whose op is that of kernels/conv/op.py.

family.py        FAMILY: all kernels, and which of them tests and PTX take
pointer.py       plain Triton, for every GPU, layout and number of groups
tma.py           for Hopper, of the parts in kernels/hopper/; tma_plans.py: its plans and grid
depthwise.py     groups of one channel: no product; depthwise_slide.py: with outputs beside each other in a thread
contained.py     where groups are multiplied as one: what another group's NaN or infinity made NaN, worked out again
contained_op.py  the same as an op of its own
"""
