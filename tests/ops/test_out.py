"""The out forms: where the result goes, and memory that must not be shared."""

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

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


# --- Every product that has an out, also where nothing is computed ---


def _halves(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16)


def _fp8(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).to(torch.float8_e4m3fn)


_ENDS = torch.tensor([5, 16], dtype=torch.int32)
_ONE = torch.ones(())
_4_BITS = torch.randint(0, 256, (64, 16), dtype=torch.uint8)
CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (torch.randn(4, 3), torch.randn(3, 5)),
    "addmm": (torch.randn(5), torch.randn(4, 3), torch.randn(3, 5)),
    "linear": (torch.randn(2, 4, 3), torch.randn(5, 3)),
    "bmm": (torch.randn(2, 4, 3), torch.randn(2, 3, 5)),
    "baddbmm": (torch.randn(5), torch.randn(2, 4, 3), torch.randn(2, 3, 5)),
    "mm_plus_mm": (torch.randn(4, 3), torch.randn(3, 5), torch.randn(4, 2), torch.randn(2, 5)),
    "grouped_mm": (_halves(16, 16), _halves(2, 16, 16), {"offs": _ENDS}),
    "int4_mm": (_halves(4, 128), _4_BITS, _halves(1, 16)),
    "uint4x2_mixed_mm": (_halves(4, 128), _4_BITS),
    "scaled_mm": (_fp8(16, 16), _fp8(16, 16).t(), _ONE, _ONE),
    "scaled_grouped_mm": (_fp8(16, 16), _fp8(2, 16, 16).mT, torch.ones(16), torch.ones(2, 16), {"offs": _ENDS}),
}  # fmt: skip


def test_every_function_with_an_out_is_here() -> None:
    assert CALLS.keys() == {name for name in tk.inspect.functions() if _has_out(getattr(tk, name))}


def _has_out(function: Any) -> bool:
    return "out" in function.__annotations__


def _call(name: str, out: Any, mode: Any = None) -> Any:
    def moved(x: Any) -> Any:
        return mode.from_tensor(x) if mode and isinstance(x, torch.Tensor) else x

    *args, last = CALLS[name]
    kwargs = last if isinstance(last, dict) else {}
    args += [] if kwargs else [last]
    given = moved(out)
    found = getattr(tk, name)(*map(moved, args), **{k: moved(x) for k, x in kwargs.items()}, out=given)
    assert found is given
    return found


@pytest.mark.parametrize("is_fake", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused_and_what_resized(name: str, is_fake: bool) -> None:
    """Fakes say what the kernels say, so that torch.compile does."""
    result = _call(name, torch.empty(0, dtype=_dtype(name)))
    sizes, dtype = list(result.shape), str(result.dtype).removeprefix("torch.")
    with FakeTensorMode() if is_fake else contextlib.nullcontext() as mode:
        for empty in ((0,), (0, 3), (0,) * result.dim()):
            assert _call(name, torch.empty(empty, dtype=result.dtype), mode).shape == result.shape
        with pytest.raises(
            ValueError, match=rf"tk.{name}: out is \[2, 7\], must be .*{sizes[-1]}\]; it is not resized"
        ):
            _call(name, torch.empty(2, 7, dtype=result.dtype), mode)
        with pytest.raises(ValueError, match=f"tk.{name}: out is complex64, must be {dtype}"):
            _call(name, torch.empty(sizes, dtype=torch.complex64), mode)
        with pytest.raises(ValueError, match=rf"tk.{name}: \w+ is on cpu, out on meta; all tensors must be on one"):
            _call(name, torch.empty(sizes, dtype=result.dtype, device="meta"), mode)
        with pytest.raises(tk.UnsupportedError, match=f"tk.{name}: out is sparse_coo, must be a dense tensor"):
            _call(name, torch.zeros(sizes, dtype=result.dtype).to_sparse(), mode)
    with pytest.raises(TypeError, match=f"tk.{name}: out must be .*Tensor, is .*list"):
        _call(name, [result])


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if CALLS[name][0].dtype == torch.float32 else torch.bfloat16


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_an_empty_out_takes_the_results_shape(name: str, backend: str) -> None:
    torch._dynamo.reset()
    expected = _call(name, torch.empty(0, dtype=_dtype(name)))
    given = torch.empty(0, dtype=_dtype(name))
    torch.compile(lambda out: _call(name, out), backend=backend)(given)
    torch.testing.assert_close(given, expected)
