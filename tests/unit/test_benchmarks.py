"""The benchmarks' own arithmetic: judging a result, ratios, goals, files."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import accuracy, report  # noqa: E402
from benchmarks.report import Figure, Goal, Report, Row  # noqa: E402


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
