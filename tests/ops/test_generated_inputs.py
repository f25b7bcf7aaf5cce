"""Made-up calls of generated ops, and how their results are judged."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
import torch

from tk.generated import inputs, interpret, register
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for benchmarks/

from tests.gpu import op_cases  # noqa: E402

from benchmarks import ops  # noqa: E402


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_cases, "DEVICE", "cpu")


# The package's, less those of lists: no test has loaded a pack yet.
NAMES = [name for name in register.names() if not register.find(name).takes_lists]  # type: ignore[union-attr]


def find(name: str) -> GeneratedOp:
    op = register.find(name)
    assert op is not None, f"the package has no {name}"
    return op


# --- Inputs ---


def test_every_op_of_the_package_can_be_called() -> None:
    for name in NAMES:
        for dtypes, flags in inputs.kinds(find(name)):
            example = inputs.of_shape(
                find(name), op_cases.shape_of(find(name), (3, 8)), next(iter(dtypes.values()), ""), flags
            )
            args = example.arguments("cpu")
            results = inputs.listed(getattr(torch.ops.tk, name)(*args))
            assert inputs.bytes_moved(args, results) > 0


def test_shapes_follow_from_the_widest_tensor() -> None:
    norm = inputs.of_shape(find("layer_norm"), (2, 3, 8), "fp16")
    assert [norm.shape(n) for n in ("x", "weight", "bias")] == [(2, 3, 8), (8,), (8,)]
    assert str(norm) == "layer_norm(x fp16[2, 3, 8], weight fp16[8], bias fp16[8])"
    backward = inputs.of_shape(find("logsumexp_backward"), (4, 8), "fp32")
    assert (backward.shape("grad_0"), backward.shape("x")) == ((4,), (4, 8))
    assert inputs.of_shape(find("gelu"), (5,), "bf16", {"tanh": True}).arguments("cpu")[1] is True


def test_lists_have_as_many_tensors_as_the_first_number_says() -> None:
    example = inputs.of_shape(find("adamw"), (3, 5, 7), "bf16")
    args = example.arguments("cpu")
    assert [x.shape for x in args[0]] == [(5, 7)] * 3 and [x.shape for x in args[4]] == [()] * 3
    assert all((x >= 0).all() for x in args[3]) and "params bf16[5, 7] x 3" in str(example)
    assert inputs.bytes_moved(args, ()) == 3 * (4 * 35 * 2 + 4)
    with pytest.raises(ValueError, match="adamw takes lists: a shape is how many tensors, then their sizes"):
        inputs.of_shape(find("adamw"), (), "bf16")


def test_bytes_are_those_of_arguments_and_results() -> None:
    args = inputs.of_shape(find("rms_norm"), (4, 8), "bf16").arguments("cpu")
    assert inputs.bytes_moved(args, [torch.empty(4, 8)]) == 2 * (32 + 8) + 4 * 32


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("column_sum", (8,), "bf16", r"T\[M, N\], the shape given is \[8\]"),
        ("column_sum", (2, 3, 4), "bf16", r"the shape given is \[2, 3, 4\]"),
        ("softmax", (2, 3), "fp64", "T is bf16, fp16, fp32, not fp64"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(name: str, shape: tuple[int, ...], dtype: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        inputs.of_shape(find(name), shape, dtype)


def test_shapes_are_read() -> None:
    assert inputs.read_shape("32768x4096") == (32768, 4096)
    with pytest.raises(ValueError, match="'4,4' is no shape"):
        inputs.read_shape("4,4")


# --- Layouts ---


@pytest.mark.parametrize("layout", op_cases.LAYOUTS)
def test_a_layout_holds_the_values_and_nan_around_them(layout: str) -> None:
    rng = random.Random(layout)
    for shape in ((), (1,), (5,), (3, 4), (2, 3, 4, 5), (0, 3)):
        values = torch.randn(shape)
        view = op_cases.place(values, layout, rng)
        assert view.shape == values.shape
        if 0 not in view.stride() or not shape:
            assert torch.equal(view, values)
            storage = torch.tensor(view.untyped_storage(), dtype=torch.uint8).view(torch.float32)
            assert int((~storage.isnan()).sum()) == values.numel()


def test_layouts_are_what_they_are_called() -> None:
    rng = random.Random(0)
    assert op_cases.place(torch.randn(3, 4), "offset", rng).data_ptr() % 16 == 4
    assert op_cases.place(torch.randn(3, 4), "transposed", rng).stride() == (1, 3)
    assert op_cases.place(torch.randn(3, 4), "gaps", rng).stride(1) in (2, 3)
    assert 0 in op_cases.place(torch.randn(3, 4), "expanded", rng).stride()
    assert op_cases.place(torch.randn(3, 4, 5), "channels_last", rng).stride(2) == 1


def test_random_cases_are_of_all_kinds() -> None:
    rng = random.Random(0)
    cases = [op_cases.draw(rng, find("rms_norm")) for _ in range(400)]
    assert {c.layouts["x"] for c in cases} == set(op_cases.LAYOUTS)
    assert {c.special for c in cases} == {"", *op_cases.SPECIAL}
    assert {len(c.example.leading) for c in cases} == {0, 1, 2, 3, 4, 5}
    assert {c.example.dtype_name("x") for c in cases} == {"bf16", "fp16", "fp32"}
    assert any(0 in c.example.leading for c in cases) and any(c.any_config for c in cases)
    assert max(c.example.sizes["N"] for c in cases) > 30_000
    assert all(math.prod(c.example.shape("x")) <= op_cases.MOST_ELEMENTS for c in cases)


# --- Judging ---


def judged(name: str, spoil, dtype: str = "fp32", shape: tuple[int, ...] = (16, 1000)) -> ops.Verdicts:
    op = find(name)
    torch.manual_seed(0)
    args = inputs.of_shape(op, shape, dtype).arguments("cpu")
    results = ops.run_tk(op, args)
    spoil(results[0])
    return ops.judge(op, args, results)


def test_where_the_function_cancels_rounding_is_granted() -> None:
    """The gradient of a norm over one column is all but nothing, and what fp32 makes of it is noise."""
    op = find("rms_norm_backward")
    args = inputs.of_shape(op, (7, 1), "fp32").arguments("cpu")
    results = [x.clone() for x in ops.run_tk(op, args)]
    results[0] += 2**-24 * args[0]
    ops.judge(op, args, results)
    results[0] += 2**-16 * args[0]
    with pytest.raises(ops.WrongResult):
        ops.judge(op, args, results)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["softmax", "rms_norm", "row_sum", "column_sum", "gelu"])
def test_what_aten_gives_is_right(name: str, dtype: str) -> None:
    assert judged(name, lambda out: None, dtype)


def shift_one(out: torch.Tensor) -> None:
    out.flatten()[3] += 1e-3 * out.abs().max()


def shift_all(out: torch.Tensor) -> None:
    out *= 1 + 3e-5


@pytest.mark.parametrize("spoil", [shift_one, shift_all, lambda out: out.flatten()[0:1].fill_(math.nan)])
@pytest.mark.parametrize("name", ["softmax", "rms_norm", "row_sum", "column_sum", "gelu", "logsumexp"])
def test_what_is_a_little_off_is_wrong(name: str, spoil) -> None:
    with pytest.raises(ops.WrongResult, match="output 0: mean error"):
        judged(name, spoil)


def test_a_missed_column_is_wrong() -> None:
    op = find("row_sum")
    x = torch.randn(64, 4096)
    with pytest.raises(ops.WrongResult, match="output 0"):
        ops.judge(op, [x], [x[:, :-1].sum(-1)])


def test_indices_must_be_equal() -> None:
    op = find("row_argmax")
    x = torch.zeros(4, 8)
    ops.judge(op, [x, 1.0], [torch.zeros(4, dtype=torch.int64)])
    with pytest.raises(ops.WrongResult, match="1 of 4 elements differ"):
        ops.judge(op, [x, 1.0], [torch.tensor([0, 0, 1, 0])])


def test_a_wrong_dtype_and_a_missing_result_are_wrong() -> None:
    op, x = find("silu"), torch.randn(4)
    with pytest.raises(ops.WrongResult, match=r"output 0 is torch\.float64"):
        ops.judge(op, [x], [torch.nn.functional.silu(x.double())])
    with pytest.raises(ops.WrongResult, match="0 results, the graph has 1"):
        ops.judge(op, [x], [])


def test_nan_belongs_where_the_reference_has_it() -> None:
    op, x = find("softmax"), torch.randn(3, 8)
    x[1, 2] = math.nan
    good = torch.softmax(x, -1)
    ops.judge(op, [x], [good])
    with pytest.raises(ops.WrongResult):
        ops.judge(op, [x], [torch.nan_to_num(good)])


def test_a_failure_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(op: GeneratedOp, args: list, config: int = -1) -> list[torch.Tensor]:
        return [interpret.aten(Call(op, [*args, -1, 0]))[0].add(1).reshape(args[0].shape)]

    monkeypatch.setattr(ops, "run_tk", wrong)
    case = op_cases.draw(random.Random(2), find("softmax"))
    problem = op_cases.check(case).problem
    for part in ("softmax(x ", "strides [", "offset ", f"seed {case.seed}", "config ", "mean error"):
        assert part in problem


def test_the_exact_graph_converts_to_nothing_narrower() -> None:
    """rms_norm's graph rounds to fp32 and back: exact, it does neither."""
    op = find("rms_norm")
    args = inputs.of_shape(op, (4, 64), "bf16").arguments("cpu")
    (exact,) = interpret.aten(Call(op, [*args, -1, 0]), exact=True)
    x, weight, eps = (interpret.wide(a) for a in args)
    expected = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, expected, rtol=1e-14, atol=1e-14)


def test_as_many_as_there_are_where_they_are_few() -> None:
    """What topk is timed with: 50, or the whole row."""
    for n, k in ((1000, 50), (7, 7), (0, 0)):
        assert inputs.of_shape(find("topk"), (3, n), "bf16").arguments("cpu")[1] == k
