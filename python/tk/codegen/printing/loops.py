"""Loops over the reduced axes as source: one for every generation of reductions, with what each begins with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tk.aot.spec import ITEMSIZE
from tk.codegen.interleaved import Steps
from tk.codegen.ir import PLACES, Kernel, Value, values_in
from tk.codegen.pieces import Piece
from tk.codegen.printing.accumulators import Accumulator, Online, Plain, Position, Welford
from tk.codegen.printing.body import Body, Form
from tk.codegen.printing.scans import ScanPrinter
from tk.codegen.tile import Layout, Tile


def loops(kernel: Kernel, tile: Tile) -> int:
    """How often a looped launch goes over what is reduced."""
    if tile.reduced is None or tile.walk:
        return 1
    body = Body(kernel, tile, Layout(""), {}, form=Form(looped=True))
    depth = depths(kernel, online(body))
    varying = {v.number for v in kernel.values if tile.reduced in body.dims_of(v)}
    stores = {depth[v.number] for v in kernel.values if v.op == "store" and v.number in varying}
    return len(stores | {depth[v.number] - 1 for v in kernel.values if v.op == "reduce"})


# --- What a loop needs ---


def depths(kernel: Kernel, online: Mapping[int, int]) -> dict[int, int]:
    """How many reductions, one of the other, must be done before each value. online: sums that come of one pass with
    their maximum."""
    depth: dict[int, int] = {}
    for v in kernel.values:
        used = [*v.args, *(m for e in v.index for m in values_in(e))]
        if v.number in online:
            used = list(kernel.value(online[v.number]).args)
        depth[v.number] = max((depth[a] for a in used), default=0) + (v.op == "reduce")
    return depth


def needed(kernel: Kernel, roots: Iterable[int], varying: Collection[int], stop: int = -1) -> set[int]:
    """What must be worked out for these anew with every block, of the values that vary along it. stop: a value that
    stands already."""
    pending = list(roots)
    found: set[int] = set()
    while pending:
        n = pending.pop()
        v = kernel.value(n)
        if n in found or n not in varying:
            continue
        found.add(n)
        if n != stop:
            pending += [*v.args, *(m for e in v.index for m in values_in(e))]
    return found


def roots_of(kernel: Kernel, values: Iterable[Value], online: Mapping[int, int]) -> list[int]:
    """Stores themselves; and what reductions read."""
    found: list[int] = []
    for v in values:
        found += [v.number] if v.op == "store" else kernel.value(online.get(v.number, v.number)).args
    return found


def online(body: Body) -> dict[int, int]:
    """The sums of exp(x - max(x)), each with its maximum: in a loop both come of one pass."""
    kernel, found = body.kernel, dict[int, int]()
    for v in kernel.values:
        if v.op != "reduce" or v.data != "sum" or body.reduced_dim != "q" or not body.form.looped:
            continue
        exp = kernel.value(v.args[0])
        if exp.op != "exp":
            continue
        away = kernel.value(exp.args[0])
        most = _unguarded(kernel, kernel.value(away.args[1])) if away.op == "sub" else v
        if most.data == "max" and most.args == away.args[:1] and most.number not in found.values():
            found[v.number] = most.number
    return found


def _unguarded(kernel: Kernel, v: Value) -> Value:
    """The maximum in where(abs(maximum) == inf, 0, maximum), which is what torch.logsumexp takes away."""
    if v.op != "where" or kernel.value(v.args[1]).data != 0:
        return v
    test, most = kernel.value(v.args[0]), kernel.value(v.args[2])
    operands = [kernel.value(a) for a in test.args]
    is_guard = test.op == "eq" and operands[0].op == "abs" and operands[1].data == math.inf
    return most if is_guard and operands[0].args == (most.number,) else v


# --- The loops ---


@dataclass
class LoopPrinter:
    """Prints a kernel whose reduced axes are run through in blocks."""

    body: Body
    scans: ScanPrinter

    @cached_property
    def online(self) -> dict[int, int]:
        return online(self.body)

    def print(self) -> None:
        """A loop for every generation of reductions, and one more for what is stored along the reduced axes."""
        body, kernel = self.body, self.body.kernel
        depth, n = depths(kernel, self.online), body.reduced_dim
        assert n is not None
        varying = {v.number for v in kernel.values if n in body.dims_of(v)}
        found = []
        for level in range(max(depth.values()) + 1):
            stores = [v for v in kernel.values if v.op == "store" and v.number in varying and depth[v.number] == level]
            reduces = [v for v in kernel.values if v.op == "reduce" and depth[v.number] == level + 1]
            roots = roots_of(kernel, [*stores, *reduces], self.online)
            found.append((stores, reduces, needed(kernel, roots, varying)))
        for level, (stores, reduces, inside) in enumerate(found):
            for v in kernel.values:
                if v.number not in varying and v.op != "reduce" and depth[v.number] == level:
                    body.value(v)
            if stores or reduces:
                later = [kernel.value(m) for _, _, rest in found[level + 1 :] for m in rest]
                body.again = {v.buffer for v in later if v.op == "load"}
                self._loop(n, [kernel.value(m) for m in sorted(inside)], reduces)

    def _loop(self, n: str, inside: Sequence[Value], reduces: Sequence[Value]) -> None:
        body = self.body
        accumulators = self._accumulators(reduces)
        for a in accumulators:
            a.start()
        self.scans.start_loop([v for v in inside if v.op == "scan"])
        if body.form.piece is not None:
            self._piece(body.form.piece, inside, accumulators)
        elif body.form.steps is not None:
            self._steps(body.form.steps, inside, accumulators)
        else:
            self._blocks(n, inside, accumulators)
        for a in accumulators:
            a.finish()

    def _blocks(self, n: str, inside: Sequence[Value], accumulators: Sequence[Accumulator]) -> None:
        body = self.body
        block, size, is_backwards = body.block(n), body.extent(n), body.is_backwards
        with body.out.block(f"for {'back' if is_backwards else 'start'} in range(0, {size}, {block}):"):
            if is_backwards:
                body.out(f"start = ({size} - 1) // {block} * {block} - back")
            body.places(n, "start")
            for v in inside:
                self.scans.in_loop(v) if v.op == "scan" else body.value(v)
            for a in accumulators:
                a.step()

    def _piece(self, piece: Piece, inside: Sequence[Value], accumulators: Sequence[Accumulator]) -> None:
        """Whole blocks, and the one or two that are not: see pieces.py."""
        body, out = self.body, self.body.out
        shift = "0"
        if body.is_shifted:
            self._shift(piece)
            shift = "shift"
        out(f"begin = tl.where(start_p == 0, {shift}, 0)")
        out(f"left = {body.size_arg('count', piece.count, False)} + {shift} - start_p.to(tl.int64) * q_size")
        out("end = tl.minimum(left, q_size).to(tl.int32)")
        out("first = tl.cdiv(begin, BLOCK_Q) * BLOCK_Q")
        out("last = tl.maximum(end // BLOCK_Q * BLOCK_Q, first)")

        def block() -> None:
            out(f"v{piece.guard} = q_mask")
            for v in inside:
                if v.number not in (piece.guard, piece.place):
                    body.value(v)
            for a in accumulators:
                a.step()

        with out.block("for start in range(first, last, BLOCK_Q):"):
            out(f"q = start + {body.offsets('q')}")
            out(f"q_mask = tl.full({body.shape_of('q')}, True, tl.int1)")
            block()
        with out.block("for edge in range(tl.where(first > 0, 0, 1), tl.where(last < end, 2, 1)):"):
            out(f"q = edge * last + {body.offsets('q')}")
            out("q_mask = (q >= begin) & (q < end)")
            block()

    def _steps(self, steps: Steps, inside: Sequence[Value], accumulators: Sequence[Accumulator]) -> None:
        """The steps that all parts have, and the one behind them that only the first have: see interleaved.py."""
        body, out = self.body, self.body.out
        whole, left = body.count("whole", steps.whole), body.count("left", steps.left)
        for begin, end, guard in (("0", whole, "p_mask"), (whole, "p_size", f"p_mask & (q < {left})")):
            with out.block(f"for start in range({begin}, {end}, BLOCK_P):"):
                out(f"p = start + {body.offsets('p')}")
                out(f"p_mask = p < {end}")
                out(f"v{steps.guard} = {guard}")
                for v in inside:
                    if v.number not in (steps.guard, steps.place):
                        body.value(v)
                for a in accumulators:
                    a.step()

    def _shift(self, piece: Piece) -> None:
        """Prints how far the first element lies behind 16 bytes, and where a program's part begins."""
        body, (name,) = self.body, piece.buffers
        load = next(v for v in body.kernel.accesses if v.buffer == name)
        size = ITEMSIZE[body.kernel.buffer(name).dtype]
        first = " + ".join([f"ptr_{name}", *body.accesses[load.number].base])
        body.out(f"shift = (({first}).to(tl.int64) % 16).to(tl.int32) // {size}")
        body.out(f"part = tl.multiple_of({first} - shift + start_p.to(tl.int64) * q_size, 16)")

    def _accumulators(self, reduces: Sequence[Value]) -> list[Accumulator]:
        body, found = self.body, list[Accumulator]()
        variances: dict[int, list[Value]] = {}
        for v in reduces:
            if v.number in self.online:
                found.append(Online(body, body.kernel.value(self.online[v.number]), v))
            elif v.number in self.online.values():
                continue
            elif v.data in ("mean", "m2"):
                variances.setdefault(v.args[0], []).append(v)
            elif v.data in PLACES:
                found.append(Position(body, v))
            else:
                found.append(Plain(body, v))
        return [*found, *(Welford(body, operand, group) for operand, group in variances.items())]
