"""scaled_mm and scaled_grouped_mm on the CPU: torch's conventions, float64, transforms, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

import tk
from tk import capi
from tk.ops.product import ACTIVATIONS
from tk.ops.scaled import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
M, K, N = 24, 48, 32
T, G = 24, 3
ENDS = (5, 5, 23)
OFFS = torch.tensor(ENDS, dtype=torch.int32)


def float8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def operands(pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)) -> tuple[torch.Tensor, torch.Tensor]:
    """b column-major."""
    return float8(M, K, dtype=pair[0]), float8(N, K, dtype=pair[1]).t()


def scales(rowwise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.rand(M, 1), torch.rand(1, N)) if rowwise else (torch.rand(()), torch.rand(1))


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Summed in fp32, of numbers of order 1, and rounded once."""
    rtol = 1.02 * torch.finfo(result.dtype).eps / 2
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=K * 2.0**-21)


# --- Numbers ---


@pytest.mark.parametrize("rowwise", (True, False))
@pytest.mark.parametrize("out_dtype", (None, BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_against_fp64(pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype | None, rowwise: bool) -> None:
    a, b = operands(pair)
    bias = torch.randn(N).to(out_dtype or BF16)
    for activation in ("none", "gelu"):
        result = tk.scaled_mm(a, b, *scales(rowwise), bias, out_dtype, activation=activation)  # type: ignore[arg-type]
        assert result.dtype == (out_dtype or BF16) and result.shape == (M, N) and result.is_contiguous()
    for given in (None, bias):
        both = scales(rowwise)
        close(tk.scaled_mm(a, b, *both, given, out_dtype), reference(a, b, *both, given))
        close(tk.scaled_mm(a, b, *both, given, out_dtype, activation="silu"), reference(a, b, *both, given, "silu"))


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_a_bias_of_16_bits_with_a_float32_result(dtype: torch.dtype) -> None:
    a, b = operands()
    both, bias = scales(), torch.randn(2 * N).to(dtype)[::2]
    result = tk.scaled_mm(a, b, *both, bias, FP32, activation="silu")
    assert result.dtype == FP32
    close(result, reference(a, b, *both, bias, "silu"))
    meta = tk.scaled_mm(a.to("meta"), b.to("meta"), *(s.to("meta") for s in both), bias.detach().to("meta"), FP32)
    assert meta.dtype == FP32


def test_a_groups_bias_of_16_bits_with_a_float32_result() -> None:
    a, b, scale_a, scale_b = float8(T, K), float8(G, N, K).transpose(1, 2), torch.rand(T), torch.rand(G, N)
    bias = torch.randn(G, N).bfloat16()
    wide = tk.scaled_grouped_mm(a, b, scale_a, scale_b, offs=OFFS, bias=bias.float(), out_dtype=FP32)
    found = tk.scaled_grouped_mm(a, b, scale_a, scale_b, offs=OFFS, bias=bias, out_dtype=FP32)
    assert torch.equal(found[: ENDS[-1]], wide[: ENDS[-1]])


@pytest.mark.parametrize("rowwise", (True, False))
def test_as_torchs(rowwise: bool) -> None:
    a, b = operands()
    scale_a, scale_b = scales(rowwise)
    try:
        theirs = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16)
    except RuntimeError as error:
        pytest.skip(f"torch has no such product for this CPU: {error}")
    torch.testing.assert_close(tk.scaled_mm(a, b, scale_a, scale_b), theirs)
    torch.testing.assert_close(tk.scaled_mm(a, b, scale_a, scale_b, use_fast_accum=True), theirs)


@pytest.mark.parametrize("shape", ((), (1,), (1, 1), (1, 1, 1)), ids=str)
def test_one_scale_of_any_rank(shape: tuple[int, ...]) -> None:
    a, b = operands()
    one = torch.full(shape, 0.5)
    close(tk.scaled_mm(a, b, one, one, out_dtype=FP32), reference(a, b, torch.tensor(0.5), torch.tensor(0.5)))
    rows = torch.rand(M, 1)
    close(tk.scaled_mm(a, b, rows, one, out_dtype=FP32), reference(a, b, rows, torch.tensor(0.5)))


@pytest.mark.parametrize("layout", ("nn", "nt", "tn", "tt", "strided"))
def test_layouts_and_odd_sizes(layout: str) -> None:
    m, k, n = 7, 13, 5
    a, b = float8(m, k), float8(k, n)
    if layout == "strided":
        a, b = float8(m, 2 * k)[:, ::2], float8(3 * k, n)[::3]
    a = a.t().contiguous().t() if layout[0] == "t" else a
    b = b.t().contiguous().t() if layout[1] == "t" else b
    rows, columns = torch.rand(m, 3)[:, 1:2], torch.rand(n, 2).t()[:1]
    bias = torch.randn(2 * n)[::2]
    close(tk.scaled_mm(a, b, rows, columns, bias, FP32), reference(a, b, rows, columns, bias))


def test_of_what_quantize_fp8_makes() -> None:
    x, weight = torch.randn(M, 256), torch.randn(N, 256)
    (a, scale_a), (b, scale_b) = (tk.quantize_fp8(t, per="row") for t in (x, weight))
    result = tk.scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=FP32)
    assert (result - x @ weight.t()).norm() / (x @ weight.t()).norm() < 0.05


