"""The op `mm` of the core — out = activation(alpha * a @ b + beta * bias) — and what the plans of its kernels share."""

from collections.abc import Mapping
from dataclasses import dataclass

from tk.aot.expr import Expr, Tensor, int_arg, maximum, mode, select, tensors
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
class Speed:
    """What a kernel reaches on a GPU before anyone has measured it: where a prediction starts."""

    bytes_per_ns: int
    flops_per_ns: Mapping[str, int]  # of one multiprocessor, by dtype, or by precision for fp32


# Data sheets of A100 and H100, at about the share of the peak that `tl.dot` reaches.
_SPEED = {
    80: Speed(1500, {"bf16": 2000, "fp16": 2000, "tf32": 900, "ieee": 120}),
    90: Speed(4200, {"bf16": 3600, "fp16": 3600, "tf32": 1500, "ieee": 200}),
}


def _speed(arch: int) -> Speed:
    return _SPEED[max((a for a in _SPEED if a <= arch), default=min(_SPEED))]


def traffic(point: Point) -> Expr:
    """Bytes: each operand read once, the result written once."""
    return (M_CHOICE * K + K * N) * ITEMSIZE[point.dtype] + M_CHOICE * N * ITEMSIZE[out_dtype(point)]


def predict(point: Point, kernel: str, waves: Expr, steps: Expr, moved: Expr, flops: int, slowdown: int = 1) -> Expr:
    """Picoseconds: fixed + max(waves * (steps * step + tile), moved / bandwidth).

    waves: rounds of programs over the multiprocessors. steps: blocks of K in one, `flops` each. moved: bytes. The four
    coefficients are measured (kernels/tuned/); where they are not they are guessed from the data sheet and `slowdown`."""
    speed = _speed(point.arch)
    measured = load_tuned("mm", point.arch).get("coefficients", {})
    own = measured.get(f"{kernel}/{point.config.name}/{point.dtype}/{point.precision}/{point.order}", {})
    rate = speed.flops_per_ns[point.precision if point.dtype == "fp32" else point.dtype]
    step = own.get("step_ps", slowdown * flops * 1000 // rate)
    tile = own.get("tile_ps", 1_000_000)
    fixed = own.get("fixed_ps", 2_000_000)
    bytes_per_ns = own.get("bytes_per_ns", speed.bytes_per_ns // slowdown)
    return fixed + maximum(waves * (steps * step + tile), moved * 1000 // bytes_per_ns)
