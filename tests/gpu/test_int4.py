"""int4_mm and uint4x2_mixed_mm: every config, random problems, torch's own layout, against exact weights in float64."""

from __future__ import annotations

import random

import pytest
import torch

import tk

from .device import DEVICE
from .other_products import BF16, FP16, FP32, LETTERS, activated, draws, every_config, matrices, size

KINDS = ((BF16, None), (BF16, FP32), (FP16, None), (FP16, FP32))
SIZES = (
    (1, 128, 256),
    (2, 4096, 512),
    (3, 272, 384),
    (16, 1024, 4096),
    (20, 1040, 8320),
    (77, 144, 256),
    (200, 512, 1024),
)


def packed(k: int, n: int, letter: str = "n") -> tuple[torch.Tensor, torch.Tensor]:
    """b in a layout, and its values less 8, in float64."""
    q = torch.randint(16, (k, n), dtype=torch.uint8, device=DEVICE)
    b = tk.pack_int4(q)
    if letter == "t":
        b = b.t().contiguous().t()
    elif letter == "s":
        b = b.repeat_interleave(3, 1)[:, ::3]
    return b, q.double()


def scaling(groups: int, n: int, dtype: torch.dtype, letter: str = "n") -> tuple[torch.Tensor, torch.Tensor]:
    scales, zeros = matrices(groups, n, dtype=dtype, letter=letter), matrices(groups, n, dtype=dtype, letter=letter)
    return scales.abs_().add_(0.25).div_(8), zeros.abs_().mul_(4)


