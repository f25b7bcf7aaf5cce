"""torch's samples of calls of its own functions.

Their module forbids its process to set the backends' flags outside of ``with``, which other tests and models do."""

import torch
from torch.testing._internal.common_methods_invocations import op_db

torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

__all__ = ["op_db"]
