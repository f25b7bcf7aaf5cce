"""The CPU path against float64: dtypes, layouts, epilogues, empty and degenerate sizes, NaN and inf."""

import math

import pytest
import torch
import torch.nn.functional as F

import tk

from .products import ACTIVATION_NAMES, FORMS, LAYOUTS, Form, assert_close, exact, laid_out

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIZES = ((1, 1, 1), (7, 5, 3), (1, 33, 17), (33, 1, 17), (17, 33, 1), (64, 48, 80))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_fp64(form: Form, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    m, n, k = size
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(n).to(dtype)
    for activation in ACTIVATION_NAMES:
        result = form.call(a, b, bias, activation=activation)
        assert result.dtype == dtype and result.is_contiguous()
        assert_close(result, exact(a, b, bias, activation=activation), k)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_layouts(form: Form, a_layout: str, b_layout: str) -> None:
    for m, n, k in ((9, 7, 5), (1, 7, 5), (9, 1, 5), (9, 7, 1)):
        a, b = laid_out(torch.randn(m, k), a_layout), laid_out(torch.randn(k, n), b_layout)
        assert_close(form.call(a, b, None), exact(a, b), k)


@pytest.mark.parametrize("shape", ((), (1,), (5,), (1, 1), (1, 5), (4, 1), (4, 5)), ids=str)
def test_bias_broadcasts_as_in_torch(shape: tuple[int, ...]) -> None:
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(shape)
    expected = torch.addmm(bias.double(), a.double(), b.double(), beta=0.5, alpha=-2)
    assert_close(tk.addmm(bias, a, b, beta=0.5, alpha=-2), expected, 3)
    assert_close(tk.mm(a, b, bias), exact(a, b, bias), 3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_out_dtype_keeps_what_the_accumulator_holds(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 64).to(dtype), torch.randn(64, 16).to(dtype)
    result = tk.mm(a, b, out_dtype=torch.float32)
    assert result.dtype == torch.float32
    assert_close(result, exact(a, b), 64)
    assert torch.equal(result.to(dtype), tk.mm(a, b))


def test_16_bit_sums_are_accumulated_in_fp32() -> None:
    # 1 + 4096 x 2**-12: a bfloat16 accumulator would stay at 1.
    a = torch.full((1, 4097), 2.0**-12, dtype=torch.bfloat16)
    a[0, 0] = 1
    assert tk.mm(a, torch.ones(4097, 1, dtype=torch.bfloat16)).item() == 2.0


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", ((0, 5, 3), (4, 0, 3), (0, 0, 3), (0, 0, 0)), ids=str)
def test_empty_results(form: Form, size: tuple[int, int, int]) -> None:
    m, n, k = size
    assert form.call(torch.randn(m, k), torch.randn(k, n), torch.randn(n)).shape == (m, n)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_no_inner_size_leaves_the_bias(activation: str) -> None:
    a, b, bias = torch.randn(4, 0), torch.randn(0, 5), torch.randn(5)
    assert torch.equal(tk.mm(a, b), torch.zeros(4, 5))
    expected = exact(a, b, bias, beta=0.5, activation=activation)
    assert_close(tk.addmm(bias, a, b, beta=0.5, activation=activation), expected, 1)


def test_beta_of_zero_does_not_read_the_bias() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    bias = torch.full((5,), math.nan)
    assert_close(tk.addmm(bias, a, b, beta=0), exact(a, b), 3)
    assert tk.addmm(bias, a, b).isnan().all()


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_nan_and_inf_end_where_atens_do(activation: str, value: float) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    a[1, 2] = value
    expected = exact(a, b, activation=activation).float()
    torch.testing.assert_close(tk.mm(a, b, activation=activation), expected, equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_activations_over_their_whole_range(activation: str) -> None:
    z = torch.linspace(-40, 40, 4001, dtype=torch.float64)[:, None]
    one = torch.ones(1, 1, dtype=torch.float64)
    plain = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    plain["gelu_tanh"] = lambda x: F.gelu(x, approximate="tanh")
    torch.testing.assert_close(tk.mm(z, one, activation=activation), plain[activation](z), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("leading", ((), (3,), (2, 3), (2, 1, 3), (0, 3)), ids=str)
def test_linear_takes_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(*leading, 6), torch.randn(4, 6), torch.randn(4)
    result = tk.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert result.is_contiguous()
    assert_close(result, expected, 6)


def test_linear_of_leading_dimensions_that_do_not_run_together() -> None:
    x, weight = torch.randn(3, 2, 5, 6), torch.randn(4, 6)
    for view in (x.transpose(0, 1), x[:, :, ::2], x[:, :1].expand(3, 4, 5, 6), x.transpose(1, 3).transpose(1, 2)):
        if view.shape[-1] == 6:
            assert_close(tk.linear(view, weight), F.linear(view.double(), weight.double()), 6)


def test_config_and_modes_have_no_effect_on_the_cpu() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    plain = tk.mm(a, b)
    with tk.config.modes(strict=True, batch_invariant=True, deterministic=True, static_weights=True):
        assert torch.equal(tk.mm(a, b, config="no such config"), plain)
    assert torch.equal(tk.mm(a, b, config=3), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [0, 1, -0.5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_alpha_0_does_not_read_the_product(bad: float, beta: float, dtype: torch.dtype) -> None:
    for m, k, n in ((1, 1, 1), (3, 4, 5), (33, 64, 48)):
        a, b = torch.full((2, m, k), bad, dtype=dtype), torch.randn(2, k, n, dtype=dtype)
        for bias in (torch.randn(n, dtype=dtype), torch.randn(m, n, dtype=dtype), torch.randn(1, dtype=dtype)):
            expected = (beta * bias.double()).expand(m, n)
            assert_close(tk.addmm(bias, a[0], b[0], beta=beta, alpha=0), expected, 1)
            batch = tk.baddbmm(bias, a, b, beta=beta, alpha=0)
            assert_close(batch, expected.expand(2, m, n), 1)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)], ids=str)
def test_linear_of_a_vector(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(4)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    assert_close(tk.linear(x, weight), expected, 4)
    assert_close(tk.linear(x, weight, torch.tensor(2.0)), expected + 2, 4)
    assert_close(tk.linear(x, weight, out=torch.empty(0)), expected, 4)
    out = torch.empty(shape[:-1])
    assert tk.linear(x, weight, out=out) is out
    assert_close(out, expected, 4)
    with pytest.raises(ValueError, match=r"bias is \[3\], must be one number"):
        tk.linear(x, weight, torch.randn(3))
