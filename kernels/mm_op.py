"""The op `mm` of the core — out = activation(alpha * a @ b + beta * bias) — and what the plans of its kernels share."""

from dataclasses import dataclass

from tk.aot.expr import Expr, Tensor, ceil_div, const, int_arg, maximum, mode, select, tensors
from tk.aot.spec import DTYPES, ITEMSIZE, Arg, Constraint, Int, Op, Point, Pointer, Selector, require
from tk.aot.tuned import load as load_tuned

# --- The op ---

A, B, BIAS, OUT = tensors("a", "b", "bias", "out")

# Values of the selector axes, in the order of their numbers.
DTYPE_AXIS = ("bf16", "fp16", "fp32")
ORDER_AXIS = ("nn", "nt", "tn", "tt", "ss")  # of a and b. n: the last dimension is contiguous, t: the first, s: neither
EPILOGUE_AXIS = ("plain", "vector", "matrix")  # plain: a factor alone; vector: bias is one row; matrix: any bias
OUT_AXIS = ("same", "fp32")
PRECISION_AXIS = ("ieee", "tf32")


def _order() -> Expr:
    """Both strides 1 (a single row or column) counts as n."""

    def letter(t: Tensor) -> Expr:
        return select(t.stride(1) == 1, 0, select(t.stride(0) == 1, 1, 2))

    a, b = letter(A), letter(B)
    return select((a == 2) | (b == 2) | (OUT.stride(1) != 1), 4, 2 * a + b)


_SIZE = select(A.dtype == DTYPES["fp32"], 4, 2)  # bytes
_OUT_SIZE = select(OUT.dtype == DTYPES["fp32"], 4, 2)
_M_CHOICE = select(mode("batch_invariant"), 256, A.size(0))
_FEW_ROWS = _M_CHOICE <= 512
_B_BYTES = A.size(1) * B.size(1) * _SIZE
# In static_weights mode b is read before the kernels ahead have ended. Above 64 rows it is read more than once, and L2,
# 50 to 60 MB, must have room for it beside the b of the kernel ahead.
_BEGINS_EARLY = mode("static_weights") & _FEW_ROWS & ((_M_CHOICE <= 64) | (_B_BYTES <= 30 << 20))


def _pitch(t: Tensor, size: Expr) -> Expr:
    """Bytes from row to row, or from column to column: whichever lie apart."""
    return maximum(t.stride(0), t.stride(1)) * size


def _tma(t: Tensor, size: Expr) -> Expr:
    return (t.alignment >= 16) & (_pitch(t, size) % 16 == 0)


OP = Op(
    name="mm",
    tensors=(A, B, BIAS, OUT),
    ints=("activation", "precision"),
    floats=("alpha", "beta"),
    locals={
        "M": A.size(0),
        "N": B.size(1),
        "K": A.size(1),
        # In batch-invariant mode a row's result must not depend on M: nor may the choice.
        "M_choice": _M_CHOICE,
        # What many variants ask for is computed once.
        "largest": maximum(maximum(A.size(0), B.size(1)), A.size(1)),
        "row_bytes": A.size(1) * _SIZE,  # of a; and of b, a column
        "a_bytes": _M_CHOICE * A.size(1) * _SIZE,
        "b_bytes": _B_BYTES,
        "out_bytes": _M_CHOICE * B.size(1) * _OUT_SIZE,
        "a_crooked": _pitch(A, _SIZE) % 128 != 0,
        "b_crooked": _pitch(B, _SIZE) % 128 != 0,
        "a_tma": _tma(A, _SIZE),
        "b_tma": _tma(B, _SIZE),
        "out_tma": _tma(OUT, _OUT_SIZE) & (B.size(1) * _OUT_SIZE % 16 == 0),
        "few_rows": _FEW_ROWS,
        # Which is a good part of the time, and not the same part for all kernels.
        "begins_early": _BEGINS_EARLY,
    },
    selectors={
        "dtype": Selector(select(A.dtype == DTYPES["bf16"], 0, select(A.dtype == DTYPES["fp16"], 1, 2)), 3),
        "order": Selector(_order(), 5),
        "epilogue": Selector(select(BIAS.present, select(BIAS.stride(0) == 0, 1, 2), int_arg(0) != 0), 3),
        "out": Selector((OUT.dtype == DTYPES["fp32"]) & (A.dtype != DTYPES["fp32"]), 2),
        "precision": Selector(select(A.dtype == DTYPES["fp32"], int_arg(1), 0), 2),
    },
    dims=("M", "N", "K", "begins_early"),
)
M, N, K, M_CHOICE = (OP.local(name) for name in ("M", "N", "K", "M_choice"))


