"""Indirect reads."""

import torch.nn.functional as F

from tk.generated import op


@op(indices="i64[...]", weight="T[V, D]", T=("bf16", "fp16", "fp32"))
def embedding(indices, weight):
    """weight[indices]."""
    return F.embedding(indices, weight)
