"""What goes along the one reduced axis of a kernel: its scans and its sorts, and what may be done about them."""

from __future__ import annotations

import sympy

from tk.codegen.ir import SCAN, Kernel, Scanned, Value

LONGEST_NARROW = 1 << 15  # elements of a row whose places a number of 32 bits has room for, beside a key of 16


# --- Scans ---


def scans(kernel: Kernel) -> list[Value]:
    return [v for v in kernel.values if v.op == "scan"]


def scan_key(v: Value) -> tuple[object, ...]:
    """What the results of one scan have in common."""
    assert isinstance(v.data, Scanned)
    return v.args, v.data.kind, v.data.combine


def is_backwards(v: Value) -> bool:
    return isinstance(v.data, Scanned) and v.data.backwards


def adds_logs(kernel: Kernel) -> bool:
    """Whether a scan adds numbers that are given by their logarithms: each sum is an exponential and a logarithm."""
    return any(v.data.kind == "logaddexp" for v in scans(kernel))


def can_be_realigned(kernel: Kernel) -> bool:
    """Whether every scan may begin before its row does. The lanes of a variance begin with it."""
    has_variance = any(v.op == "reduce" and v.data in ("mean", "m2") for v in kernel.values)
    return not has_variance and all(isinstance(v.data, Scanned) and v.data.kind in SCAN for v in scans(kernel))


def can_be_spread(kernel: Kernel) -> bool:
    """Whether programs may share a row: one scan along memory, and nothing else that needs the whole row."""
    others = any(v.op in ("reduce", "sort") for v in kernel.values)
    return not others and len({scan_key(v) for v in scans(kernel)}) == 1


def carried(kernel: Kernel, v: Value, wide: bool) -> list[str]:
    """The dtypes of what a scan hands on. wide: places have 64 bits."""
    found = [kernel.value(a).dtype for a in v.args]
    assert isinstance(v.data, Scanned)
    return found + ["i64" if wide else "i32"] * (SCAN.get(v.data.kind, 1) - 1)


# --- Sorts ---


def sorts(kernel: Kernel) -> list[Value]:
    return [v for v in kernel.values if v.op == "sort"]


def sorts_runs(kernel: Kernel) -> bool:
    return any(v.data.runs for v in sorts(kernel))


def is_narrow(kernel: Kernel) -> bool:
    return any(v.data.narrow for v in sorts(kernel))


def by_digits(kernel: Kernel) -> bool:
    return any(v.data.digits for v in sorts(kernel))


def by_radix(kernel: Kernel) -> bool:
    return any(v.data.radix for v in sorts(kernel))


def limits(kernel: Kernel) -> list[sympy.Expr]:
    """How much of each row is stored, where that is the first part of what one sort of single numbers gives and nothing
    else needs a whole row: then as much is kept while the row is run through. Else nothing. The numbers are of 64
    bits, or their rows are not long."""
    found: list[sympy.Expr] = []
    if len({v.args for v in sorts(kernel)}) != 1 or any(v.op in ("reduce", "scan") for v in kernel.values):
        return []
    for v in kernel.values:
        if v.op == "store":
            size = _limit(kernel, v)
            if size is None:
                return []
            found.append(size)
    first = sorts(kernel)[0]
    return found if len(first.args) == 1 and (first.dtype == "i64" or first.data.narrow) else []


def _limit(kernel: Kernel, store: Value) -> sympy.Expr | None:
    """What the reduced axis stays below where there is a store."""
    mask = kernel.value(store.args[1]) if len(store.args) == 2 else None
    if mask is None or mask.op != "lt" or kernel.value(mask.args[0]).data != kernel.reduced[0].symbol:
        return None
    size = kernel.value(mask.args[1])
    return sympy.sympify(size.data) if size.op in ("index", "constant") else None