def test_nan_and_infinity() -> None:
    a, b = operands((E5M2, E4M3))
    a[0, 0], a[1, 0] = math.nan, math.inf
    result = tk.scaled_mm(a, b, *scales())
    assert result[0].isnan().all() and not result[1].isfinite().any() and result[2:].isfinite().all()


def test_sizes_of_0() -> None:
    one = torch.ones(())
    bias = torch.randn(N).bfloat16()
    assert tk.scaled_mm(float8(0, K), float8(K, N), one, one).shape == (0, N)
    assert tk.scaled_mm(float8(0, K), float8(K, N), torch.empty(0, 1), torch.rand(1, N)).shape == (0, N)
    assert tk.scaled_mm(float8(M, K), float8(K, 0), one, one).shape == (M, 0)
    assert not tk.scaled_mm(float8(M, 0), float8(0, N), one, one).any()
    assert torch.equal(tk.scaled_mm(float8(M, 0), float8(0, N), one, one, bias), bias.expand(M, N))


def test_out() -> None:
    a, b = operands()
    both = scales()
    out = torch.full((N, M), math.nan).bfloat16().t()
    assert tk.scaled_mm(a, b, *both, out=out) is out
    assert torch.equal(out, tk.scaled_mm(a, b, *both))


# --- Groups ---


def groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return float8(T, K), float8(G, N, K).mT, torch.rand(T), torch.rand(G, N)


@pytest.mark.parametrize("out_dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("bias_shape", (None, (N,), (G, N)), ids=str)
def test_groups_against_fp64(bias_shape: tuple[int, ...] | None, out_dtype: torch.dtype) -> None:
    a, b, scale_a, scale_b = groups()
    bias = None if bias_shape is None else torch.randn(bias_shape).to(out_dtype)
    out = torch.full((T, N), 7.0).to(out_dtype)
    result = tk.scaled_grouped_mm(a, b, scale_a, scale_b, offs=OFFS, bias=bias, out_dtype=out_dtype, out=out)
    assert result is out and (out[ENDS[-1] :] == 7).all(), "what comes after the last end is left unwritten"
    for g, (begin, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        of_group = bias[g] if bias is not None and bias.dim() == 2 else bias
        close(result[begin:end], reference(a[begin:end], b[g], scale_a[begin:end, None], scale_b[g], of_group))


@pytest.mark.parametrize("ends", ((0, 0, 0), (T, T, T), (99, 99, 99), (-5, 3, T), (15, 4, 90)), ids=str)
def test_ends_within_and_without(ends: tuple[int, ...]) -> None:
    a, b, scale_a, scale_b = groups()
    memory = torch.full((3 * T, N), 7.0).bfloat16()
    offs = torch.tensor(ends, dtype=torch.int32)
    tk.scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out=memory[T : 2 * T])
    assert (memory[:T] == 7).all() and (memory[2 * T :] == 7).all()
    begin, end = (min(max(e, 0), T) for e in ends[1:])
    close(memory[T + begin : T + end], reference(a[begin:end], b[2], scale_a[begin:end, None], scale_b[2]))


def test_no_groups_and_no_inner_size() -> None:
    a, b, scale_a, scale_b = groups()
    none = torch.empty(0, dtype=torch.int32)
    assert tk.scaled_grouped_mm(a, b[:0], scale_a, scale_b[:0], offs=none).shape == (T, N)
    result = tk.scaled_grouped_mm(a[:, :0], b[:, :0], scale_a, scale_b, offs=OFFS)
    assert not result[: ENDS[-1]].any()


# --- Transforms ---


# Of opcheck's all but its test of schemas, which compares inputs by arithmetic that float8 has none of.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("overload", ("default", "out"))
def test_opcheck(overload: str) -> None:
    a, b = operands()
    bias = torch.randn(N).bfloat16().requires_grad_(overload == "default")
    kwargs = {"out": torch.zeros(M, N).bfloat16()} if overload == "out" else {}
    checks = CHECKS if overload == "out" else CHECKS[:2]  # the last would ask for a gradient
    opcheck(getattr(torch.ops.tk.scaled_mm, overload), (a, b, *scales(), bias, True, 2), kwargs, test_utils=checks)
    opcheck(torch.ops.tk.scaled_mm.default, (a, b, *scales(), None, True, 2), test_utils=CHECKS)
    a, b, scale_a, scale_b = groups()
    offs = torch.tensor((5, 5, T), dtype=torch.int32)  # all of it is written
    kwargs = {"out": torch.zeros(T, N).bfloat16()} if overload == "out" else {}
    op = getattr(torch.ops.tk.scaled_grouped_mm, overload)
    opcheck(op, (a, b, scale_a, scale_b, offs), kwargs, test_utils=CHECKS)


def test_arguments_stay_as_they_were() -> None:
    a, b = operands()
    before = [x.clone() for x in (a, b)]
    tk.scaled_mm(a, b, *scales())
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip((a, b), before, strict=True))


