"""A call of a generated op in Python: the same checks and outputs as the C++ kernel's, on real tensors and on fake ones
with symbolic sizes.

Checks and outputs speak of declared dimensions: the leading ones count as one, [1, 1, n, *declared], whose strides are
0, as csrc/ops/canonical.h has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tk import capi
from tk._dtypes import DTYPES
from tk.expr import DEVICE_FIELDS, Expr
from tk.generated.records import LEADING_DIMS, GeneratedOp, Param, Result

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
NUMBERS: Mapping[torch.dtype, int] = capi.DTYPES
BY_NUMBER: Mapping[int, torch.dtype] = {number: dtype for dtype, number in NUMBERS.items()}
MODE_BITS = 15


class Call:
    """The arguments of one call, `args` as the schema orders them, config and mode last.

    Raises ValueError for what the C++ kernel refuses too, with the same words."""

    def __init__(self, op: GeneratedOp, args: Sequence[Any]):
        self.op = op
        self.args = args
        pairs = list(zip(op.params, args, strict=False))
        self.tensors: list[Any] = [x for p, x in pairs if p.kind in ("tensor", "optional_tensor")]  # None: it is absent
        self.present: list[tuple[Param, Tensor]] = [
            (p, x) for p, x in zip(op.tensors, self.tensors, strict=True) if x is not None
        ]
        self.device = self.present[0][1].device
        self.ints = [x for p, x in pairs if p.kind in ("int", "bool")]
        self.config, self.mode = args[len(op.params) :]
        self._locals: dict[int, Any] = {}
        self._check_settings()
        self._check_tensors()
        self._check_values()

    # --- Checks ---

    def fail(self, message: str) -> None:
        raise ValueError(f"tk.{self.op.name}: {message}")

    def require(self, holds: Any, message: Callable[[], str]) -> None:
        """`holds` may be symbolic: then it is a guard, or checked when the graph runs."""
        torch._check_value(holds, lambda: f"tk.{self.op.name}: {message()}")

    def _check_settings(self) -> None:
        if not -1 <= self.config < 2**31:
            self.fail(f"config is {self.config}, must be -1 (choose) or the number of one")
        if not 0 <= self.mode <= MODE_BITS:
            self.fail(f"mode is {self.mode}, must be 0 to {MODE_BITS}")

    def _check_tensors(self) -> None:
        first = self.present[0][0]
        leading: tuple[Param, Sequence[Any]] | None = None
        for param, x in self.present:
            self._check_rank(param, x)
            if x.device != self.device:
                self.fail(
                    f"{first.name} is on {self.device}, {param.name} on {x.device}; all tensors must be on one device"
                )
            if not param.leading:
                continue
            sizes = x.shape[: x.dim() - param.rank]
            leading = leading or (param, sizes)
            self._check_leading(leading, (param, sizes))

    def _check_rank(self, param: Param, x: Tensor) -> None:
        if x.dim() == param.rank or (param.leading and x.dim() > param.rank):
            return
        dims = f"{param.rank}{' or more' if param.leading else ''} dimension{'' if param.rank == 1 else 's'}"
        self.fail(f"{param.name} must have {dims}, is {list(x.shape)}")

    def _check_leading(self, first: tuple[Param, Sequence[Any]], other: tuple[Param, Sequence[Any]]) -> None:
        (param, wanted), (other_param, sizes) = first, other

        def message() -> str:
            return (
                f"the leading dimensions of {param.name} and {other_param.name} must be the same, are {list(wanted)} "
                f"and {list(sizes)}"
            )

        if len(wanted) != len(sizes):
            raise ValueError(f"tk.{self.op.name}: {message()}")
        for a, b in zip(wanted, sizes, strict=True):
            self.require(a == b, message)

    def _check_values(self) -> None:
        for check in self.op.checks:
            holds = self.evaluate(check.holds)
            self.require(
                holds if isinstance(holds, bool | torch.SymBool) else holds != 0,
                lambda check=check: f"{self._left_out() or check.message}; {self._given()}",  # type: ignore[misc]
            )

    def _left_out(self) -> str | None:
        """Names a tensor that must be given and is None: a check that fails for it speaks of its dtype or sizes."""
        required = (
            p.name for p, x in zip(self.op.tensors, self.tensors, strict=True) if p.kind == "tensor" and x is None
        )
        name = next(required, None)
        return None if name is None else f"{name} must be a Tensor, is None"

    def _given(self) -> str:
        """What was given, in the words of csrc/ops/generated.cpp."""
        return ", ".join(f"{p.name} is {_described(x)}" for p, x in zip(self.op.tensors, self.tensors, strict=True))

    def check_written(self) -> None:
        """A tensor that is written shares memory with no other, not even as the same view: the op was traced with
        different tensors, so what it would do to one that is two of its arguments is not what the function does."""
        for i, (param, x) in enumerate(self.present):
            if not param.mutated:
                continue
            if overlaps_itself(x):
                self.fail(
                    f"elements of {param.name}, which is written, share memory: give each a place of its own (.clone())"
                )
            for j, (other, y) in enumerate(self.present):
                if j != i and _overlap(x, y):
                    self.fail(f"{param.name}, which is written, overlaps {other.name} in memory; clone one of them")

    # --- Expressions ---

    def evaluate(self, node: Expr) -> Any:
        """An int, a bool, or one of torch's symbolic ones."""
        if not node.args:
            return self._leaf(node)
        if node.op == "select":
            return self.evaluate(node.args[1 if bool(self.evaluate(node.args[0])) else 2])
        return _OPERATIONS[node.op](*map(self.evaluate, node.args))

    def _leaf(self, node: Expr) -> Any:
        if node.op == "const":
            return node.operand
        if node.op == "int":
            return self.ints[node.operand]
        if node.op == "mode":
            return self.mode
        if node.op == "local":
            if node.operand not in self._locals:
                self._locals[node.operand] = self.evaluate(self.op.locals[node.operand])
            return self._locals[node.operand]
        if node.op == "device":
            raise ValueError(f"tk.{self.op.name}: its outputs depend on {DEVICE_FIELDS[node.operand]} of a GPU")
        return self._of_tensor(node)

    def _of_tensor(self, node: Expr) -> Any:
        t, d = node.operand & 0xFF, node.operand >> 8
        if t >= len(self.tensors) or self.tensors[t] is None:  # an output is not there yet
            return {"alignment": 256, "size": 0, "stride": 0}.get(node.op, -1)
        x, param = self.tensors[t], self.op.tensors[t]
        front = LEADING_DIMS if param.leading else 0
        n_leading = x.dim() - param.rank
        if node.op == "dtype":
            return NUMBERS.get(x.dtype, -2)
        if node.op == "ndim":
            return front + param.rank
        if node.op == "alignment":
            return 256
        if d < front:
            return 0 if node.op == "stride" else (math.prod(x.shape[:n_leading]) if d == front - 1 else 1)
        if d - front >= param.rank:
            return 0
        d = n_leading + d - front
        size = x.shape[d]
        return size if node.op == "size" else (0 if size == 1 else x.stride(d))

    # --- Outputs ---

    def allocate(self) -> list[Tensor]:
        """An empty tensor for each output, those that are only saved included."""
        return [self._allocate(result) for result in self.op.results]

    def _allocate(self, result: Result) -> Tensor:
        dtype = BY_NUMBER[int(self.evaluate(result.dtype))]
        sizes = [self.evaluate(x) for x in result.sizes]
        strides = [self.evaluate(x) for x in result.strides]
        if result.leading is not None:
            like = self.tensors[result.leading]
            n_leading = like.dim() - self.op.tensors[result.leading].rank
            strides = [*_leading_strides(like, n_leading, sizes), *strides]
            sizes = [*like.shape[:n_leading], *sizes]
        return torch.empty_strided(sizes, strides, dtype=dtype, device=self.device)


