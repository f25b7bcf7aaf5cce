"""Which of an op's graphs a call is of: of the choices of dtypes and flags that it was traced for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tk.aot.expr import Expr, Tensor, as_expr, select
from tk.aot.spec import DTYPES
from tk.codegen.ir import IR_DTYPES
from tk.codegen.tracing.trace import Trace
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import Signature


def dtype_number(dtype: str) -> int:
    """That of a signature's dtype in packs."""
    return DTYPES[IR_DTYPES[TORCH_DTYPES[dtype]]]


def graph_number(
    traces: Sequence[Trace], signature: Signature, by_name: Mapping[str, Tensor], ints: Sequence[str]
) -> Expr:
    """The place of the call's graph among these; -1 for none."""
    number = as_expr(-1)
    for n, trace in reversed(list(enumerate(traces))):
        holds = as_expr(1)
        for variable, dtype in trace.dtypes.items():
            of = next(name for name, spec in signature.tensors.items() if spec.dtype == variable)
            holds = holds & (by_name[of].dtype == dtype_number(dtype))
        for flag, on in trace.flags.items():
            value = Expr("int", list(ints).index(flag))
            holds = holds & ((value != 0) if on else (value == 0))
        number = select(holds, n, number)
    return number
