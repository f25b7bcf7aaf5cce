"""The benchmark of whole models (benchmarks/zoo.py), on tiny ones: each is built, runs, is served, and is judged."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tk

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import zoo, zoo_models  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.runner import Options  # noqa: E402
from tk.dropin import sample  # noqa: E402

CPU = zoo.Place("cpu")
NEEDS = {"transformers": ("bert", "qwen3", "mixtral", "whisper"), "timm": ("convnext",), "torchvision": ("mobilenet",)}
NAMES = ["unet", "recommender", *(name for names in NEEDS.values() for name in names)]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(zoo, "TURN_MS", 0)
    monkeypatch.setattr(zoo, "TURNS", 1)
    monkeypatch.setattr(sample, "SHORT_US", 1.0)  # a call is timed once in a round
    monkeypatch.setattr(sample, "LONG_US", 1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more gain nothing at these sizes, and wait for one another where cores are few
    yield
    torch.set_num_threads(threads)


def measured(tmp_path: Path, only: str) -> Report:
    report = Report("zoo", {})
    zoo.run(Options(tmp_path, only=only), report, device="cpu")
    return report


def skip_without(name: str) -> None:
    for package in (package for package, names in NEEDS.items() if name in names):
        try:
            importlib.import_module(f"{package}.models" if package != "transformers" else package)
        except Exception as error:
            pytest.skip(f"no {package} for this torch: {error}")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_a_row_of_every_kind_with_a_sample_and_without(name: str, tmp_path: Path) -> None:
    skip_without(name)
    model = next(m for m in zoo_models.MODELS if m.name == name)
    report = measured(tmp_path, f"^{name},")
    assert report.failures == []
    for suffix in ("", "_unmeasured"):
        labels = [row.label for mode in zoo.GOALS for row in report.groups[f"zoo_{mode}{suffix}"].rows]
        wanted = {case.label(mode) for case in zoo.cases(model, CPU) for mode in case.modes}
        assert set(labels) == wanted and len(labels) == len(wanted)
        rows = [row for mode in zoo.GOALS for row in report.groups[f"zoo_{mode}{suffix}"].rows]
        assert all(row.more["difference"] < 1e-4 for row in rows)
        assert all(set(row.us) == {"torch", "tk", "unmeasured"} for row in rows)


@pytest.mark.parametrize("name", ["unet", "recommender"])
def test_models_are_served_and_left_as_they_were(name: str) -> None:
    model = next(m for m in zoo_models.MODELS if m.name == name)
    module = model.make("cpu", torch.float32, True)
    given = model.arguments("cpu", torch.float32, True, 2)
    expected = module(**given)
    before = os.environ["TK_CACHE_DIR"]
    with zoo.served(module, lambda: given) as ways:
        assert all(a is b for a, b in zip(ways["tk"].parameters(), module.parameters(), strict=True))
        replaced = [m for m in ways["unmeasured"].modules() if "forward" in vars(m)]
        assert len(replaced) > 5 and not any("forward" in vars(m) for m in module.modules())
        torch.testing.assert_close(ways["unmeasured"](**given), expected, rtol=1e-4, atol=1e-5)
    assert os.environ["TK_CACHE_DIR"] == before
    assert not any("forward" in vars(m) for m in ways["unmeasured"].modules())


def test_a_wrong_result_is_a_failure_of_its_way_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = tk.use

    def wrong(module: nn.Module, **settings: object) -> object:
        report = use(module, **settings)  # type: ignore[arg-type]
        if not settings:
            module.register_forward_hook(lambda _module, _inputs, result: result * 1.2)
        return report

    monkeypatch.setattr(tk, "use", wrong)
    report = measured(tmp_path, "^recommender, eager, batch 1$")
    assert [f["label"] for f in report.failures] == ["recommender, eager, batch 1, unmeasured"]
    assert "off by" in report.failures[0]["error"]
    assert len(report.groups["zoo_eager"].rows) == 1 and "zoo_eager_unmeasured" not in report.groups


def test_what_is_no_number_is_wrong() -> None:
    case = zoo.cases(zoo_models.MODELS[0], CPU)[0]
    with pytest.raises(AssertionError, match="off by nan"):
        case.judge(torch.tensor([float("nan"), 1.0]), torch.ones(2))


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    report, options = Report("zoo", {}), Options(tmp_path, only="^unet", seconds=0.0)
    zoo.run(options, report, device="cpu")
    assert not report.groups and options.left_out == 1


def test_batch_norms_have_the_statistics_of_a_batch() -> None:
    module = nn.BatchNorm2d(3)
    model = zoo_models.Model("norm", lambda _: module, zoo_models.images, zoo_models.distance)
    given = {"input": 5 + 2 * torch.randn(8, 3, 16, 16)}
    model._set_statistics(module, given)
    assert module.momentum == 0.1
    result = module.eval()(**given).detach()
    assert abs(float(result.mean())) < 1e-3 and abs(float(result.std()) - 1) < 1e-2