def _described(x: Tensor | None) -> str:
    return "None" if x is None else f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"


def _leading_strides(like: Tensor, n_leading: int, declared: Sequence[Any]) -> list[Any]:
    """csrc/ops/canonical.cpp's dense_strides."""
    step = math.prod([_at_least_one(size) for size in declared])
    strides: list[Any] = [0] * n_leading
    for d in reversed(memory_order(like, n_leading)):
        strides[d] = step
        step = step * _at_least_one(like.shape[d])
    return strides


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return [order.index(d) for d in range(len(order))]


def memory_order(x: Tensor, n: int) -> list[int]:
    """The first `n` dimensions, largest stride first, those of size 1 outermost; as they are where that is their order,
    and for a tensor that repeats elements."""
    if x.is_contiguous() and x.numel() != 0:  # spares symbolic sizes the comparisons
        return list(range(n))
    dims = [d for d in range(n) if x.shape[d] != 1]
    if any(x.stride(d) == 0 for d in dims):
        return list(range(n))
    ordered = _stably_sorted(dims, x.stride())
    return list(range(n)) if ordered == dims else [d for d in range(n) if d not in dims] + ordered


def _stably_sorted(dims: Sequence[int], strides: Sequence[Any]) -> list[int]:
    """Sorts dimensions by comparisons alone, which symbolic strides have."""
    ordered: list[int] = []
    for d in dims:
        at = len(ordered)
        while at > 0 and strides[ordered[at - 1]] < strides[d]:
            at -= 1
        ordered.insert(at, d)
    return ordered


