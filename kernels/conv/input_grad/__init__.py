"""The gradient of a convolution's input: all places of a stride in one launch, of the forward pass's own weight.

op.py         what the core sees of it; imports no Triton
tma.py        for Hopper; tma_plans.py: its plans and grid

Without it, and for what it does not take, the gradient is a convolution for each remainder of the stride, of a copy of
the weight (csrc/ops/conv_launch.cpp).
"""
