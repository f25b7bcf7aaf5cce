"""docs/functions.md: which dtypes each function takes on CUDA, found by calling it with tensors that are not there.

python tools/functions_table.py --write
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tk
from tk import functional
from tk.functional._call import NUMBERS

FILE = Path(__file__).parents[1] / "docs" / "functions.md"
HEAD = """# Functions and dtypes

Which dtypes the package's functions take on CUDA. **tk**: a kernel of its own (float64 and integers have one for each
class of shapes that needs no alignment). *ATen*: no kernel has it, so it is ATen's; in strict mode
(`tk.config.strict()`) it is a `tk.UnsupportedError`. Empty: refused with `tk.UnsupportedError`, or by torch itself
where torch has it not either. On the CPU all dtypes go that torch takes.

This table is made by `tools/functions_table.py`.

"""
FOOT = """
- Results are of ATen's dtypes: sums, products and their scans of integers and bool are int64 (modulo 2^64), `any` and
  `all` of uint8 are uint8, positions are int64.
- `dtype=` of sums, scans, norms and softmaxes converts the argument first, as in torch.
- float64 is worked out in float64, all other floats in float32. `softmax` and `log_softmax` of float64 are made of
  `logsumexp`.
- Integers of 16 bits and fewer are sorted as floats that hold them; those of 32 and 64 bits, and float64, by two or
  three sorts of parts of them. `topk` of the latter sorts all.
- Two dtypes of a search are compared in torch's common one. Norms of 16 bits take weights in float32.
- `mean`, `var`, `std` and norms of integers are refused, as in torch: give `dtype`, or convert.
- `rope` takes bfloat16, float16 and float32, and tables in float32 or its own dtype.
- Refused everywhere: uint16, uint32, uint64, complex numbers and fp8.
"""

# How a function is called with an x of 3 rows and 8 columns, where not by x and the last dimension.
CALLS: Mapping[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    **dict.fromkeys(("gelu", "silu", "swiglu", "geglu", "quantize_fp8", "any", "all"), lambda f, x: f(x)),
    **dict.fromkeys(("swiglu", "geglu"), lambda f, x: f(x, x)),
    **dict.fromkeys(("vector_norm", "norm"), lambda f, x: f(x, 2, 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), lambda f, x: f(x, (8,), x.new_empty(8))),
    **dict.fromkeys(("add_layer_norm", "add_rms_norm"), lambda f, x: f(x, x)),
    **dict.fromkeys(("rand", "randn"), lambda f, x: f((3,), seed=x.new_empty((), dtype=torch.int64), offset=0,
                                                      dtype=x.dtype, device=x.device)),
    "randint": lambda f, x: f(0, 5, (3,), seed=x.new_empty((), dtype=torch.int64), offset=0, dtype=x.dtype,
                              device=x.device),
    "group_norm": lambda f, x: f(x, 2),
    "cross_entropy": lambda f, x: f(x, x.new_empty(3, dtype=torch.int64)),
    "embedding": lambda f, x: f(x.new_empty(3, dtype=torch.int64), x),
    "dropout": lambda f, x: f(x, 0.5, seed=x.new_empty((), dtype=torch.int64), offset=0),
    "dropout_add": lambda f, x: f(x, x, 0.5, seed=x.new_empty((), dtype=torch.int64), offset=0),
    "topk": lambda f, x: f(x, 2),
    "bucketize": lambda f, x: f(x, x.new_empty(4)),
    "searchsorted": lambda f, x: f(x, x),
    "adamw_": lambda f, x: f([x], *([x.clone()] for _ in range(3)), [x.new_empty((), dtype=torch.float32)], lr=0.1),
}  # fmt: skip


def way(name: str, dtype: torch.dtype) -> str:
    """By which a function takes a dtype: "tk", "ATen" or ""."""
    function = getattr(tk, name)
    call = CALLS.get(name, lambda f, x: f(x, 1))
    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=dtype, device="cuda")
        for strict, found in ((True, "tk"), (False, "ATen")):
            try:
                with tk.config.strict(strict):
                    call(function, x)
            except (tk.UnsupportedError, RuntimeError, ValueError, TypeError, NotImplementedError):
                continue
            return found
    return ""


def table() -> str:
    names = sorted(functional.FUNCTIONS.keys() - {"rope"})  # which slices its tables, and torch asks for a device then
    heads = ["function", *(str(d).removeprefix("torch.") for d in NUMBERS)]
    marks = {"tk": "**tk**", "ATen": "*ATen*", "": ""}
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name in names:
        lines.append(f"| `{name}` | " + " | ".join(marks[way(name, d)] for d in NUMBERS) + " |")
    return "\n".join(lines) + "\n"


def text() -> str:
    return HEAD + table() + FOOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/functions.md instead of printing it")
    if parser.parse_args().write:
        FILE.write_text(text())
    else:
        print(text())


if __name__ == "__main__":
    main()
