"""Copies of a convolution's operands, in which channels are together: where they pay, they are made first.

op.py      what the copies' ops, plans and families have in common
blocks.py  of several groups' weights: one weight, with zeros between the groups
layout.py  of images whose channels are apart in memory
unfold.py  of images of few channels: the taps of a line are channels too
"""
