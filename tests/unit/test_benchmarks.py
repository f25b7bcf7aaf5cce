"""The benchmarks' own arithmetic: judging a result, ratios, goals, files."""

import json
import math
import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import tk  # noqa: E402
from benchmarks import accuracy, everywhere, first_call, gains, losses, mm, peers, picture, products, report, shapes  # noqa: E402
from benchmarks.products import Product  # noqa: E402
from benchmarks.report import Figure, Goal, Report, Row  # noqa: E402
from benchmarks.runner import Options  # noqa: E402
from tk import timing  # noqa: E402


def judged(result: torch.Tensor, torchs: torch.Tensor, reference: torch.Tensor, slack: float = 0.0) -> bool:
    return accuracy.judge(result, torchs, reference, slack).ok


def test_as_good_as_torch_passes_and_a_fifth_worse_does_not() -> None:
    reference = torch.randn(1000, dtype=torch.float64)
    torchs = reference + 1e-3
    assert judged(reference + 1.05e-3, torchs, reference)
    assert not judged(reference + 1.2e-3, torchs, reference)
    assert judged(reference + 1.2e-3, torchs, reference, slack=1e-3)


def test_one_element_far_off_fails() -> None:
    reference = torch.zeros(1000, dtype=torch.float64)
    torchs = reference + 1e-3
    result = torchs.clone()
    result[17] = 2.5e-3
    assert not judged(result, torchs, reference)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_where_none_belong_fail(bad: float) -> None:
    reference = torch.zeros(10, dtype=torch.float64)
    result = torch.zeros(10)
    result[3] = bad
    assert not judged(result, torch.zeros(10), reference, slack=1.0)
    assert not judged(result, result, reference, slack=1.0), "not even where torch has it too"
    expected = torch.where(torch.arange(10) == 3, bad, 0.0).double()
    assert not judged(torch.zeros(10), torch.zeros(10), expected, slack=1.0)


def test_what_rounds_to_infinity_is_right() -> None:
    reference = torch.tensor([1e6, -1e6, math.inf, math.nan], dtype=torch.float64)
    error = accuracy.error(torch.tensor([math.inf, -math.inf, math.inf, math.nan], dtype=torch.float16), reference)
    assert error == accuracy.Error(0.0, 0.0)
    assert accuracy.error(torch.full((4,), math.inf, dtype=torch.float16), reference).max == math.inf


def test_slack_is_below_the_effect_of_one_product_missed() -> None:
    for inner in (1, 64, 4096, 65536):
        assert accuracy.slack(inner, math.sqrt(inner), tensor_cores=True) < 0.1


def test_groups_and_goals() -> None:
    r = Report("mm", {"gpu": "G", "torch": "2.11"})
    group = r.group("large", "M ≥ 1024", "torch.mm", Goal(1.05, 0.97))
    assert group.met is None
    group.rows += [Row("first", 1.21, {"tk": 1.0, "torch.mm": 1.21}), Row("second", 1.0, {"tk": 1.0})]
    assert group.geomean == pytest.approx(1.1)
    assert group.worst.label == "second"
    assert group.met
    group.rows.append(Row("third", 0.9, {}))
    assert not group.met


def test_a_failure_costs_no_other_row(tmp_path: Path) -> None:
    r = Report("mm", {"gpu": "G", "torch": "2.11"})
    r.attempt("bad", lambda: 1 / 0)
    r.attempt("good", lambda: r.group("g", "G", "peer").rows.append(Row("good", 2.0, {"tk": 1.0, "peer": 2.0})))
    r.figures.append(Figure("import", "import tk", 61.0, "ms", 60.0))
    found = json.loads(r.write(tmp_path).read_text())
    assert [f["label"] for f in found["failures"]] == ["bad"]
    assert "ZeroDivisionError" in found["failures"][0]["error"]
    assert found["groups"][0]["geomean"] == 2.0
    assert found["figures"][0]["value"] == 61.0
    text = r.markdown()
    assert "**missed**" in text and "2.000" in text and "1 rows failed: bad" in text


def test_what_is_not_finite_becomes_null() -> None:
    assert report.rounded({"a": [1.23456789, math.nan], "b": math.inf}) == {"a": [1.2346, None], "b": None}


# --- Shapes ---


def test_drawn_shapes_are_a_models_and_every_third_is_near_one_in_eights_alone() -> None:
    found = shapes.drawn(5, 60, 257, 1024, frozenset())
    assert found == shapes.drawn(5, 60, 257, 1024, frozenset()) != shapes.drawn(6, 60, 257, 1024, frozenset())
    assert len(set(found)) == 60
    for i, (m, n, k) in enumerate(found):
        assert 257 <= m <= 1024
        assert m % 2 == 1 if i % 2 == 0 else m % 64 == 0
        if i % 3 == 2:
            assert (n % 16, k % 16) == (8, 8)
        else:
            assert (k, n) in shapes.LINEARS


