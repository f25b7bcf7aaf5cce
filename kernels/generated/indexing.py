"""Look-up of rows, and what is added up or put at them; elements taken and added at indices; searches.

Elements at indices come in two ops each: along the last dimension, and along the last but one, where those of the last
stay beside each other in memory. tk.functional.indexing puts every call into one of the two, and the indices of
index_put into one. Their gradients are each other: tk.generated.gradients has them.
"""

import torch
import torch.nn.functional as F

from tk.generated import op
from tk.kernels.generated import FLOATS

NUMBERS = (*FLOATS, "fp64", "i64", "i32", "i16", "i8")
SUMS = (*FLOATS, "fp64", "i64")  # of shorter integers they are those of i64, modulo
INDEX = ("i64",)


@op(weight="T[V, D]", index="I[...]", padding_idx="int", T=FLOATS, I=("i64", "i32"))
def embedding(weight, index, padding_idx):
    """weight[index]. The gradient, which tk.generated.gradients has, leaves out padding_idx; -1 is none."""
    return F.embedding(index, weight)


@op(rows="fp32[..., D]", index="i64[...]", weight="fp32[V, D]", padding_idx="int")
def embedding_backward(rows, index, weight, padding_idx):
    """The gradient of embedding for weight, whose shape alone is read: the rows added up at index. In 16 bits ATen's,
    which sorts, moves fewer bytes: the sums would be kept in fp32 first."""
    return torch.ops.aten.embedding_dense_backward(rows, index, weight.shape[0], padding_idx, False)


@op(x="T[..., K]", index="I[..., N]", T=NUMBERS, I=INDEX)
def gather(x, index):
    return x.gather(-1, index)


@op(x="T[..., K, B]", index="I[..., N, B]", T=NUMBERS, I=INDEX)
def gather_columns(x, index):
    return x.gather(-2, index)


@op(x="T[..., K]", index="I[..., N]", source="T[..., N]", T=SUMS, I=INDEX)
def scatter_add(x, index, source):
    """scatter_add, of 16 bits in fp32 but for few additions a place: tk.codegen.ways, "rounded"."""
    return x.scatter_add(-1, index, source)


@op(x="T[..., K, B]", index="I[..., N, B]", source="T[..., N, B]", T=SUMS, I=INDEX)
def scatter_add_columns(x, index, source):
    return x.scatter_add(-2, index, source)


@op(x="T[..., K, B]", index="I[N]", source="T[..., N, B]", T=SUMS, I=INDEX)
def index_add(x, index, source):
    return x.index_add(-2, index, source)


@op(x="T[..., K]", index="I[N]", source="T[..., N]", T=NUMBERS, I=INDEX)
def put(x, index, source):
    """x with the source's elements at index, which counts from the end where it is below 0. Of several for one place
    the last stays, in any mode: tk.codegen.ways.IN_ORDER."""
    return torch.ops.aten.index_put(x, [*[None] * (x.dim() - 1), index], source)


@op(x="T[..., K, B]", index="I[N]", source="T[..., N, B]", T=NUMBERS, I=INDEX)
def put_rows(x, index, source):
    """The same of rows."""
    return torch.ops.aten.index_put(x, [*[None] * (x.dim() - 2), index], source)


@op(at="i64[...]", index="i64[...]", rows="int", size="int")
def flat_index(at, index, rows, size):
    """at · size + index, both counted from the end where they are below 0: one index for two dimensions, of `rows` and
    `size`. Where one of them is out of bounds, it is rows · size, which is so too."""
    row = torch.where(at < 0, at + rows, at)
    column = torch.where(index < 0, index + size, index)
    is_none = (row < 0) | (row >= rows) | (column < 0) | (column >= size)
    return torch.where(is_none, rows * size, row * size + column)


@op(x="T[...]", boundaries="T[K]", right="bool", T=("fp32", "i64"))
def bucketize(x, boundaries, right):
    """How many boundaries, which are sorted, come before each x; with right those equal to it too."""
    return torch.bucketize(x, boundaries, right=right)


@op(sequence="T[..., K]", x="T[..., N]", right="bool", T=("fp32", "i64"))
def searchsorted(sequence, x, right):
    """The same in a sorted row of its own for each row of x."""
    return torch.searchsorted(sequence, x, right=right)
