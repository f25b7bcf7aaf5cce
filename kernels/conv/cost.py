"""The predicted time of a convolution: the roofline of tensor cores, memory and L2."""

from __future__ import annotations

from tk.aot.expr import Expr, ceil_div, device, maximum
from tk.aot.spec import Op, Point
from tk.kernels.gemm.cost import kind_of, nearest

# What the hardware can do, by architecture: bytes a nanosecond from memory and from L2, and operations a nanosecond of
# one multiprocessor by dtype, for fp32 by precision. Data sheets of A100 and H100, at about the share that is reached.
_MEMORY = {80: 1500, 90: 4000}
_L2 = {80: 4000, 90: 7000}
_OPERATIONS = {
    80: {"bf16": 1800, "fp16": 1800, "tf32": 800, "ieee": 110},
    90: {"bf16": 5600, "fp16": 5600, "tf32": 2800, "ieee": 350},
}


def predict(point: Point, op: Op, tiles: Expr, k: Expr, *, occupancy: int = 1, percent: int = 100,
            extra_bytes: Expr | int = 0, launches: int = 1, l2: int = 0, alone_ns: int = 0) -> Expr:  # fmt: skip
    """Picoseconds. tiles: how many there are of the config's, of a sum over `k` each. occupancy: programs that a
    multiprocessor holds at once. percent: of the pace of a kernel whose loads TMA does. l2: bytes a nanosecond from it,
    in place of the usual. alone_ns: of a tile, in which its multiprocessor does nothing else."""
    arch = nearest(point.arch)
    rows, cols = point.config.block_m, point.config.block_n
    waves = ceil_div(tiles, device.sm_count * occupancy) * occupancy
    fetched = tiles * k * (rows + cols) * op.local("itemsize")
    compute = waves * k * (2 * rows * cols) // _OPERATIONS[arch][kind_of(point)]
    memory = (op.local("traffic") + extra_bytes) // _MEMORY[arch]
    slowest = maximum(maximum(compute, fetched // (l2 or _L2[arch])), memory)
    return 3_000_000 * launches + (500_000 + 1000 * alone_ns) * waves + 1000 * (slowest * 100 // percent)


def step_ns(point: Point, percent: int) -> int:
    """Nanoseconds of a multiprocessor for one block of K of a tile."""
    c = point.config
    a_nanosecond = _OPERATIONS[nearest(point.arch)][kind_of(point)] * percent
    return max(2 * c.block_m * c.block_n * c.block_k * 100 // a_nanosecond, 1)


def plain_cores(point: Point, op: Op, work: Expr, per_ns: int, *, launches: int = 1,
                least_ns: Expr | int = 0) -> Expr:  # fmt: skip
    """Picoseconds of a kernel without tensor cores. work: multiplications, of which an H200 does `per_ns` a nanosecond;
    or every tensor once, if memory takes longer; or `least_ns`, which it takes however little there is."""
    arch = nearest(point.arch)
    per_ns = per_ns if arch >= 90 else per_ns * 6 // 10
    slowest = maximum(op.local("traffic") // _MEMORY[arch], work // per_ns)
    return 3_000_000 * launches + 1000 * maximum(slowest, least_ns)


def waiting_ns(programs: Expr, occupancy: int, steps: Expr, step_ns: int) -> Expr:
    """The time of programs that wait for memory in each of their steps, `occupancy` of them on a multiprocessor at
    once."""
    room = device.sm_count * occupancy
    return steps * step_ns * maximum(programs, room) // room


def multiplications(op: Op) -> Expr:
    return op.local("M_choice") * op.local("N") * op.local("groups") * op.local("taps")


def tiles_of(rows: Expr, cols: Expr, tile: tuple[int, int]) -> Expr:
    return ceil_div(rows, tile[0]) * ceil_div(cols, tile[1])