@pytest.mark.parametrize(("low", "high"), [(1, 16), (17, 256), (1025, 8192), (1, 1), (3, 4)])
def test_drawn_rows_are_log_uniform_in_their_band(low: int, high: int) -> None:
    rows = [m for m, _, _ in shapes.drawn(9, 50, low, high, frozenset())]
    assert all(low <= m <= high for m in rows)
    middle = statistics.fmean(map(math.log, rows))
    assert middle == pytest.approx((math.log(low) + math.log(high)) / 2, abs=0.1 + 0.15 * math.log(high / low))


def test_drawn_shapes_leave_out_what_is_known_and_light_weights() -> None:
    known = set(shapes.drawn(5, 30, 1, 256, frozenset()))
    assert not known & set(shapes.drawn(5, 30, 1, 256, known))
    assert all(n * k >= 10**8 for _, n, k in shapes.drawn(5, 30, 1, 256, frozenset(), weights=10**8))


def test_tuned_sizes_are_those_of_the_timings(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mm_timings"):
        shapes.tuned(tmp_path)
    for arch, m in (("sm80", 1), ("sm90", 2)):
        file = tmp_path / "tuned" / arch / "mm_timings.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"timings": [{"m": m, "n": 16, "k": 8}]}))
    assert shapes.tuned(tmp_path) == {(1, 16, 8), (2, 16, 8)}


def test_lines_drawn_at_random_are_thirty_shapes_each_that_no_table_knows() -> None:
    assert len(set(mm.SEEDS.values())) == len(mm.SEEDS)
    known, drawn = shapes.tuned(), []
    for line in mm.SEEDS:
        products = list(mm.random_products(line, quick=False))
        assert len(products) >= 30
        assert {p.order for p in products} == {"nn", "nt"}
        drawn += [(p.m, p.n, p.k) for p in products]
    assert len(known) > 1000 and not known & set(drawn)


def stub_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs on a GPU: every call takes a microsecond, torch's two."""

    def one_us(calls: Mapping[str, object], /, **_: object) -> dict[str, timing.Timing]:
        return {name: timing.Timing(*(1.0 if name.startswith("tk") else 2.0,) * 3) for name in calls}

    for name in ("device_times", "eager_times", "host_times"):
        monkeypatch.setattr(timing, name, one_us)
    monkeypatch.setattr(timing, "capture", lambda calls: calls)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(mm, "check", lambda *_, **__: 1.0)
    monkeypatch.setattr(mm, "chosen", lambda *_, **__: "some config")
    monkeypatch.setattr(mm.Inputs, "sets", lambda *_: [(None, None, None)])
    monkeypatch.setattr(Product, "make_bias", lambda _: None)


def test_every_line_of_products_has_one_drawn_at_random_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub_timing(monkeypatch)
    found = Report("mm", {})
    mm.run(Options(tmp_path, compiled=True), found)
    assert not found.failures
    listed = {"few", "few_static", "ceiling", "large", "tf32", "eager", "fused", "autotuned"}
    bands = {f"random_{band.name}" for band in shapes.BANDS}
    assert set(found.groups) == listed | bands | {f"{name}_random" for name in listed - {"few", "large"}}
    for name in found.groups.keys() - listed:
        assert len(found.groups[name].rows) >= 30
    for band in shapes.BANDS:
        assert all(row.more["m"] in band for row in found.groups[f"random_{band.name}"].rows)
    heavy = [row.more for row in found.groups["ceiling_random"].rows]
    assert all(row["m"] <= 16 and row["n"] * row["k"] * 2 >= 32e6 for row in heavy)
    assert {row.more["dtype"] for row in found.groups["tf32_random"].rows} == {"fp32"}
    assert set(found.environment["part_seconds"]) >= {"few_random", "large_random", "autotuned"}
    mm.run(Options(tmp_path, compiled=True, only="^random_16 "), only := Report("mm", {}))
    assert [name for name, group in only.groups.items() if group.rows] == ["random_16", "few_static_random"]


# --- What a call costs ---


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_timing(monkeypatch)
    random = peers.Inputs.random
    monkeypatch.setattr(peers.Inputs, "random", staticmethod(lambda product, _: random(product, "cpu")))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def measured(part: object, tmp_path: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Figures and failures."""
    found = Report("everywhere", {})
    found.attempt("the part", lambda: part(Options(tmp_path), found))
    return {f.name: f.value for f in found.figures}, {f["label"]: f["error"] for f in found.failures}


@pytest.mark.usefixtures("on_cpu")
def test_host_times_of_all_ways_and_one_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    figures, failures = measured(everywhere.host_time, tmp_path)
    assert list(failures) == ["host_jit"], "Triton's JIT takes no CPU tensors"
    ways = {way.host_figure for way in peers.WAYS} - {"host_jit"}
    assert ways < set(figures)
    others = {"host_wrapper", "host_generated", "host_tk_mm", "host_op_grad", "host_torch_mm_grad"}
    assert others == set(figures) - ways


@pytest.mark.usefixtures("on_cpu")
def test_a_way_with_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = replace(peers.WAYS[2], make=lambda x: lambda: torch.mm(x.a, x.b) * 1.05)
    monkeypatch.setattr(peers, "WAYS", (*peers.WAYS[:2], wrong))
    inputs = peers.Inputs.random(everywhere.SMALL, "cpu")
    found = Report("everywhere", {})
    assert set(everywhere._prepared(found, inputs)) == {"op", "tk"}
    assert "WrongResult" in found.failures[0]["error"]


def test_first_calls_are_made_in_fresh_processes(tmp_path: Path) -> None:
    found = first_call.measure(["torch_mm", "tk", "jit"], rounds=2, seconds=300, device="cpu")
    assert [len(found[name].ms) for name in found] == [2, 2, 0]
    assert all(0 < ms < 60_000 for ms in found["torch_mm"].ms + found["tk"].ms)
    assert "active drivers" in found["jit"].error or "cpu tensor" in found["jit"].error
    assert not found["torch_mm"].error


def test_first_calls_end_when_their_time_is_over() -> None:
    found = first_call.measure(["torch_mm"], rounds=3, seconds=0.05, device="cpu")
    assert found["torch_mm"].ms == []
    assert "not ready" in found["torch_mm"].error


def test_a_first_call_that_was_made_once_outlives_a_later_round_without_time() -> None:
    class Late:
        def call(self, deadline: float) -> float:
            raise first_call.OutOfTime("late")

    kept, lost = first_call.Found([3.0]), first_call.Found()
    first_call._call(Late(), kept, 0.0)  # type: ignore[arg-type]
    first_call._call(Late(), lost, 0.0)  # type: ignore[arg-type]
    assert (kept.ms, kept.error, lost.error) == ([3.0], "", "late")


def test_rounds_of_first_calls_end_in_time_and_leave_out_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    clock = iter(range(0, 10_000, 10))  # every look at the clock is ten seconds later

    class Stub:
        def __init__(self, name: str, device: str):
            begun.append(name)
            self.name = name

        def wait_until_ready(self, deadline: float) -> None: ...

        def call(self, deadline: float) -> float:
            if self.name == "bad":
                raise first_call.Failed("no compiler")
            return 5.0

        def end(self) -> None: ...

    monkeypatch.setattr(first_call, "_Process", Stub)
    monkeypatch.setattr(first_call.time, "monotonic", lambda: next(clock))
    found = first_call.measure(["good", "bad"], rounds=3, seconds=25)
    assert begun == ["good", "bad", "good"], "a third round would have ended after 30 seconds"
    assert (found["good"].ms, found["bad"].error) == ([5.0, 5.0], "no compiler")


def test_figures_of_first_calls_and_a_failure_keeps_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = {way.name: first_call.Found([5.0, 3.0, 4.0]) for way in peers.WAYS}
    answers["jit"] = first_call.Found(error="no compiler")
    monkeypatch.setattr(first_call, "measure", lambda names, **_: {name: answers[name] for name in names})
    figures, failures = measured(everywhere.first_calls, tmp_path)
    assert figures["first_call"] == 4.0
    assert set(figures) == {way.first_figure for way in peers.WAYS} - {"first_call_jit"}
    assert failures == {"first_call_jit": "Failed: no compiler"}


def test_first_calls_take_no_more_time_than_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[float] = []
    monkeypatch.setattr(first_call, "measure", lambda names, *, rounds, seconds: given.append(seconds) or {})
    everywhere.first_calls(Options(tmp_path), Report("everywhere", {}))
    everywhere.first_calls(Options(tmp_path, seconds=10.0), Report("everywhere", {}))
    assert given[0] == everywhere.FIRST_CALLS_SECONDS and given[1] <= 10.0


def test_the_kernel_of_the_jit_multiplies() -> None:
    """In Triton's interpreter, on sizes that no block divides."""
    code = """
import torch
from benchmarks.jit import matmul
a, b = torch.randn(70, 45), torch.randn(33, 45).t()
torch.testing.assert_close(matmul(a, b), a @ b, rtol=1e-5, atol=1e-4)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


# --- What a user gains ---


def results() -> list[gains.Result]:
    rows = [{"m": 16, "ratio": 1.25}, {"m": 17, "ratio": 0.8}, {"m": 256, "ratio": 1.25}, {"m": 20, "ratio": 3.14}]
    figures = [{"name": "first_call", "value": 2.74, "unit": "ms"}, {"name": "host_op", "value": 11.3, "unit": "µs"}]
    return [
        {"figures": figures, "failures": [{"label": "first_call_jit"}]},
        {"groups": [{"name": "few", "rows": rows}, {"name": "random_above", "rows": [{"m": 8192, "ratio": 0.5}]}]},
        {"groups": [{"name": "eager", "rows": rows}]},
    ]


def test_a_figure_is_measured_failed_or_not_measured() -> None:
    found = [str(gains.figure(results(), name)) for name in ("first_call", "first_call_jit", "first_call_compile")]
    assert found == ["2.7 ms", "failed", "not measured"]
    assert [gains.quantity(v, "ms") for v in (0.052, 9.96, 48.2, 1510.0, 15000.0)] == [
        "0.052 ms", "10.0 ms", "48 ms", "1.5 s", "15 s",
    ]  # fmt: skip


def test_products_go_by_bands_and_count_where_cublas_is_faster() -> None:
    found = gains.products(results())
    assert [(p.band.name, p.random, len(p.ratios), p.slower) for p in found] == [
        ("16", False, 1, 0), ("256", False, 3, 1), ("above", True, 1, 1),
    ]  # fmt: skip
    assert found[1].geomean == pytest.approx((0.8 * 1.25 * 3.14) ** (1 / 3))
    assert found[1].worst == 0.8


def test_the_picture_has_a_point_for_each_shape_and_says_what_is_missing() -> None:
    drawn = picture.draw(results())
    assert drawn == picture.draw(results())
    svg = {"": "http://www.w3.org/2000/svg"}
    root = ElementTree.fromstring(drawn)
    points = [c for c in root.findall("circle", svg) if c.get("r") == str(picture.RADIUS)]
    kinds = [c.get("class") for c in points]
    assert (kinds.count("ours"), kinds.count("theirs")) == (3 + 1, 2 + 1), "and one of each in the legend"
    for x in (float(c.get("cx", "nan")) for c in points):
        assert 0 < x < picture.WIDTH
    texts = [t.text for t in root.findall("text", svg)]
    assert texts.count("3.1") == 1, "a ratio beyond the axis stands at its edge with its number"
    assert texts.count("1 of 3") == 1 and texts.count("2.7 ms") == 1 and texts.count("failed") == 1
    assert texts.count("not measured") == len(picture.FIRST_CALLS) - 2


def test_the_picture_of_no_results() -> None:
    texts = [t.text for t in ElementTree.fromstring(picture.draw([])).iter() if t.text]
    assert texts.count("not measured") == len(picture.FIRST_CALLS)


def test_the_axis_of_ratios_ends_around_them() -> None:
    assert picture.ticks_around([]) == [0.85, 1.0, 1.2]
    assert picture.ticks_around([0.69, 1.2]) == [0.6, 0.7, 0.85, 1.0, 1.2]
    assert picture.ticks_around([0.1, 9.0]) == list(picture.RATIO_TICKS)


@pytest.mark.parametrize(("precision", "ok"), [("tf32", True), ("ieee", False)])
def test_tf32_is_judged_by_its_own_error_where_torch_does_without_it(precision: str, ok: bool) -> None:
    p = products.Product(1, 300, 700, torch.float32, precision=precision)
    a, b = torch.randn(p.m, p.k), torch.randn(p.k, p.n)
    ours = products.rounded_to_tf32(a) @ products.rounded_to_tf32(b)
    assert products.judge(p, a, b, None, ours, a @ b).ok is ok
    assert not products.judge(p, a, b, None, ours * 1.001, a @ b).ok


# --- Losses ---


def test_losses_are_judged_with_both_gradients() -> None:
    hidden, weight = torch.randn(50, 24).bfloat16().requires_grad_(), torch.randn(300, 24).bfloat16().requires_grad_()
    target = torch.randint(300, (50,))
    torchs = losses.step(losses.eager, hidden, weight, target)
    expected = losses.reference(hidden, weight, target)
    in_parts = losses.reference(hidden, weight, target, most=3000)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(in_parts, expected, strict=True))
    losses.check(losses.step(tk.linear_cross_entropy, hidden, weight, target), torchs, expected)
    for place in range(3):
        wrong = tuple(x * 1.1 if i == place else x for i, x in enumerate(torchs))
        with pytest.raises(AssertionError, match="off by"):
            losses.check(wrong, torchs, expected)


def test_losses_are_drawn_alike_each_time() -> None:
    sizes = losses.drawn(6)
    assert sizes == losses.drawn(6)
    assert all(256 <= s.rows <= 16384 and s.columns % 64 == 0 and s.classes <= 262144 for s in sizes)
