"""What ``tk build --debug`` adds to a printed kernel: an index out of bounds is named (bounds.py stops it in any
case), and NaN and infinities in results are reported. Both name the op and the tensor.

A failed assertion ends the process's CUDA context, as ATen's do; what is not finite is printed and no more, since it
may be meant.
"""

from __future__ import annotations

from collections.abc import Iterator

from tk.codegen.ir import FLOATS, Buffer, Value

# Asserting that sums and products of integers stay within 64 bits is no part of it: torch wraps them.
OPTIONS = {"debug": True, "sanitize_overflow": False}


def assertion(op: str, buffer: Buffer, dim: int, is_written: bool, holds: str, asked: str) -> str:
    """A line before a load or store: an index that is itself read is one of its dimension's. asked: the lanes that read
    or write, empty for all."""
    name = buffer.name if buffer.kind != "scratch" else "an intermediate result"
    what = "written" if is_written else "read"
    message = f"tk.{op}: index out of bounds: dimension {dim} of {name}, which is {what}"
    return f'tl.device_assert({holds}, "{message}"{f", mask={asked}" if asked else ""})'


def after(op: str, buffer: Buffer, v: Value, operand: str, shape: str, mask: str) -> Iterator[str]:
    """Lines after a store of a result: how many of a program's numbers are not finite. All its threads say so. shape:
    of a block. mask: the store's, empty for none."""
    if v.op != "store" or buffer.kind == "scratch" or v.dtype not in FLOATS:
        return
    wide, count = "tl.float64" if v.dtype == "fp64" else "tl.float32", f"bad{v.number}"
    yield f"x{count} = {operand}.to({wide}) + tl.zeros({shape}, {wide})"
    yield f'{count} = ((x{count} != x{count}) | (tl.abs(x{count}) == float("inf"))){f" & {mask}" if mask else ""}'
    yield f"{count} = tl.sum({count}.to(tl.int32))"
    yield f"if {count} > 0:"
    yield f'    tl.device_print("tk.{op}: NaN or infinity in {buffer.name}, so many times in this program: ", {count})'
