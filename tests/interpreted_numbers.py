"""Conversions between floats in Triton's interpreter, as a GPU does them: rounded to nearest even.

The interpreter itself cuts off what does not fit into 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton.ir import ROUNDING_MODE
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}


def _convert_float(data: Any, source: Any, target: Any, rounding: Any, theirs: Any = interpreter._convert_float) -> Any:
    """The bits of the result."""
    if source not in _TORCH or target not in _TORCH or rounding == ROUNDING_MODE.RTZ:
        return theirs(data, source, target, rounding)
    bits = np.array(data).view(f"i{data.itemsize}")  # numpy has no bf16
    made = torch.from_numpy(bits).view(_TORCH[source]).to(_TORCH[target])
    of_torch, of_numpy = _BITS[made.element_size()]
    return made.view(of_torch).numpy().view(of_numpy)


interpreter._convert_float = _convert_float
