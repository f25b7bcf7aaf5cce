"""The out forms: where the result goes, and memory that must not be shared."""

import pytest
import torch

import tk

from .products import FORMS, Form, assert_close, exact


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_result_is_out(form: Form) -> None:
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(5)
    out = torch.empty(4, 5)
    assert form.call(a, b, bias, activation="gelu", out=out) is out
    assert_close(out, exact(a, b, bias, activation="gelu"), 3)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_out_in_any_layout(form: Form) -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    for out in (torch.empty(5, 4).t(), torch.empty(4, 3, 5, 2)[:, 1, :, 1], torch.empty(60)[7:27].view(4, 5)):
        form.call(a, b, None, out=out)
        assert_close(out, exact(a, b), 3)


def test_what_lies_beside_a_strided_out_stays() -> None:
    whole = torch.full((4, 12), 7.0)
    tk.mm(torch.randn(4, 3), torch.randn(3, 5), out=whole[:, 3:8])
    assert (whole[:, :3] == 7).all() and (whole[:, 8:] == 7).all()


def test_linear_out_whose_leading_dimensions_do_not_run_together() -> None:
    x, weight = torch.randn(2, 3, 6), torch.randn(4, 6)
    out = torch.empty(3, 2, 4).transpose(0, 1)
    tk.linear(x, weight, out=out)
    assert_close(out, torch.nn.functional.linear(x.double(), weight.double()), 6)


def test_empty_out() -> None:
    out = torch.empty(0, 5)
    assert tk.mm(torch.empty(0, 3), torch.empty(3, 5), out=out) is out


def test_out_may_be_the_bias() -> None:
    a, b, bias = torch.randn(4, 3), torch.randn(3, 5), torch.randn(4, 5)
    expected = exact(a, b, bias, beta=2)
    tk.addmm(bias, a, b, beta=2, out=bias)
    assert_close(bias, expected, 3)


def test_neighbours_in_one_matrix_are_no_overlap() -> None:
    whole = torch.randn(4, 12)
    a, out = whole[:, :4], whole[:, 4:9]
    b = torch.randn(4, 5)
    expected = exact(a, b)
    tk.mm(a, b, out=out)
    assert_close(out, expected, 4)


@pytest.mark.parametrize(
    "make",
    (
        lambda m: (m[:4, :4], torch.randn(4, 4), None, m[:4, :4]),
        lambda m: (m[:4, :4], torch.randn(4, 4), None, m[2:6, :4]),
        lambda m: (torch.randn(4, 4), m[:4, :4], None, m[:4, 3:7]),
        lambda m: (m[:4, :4], torch.randn(4, 4), None, m[:4, :4].t()),
        lambda m: (torch.randn(4, 4), torch.randn(4, 4), m[:4, :4], m[1:5, :4]),
        lambda m: (torch.randn(4, 4), torch.randn(4, 4), m[0, :4], m[:4, :4]),
    ),
)
def test_overlapping_memory_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    a, b, bias, out = make(torch.randn(8, 8))
    before = out.clone()
    with pytest.raises(ValueError, match="overlaps"):
        tk.mm(a, b, bias, out=out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("out", (torch.empty(1, 5).expand(4, 5), torch.empty(8).as_strided((4, 5), (1, 1))))
def test_out_that_overlaps_itself_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="share memory"):
        tk.mm(torch.randn(4, 3), torch.randn(3, 5), out=out)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("out", "message"),
    (
        (torch.empty(5, 5), r"out is \[5, 5\], must be \[4, 5\]"),
        (torch.empty(20), r"out is \[20\], must be \[4, 5\]"),
        (torch.empty(4, 5, dtype=torch.float64), "out is float64, must be float32"),
    ),
)
def test_wrong_out(form: Form, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form.call(torch.randn(4, 3), torch.randn(3, 5), None, out=out)


def test_out_takes_no_gradients() -> None:
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        tk.mm(a, b, out=torch.empty(4, 5))
    with torch.no_grad():
        assert_close(tk.mm(a, b, out=torch.empty(4, 5)), exact(a.detach(), b), 3)


@pytest.mark.parametrize("empty", [(0,), (0, 7), (3, 0), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_out_without_elements_takes_the_results_shape(form: Form, empty: tuple[int, ...]) -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    out = torch.empty(empty)
    assert form.call(a, b, None, out=out) is out
    assert_close(out, exact(a, b), 3)


def test_so_does_one_of_a_batch_and_of_two_products() -> None:
    a, b = torch.randn(2, 4, 3), torch.randn(2, 3, 5)
    assert_close(tk.bmm(a, b, out=torch.empty(0)), exact(a, b), 3)
    assert_close(tk.baddbmm(torch.zeros(5), a, b, out=torch.empty(0)), exact(a, b), 3)
    both = tk.mm_plus_mm(a[0], b[0], a[1], b[1], out=torch.empty(0))
    assert_close(both, exact(a[0], b[0]) + exact(a[1], b[1]), 6)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (20,), (1, 4, 5)], ids=str)
def test_an_out_with_elements_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"tk.mm: out is .*, must be \[4, 5\]"):
        tk.mm(torch.randn(4, 3), torch.randn(3, 5), out=torch.empty(shape))
