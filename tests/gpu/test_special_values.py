"""NaN and infinities end where torch's do, and nowhere else."""

import math
import random
from collections.abc import Callable

import pytest
import torch

import tk
from benchmarks import products
from tk import _packs

from .cases import KINDS, Kind
from .device import DEVICE

SIZES = ((150, 264, 520), (4, 256, 4096), (33, 77, 95))


def classes(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 inf, 3 -inf."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


@pytest.mark.parametrize("activation", range(len(products.ACTIVATIONS)), ids=[n for n, _ in products.ACTIVATIONS])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_and_inf(kind: Kind, activation: int) -> None:
    name, activate = products.ACTIVATIONS[activation]
    precision = kind.precision if kind.dtype == torch.float32 else None
    for m, n, k in SIZES:
        a, b = torch.randn(m, k, device=DEVICE).to(kind.dtype), torch.randn(k, n, device=DEVICE).to(kind.dtype)
        bias = torch.randn(n, device=DEVICE).to(kind.dtype)
        a[1, 3], a[2, k - 1] = math.nan, math.inf
        b[5, 7], b[k - 1, n - 1] = -math.inf, math.nan
        bias[2], bias[3], bias[4] = math.nan, math.inf, -math.inf
        result = tk.mm(a, b, bias, activation=name, out_dtype=kind.out_dtype, precision=precision)
        with products.torch_precision(kind.precision):
            before = torch.addmm(bias, a, b)
        expected = activate(before)
        if name == "gelu":  # of minus infinity it is 0; ATen multiplies infinity by 0
            expected = torch.where(before == -math.inf, 0, expected)
        assert torch.equal(classes(result), classes(expected)), (m, n, k)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_beta_zero_does_not_read_the_bias(kind: Kind) -> None:
    a, b = torch.randn(40, 50, device=DEVICE).to(kind.dtype), torch.randn(50, 60, device=DEVICE).to(kind.dtype)
    bias = torch.full((60,), math.nan, device=DEVICE, dtype=kind.dtype)
    result = tk.addmm(bias, a, b, beta=0, out_dtype=kind.out_dtype)
    assert torch.equal(result, tk.mm(a, b, out_dtype=kind.out_dtype))


def test_overflow_of_the_result_is_infinite() -> None:
    a = torch.full((64, 512), 200.0, device=DEVICE, dtype=torch.float16)
    assert tk.mm(a, a.t()).isposinf().all()
    assert tk.mm(a, a.t(), out_dtype=torch.float32).eq(512 * 200.0**2).all()


# --- One NaN anywhere ---

Operands = dict[str, torch.Tensor]
Call = Callable[[Operands], torch.Tensor]


def _matrix(rng: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Row-major or the other way round, of a pitch of its own or not."""
    pitch = shape[-1] + rng.choice((0, 0, 3, 8))
    t = torch.randn(*shape[:-1], pitch, device=DEVICE).to(dtype)[..., : shape[-1]]
    if rng.random() < 0.5:
        return t
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _sizes(rng: random.Random) -> tuple[int, int, int]:
    m, n, k = (rng.choice((1, 3, 16, 33, 64, 150, 264)) for _ in range(3))
    return m, n, 8 * k if rng.random() < 0.5 else k


def _mm(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, n, k = _sizes(rng)
    x = {"a": _matrix(rng, m, k, dtype=dtype), "b": _matrix(rng, k, n, dtype=dtype)}
    x["bias"] = torch.randn(rng.choice(((n,), (m, n), (m, 1))), device=DEVICE).to(dtype)
    return x, lambda t: tk.addmm(t["bias"], t["a"], t["b"]), lambda t: t["bias"] + t["a"] @ t["b"]


def _bmm(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, n, k = _sizes(rng)
    x = {"a": _matrix(rng, 3, m, k, dtype=dtype), "b": _matrix(rng, 3, k, n, dtype=dtype)}
    return x, lambda t: tk.bmm(t["a"], t["b"]), lambda t: t["a"] @ t["b"]


def _mm_plus_mm(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, n, k = _sizes(rng)
    other = rng.choice((k, 40, 77))
    shapes = {"a": (m, k), "b": (k, n), "c": (m, other), "d": (other, n)}
    x = {name: _matrix(rng, *shape, dtype=dtype) for name, shape in shapes.items()}
    names = "abcd"
    return x, lambda t: tk.mm_plus_mm(*(t[i] for i in names)), lambda t: t["a"] @ t["b"] + t["c"] @ t["d"]


def _ends(rng: random.Random, total: int) -> torch.Tensor:
    """Of five groups, some of them empty; something may be left behind the last."""
    return torch.tensor(sorted(rng.randint(0, total) for _ in range(5)), dtype=torch.int32, device=DEVICE)


def _grouped_rows(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    _, n, k = _sizes(rng)
    n, k, rows = 8 * n, 8 * k, 200  # torch's own wants 16 bytes, and the fast kernel as well
    offs = _ends(rng, rows)
    ends = [0, *offs.tolist()]
    x = {"a": torch.randn(rows, k, device=DEVICE).to(dtype), "b": torch.randn(5, k, n, device=DEVICE).to(dtype)}

    def exact(t: Operands) -> torch.Tensor:
        return torch.cat([t["a"][ends[g] : ends[g + 1]] @ t["b"][g] for g in range(5)])

    return x, lambda t: tk.grouped_mm(t["a"], t["b"], offs=offs)[: ends[-1]], exact


def _grouped_inner(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, n, _ = _sizes(rng)
    m, n, total = 8 * m, 8 * n, 200
    offs = _ends(rng, total)
    ends = [0, *offs.tolist()]
    x = {"a": torch.randn(total, m, device=DEVICE).to(dtype).t(), "b": torch.randn(total, n, device=DEVICE).to(dtype)}

    def exact(t: Operands) -> torch.Tensor:
        return torch.stack([t["a"][:, ends[g] : ends[g + 1]] @ t["b"][ends[g] : ends[g + 1]] for g in range(5)])

    return x, lambda t: tk.grouped_mm(t["a"], t["b"], offs=offs), exact


def _int4(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, _, _ = _sizes(rng)
    group, n = rng.choice((32, 128)), rng.choice((16, 48, 256, 36))
    k = group * rng.choice((1, 2, 5, 9))
    q = torch.randint(0, 16, (k, n), dtype=torch.uint8, device=DEVICE)
    packed = tk.pack_int4(q)
    x = {"a": torch.randn(m, k, device=DEVICE).to(dtype)}
    x |= {name: torch.rand(k // group, n, device=DEVICE).to(dtype) for name in ("scales", "zeros")}

    def exact(t: Operands) -> torch.Tensor:
        scales, zeros = (t[name].repeat_interleave(group, 0) for name in ("scales", "zeros"))
        return t["a"] @ ((q - zeros) * scales)

    return x, lambda t: tk.int4_mm(t["a"], packed, t["scales"], t["zeros"], group), exact


def _b2b(rng: random.Random, dtype: torch.dtype) -> tuple[Operands, Call, Call]:
    m, k, p, n = (rng.choice((16, 33, 64, 200)) for _ in range(4))
    order = rng.choice(("left", "right"))
    shapes = {"a": (m, k), "b": (k, p), "c": (p, n)}
    x = {name: torch.randn(shape, device=DEVICE).to(dtype) for name, shape in shapes.items()}

    def exact(t: Operands) -> torch.Tensor:
        if order == "left":
            return torch.relu(t["a"] @ t["b"]) @ t["c"]
        return t["a"] @ torch.relu(t["b"] @ t["c"])

    return x, lambda t: tk.b2b_gemm(t["a"], t["b"], t["c"], order=order, f="relu"), exact


PRODUCTS = {"mm": _mm, "bmm": _bmm, "mm_plus_mm": _mm_plus_mm, "grouped rows": _grouped_rows,
            "grouped inner": _grouped_inner, "int4": _int4, "b2b": _b2b}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_one_nan_anywhere(name: str, dtype: torch.dtype) -> None:
    """Whatever tile, split or group it is in: results that depend on it are NaN, all others are numbers."""
    if dtype is torch.float32 and name not in ("mm", "bmm", "mm_plus_mm"):
        pytest.skip("of 16 bits alone")
    rng = random.Random(f"{name} {dtype}")
    for _ in range(60):
        operands, ours, exact = PRODUCTS[name](rng, dtype)
        of = rng.choice(list(operands))
        shape = operands[of].shape
        place = tuple(rng.randrange(size) for size in shape)
        operands[of][place] = math.nan
        expected = exact({key: t.double() for key, t in operands.items()})
        found = ours(operands)
        shapes = {key: tuple(t.shape) for key, t in operands.items()}
        assert torch.equal(found.isnan(), expected.isnan()), f"a NaN in {of} at {place} of {shapes}"


@pytest.mark.parametrize("rowwise", [True, False])
def test_one_nan_in_a_product_of_float8(rowwise: bool) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("a GPU without float8")
    rng = random.Random(f"float8 {rowwise}")
    for _ in range(60):
        m, n, k = _sizes(rng)
        a = torch.randn(m, k, device=DEVICE).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn).t()
        scale_a, scale_b = (torch.rand(s if rowwise else (), device=DEVICE) for s in ((m, 1), (1, n)))
        bias = torch.randn(n, device=DEVICE).bfloat16()
        of = rng.choice(("a", "b", "bias", "scale_a", "scale_b") if rowwise else ("a", "b", "bias"))
        t = {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}[of]
        place = tuple(rng.randrange(size) for size in t.shape)
        if of in "ab":
            t.view(torch.uint8)[place] = 0x7F  # e4m3fn's NaN
        else:
            t[place] = math.nan
        exact = a.double() @ b.double() * scale_a.double() * scale_b.double() + bias.double()
        for fast in (False, True):
            found = tk.scaled_mm(a, b, scale_a, scale_b, bias, use_fast_accum=fast)
            assert torch.equal(found.isnan(), exact.isnan()), f"a NaN in {of} at {place}, {m}x{n}x{k}"


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is chosen on the CPU")
@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_one_nan_with_every_config(op: str) -> None:
    rng = random.Random(op)
    for m, n, k in ((150, 264, 520), (4, 256, 4096), (33, 77, 95), (64, 128, 256)):
        batch = (3,) if op == "bmm" else ()
        for transposed in (False, True):
            a = torch.randn(*batch, m, k, device=DEVICE).bfloat16()
            b = torch.randn(*batch, n, k, device=DEVICE).bfloat16().mT
            b = b.contiguous() if transposed else b
            t = rng.choice((a, b))
            t[tuple(rng.randrange(size) for size in t.shape)] = math.nan
            expected = (a.double() @ b.double()).isnan()
            for config in _packs.config_numbers(op):
                try:
                    found = getattr(tk, op)(a, b, config=config)
                except ValueError:
                    continue  # not for this problem
                assert torch.equal(found.isnan(), expected), f"{config} {m}x{n}x{k}"
