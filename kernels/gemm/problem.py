"""A product out[M, N] = a[M, K] b[K, N] as an op of the core describes it: sizes, operand order, alignment, pitch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tk.aot.expr import Expr, Tensor, const, int_arg, maximum, mode, select
from tk.aot.spec import DTYPES, ITEMSIZE, Constraint, Int, Op, Point, Pointer, Selector, require
from tk.kernels.gemm.arguments import Epilogue, Size

# Values of the selector axes, in the order of their numbers.
DTYPE_AXIS = ("bf16", "fp16", "fp32")
ORDER_AXIS = ("nn", "nt", "tn", "tt", "ss")  # of a and b. n: the last dimension is contiguous, t: the first, s: neither
EPILOGUE_AXIS = ("plain", "vector", "matrix")  # plain: a factor alone; vector: bias is one row; matrix: any bias
OUT_AXIS = ("same", "fp32")
PRECISION_AXIS = ("ieee", "tf32")


class Batch(Tensor):
    """The matrices of a batch, whose first dimension counts them: ``size`` and ``stride`` are those of one matrix."""

    def size(self, d: int) -> Expr:
        return super().size(d + 1)

    def stride(self, d: int) -> Expr:
        return super().stride(d + 1)

    @property
    def batch(self) -> Expr:
        return super().size(0)

    @property
    def batch_stride(self) -> Expr:
        return super().stride(0)

    def apart(self, by: int) -> Constraint:
        """Requires matrices so far apart that what is loaded at once lies as evenly in every one."""
        return require(self.batch_stride % by == 0, f"{self.name}'s matrices a multiple of {by} elements apart")


def _order(a: Tensor, b: Tensor, out: Tensor) -> Expr:
    """Both strides 1 (a single row or column) counts as n."""

    def letter(t: Tensor) -> Expr:
        return select(t.stride(1) == 1, 0, select(t.stride(0) == 1, 1, 2))

    of_a, of_b = letter(a), letter(b)
    return select((of_a == 2) | (of_b == 2) | (out.stride(1) != 1), 4, 2 * of_a + of_b)


def dtype_selector(t: Tensor) -> Selector:
    """The place of a tensor's dtype in DTYPE_AXIS."""
    return Selector(select(t.dtype == DTYPES["bf16"], 0, select(t.dtype == DTYPES["fp16"], 1, 2)), 3)


def out_selector(a: Tensor, out: Tensor) -> Selector:
    """The place of the result's dtype in OUT_AXIS."""
    return Selector((out.dtype == DTYPES["fp32"]) & (a.dtype != DTYPES["fp32"]), 2)


def gemm_selectors(a: Tensor, b: Tensor, bias: Tensor, out: Tensor) -> dict[str, Selector]:
    """The axes of the bucket of a ``gemm_op``."""
    activation, precision = (int_arg(i) for i in range(len(_GEMM_INTS)))
    is_fp32 = a.dtype == DTYPES["fp32"]
    return {
        "dtype": dtype_selector(a),
        "order": Selector(_order(a, b, out), 5),
        "epilogue": Selector(select(bias.present, select(bias.stride(0) == 0, 1, 2), activation != 0), 3),
        "out": out_selector(a, out),
        "precision": Selector(select(is_fp32, precision, 0), 2),
    }


def _pitch(t: Tensor, size: Expr) -> Expr:
    """Bytes from row to row, or from column to column: the leading dimension."""
    return maximum(t.stride(0), t.stride(1)) * size


def _tma(t: Tensor, size: Expr) -> Expr:
    return (t.alignment >= 16) & (_pitch(t, size) % 16 == 0)


def gemm_locals(a: Tensor, b: Tensor, out: Tensor, itemsize: int | None = None) -> dict[str, Expr]:
    """What is worked out once for each problem; Gemm reads it. itemsize: bytes of an operand's element, where its dtype
    does not decide."""
    size = select(a.dtype == DTYPES["fp32"], 4, 2) if itemsize is None else const(itemsize)
    out_size = select(out.dtype == DTYPES["fp32"], 4, 2)
    # In batch-invariant mode a row's result must not depend on M: nor may the choice.
    m_choice = select(mode("batch_invariant"), 256, a.size(0))
    few_rows = m_choice <= 512
    b_bytes = a.size(1) * b.size(1) * size
    return {
        "M": a.size(0),
        "N": b.size(1),
        "K": a.size(1),
        "M_choice": m_choice,
        "largest": maximum(maximum(a.size(0), b.size(1)), a.size(1)),
        "k_bytes": a.size(1) * size,  # of a row of a; and of b, a column
        "a_bytes": m_choice * a.size(1) * size,
        "b_bytes": b_bytes,
        "out_bytes": m_choice * b.size(1) * out_size,
        # A row then begins within a cache line, and takes a request more.
        "a_pitch_unaligned": _pitch(a, size) % 128 != 0,
        "b_pitch_unaligned": _pitch(b, size) % 128 != 0,
        "a_tma": _tma(a, size),
        "b_tma": _tma(b, size),
        "out_tma": _tma(out, out_size) & (b.size(1) * out_size % 16 == 0),
        "few_rows": few_rows,
        # Programmatic dependent launch: in static_weights mode b is read before the kernels ahead have ended, which is
        # a good part of the time, and not the same part for all kernels. Above 64 rows b is read more than once, and
        # L2, 50 to 60 MB, must have room for it beside the b of the kernel ahead.
        "pdl": mode("static_weights") & few_rows & ((m_choice <= 64) | (b_bytes <= 30 << 20)),
    }