def test_there_is_no_gradient_and_the_error_says_so() -> None:
    a, b = operands()
    bias = torch.randn(N).bfloat16().requires_grad_()
    result = tk.scaled_mm(a, b, *scales(), bias)  # a layer's bias may need one, as long as nobody asks for it
    with pytest.raises(NotImplementedError, match=r"tk\.scaled_mm is for inference"):
        result.sum().backward()
    _, b3, scale_a, scale_b = groups()
    grouped = tk.scaled_grouped_mm(a, b3, scale_a.requires_grad_(), scale_b, offs=OFFS)
    with pytest.raises(NotImplementedError, match=r"tk\.scaled_grouped_mm is for inference"):
        grouped.sum().backward()
    with torch.no_grad():
        assert not tk.scaled_mm(a, b, *scales(), bias).requires_grad


def test_autocast_leaves_it_alone() -> None:
    a, b = operands()
    bias = torch.randn(N)
    with torch.autocast("cpu", dtype=BF16):
        assert tk.scaled_mm(a, b, *scales(), bias, FP32).dtype == FP32


def test_vmap() -> None:
    a, b = float8(2, M, K), float8(K, N)
    both = scales()
    result = torch.vmap(lambda x: tk.scaled_mm(x, b, *both))(a)
    assert torch.equal(result, torch.stack([tk.scaled_mm(x, b, *both) for x in a]))


def test_compile_with_dynamic_sizes() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
        return tk.scaled_mm(a, b, scale_a, scale_b, use_fast_accum=True) * 2

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (M, M + 9):
        arguments = (float8(rows, K), float8(K, N), torch.rand(rows, 1), torch.rand(1, N))
        torch.testing.assert_close(compiled(*arguments), f(*arguments))
    torch._dynamo.reset()


# --- What is refused ---

A, B = operands()
SA, SB = scales()
ONE = torch.ones(())
GA, GB, GSA, GSB = groups()


