"""The op `mm` of the core — out = activation(alpha * a @ b + beta * bias) — and what the plans of its kernels share."""

from dataclasses import dataclass

from tk.aot.expr import Expr, Tensor, ceil_div, const, int_arg, mode, select, tensors
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
        "M_choice": select(mode("batch_invariant"), 256, A.size(0)),
    },
    selectors={
        "dtype": Selector(select(A.dtype == DTYPES["bf16"], 0, select(A.dtype == DTYPES["fp16"], 1, 2)), 3),
        "order": Selector(_order(), 5),
        "epilogue": Selector(select(BIAS.present, select(BIAS.stride(0) == 0, 1, 2), int_arg(0) != 0), 3),
        "out": Selector((OUT.dtype == DTYPES["fp32"]) & (A.dtype != DTYPES["fp32"]), 2),
        "precision": Selector(select(A.dtype == DTYPES["fp32"], int_arg(1), 0), 2),
    },
    dims=("M", "N", "K"),
)
M, N, K, M_CHOICE = (OP.local(name) for name in ("M", "N", "K", "M_choice"))


# --- What the plans of all products share ---


def fits_32_bits() -> tuple[Constraint, ...]:
    return tuple(require(x < 2**31 - 2**16, f"{n} < 2**31 - 65536") for n, x in (("M", M), ("N", N), ("K", K)))


def batch_invariant() -> Constraint:
    """Of a kernel that cuts K: into how many parts depends on the number of tiles, and so on M."""
    return require(~mode("batch_invariant"), "batch_invariant mode off, since K is split")


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


@dataclass(frozen=True)
class Work:
    """What a plan has to do, in the terms that its predicted time is a sum of.

    waves: tiles that a multiprocessor does one after the other. steps: blocks of K in all of these. flops: of one step.
    moved: bytes from and to memory. reread: bytes that programs fetch from L2, each operand once for every tile that
    needs it. parts: whether several programs share a tile."""

    waves: Expr
    steps: Expr
    flops: int
    moved: Expr
    reread: Expr
    parts: Expr = const(0)

    @property
    def terms(self) -> dict[str, Expr]:
        """What the predicted time is a sum of. Bytes by the KB: one takes less than a picosecond."""
        return {
            "fixed": const(1),
            "wave": self.waves,
            "step": self.steps,
            "kilobyte": self.moved // 1024,
            "l2_kilobyte": self.reread // 1024,
            "parts": self.parts,
        }


def traffic(point: Point) -> Expr:
    """Bytes: each operand read once, the result written once."""
    return (M_CHOICE * K + K * N) * ITEMSIZE[point.dtype] + M_CHOICE * N * ITEMSIZE[out_dtype(point)]


def reread(point: Point, block_m: int, block_n: int) -> Expr:
    """Bytes: each operand once for every tile of block_m x block_n that needs it."""
    return (ceil_div(N, block_n) * M_CHOICE + ceil_div(M_CHOICE, block_m) * N) * K * ITEMSIZE[point.dtype]


# Bytes and operations of one multiprocessor a nanosecond, by dtype and for fp32 by precision: data sheets of A100 and
# H100 at about the share of the peak that `tl.dot` reaches. Where a prediction starts that nothing measured corrects.
_BYTES_PER_NS = {80: 1500, 90: 4200}
_FLOPS_PER_NS = {
    80: {"bf16": 2000, "fp16": 2000, "tf32": 900, "ieee": 120},
    90: {"bf16": 3600, "fp16": 3600, "tf32": 1500, "ieee": 200},
}


def predict(point: Point, work: Work, slowdown: int = 1) -> Expr:
    """Picoseconds: the work's terms, weighted.

    The weights are fitted to measurements (kernels/tuned/, tools/fit_cost.py); without, guessed from the data sheet and
    `slowdown`."""
    precision = point.precision if point.dtype == "fp32" else "bf16"  # fp16 runs as bf16 does
    weights = load_tuned("mm", point.arch).get("coefficients", {}).get(f"{point.config.name}/{precision}/{point.order}")
    if weights is None:
        arch = max((a for a in _BYTES_PER_NS if a <= point.arch), default=min(_BYTES_PER_NS))
        step = slowdown * work.flops * 1000 // _FLOPS_PER_NS[arch][precision]
        kilobyte = slowdown * 1024_000 // _BYTES_PER_NS[arch]
        weights = dict(fixed=2_000_000, wave=1_000_000, step=step, kilobyte=kilobyte, l2_kilobyte=0, parts=2_000_000)
    return sum((weights[name] * term for name, term in work.terms.items()), const(0))
