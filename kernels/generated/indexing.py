"""Look-up of rows."""

import torch.nn.functional as F

from tk.generated import op

FLOATS = ("bf16", "fp16", "fp32")


@op(weight="T[V, D]", index="I[...]", padding_idx="int", T=FLOATS, I=("i64", "i32"))
def embedding(weight, index, padding_idx):
    """weight[index]. The gradient, which tk.generated.gradients has, leaves out padding_idx; -1 is none."""
    return F.embedding(index, weight)