def grouped(**changed: object) -> Callable[[], torch.Tensor]:
    arguments = dict(a=GA, b=GB, scale_a=GSA, scale_b=GSB, offs=OFFS) | changed
    return lambda: tk.scaled_grouped_mm(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.scaled_mm(A, B.t(), SA, SB), r"the inner sizes differ: a is \[24, 48\], b is \[32, 48\]"),
        (lambda: tk.scaled_mm(A[0], B, SA, SB), "a must have 2 dimensions"),
        (lambda: tk.scaled_mm(A, B, SA.double(), SB), "scale_a is float64, must be float32"),
        (lambda: tk.scaled_mm(A, B, SA, SB.bfloat16()), "scale_b is bfloat16, must be float32"),
        (lambda: tk.scaled_mm(A, B, SA[:3], SB), r"scale_a is \[3, 1\], must be one number, or \[24, 1\]"),
        (lambda: tk.scaled_mm(A, B, SA[:, 0], SB), r"scale_a is \[24\], must be one number"),
        (lambda: tk.scaled_mm(A, B, SA, SB.t()), r"scale_b is \[32, 1\], must be one number, or \[1, 32\]"),
        (lambda: tk.scaled_mm(A, B, torch.empty(0), SB), r"scale_a is \[0\]"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, torch.randn(N)), "bias is float32, must be bfloat16"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, torch.randn(N).half()), "bias is float16, must be bfloat16"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, torch.randn(N).double(), FP32), "must be float32 .*, or bfloat16 or"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, torch.randn(N + 1).bfloat16()), r"bias is \[33\], must be \[32\]"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, out=torch.empty(M, N)), "out is float32, must be bfloat16"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, out=torch.empty(M, M, dtype=BF16)), r"out is \[24, 24\]"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, activation="tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: tk.scaled_mm(*(x.to("meta") for x in (A, B.t(), ONE, ONE))), "the inner sizes differ"),
        (lambda: tk.scaled_mm(A.to("meta"), B, ONE, ONE), "a is on meta, b on cpu; all tensors must be on one device"),
        (grouped(scale_a=GSA[:, None]), r"scale_a is \[24, 1\], must be \[24\]"),
        (grouped(scale_b=GSB[0]), r"scale_b is \[32\], must be \[3, 32\]"),
        (grouped(scale_b=GSB.half()), "scale_b is float16, must be float32"),
        (grouped(offs=OFFS[:2]), "b has 3 groups, offs has 2"),
        (grouped(offs=OFFS.long()), "offs are int64, must be int32"),
        (grouped(bias=torch.randn(2, N).bfloat16()), r"bias is \[2, 32\], must be \[32\] or \[3, 32\]"),
    ),
)
def test_wrong_arguments(call: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_out_must_have_memory_of_its_own() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    a = memory[: M * K].view(E4M3).view(M, K)
    with pytest.raises(ValueError, match="out overlaps a"):
        tk.scaled_mm(a, B, ONE, ONE, out=memory[: 2 * M * N].view(BF16).view(M, N))
    wide = torch.rand(M, N)
    with pytest.raises(ValueError, match="out overlaps scale_a"):
        tk.scaled_mm(A, B, wide[:, :1], ONE, out_dtype=FP32, out=wide)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.scaled_mm(A.float(), B, ONE, ONE), "a is float32; float8_e4m3fn and float8_e5m2"),
        (lambda: tk.scaled_mm(A, B.bfloat16(), ONE, ONE), "b is bfloat16"),
        (lambda: tk.scaled_mm(*operands((E5M2, E5M2)), ONE, ONE), "two float8_e5m2 matrices"),
        (lambda: tk.scaled_mm(A, B, ONE, ONE, out_dtype=E4M3), "out_dtype is float8_e4m3fn; bfloat16"),
        (grouped(a=GB, b=GA), r"groups of rows, \[T, K\] by \[G, K, N\]"),
        (grouped(b=GB.float()), "b is float32"),
    ),
)
def test_unsupported(call: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(tk.UnsupportedError, match=message):
        call()


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="scale_a must be a Tensor, is float"):
        tk.scaled_mm(A, B, 1.0, ONE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offs must be a Tensor, is list"):
        grouped(offs=[5])()


def test_every_activation() -> None:
    for activation in ACTIVATIONS:
        close(tk.scaled_mm(A, B, SA, SB, activation=activation), reference(A, B, SA, SB, activation=activation))  # type: ignore[arg-type]


# --- What the core chooses, for a GPU that is only described ---


def described(m: int, k: int, pitch: int, fast: bool) -> capi.Problem:
    h200 = capi.describe_device(sm_count=132, arch=90, shared_optin=232448, l2_bytes=60 << 20)
    tensors = (
        capi.Matrix(E4M3, (m, k), (pitch, 1)),
        capi.Matrix(E4M3, (k, 4096), (1, pitch)),
        capi.Matrix(FP32, (m, 1), (1, 1)),
        capi.Matrix(FP32, (1, 4096), (4096, 1)),
        None,
        capi.Matrix(BF16, (m, 4096), (4096, 1)),
    )
    return capi.Problem("scaled_mm", tensors, (0, fast), (), 0, h200)


SPLIT = ("scaled_mm_tma_stream_k", "scaled_mm_tma_cluster_split_k")


@pytest.mark.parametrize("fast", (False, True))
def test_the_core_chooses_by_rows_and_alignment(fast: bool) -> None:
    for m, k, pitch, kernel in (
        (16, 4096, 4096, SPLIT),
        (4096, 4096, 4096, ("scaled_mm_tma",)),
        (16, 4100, 4112, SPLIT),
        (16, 100, 100, ("scaled_mm_pointer",)),
    ):
        chosen = capi.choose(described(m, k, pitch, fast))
        assert chosen.kernel_name in kernel, (m, k, pitch, chosen)
