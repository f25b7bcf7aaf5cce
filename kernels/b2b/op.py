"""The op of the core behind b2b_gemm: out = f(a @ b) @ c; a [M, K], b [K, P], c [P, N], out [M, N].

One op is for f by name, whose number is an argument; a user's function has an op of its own, whose captured numbers are
arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tk.aot.expr import Expr, Tensor, const, maximum, select, tensors
from tk.aot.spec import Bundle, Constraint, Int, Op, Output, Param, Point, Selector, require
from tk.kernels.attention.bundles import bundle
from tk.kernels.attention.problem import dtype_number

MOST = 256  # of K: a row of a stays on the chip whole
LAYOUTS = ("left", "right", "strided")  # row-major operands; column-major ones; anything
BUILTIN = "b2b_fused"


@dataclass(frozen=True)
class Problem:
    """numbers: what f reads besides its argument, (name, "float" or "int"). text: f as it was traced."""

    name: str
    dtypes: tuple[str, ...]
    numbers: tuple[tuple[str, str], ...]
    text: str = ""

    @cached_property
    def op(self) -> Op:
        a, b, c, out = tensors("a", "b", "c", "out")
        floats = tuple(name for name, kind in self.numbers if kind == "float")
        ints = ("transposed", *(name for name, kind in self.numbers if kind == "int"))
        params = [Param(n, "tensor", rank=2) for n in "abc"]
        params += [Param(n, "float") for n in floats] + [Param(n, "int") for n in ints]
        bare = Op(self.name, (a, b, c, out), ints, floats, {}, {}, (), params=tuple(params))
        M, N = a.size(0), c.size(1)
        op = replace(bare, locals=self._locals(a, c))
        is_transposed = op.int("transposed") != 0
        strides = (select(is_transposed, 1, maximum(N, 1)), select(is_transposed, maximum(M, 1), 1))
        return replace(
            op,
            dims=("M", "N", "K", "P"),
            selectors={"dtype": Selector(op.local("dtype"), len(self.dtypes))},
            outputs=(Output(a.dtype, (M, N), strides),),
            checks=tuple(self._checks(op, a, b, c)),
            meta=json.dumps(dict(doc="f(a @ b) @ c.", signature=dict.fromkeys("abc", "T[]"), graphs=[], backward=None,
                                 b2b=self.text), sort_keys=True),
        )  # fmt: skip

    def _locals(self, a: Tensor, c: Tensor) -> dict[str, Expr]:
        sizes = {"M": a.size(0), "N": c.size(1), "K": a.size(1), "P": c.size(0)}
        largest = const(0)
        for size in sizes.values():
            largest = maximum(largest, size)
        return sizes | {"dtype": dtype_number(a, self.dtypes), "largest": largest}

    def _checks(self, op: Op, a: Tensor, b: Tensor, c: Tensor) -> list[Constraint]:
        return [
            require(op.local("dtype") >= 0, f"a must be of dtype {' or '.join(self.dtypes)}"),
            require((b.dtype == a.dtype) & (c.dtype == a.dtype), "b and c must have the dtype of a"),
            require((b.size(0) == a.size(1)) & (b.size(1) == c.size(0)), "the inner sizes of a, b and c differ"),
            require(op.local("largest") < 2**31 - 2**16, "sizes must be < 2**31 - 65536"),
        ]

    def captured(self) -> Bundle:
        """What a printed f unpacks."""
        op = self.op
        numbers = {name: op.float(name) if kind == "float" else Int(op.int(name)) for name, kind in self.numbers}
        return bundle("Captures", numbers)


def suits(layout: str, operands: Sequence[Tensor]) -> tuple[Constraint, ...]:
    """That 16 bytes can be loaded at once, along columns or rows."""
    if layout == "strided":
        return ()
    along, across = (1, 0) if layout == "left" else (0, 1)
    found = []
    for t in operands:
        holds = (t.stride(along) == 1) & (t.stride(across) % 16 == 0) & (t.alignment >= 16) & (t.size(along) % 16 == 0)
        which = "rows" if layout == "left" else "columns"
        found.append(require(holds, f"{t.name} contiguous along {which} of a multiple of 16, on a 16-byte boundary"))
    return tuple(found)


def serves(problem: Problem, point: Point) -> dict[str, tuple[int, ...]]:
    return {"dtype": (problem.dtypes.index(point.dtype),)}