GEMM_DIMS = ("M", "N", "K", "pdl")
_GEMM_INTS = ("activation", "precision")


def gemm_op(name: str, tensors: tuple[Tensor, ...], locals: Mapping[str, Expr], selectors: Mapping[str, Selector],
            dims: tuple[str, ...]) -> Op:  # fmt: skip
    """An op whose result is activation(alpha * product + beta * bias)."""
    return Op(name, tensors, _GEMM_INTS, ("alpha", "beta"), locals, selectors, dims)


@dataclass(frozen=True)
class Gemm:
    """An op whose locals begin with ``gemm_locals`` of its tensors."""

    op: Op
    a: Tensor
    b: Tensor
    bias: Tensor
    out: Tensor

    @property
    def M(self) -> Expr:
        return self.op.local("M")

    @property
    def N(self) -> Expr:
        return self.op.local("N")

    @property
    def K(self) -> Expr:
        return self.op.local("K")

    @property
    def M_choice(self) -> Expr:
        """The number of rows that a choice may depend on."""
        return self.op.local("M_choice")

    @property
    def pdl(self) -> Expr:
        return self.op.local("pdl")

    # --- Constraints ---

    def fits_32_bits(self) -> Constraint:
        return require(self.op.local("largest") < 2**31 - 2**16, "M, N and K < 2**31 - 65536")

    def loads_16_bytes(self, point: Point) -> tuple[Constraint, ...]:
        """Requires that 16 bytes of a and b can be loaded at once: through TMA, or by a thread."""
        return tuple(
            require(self.op.local(f"{t.name}_tma"), _alignment_message(t, 16 // ITEMSIZE[point.dtype]))
            for t in (self.a, self.b)
        )

    def operands_suit_tma(self, point: Point) -> tuple[Constraint, ...]:
        return (self.fits_32_bits(), *self.loads_16_bytes(point))

    def suits_tma(self, point: Point) -> tuple[Constraint, ...]:
        """Operands and result."""
        return (*self.operands_suit_tma(point), self.out_suits_tma(point))

    def out_suits_tma(self, point: Point) -> Constraint:
        """A TMA store writes whole pieces of 16 bytes, also across the end of a row."""
        by = 16 // ITEMSIZE[out_dtype(point)]
        return require(self.op.local("out_tma"), f"{_alignment_message(self.out, by)}; N a multiple of {by}")

    # --- Arguments ---

    def size(self, swap_ab: bool = False) -> Size:
        return Size(Int(self.N if swap_ab else self.M), Int(self.M if swap_ab else self.N), Int(self.K))

    def bias_pointer(self, dtype: str) -> Pointer:
        return Pointer(self.bias, dtype, aligned=False)

    def epilogue(self, swap_ab: bool = False) -> Epilogue:
        """All but the bias itself. swap_ab: of the transposed result."""
        strides = tuple(Int(self.bias.stride(d), "i64") for d in ((1, 0) if swap_ab else (0, 1)))
        return Epilogue(
            *strides,
            alpha=self.op.float("alpha"),
            beta=self.op.float("beta"),
            activation=Int(self.op.int("activation")),
            has_bias=Int(self.bias.present),
        )

    # --- Traffic ---

    def traffic(self) -> Expr:
        """Bytes: each operand read once, the result written once."""
        return self.op.local("a_bytes") + self.op.local("b_bytes") + self.op.local("out_bytes")


def _alignment_message(t: Tensor, by: int) -> str:
    return f"{t.name} on a 16-byte boundary, its rows a multiple of {by} elements apart"


def batch_invariant(why: str = "K is split") -> Constraint:
    """Requires batch-invariant mode off, for a kernel whose sums go by M: it splits K as the number of tiles asks for,
    or takes few rows only."""
    return require(~mode("batch_invariant"), f"batch_invariant mode off, since {why}")


def makes_sense(point: Point) -> bool:
    """Precision is a choice of fp32 alone, and fp32 has no other output."""
    if point.dtype != "fp32":
        return point.precision == "ieee"
    return point.out == "same"


def serves(point: Point, epilogues: tuple[str, ...]) -> Mapping[str, tuple[int, ...]]:
    return {
        "dtype": (DTYPE_AXIS.index(point.dtype),),
        "order": (ORDER_AXIS.index(point.order),),
        "epilogue": tuple(map(EPILOGUE_AXIS.index, epilogues)),
        "out": (OUT_AXIS.index(point.out),),
        "precision": (PRECISION_AXIS.index(point.precision),),
    }


def out_dtype(point: Point) -> str:
    return point.dtype if point.out == "same" else point.out
