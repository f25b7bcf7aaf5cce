"""Print: a kernel's body -> a Triton function.

Which program has what stands here; what it does with it is printed at once, in loops, by segments or as a walk.
"""

from __future__ import annotations

from tk.codegen.printing.body import Body
from tk.codegen.printing.loops import LoopPrinter
from tk.codegen.printing.reductions import BlockReductions
from tk.codegen.printing.scans import ScanPrinter
from tk.codegen.printing.segments import SegmentPrinter
from tk.codegen.printing.sorts import print_loop, print_sort
from tk.codegen.printing.walks import WalkPrinter


def print_function(body: Body, name: str, params: list[str]) -> str:
    """The function's source, behind that of the functions which it alone calls."""
    head = f"@triton.jit\ndef {name}({', '.join(params)}):"
    segments, scans = SegmentPrinter(body), ScanPrinter(body)
    if body.tile.walk:
        WalkPrinter(body, segments).print()
        return "\n".join([head, *body.out.text]) + "\n"
    if body.form.spread:
        _part_of_a_row(body)
    else:
        _program(body, segments)
    if body.form.looped:
        is_sort = any(v.op == "sort" for v in body.kernel.values)
        print_loop(body) if is_sort else LoopPrinter(body, scans).print()
    elif segments.is_needed:
        segments.print()
    else:
        _once(body, scans)
    return "\n\n".join([*scans.functions(), "\n".join([head, *body.out.text]) + "\n"])


def _part_of_a_row(body: Body) -> None:
    """Which block of which row. A program that waits for those before it must not have started before them."""
    out, wide = body.out, ".to(tl.int64)" if body.layout.wide else ""
    is_scan = any(v.op == "scan" for v in body.kernel.values)
    out("ticket = tl.atomic_add(ptr_state, 1)" if is_scan else "ticket = tl.program_id(0)")
    out(f"n_parts = tl.cdiv({body.extent('q')}, BLOCK_Q).to(tl.int32)")
    out(f"part = (ticket % n_parts){wide}")
    out(f"n_programs = {'p_size * ' if body.tile.p else ''}n_parts")
    if body.tile.p:
        out(f"start_p = (ticket // n_parts){wide}")
        body.places("p", "start_p")


def _program(body: Body, segments: SegmentPrinter) -> None:
    """Which tile this program has."""
    out, tile, first = body.out, body.tile, body.form.first
    blocks = [n for n in reversed(body.names) if n != body.reduced_dim]
    wide = ".to(tl.int64)" if body.layout.wide else ""
    left = "pid"
    out(f"pid = {f'(tl.program_id(0) - {first})' if first else 'tl.program_id(0)'}{wide}")
    for i, n in enumerate(blocks):
        is_last = i == len(blocks) - 1 and not tile.batch
        out(f"start_{n} = {left}{'' if is_last else f' % tl.cdiv({n}_size, BLOCK_{n.upper()})'} * BLOCK_{n.upper()}")
        if not is_last:
            out(f"{left} = {left} // tl.cdiv({n}_size, BLOCK_{n.upper()})")
    if tile.batch:
        body.decompose("pid", tile.batch)
    for n in blocks:
        segments.flat_vectors() if body.form.vectors and n == "q" else body.places(n, f"start_{n}")


def _once(body: Body, scans: ScanPrinter) -> None:
    """What a program does whose block has all of what is reduced."""
    reductions = BlockReductions(body)
    if body.reduced_dim:
        part = "(n_parts - 1 - part)" if body.is_backwards else "part"
        body.places(body.reduced_dim, f"{part} * BLOCK_Q" if body.form.spread else "0")
    for v in body.kernel.values:
        if v.op == "reduce":
            reductions.print(v)
        elif v.op == "scan":
            scans.over_programs(v) if body.form.spread else scans.in_block(v)
        elif v.op == "sort":
            print_sort(body, v)
        else:
            body.value(v)