# --- What the plans of all products share ---


def fits_32_bits() -> Constraint:
    return require(OP.local("largest") < 2**31 - 2**16, "M, N and K < 2**31 - 65536")


def suits_tma(point: Point) -> tuple[Constraint, ...]:
    """Of a and b."""
    by = 16 // ITEMSIZE[point.dtype]
    return (fits_32_bits(), *(require(OP.local(f"{t.name}_tma"), _tma_message(t, by)) for t in (A, B)))


def out_suits_tma(point: Point) -> Constraint:
    """A TMA store writes whole pieces of 16 bytes, also across the end of a row."""
    by = 16 // ITEMSIZE[out_dtype(point)]
    return require(OP.local("out_tma"), f"{_tma_message(OUT, by)}; N a multiple of {by}")


def _tma_message(t: Tensor, by: int) -> str:
    return f"{t.name} on a 16-byte boundary, its rows a multiple of {by} elements apart (TMA)"


def batch_invariant(why: str = "K is split") -> Constraint:
    """Of a kernel whose sums go by M: it cuts K into as many parts as the number of tiles asks for, or takes few rows
    only."""
    return require(~mode("batch_invariant"), f"batch_invariant mode off, since {why}")


def makes_sense(point: Point) -> bool:
    """Precision is a choice of fp32 alone, and fp32 has no other output."""
    if point.dtype != "fp32":
        return point.precision == "ieee"
    return point.out == "same"


