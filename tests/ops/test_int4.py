"""int4_mm, uint4x2_mixed_mm and Int4Linear on the CPU: against float64, torch's own layouts, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.library import opcheck

import tk
from tk.ops import product

from .products import ACTIVATION_NAMES, LAYOUTS, assert_close, laid_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
M, N, K = 5, 6, 128
Q = torch.randint(16, (K, N), dtype=torch.uint8)
B = tk.pack_int4(Q)
A = torch.randn(M, K)


def scaling(group: int, k: int = K, n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(k // group, n) / 8 + 0.1, torch.rand(k // group, n) * 15


def exact(q: torch.Tensor, scales: torch.Tensor | None = None, zeros: torch.Tensor | None = None) -> torch.Tensor:
    if scales is None:
        return q.double() - 8
    each = q.shape[0] // scales.shape[0]
    zero = 8 if zeros is None else zeros.double().repeat_interleave(each, 0)
    return (q.double() - zero) * scales.double().repeat_interleave(each, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", (32, 64, 128))
@pytest.mark.parametrize("has_zeros", (False, True))
def test_against_fp64(dtype: torch.dtype, group: int, has_zeros: bool) -> None:
    a = A.to(dtype)
    scales, zeros = (x.to(dtype) for x in scaling(group))
    result = tk.int4_mm(a, B, scales, zeros if has_zeros else None, group)
    assert result.dtype == dtype and result.is_contiguous()
    assert_close(result, a.double() @ exact(Q, scales, zeros if has_zeros else None), K)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_bias_activation_and_out_dtype(activation: str) -> None:
    a, bias = A.bfloat16(), torch.randn(N).bfloat16()
    scales, zeros = (x.bfloat16() for x in scaling(64))
    z = a.double() @ exact(Q, scales, zeros) + bias.double()
    given = dict(bias=bias, activation=activation, out_dtype=torch.float32)
    result = tk.int4_mm(a, B, scales, zeros, 64, **given)  # type: ignore[arg-type]
    assert result.dtype == torch.float32
    assert_close(result, product.ACTIVATE[activation](z), K)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_form(dtype: torch.dtype) -> None:
    a = A.to(dtype)
    assert_close(tk.uint4x2_mixed_mm(a, B), a.double() @ exact(Q), K)
    relu = tk.uint4x2_mixed_mm(a, B, activation="relu", out_dtype=dtype)
    assert_close(relu, (a.double() @ exact(Q)).relu(), K)


def test_every_value_in_both_halves_of_a_byte() -> None:
    q = torch.arange(256, dtype=torch.uint8)
    q = torch.stack((q & 15, q >> 4)).contiguous()  # [2, 256]
    assert torch.equal(tk.pack_int4(q), torch.arange(256, dtype=torch.uint8)[None])
    assert torch.equal(tk.unpack_int4(tk.pack_int4(q)), q)
    both = tk.uint4x2_mixed_mm(torch.eye(2), tk.pack_int4(q))
    assert torch.equal(both, q.float() - 8)


def test_a_group_of_all_of_K() -> None:
    q = torch.randint(16, (70, N), dtype=torch.uint8)
    a, (scales, zeros) = torch.randn(M, 70), scaling(70, 70)
    assert_close(tk.int4_mm(a, tk.pack_int4(q), scales, zeros, 70), a.double() @ exact(q, scales, zeros), 70)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    scales, zeros = scaling(32)
    operands = [A, B, scales, zeros]
    for i in range(4):
        a, b, *scaled = (laid_out(x, layout) if i == j else x for j, x in enumerate(operands))
        assert_close(tk.int4_mm(a, b, *scaled, 32), a.double() @ exact(tk.unpack_int4(b), *scaled), K)  # type: ignore[arg-type]


@pytest.mark.parametrize("lead", ((), (2,), (2, 3), (0, 3)), ids=str)
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    scales, zeros = scaling(32)
    a = torch.randn(*lead, K)
    result = tk.int4_mm(a, B, scales, zeros, 32)
    assert result.shape == (*lead, N)
    assert_close(result, a.double() @ exact(Q, scales, zeros), K)
    if len(lead) == 2:
        assert_close(tk.int4_mm(a.mT.contiguous().mT, B, scales, zeros, 32), result.double(), K)


@pytest.mark.parametrize(("m", "n", "k"), ((0, 6, 128), (5, 0, 128), (5, 6, 0)))
def test_sizes_of_0(m: int, n: int, k: int) -> None:
    a, b, bias = torch.randn(m, k), torch.empty(k // 2, n, dtype=torch.uint8), torch.ones(n)
    scales = torch.ones(k // 128, n)
    expected = torch.ones(m, n) + (a.double() @ exact(tk.unpack_int4(b))).float()
    assert_close(tk.int4_mm(a, b, scales, bias=bias), expected.double(), 128)
    assert_close(tk.uint4x2_mixed_mm(a, b), expected.double() - 1, 128)


def test_out() -> None:
    scales, zeros = scaling(32)
    out = torch.empty(N, M).t()
    assert tk.int4_mm(A, B, scales, zeros, 32, out=out) is out
    assert_close(out, A.double() @ exact(Q, scales, zeros), K)
    out = torch.empty(M, N)
    assert tk.uint4x2_mixed_mm(A, B, out=out) is out
    assert_close(out, A.double() @ exact(Q), K)
    memory = torch.randn(M, K + N)
    with pytest.raises(ValueError, match="out overlaps a"):
        tk.uint4x2_mixed_mm(memory[:, :K], B, out=memory[:, K - 1 : -1])


@pytest.mark.parametrize("overload", ("default", "out"))
def test_opcheck(overload: str) -> None:
    kwargs = {"out": torch.empty(M, N)} if overload == "out" else {}
    opcheck(getattr(torch.ops.tk.int4_mm, overload), (A, B, *scaling(32), 32, torch.randn(N), 4), kwargs)
    opcheck(getattr(torch.ops.tk.uint4x2_mixed_mm, overload), (A, B, 1), kwargs)


def test_vmap_and_autocast() -> None:
    scales, zeros = scaling(32)
    a = torch.randn(3, M, K)
    assert_close(torch.vmap(tk.int4_mm, (0, None, None, None, None))(a, B, scales, zeros, 32),
                 a.double() @ exact(Q, scales, zeros), K)  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(tk.uint4x2_mixed_mm(A, B), tk.uint4x2_mixed_mm(A.bfloat16(), B))


def test_there_are_no_gradients() -> None:
    scales, zeros = scaling(32)
    for i in range(3):
        given = [x.clone().requires_grad_(i == j) for j, x in enumerate((A, scales, zeros))]
        with pytest.raises(NotImplementedError, match=r"tk\.int4_mm has no gradient: it is for inference"):
            tk.int4_mm(given[0], B, given[1], given[2], 32)
        with torch.no_grad():
            tk.int4_mm(given[0], B, given[1], given[2], 32)
    with pytest.raises(NotImplementedError, match=r"tk\.uint4x2_mixed_mm has no gradient"):
        tk.uint4x2_mixed_mm(A.clone().requires_grad_(), B)


S, Z = scaling(32)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.int4_mm(A, B, S, Z, 48), "group_size is 48, must be 32, 64, 128 or K, which is 128"),
        (lambda: tk.int4_mm(A[:, :96], B[:48], S[:1], None, 64), "group_size is 64, which does not divide K, 96"),
        (lambda: tk.int4_mm(A, B[:60], S, Z, 32), r"a has 128 columns, b is \[60, 6\], must be \[K / 2, N\]"),
        (lambda: tk.int4_mm(A[:, :7], B[:3], S, Z, 32), r"a has 7 columns, b is \[3, 6\]"),
        (lambda: tk.int4_mm(A, B.int(), S, Z, 32), "b is int32, must be uint8"),
        (lambda: tk.int4_mm(A, B, S[:3], Z, 32), r"scales is \[3, 6\], must be \[K / group_size, N\], \[4, 6\]"),
        (lambda: tk.int4_mm(A, B, S, Z[:, :5], 32), r"zeros is \[4, 5\], must be"),
        (lambda: tk.int4_mm(A, B, S.half(), Z, 32), "a is float32, scales is float16"),
        (lambda: tk.int4_mm(A, B, S, Z.double(), 32), "a is float32, zeros is float64"),
        (lambda: tk.int4_mm(A, B, S, Z, 32, bias=torch.randn(5)), r"bias is \[5\], must be \[6\]"),
        (lambda: tk.int4_mm(A, B[0], S, Z, 32), "b must have 2 dimensions"),
        (lambda: tk.int4_mm(A, B, S, Z, 32, activation="tanh"), "activation is 'tanh'"),  # type: ignore[arg-type]
        (lambda: tk.int4_mm(A.to("meta"), B.to("meta"), S.to("meta"), None, 48), "group_size is 48"),
        (lambda: tk.uint4x2_mixed_mm(A, B[:3]), "two values to a byte"),
        (lambda: tk.pack_int4(Q.int()), r"q is torch.int32 \[128, 6\], must be uint8"),
        (lambda: tk.pack_int4(Q[:3]), "an even K"),
        (lambda: tk.pack_int4(Q + 16), "values are 0 to 15"),
        (lambda: tk.unpack_int4(B[0]), r"must be uint8 \[K / 2, N\]"),
        (lambda: tk.nn.Int4Linear(96, 8, group_size=64), "group_size is 64, must be 32, 64, 128 or in_features, 96"),
        (lambda: tk.nn.Int4Linear(7, 8, group_size=7), "in_features is 7, must be even"),
    ),
)
def test_wrong_arguments(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_tensor_and_no_dtype() -> None:
    with pytest.raises(TypeError, match="scales must be a Tensor, is NoneType"):
        tk.int4_mm(A, B, None)  # type: ignore[arg-type]
    with pytest.raises(tk.UnsupportedError, match="a is int32"):
        tk.uint4x2_mixed_mm(A.int(), B)


# --- From torch's layouts ---


def as_cuda_packs(q: torch.Tensor, tiles: int) -> torch.Tensor:
    """[K, N] in the layout of CUDA's _convert_weight_to_int4pack, element by element as its kernel writes it: lane t of
    a tile of eight columns and, two at a time, sixteen k."""
    k, n = q.shape
    out = torch.zeros(n // 8, k // (16 * tiles), 32, tiles // 2, dtype=torch.int64)
    for tile in range(n // 8):
        for outer in range(k // (16 * tiles)):
            for lane in range(32):
                for inner in range(0, tiles, 2):
                    base = (outer * tiles + inner) * 16 + lane % 4 * 2
                    ks = [base + half for half in (0, 1, 8, 9, 16, 17, 24, 25)]
                    values = [int(q[i, tile * 8 + lane // 4]) for i in ks]
                    # From the highest bits down: those of odd numbers, then those of even ones.
                    word = sum(values[i] << 4 * place for place, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                    out[tile, outer, lane, inner // 2] = word
    return (out - (out >> 31 << 32)).to(torch.int32)


@pytest.mark.parametrize("tiles", (2, 4, 8))
def test_from_the_layout_of_cuda(tiles: int) -> None:
    q = torch.randint(16, (256, 24), dtype=torch.uint8)
    scales_and_zeros = torch.rand(2, 24, 2) + 0.5
    b, scales, zeros = tk.int4_from_torch(as_cuda_packs(q, tiles), scales_and_zeros, 128)
    assert torch.equal(tk.unpack_int4(b), q)
    of_torch = (q.double() - 8) * scales_and_zeros[..., 0].double().repeat_interleave(128, 0) + scales_and_zeros[
        ..., 1
    ].double().repeat_interleave(128, 0)
    torch.testing.assert_close(exact(q, scales, zeros), of_torch, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", (16, 32, 64, 80, 96, 192))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_from_the_layout_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    k = 128
    q = torch.randint(16, (k, n), dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.t().contiguous().int(), 2)
    scales_and_zeros = ((torch.rand(k // 32, n, 2) + 0.5) / 8).to(dtype)
    b, scales, zeros = tk.int4_from_torch(packed, scales_and_zeros, 32)
    assert torch.equal(tk.unpack_int4(b), q)
    a = torch.randn(7, k).to(dtype)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(a, packed, 32, scales_and_zeros)
    ours = tk.int4_mm(a, b, scales, zeros, 32)
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("packed", "message"),
    (
        (torch.zeros(8, 4, dtype=torch.int32), "packed is torch.int32"),
        (torch.zeros(1, 1, 16, 1, dtype=torch.int32), "packed is torch.int32"),
        (torch.zeros(1, 4, 32, 1, dtype=torch.int32), r"scales_and_zeros is \[2, 8, 2\], must be .* \[4, 8, 2\]"),
    ),
)
def test_layouts_that_torch_does_not_have(packed: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tk.int4_from_torch(packed, torch.ones(2, 8, 2), 32)


def test_a_group_that_has_no_zero_point() -> None:
    packed = torch.zeros(1, 1, 32, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a scale is 0 where its zero is not"):
        tk.int4_from_torch(packed, torch.tensor([0.0, 1.0]).expand(1, 8, 2), 32)
    _, scales, zeros = tk.int4_from_torch(packed, torch.zeros(1, 8, 2), 32)
    assert not scales.any() and bool((zeros == 8).all())


# --- The layer ---


@pytest.mark.parametrize("group", (32, 128))
@pytest.mark.parametrize("bias", (True, False))
def test_the_layer_of_a_linear(group: int, bias: bool) -> None:
    linear = nn.Linear(256, 48, bias=bias)
    layer = tk.nn.Int4Linear.from_linear(linear, group)
    x = torch.randn(2, 3, 256)
    weight = exact(tk.unpack_int4(layer.packed), layer.scales, layer.zeros)
    step = layer.scales.double().repeat_interleave(group, 0)
    assert bool(((weight - linear.weight.detach().t().double()).abs() <= 0.5001 * step).all())
    expected = x.double() @ weight + (linear.bias.detach().double() if bias else 0)
    with torch.no_grad():
        assert_close(layer(x), expected, 256)
    assert "group_size" in repr(layer) and not list(layer.parameters())


def test_weights_of_sixteen_steps_come_through() -> None:
    linear = nn.Linear(64, 8, bias=False)
    values = torch.randint(-8, 8, (8, 64)).float()
    values[:, 0], values[:, 32], values[:, 1], values[:, 33] = -8, -8, 7, 7
    linear.weight.data = values / 4
    layer = tk.nn.Int4Linear.from_linear(linear, 32)
    assert torch.equal(
        exact(tk.unpack_int4(layer.packed), layer.scales, layer.zeros), linear.weight.detach().t().double()
    )
    linear.weight.data.zero_()
    layer = tk.nn.Int4Linear.from_linear(linear, 32)
    assert not layer(torch.randn(2, 64)).any()


def test_the_state_of_the_layer() -> None:
    one = tk.nn.Int4Linear.from_linear(nn.Linear(64, 8), 64)
    other = tk.nn.Int4Linear(64, 8, group_size=64, dtype=torch.float32)
    assert other.load_state_dict(one.state_dict()).missing_keys == []
    x = torch.randn(3, 64)
    assert torch.equal(one(x), other(x)) and torch.equal(copy.deepcopy(one)(x), one(x))
    assert one.bfloat16()(x.bfloat16()).dtype == torch.bfloat16 and one.packed.dtype == torch.uint8


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda: tk.nn.Int4Linear(-256, 4), ValueError, "in_features is -256, must not be negative"),
        (lambda: tk.nn.Int4Linear(256, -4), ValueError, "out_features is -4, must not be negative"),
        (lambda: tk.nn.Int4Linear(256, 4, dtype=torch.int32), TypeError, "dtype must be a floating-point torch.dtype"),
        (lambda: tk.nn.Int4Linear(256, 4, dtype=torch.complex64), TypeError, "dtype must be a floating-point"),
        (lambda: tk.nn.Int4Linear(256, 4, dtype="bf16"), TypeError, "dtype must be a floating-point torch.dtype"),
        (lambda: tk.nn.Int4Linear.from_linear(torch.nn.Conv1d(2, 2, 1)), TypeError, "must be an nn.Linear, is Conv1d"),
        (lambda: tk.nn.Int4Linear.from_linear(torch.ones(2, 2)), TypeError, "linear must be an nn.Linear, is Tensor"),
        (lambda: tk.nn.Int4Linear.from_linear(None), TypeError, "linear must be an nn.Linear, is NoneType"),
    ),
)
def test_wrong_arguments_of_the_layer(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()
