"""The gradient of a convolution's weight: a sum over all pixels of the result, one product for each tap.

op.py         what the core sees of it; imports no Triton
pointer.py    plain Triton, for every GPU, layout and number of groups
tma.py        for Hopper; tma_plans.py: its plans and grid
depthwise.py  groups of one channel; depthwise_slide.py: with the taps of a line at once
reduce.py     the pixels are split over several programs; what they leave is added up, always in the same order
"""
