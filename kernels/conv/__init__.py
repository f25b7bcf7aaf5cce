"""Convolutions of one to three dimensions as implicit products (docs/conv.md).

    op.py         what the core sees of a convolution; imports no Triton
    geometry.py   bundles: sizes, strides, which convolution it is; device functions: which element of x a tap of an
                  output pixel reads
    arguments.py  what plans fill the bundles with
    tma_maps.py   what TMA sees of images and weights
    tma_tiles.py  what plans of Hopper's kernels have in common
    cost.py       predicted time
    forward/      out of x and the weight
    input_grad/   the gradient of the input: all places of a stride in one launch
    weight_grad/  the gradient of the weight
    copies/       what has its channels apart in memory, or few of them, is copied first where that pays

The gradient of the input is a convolution too, with the roles of the channels exchanged (csrc/ops/conv_launch.cpp).
"""
