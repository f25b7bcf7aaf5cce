"""Look-up of rows, and what is added up or put at them; elements taken and added at indices; searches.

Elements at indices come in two ops each: along the last dimension, and along the last but one, where those of the last
stay beside each other in memory. tk.functional.indexing puts every call into one of the two, and the indices of
index_put into one. Their gradients are each other: tk.generated.gradients has them.
"""

import torch
import torch.nn.functional as F

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")
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


def _wide(x):
    """16-bit floats in fp32, so that sums are rounded once."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@op(x="T[..., K]", index="I[..., N]", T=NUMBERS, I=INDEX)
def gather(x, index):
    return x.gather(-1, index)


@op(x="T[..., K, B]", index="I[..., N, B]", T=NUMBERS, I=INDEX)
def gather_columns(x, index):
    return x.gather(-2, index)


@op(x="T[..., K]", index="I[..., N]", source="T[..., N]", T=SUMS, I=INDEX)
def scatter_add(x, index, source):
    return _wide(x).scatter_add(-1, index, _wide(source)).to(x.dtype)


@op(x="T[..., K, B]", index="I[..., N, B]", source="T[..., N, B]", T=SUMS, I=INDEX)
def scatter_add_columns(x, index, source):
    return _wide(x).scatter_add(-2, index, _wide(source)).to(x.dtype)


@op(x="T[..., K, B]", index="I[N]", source="T[..., N, B]", T=SUMS, I=INDEX)
def index_add(x, index, source):
    return _wide(x).index_add(-2, index, _wide(source)).to(x.dtype)


@op(x="T[..., K]", last="I[K]", index="I[N]", source="T[..., N]", T=NUMBERS, I=INDEX)
def put(x, last, index, source):
    """In the place of each element of x the source's at `last`, or x's own where that is -1. The index, of which `last`
    is last_of, is for the gradient."""
    return torch.where(last < 0, x, source.index_select(-1, last.clamp(min=0)))


@op(x="T[..., K, B]", last="I[K]", index="I[N]", source="T[..., N, B]", T=NUMBERS, I=INDEX)
def put_rows(x, last, index, source):
    """The same of rows."""
    rows = source.index_select(-2, last.clamp(min=0))
    return torch.where((last < 0).unsqueeze(-1), x, rows)


@op(index="i64[N]", like="i64[K]")
def last_of(index, like):
    """For each of as many places as like has, whose shape alone is read, the last n with index[n] there, or -1. It is
    the largest of them, so that no order of writes is left to chance."""
    none, places = like.new_full((like.shape[0],), -1), torch.arange(index.shape[0], device=index.device)
    return none.scatter_reduce(0, index, places, "amax")


@op(at="i64[...]", index="i64[...]", size="int")
def flat_index(at, index, size):
    """at · size + index, an index below 0 counted from the end: one index for two dimensions. It is -1, which is out of
    bounds, where index is out of its own, or where `at` is below 0."""
    wrapped = torch.where(index < 0, index + size, index)
    is_none = (at < 0) | (wrapped < 0) | (wrapped >= size)
    return torch.where(is_none, -1, at * size + wrapped)


@op(x="T[...]", boundaries="T[K]", right="bool", T=("fp32", "i64"))
def bucketize(x, boundaries, right):
    """How many boundaries, which are sorted, come before each x; with right those equal to it too."""
    return torch.bucketize(x, boundaries, right=right)


@op(sequence="T[..., K]", x="T[..., N]", right="bool", T=("fp32", "i64"))
def searchsorted(sequence, x, right):
    """The same in a sorted row of its own for each row of x."""
    return torch.searchsorted(sequence, x, right=right)