def serves(point: Point, epilogues: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    return {
        "dtype": (DTYPE_AXIS.index(point.dtype),),
        "order": (ORDER_AXIS.index(point.order),),
        "epilogue": tuple(map(EPILOGUE_AXIS.index, epilogues)),
        "out": (OUT_AXIS.index(point.out),),
        "precision": (PRECISION_AXIS.index(point.precision),),
    }


def out_dtype(point: Point) -> str:
    return point.dtype if point.out == "same" else point.out


def epilogue_args(dtype: str) -> dict[str, Arg]:
    """The arguments that every kernel's epilogue has."""
    return dict(
        bias=Pointer(BIAS, dtype, aligned=False),
        alpha=OP.float("alpha"),
        beta=OP.float("beta"),
        activation=Int(OP.int("activation")),
        has_bias=Int(BIAS.present),
    )


# --- Predicted time ---

# What the hardware can do, by architecture: bytes a nanosecond from memory and from L2, and operations a nanosecond of
# one multiprocessor by dtype, for fp32 by precision. Data sheets of A100 and H100, at about the share that is reached.
_MEMORY = {80: 1500, 90: 4200}
_L2 = {80: 4000, 90: 7000}
_OPERATIONS = {
    80: {"bf16": 2000, "fp16": 2000, "tf32": 900, "ieee": 120},
    90: {"bf16": 6000, "fp16": 6000, "tf32": 3000, "ieee": 400},
}


@dataclass(frozen=True)
class Work:
    """What a plan has to do, in the terms that its predicted time is a sum of.

    waves: tiles that a program does one after the other. steps: blocks of K in all of these. flops: of one step. moved:
    bytes from and to memory. block: rows and columns of a tile of out, which needs so many rows of a and columns of b.
    boxes: rows of a and columns of b that come together or not at all (TMA). parts: how many sums of parts of K are
    added up for a tile. shared: steps of the busiest multiprocessor, where several programs share one."""

    waves: Expr
    steps: Expr
    flops: int
    moved: Expr
    block: tuple[int, int]
    boxes: tuple[int, int]
    parts: Expr = const(0)
    shared: Expr = const(0)

    def terms(self, point: Point) -> dict[str, Expr]:
        """What the predicted time is a sum of. Bytes by the KB: one takes less than a picosecond.

        alone, early: a launch, and one that begins before its predecessors end. l2_kilobyte: what programs fetch.
        crooked_kilobyte: of that, what comes from rows that do not begin with a cache line, which takes two requests
        instead of one. blank_kilobyte: what boxes hold of rows that are not there. It is not free: many
        multiprocessors that ask for it wait for one another."""
        a, b = self._fetched()
        return {
            "alone": ~OP.local("begins_early"),
            "early": OP.local("begins_early"),
            "wave": self.waves,
            "step": self.steps,
            "shared_step": self.shared,
            "kilobyte": self.moved // 1024,
            "l2_kilobyte": (a + b) // 1024,
            "crooked_kilobyte": (OP.local("a_crooked") * a + OP.local("b_crooked") * b) // 1024,
            "blank_kilobyte": self._blank() // 1024,
            "parts": self.parts,
        }

    def roof(self, point: Point) -> Expr:
        """Nanoseconds that the slowest of tensor cores, memory and L2 takes for its part."""
        a, b = self._fetched()
        arch = _nearest(point.arch)
        return maximum(
            maximum(self.moved // _MEMORY[arch], (a + b) // _L2[arch]),
            self.steps * (self.flops // _OPERATIONS[arch][_kind(point)]),
        )

    def _fetched(self) -> tuple[Expr, Expr]:
        """Bytes of a and of b: each once for every tile that needs it."""
        block_m, block_n = self.block
        return ceil_div(N, block_n) * OP.local("a_bytes"), ceil_div(M_CHOICE, block_m) * OP.local("b_bytes")

    def _blank(self) -> Expr:
        """Bytes."""
        (block_m, block_n), (box_m, box_n) = self.block, self.boxes
        down, across = ceil_div(M_CHOICE, block_m), ceil_div(N, block_n)
        rows = ceil_div(M_CHOICE, box_m) * box_m - M_CHOICE
        columns = ceil_div(N, box_n) * box_n - N
        return (across * rows + down * columns) * OP.local("row_bytes")


def _nearest(arch: int) -> int:
    return max((a for a in _MEMORY if a <= arch), default=min(_MEMORY))


def _kind(point: Point) -> str:
    return point.precision if point.dtype == "fp32" else point.dtype


def traffic() -> Expr:
    """Bytes: each operand read once, the result written once."""
    return OP.local("a_bytes") + OP.local("b_bytes") + OP.local("out_bytes")


def weights_name(point: Point) -> str:
    """Of the points that have their weights in common: "config/dtype/order", and what changes a config's pace."""
    kind = "bf16" if _kind(point) == "fp16" else _kind(point)  # fp16 runs as bf16 does
    loads = "" if point.axes.get("aligned", True) else " unaligned"
    rows = f" {point.rows} rows" if "rows" in point.axes else ""
    return f"{point.config.name}{rows}{loads}/{kind}/{point.order}"


def predict(point: Point, work: Work, slowdown: int = 1) -> Expr:
    """Picoseconds: the work's terms, weighted.

    The weights, some for few rows and some for many, are fitted to measurements (kernels/tuned/, tools/fit_cost.py);
    without, the roof counts `slowdown` times, and starting, a tile and a sum of parts cost what they usually do."""
    weights = load_tuned("mm", point.arch).get("coefficients", {}).get(weights_name(point))
    if weights is None:
        return 3_000_000 + 500_000 * work.waves + 3_000_000 * work.parts + 2000 * slowdown * work.roof(point)
    total = const(0)
    for name, term in work.terms(point).items():
        few, many = (weights[rows].get(name, 0) for rows in ("few", "many"))
        total += (few if few == many else select(OP.local("few_rows"), few, many)) * term
    return total