def exact(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    each = q.shape[0] // scales.shape[0]
    zero = 8 if zeros is None else zeros.double().repeat_interleave(each, 0)
    return (q - zero) * scales.double().repeat_interleave(each, 0)


def wrong_in(result: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, reference: torch.Tensor) -> str:
    """ "" if nothing: each weight may be rounded to a's dtype, twice where the zero is no whole number, and so is the
    result; their errors add up as independent ones do."""
    if result.shape != reference.shape:
        return f"is {list(result.shape)}, not {list(reference.shape)}"
    step = torch.finfo(a.dtype).eps / 2
    norm = (a.double().square() @ weight.square()).sqrt()
    room = 1.02 * torch.finfo(result.dtype).eps / 2 * reference.abs() + 8 * step * norm + 1e-4 * norm.max() + 1e-6
    error = (result.double() - reference).abs()
    bad = ~(error <= room)
    return f"{int(bad.sum())} of {bad.numel()} wrong, the worst by {error[bad].max().item():.3g}" if bad.any() else ""


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("group", (32, 64, 128, None))
def test_every_config(group: int | None, kind: tuple[torch.dtype, torch.dtype | None]) -> None:
    """group None: the plain form."""
    dtype, out_dtype = kind
    wrong = []
    for m, n, k in SIZES:
        a, (b, q) = matrices(m, k, dtype=dtype), packed(k, n)
        scales, zeros = scaling(k // (group or k), n, dtype)
        bias = matrices(1, n, dtype=dtype)[0]
        for has_zeros in (False, True) if group else (False,):
            zero = zeros if has_zeros else None
            weight = q - 8 if group is None else exact(q, scales, zero)
            z = a.double() @ weight

            def call(config: int, a=a, b=b, scales=scales, zero=zero, bias=bias):  # type: ignore[no-untyped-def]
                if group is None:
                    return torch.ops.tk.uint4x2_mixed_mm(a, b, 4, out_dtype, -1, config)
                return torch.ops.tk.int4_mm(a, b, scales, zero, group, bias, 4, out_dtype, -1, config)

            reference = activated(z if group is None else z + bias.double(), 4)
            for name, result in every_config(call):
                if said := wrong_in(result, a, weight, reference):
                    wrong.append(f"{m}x{n}x{k} {name}{' zeros' if has_zeros else ''}: {said}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("chunk", range(4))
def test_random_products(chunk: int) -> None:
    torch.manual_seed(chunk)
    wrong = []
    for rng in draws(f"int4 {chunk}", 300):
        dtype, out_dtype = rng.choice(KINDS)
        group = rng.choice((32, 64, 128, None))
        k = group * rng.randrange(1, 12) if group else 2 * size(rng, 700)
        m, n = (rng.randrange(1, 9) if rng.random() < 0.4 else size(rng, 700)), size(rng, 1024)
        if rng.random() < 0.5:
            n = max(16, n // 16 * 16)
        letters = [rng.choice(LETTERS) if rng.random() < 0.4 else "n" for _ in range(3)]
        a = matrices(m, k, dtype=dtype, letter=letters[0], odd=rng.random() < 0.2)
        b, q = packed(k, n, letters[1])
        scales, zeros = scaling(k // (group or k), n, dtype, letters[2])
        zero = zeros if rng.random() < 0.5 else None
        bias = matrices(1, n, dtype=dtype)[0] if rng.random() < 0.5 else None
        weight, activation = exact(q, scales, zero), rng.randrange(5)
        result = torch.ops.tk.int4_mm(a, b, scales, zero, group or k, bias, activation, out_dtype)
        z = a.double() @ weight
        reference = activated(z if bias is None else z + bias.double(), activation)
        if said := wrong_in(result, a, weight, reference):
            wrong.append(f"{dtype} {m}x{n}x{k} group {group} {letters}: {said}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("m", (1, 16, 127, 128, 511, 1000))
def test_the_plain_form_is_exact_but_for_the_sum(m: int) -> None:
    """Small whole numbers: every sum is one that float32 has."""
    a = torch.randint(-4, 5, (m, 512), device=DEVICE).to(BF16)
    b, q = packed(512, 256)
    result = tk.uint4x2_mixed_mm(a, b, out_dtype=FP32)
    assert torch.equal(result.double(), a.double() @ (q - 8))


def test_the_extremes_of_every_column() -> None:
    for value in (0, 8, 15):
        q = torch.full((256, 64), value, dtype=torch.uint8, device=DEVICE)
        for m in (1, 2, 4, 16, 600):
            result = tk.uint4x2_mixed_mm(torch.ones(m, 256, device=DEVICE, dtype=FP16), tk.pack_int4(q))
            assert bool((result == 256 * (value - 8)).all())


def test_empty_and_out() -> None:
    b, q = packed(128, 64)
    scales, zeros = scaling(1, 64, BF16)
    for m in (0, 7):
        a = matrices(m, 128) if m else torch.empty(0, 128, device=DEVICE, dtype=BF16)
        out = torch.empty(64, m, device=DEVICE, dtype=BF16).t()
        assert tk.int4_mm(a, b, scales, zeros, out=out) is out
        assert not wrong_in(out, a, exact(q, scales, zeros), a.double() @ exact(q, scales, zeros)) if m else True
    nothing = tk.int4_mm(torch.empty(3, 0, device=DEVICE, dtype=BF16), b[:0], scales[:0], bias=zeros[0])
    assert torch.equal(nothing, zeros[:1].expand(3, 64))


def test_rows_do_not_depend_on_one_another_in_batch_invariant_mode() -> None:
    a, (b, _) = matrices(700, 512), packed(512, 256)
    scales, zeros = scaling(4, 256, BF16)
    with tk.config.batch_invariant():
        whole = tk.int4_mm(a, b, scales, zeros)
        for m in (1, 3, 16, 100):
            assert torch.equal(tk.int4_mm(a[:m], b, scales, zeros), whole[:m])


@pytest.mark.skipif(DEVICE == "cpu", reason="torch's own layout of CUDA")
@pytest.mark.parametrize("tiles", (2, 4, 8))
def test_from_the_layout_of_torch(tiles: int) -> None:
    k, n = 512, 256
    q = torch.randint(16, (n, k), dtype=torch.uint8, device=DEVICE)
    theirs = torch.ops.aten._convert_weight_to_int4pack((q[:, ::2] << 4) | q[:, 1::2], tiles)
    scales_and_zeros = (torch.rand(k // 64, n, 2, device=DEVICE) / 8 + 0.1).to(BF16)
    b, scales, zeros = tk.int4_from_torch(theirs, scales_and_zeros, 64)
    assert torch.equal(tk.unpack_int4(b), q.t())
    a = matrices(random.Random(tiles).randrange(1, 40), k)
    expected = torch.ops.aten._weight_int4pack_mm(a, theirs, 64, scales_and_zeros).float()
    error = (tk.int4_mm(a, b, scales, zeros, 64).float() - expected).norm() / expected.norm()
    assert error < 2e-2


def test_the_layer_compiles_and_captures() -> None:
    layer = tk.nn.Int4Linear.from_linear(torch.nn.Linear(512, 256, device=DEVICE, dtype=BF16))
    x = matrices(4, 512)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
        if DEVICE != "cpu":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = layer(x)
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("m", (1, 4, 16, 48, 200))
def test_what_is_not_finite_stays_so_and_where_it_is(m: int, dtype: torch.dtype) -> None:
    """An infinity may become NaN (docs/products.md); it reaches its own row or column, all of it, and no other."""
    k, n = 256, 160
    a, (b, _) = matrices(m, k, dtype=dtype), packed(k, n)
    scales, zeros = scaling(k // 64, n, dtype)
    clean = tk.int4_mm(a, b, scales, zeros, 64)
    for value in (torch.inf, -torch.inf, torch.nan):
        spoilt = a.clone()
        spoilt[0, 5] = value
        found = tk.int4_mm(spoilt, b, scales, zeros, 64)
        assert not found[0].isfinite().any() and torch.equal(found[1:], clean[1:])
        for which in (0, 1):
            given = [scales.clone(), zeros.clone()]
            given[which][1, 7] = value
            found = tk.int4_mm(a, b, *given, 64)
            others = torch.arange(n, device=DEVICE) != 7
            assert not found[:, 7].isfinite().any() and torch.equal(found[:, others], clean[:, others])
