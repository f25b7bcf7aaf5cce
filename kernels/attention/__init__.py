"""Attention with the user's own score and mask modifications. See docs/attention-kernels.md.

problem.py          what a call brings: arguments, checks, outputs; the records that all kernels share
bundles.py          what kernels take and pass on as one parameter: strides, block lists, mods
walk.py             which tiles of keys a tile of queries meets (or the other way round): block lists or a band
operands.py         rows of query, key and value: strides, pages, head sizes that are no power of two
softmax.py          scores with the holes for the mods, one step of online softmax, the end of a row
forward.py          the plain kernel, for every GPU
decode.py           few query rows: split over keys, a second launch puts the parts together
backward.py         gradients of query, key, value, sinks and captured tensors
hopper_forward.py   the same forward in Gluon: TMA, a producer warp, two consumer warp groups
hopper_backward.py  the gradients in Gluon; hopper_backward_plans.py: when they run
hopper_tiles.py     which tiles there are, and how a producer tells of them, for both
"""
