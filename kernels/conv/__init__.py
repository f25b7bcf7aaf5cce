"""Convolutions of one to three dimensions as implicit products (docs/conv.md).

    op.py           what the core sees of a convolution; imports no Triton
    geometry.py     bundles: sizes, strides, which convolution it is; device functions: which element of x a tap of an
                    output pixel reads
    arguments.py    what plans fill the bundles with
    pointer.py      plain Triton, for every GPU, layout and number of groups
    tma.py          for Hopper, of the parts in kernels/hopper/; tma_plans.py: its plans and grid
    depthwise.py    groups of one channel: no product; depthwise_slide.py: with outputs beside each other in a thread
    contained.py    where groups are multiplied as one: what another group's NaN or infinity made NaN, worked out again
    cost.py         predicted time

What has its channels apart in memory, or few of them, is copied first where that pays: kernels/conv_layout.py and
conv_unfold.py. The gradient of the input is a convolution too, with the roles of the channels exchanged
(csrc/ops/conv_launch.cpp). The gradient of the weight has a family of its own: kernels/conv_weight_grad/.
"""