def overlaps_itself(x: Tensor) -> bool:
    """Two elements lie in one place."""
    if x.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0:
        return False
    (first, end), (other_first, other_end) = extent(x), extent(y)
    return first < other_end and other_first < end


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and past the last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _at_least_one(size: Any) -> Any:
    return torch.sym_max(size, 1)


def _number(x: Any) -> Any:
    return int(x) if isinstance(x, bool | torch.SymBool) else x


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*map(_number, args))


def _logic(function: Callable[[Any, Any], Any], decisive: bool) -> Callable[[Any, Any], Any]:
    """A logical operator that does not ask a symbolic operand where the other one decides."""

    def apply(a: Any, b: Any) -> Any:
        a, b = _truth(a), _truth(b)
        for known, other in ((a, b), (b, a)):
            if isinstance(known, bool):
                return decisive if known is decisive else other
        return function(a, b)

    return apply


def _truth(x: Any) -> Any:
    return x if isinstance(x, bool | torch.SymBool) else x != 0


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": _arithmetic(lambda a, b: a + b),
    "sub": _arithmetic(lambda a, b: a - b),
    "mul": _arithmetic(lambda a, b: a * b),
    "floordiv": _arithmetic(lambda a, b: a // b if b != 0 else 0),
    "mod": _arithmetic(lambda a, b: a % b if b != 0 else 0),
    "ceildiv": _arithmetic(lambda a, b: -(-a // b) if b != 0 else 0),
    "min": _arithmetic(torch.sym_min),
    "max": _arithmetic(torch.sym_max),
    "neg": _arithmetic(lambda a: -a),
    "eq": _arithmetic(lambda a, b: a == b),
    "ne": _arithmetic(lambda a, b: a != b),
    "lt": _arithmetic(lambda a, b: a < b),
    "le": _arithmetic(lambda a, b: a <= b),
    "gt": _arithmetic(lambda a, b: a > b),
    "ge": _arithmetic(lambda a, b: a >= b),
    "and": _logic(lambda a, b: a & b, False),
    "or": _logic(lambda a, b: a | b, True),
    "not": lambda a: torch.sym_not(_truth(a)),
    "bitand": _arithmetic(lambda a, b: int(a) & int(b)),
    "shl": _arithmetic(lambda a, b: a << b),
    "shr": _arithmetic(lambda a, b: a >> b),
}
