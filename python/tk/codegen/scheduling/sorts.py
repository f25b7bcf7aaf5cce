"""Launches of sorts beside the kernel's own: rows by their digits, in one program or in many, and merges of runs in
pairs, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tk.aot.expr import Expr, as_expr, ceil_div
from tk.aot.spec import ITEMSIZE, Arg, Const, Int, Launch, Scratch
from tk.codegen import device, radix

TILE = 2048  # elements that one program merges: not more than the shortest run
REGISTERS = 64  # of a thread of `digits`: as many as 32 warps may have
SCATTER_REGISTERS = 80  # of a thread that scatters: three programs are resident on a multiprocessor
COUNTS = 1024  # that a program adds up at once
FEW = 128  # blocks of a row, of which a program adds up the counts of several digits
PASSES = 20  # runs of 2048 elements and 20 passes: rows of 2^31


def stages(n: int, looped: bool) -> int:
    """Exchanges for each element of a block of n: a bitonic sort's, and in a loop those that merge it with the best."""
    depth = n.bit_length() - 1
    return depth * (depth + 1) // 2 + (depth + 1 if looped else 0)


def passes(n: Expr) -> Expr:
    """How many merges a row of n elements needs."""
    total = as_expr(0)
    for j in range(PASSES):
        total = total + (n > TILE << j)
    return total


def digits(number: int, dtype: str, rows: Expr, n: Expr, half: Expr, block: int, warps: int) -> Launch:
    """The launch that sorts rows of up to `block` elements by digits, into the half of the buffer that merges of as
    long ones would have left them in. Every second bit of a number is below the key (lowering/rules/sorts.py)."""
    bits = 8 * ITEMSIZE[dtype]
    args: dict[str, Arg] = {
        "source": Scratch(number, dtype, as_expr(0)), "target": Scratch(number, dtype, passes(n) % 2 * half),
        "n": Int(n, "i32"), "LOW": Const(bits // 2), "HIGH": Const(bits), "BLOCK": Const(block), "TWICE": Const(True),
    }  # fmt: skip
    return Launch(radix.sort_rows, args, (rows, 1, 1), num_warps=warps, num_stages=1, maxnreg=REGISTERS)


def digit_passes(bits: int) -> int:
    """How many digits a key has."""
    return bits // radix.BITS


def counts_of_row(n: Expr, block: int) -> Expr:
    """How many counts a row has: of each digit one for each block, and one for all."""
    return (ceil_div(n, block) + 1) * 2**radix.BITS


def by_radix(
    number: int, counts: int, dtype: str, rows: Expr, n: Expr, half: Expr, bits: int, block: int, warps: int
) -> list[Launch]:
    """The launches that sort rows by digits, the least significant first, in blocks of programs of their own. Each goes
    from one half of the buffer to the other, and the last one to where merges of as long rows would have left them.
    counts: the scratch buffer of counts_of_row. bits: of a key, the lowest of a number's upper half."""
    found = []
    blocks, last = ceil_div(n, block), digit_passes(bits)
    programs = (rows * blocks, 1, 1)
    table: dict[str, Arg] = {"counts": Scratch(counts, "i32")}
    scans = []
    for most, when in ((FEW, blocks <= FEW), (COUNTS, blocks > FEW)):
        digits = COUNTS // most
        scan = {**table, "blocks": Int(blocks, "i32"), "LINES": Const(digits), "BLOCK": Const(most)}
        lines = (rows * (2**radix.BITS // digits), 1, 1)
        scans.append(Launch(radix.scan_counts, scan, lines, num_warps=4, num_stages=1, when=when))
    for j in range(last):
        source, target = (Scratch(number, dtype, (passes(n) + last - i) % 2 * half) for i in (j, j + 1))
        sign = 2 ** (radix.BITS - 1) if j == last - 1 else 0
        rest: dict[str, Arg] = {
            **table, "n": Int(n, "i32"), "blocks": Int(blocks, "i32"), "shift": Int(j * radix.BITS, "i32"),
            "sign": Int(sign, "i32"), "BLOCK": Const(block),
        }  # fmt: skip
        scatter = {"source": source, "target": target, **rest}
        found += [
            Launch(radix.count_digits, {"source": source, **rest}, programs, num_warps=warps, num_stages=1),
            *scans,
            Launch(radix.scatter_digits, scatter, programs, num_warps=warps, num_stages=1,
                   maxnreg=SCATTER_REGISTERS),
        ]  # fmt: skip
    return found


def merges(buffers: Mapping[int, tuple[int, str]], rows: Expr, n: Expr, half: Callable[[str], Expr]) -> list[Launch]:
    """The launches that merge runs of TILE elements. buffers: of each operand its scratch buffer and dtype; a buffer is
    twice as large as what is sorted (half: bytes, of a dtype), and each pass goes from one half to the other."""
    found = []
    for j in range(PASSES):
        args: dict[str, Arg] = {}
        for i, (number, dtype) in buffers.items():
            at = [as_expr(0), half(dtype)]
            args[f"source_{i}"] = Scratch(number, dtype, at[j % 2])
            args[f"target_{i}"] = Scratch(number, dtype, at[(j + 1) % 2])
        args |= {"n": Int(n, "i32"), "run": Int(TILE << j, "i64"), "TILE": Const(TILE)}
        fn = device.merge_pairs if len(buffers) == 2 else device.merge
        found.append(Launch(fn, args, (rows * ceil_div(n, TILE), 1, 1), num_warps=4, num_stages=1, when=n > TILE << j))
    return found
