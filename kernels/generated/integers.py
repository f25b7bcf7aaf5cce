"""Reductions and sums of integers along the last dimension.

One op serves several functions and dtypes of tk.functional. A bool or a uint8 comes as the int8 with the same bits.
Where orders matter each element is turned over by an exclusive or with `flip`, which makes the smallest the largest
(-1), or what the sign bit says of an unsigned one (-128; 127 of both): no integer has an opposite too large for its
dtype, as the least one has by its sign.
"""

from tk.generated import op


@op(x="I[..., N]", mask="int", I=("i64", "i32", "i16", "i8"))
def row_sum_int(x, mask):
    """The sum modulo 2^64, of the elements' bits in mask: 255 for the bytes of unsigned ones, else -1."""
    return (x.long() & mask).sum(-1)


@op(x="I[..., N]", flip="int", I=("i64", "i32", "i16", "i8"))
def row_extreme_int(x, flip):
    """The largest x ^ flip, turned back."""
    return (x ^ flip).amax(-1) ^ flip


@op(x="I[..., N]", flip="int", I=("i64", "i32"))
def row_place_int(x, flip):
    """The first index of the largest x ^ flip."""
    return (x ^ flip).argmax(-1)


@op(x="i64[..., N]")
def cumsum_int(x):
    return x.cumsum(-1)
