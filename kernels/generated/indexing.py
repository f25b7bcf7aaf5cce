"""Look-up of rows, and what is added up at them; searches."""

import torch
import torch.nn.functional as F

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(weight="T[V, D]", index="I[...]", padding_idx="int", T=FLOATS, I=("i64", "i32"))
def embedding(weight, index, padding_idx):
    """weight[index]. The gradient, which tk.generated.gradients has, leaves out padding_idx; -1 is none."""
    return F.embedding(index, weight)


@op(rows="fp32[..., D]", index="i64[...]", weight="fp32[V, D]", padding_idx="int")
def embedding_backward(rows, index, weight, padding_idx):
    """The gradient of embedding for weight, whose shape alone is read: the rows added up at index. In 16 bits ATen's,
    which sorts, moves fewer bytes: the sums would be kept in fp32 first."""
    return torch.ops.aten.embedding_dense_backward(rows, index, weight.shape[0], padding_idx, False)


@op(x="T[...]", boundaries="T[K]", right="bool", T=("fp32", "i64"))
def bucketize(x, boundaries, right):
    """How many boundaries, which are sorted, come before each x; with right those equal to it too."""
    return torch.bucketize(x, boundaries, right=right)


@op(sequence="T[..., K]", x="T[..., N]", right="bool", T=("fp32", "i64"))
def searchsorted(sequence, x, right):
    """The same in a sorted row of its own for each row of x."""
    return torch.searchsorted(sequence, x, right=right)
