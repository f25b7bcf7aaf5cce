"""The scripts that the Makefile calls."""

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_what_has_changed_names_its_tests() -> None:
    tests = ["tests/ops/test_bmm.py", "tests/kernels/interpreted/test_bmm.py", "tests/ops/test_mm.py",
             "tests/flex/test_flex_trace.py", "tests/gpu/test_bmm.py", "tests/use/test_report.py",
             "tests/ops/test_generated_build.py", "tests/unit/test_grid.py"]  # fmt: skip

    def found(*files: str) -> list[str]:
        return tool("touched_tests").touched(files, tests)

    assert found("kernels/bmm/pointer.py") == found("csrc/ops/bmm.cpp") == sorted(tests[:2])
    assert found("python/tk/flex/ops.py") == ["tests/flex/test_flex_trace.py"]
    assert found("python/tk/dropin/report.py") == ["tests/use/test_report.py"]
    assert found("python/tk/generated/register.py") == ["tests/ops/test_generated_build.py"]
    assert found("tests/ops/test_mm.py", "docs/mm.md") == ["tests/ops/test_mm.py"]
    assert found("tests/gpu/test_bmm.py", "README.md") == []


def test_a_system_venv_sees_the_packages_of_a_venv(tmp_path: Path) -> None:
    """TORCH=system where torch is in a virtual environment, by the Makefile's PATH: the new folder first."""
    outer, folder = tmp_path / "outer", tmp_path / "made"
    venv.create(outer, with_pip=False, symlinks=True)
    package = outer / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/only_outside.py"
    package.write_text("")
    env = os.environ | {"PATH": os.pathsep.join([f"{folder}/bin", f"{outer}/bin", os.environ["PATH"]])}
    env.pop("PYTHONPATH", None)
    # The second time, the folder has a python3 of its own.
    for _ in range(2):
        subprocess.run([ROOT / "tools/make_venv.sh", "python3", folder, "system"], env=env, check=True)
        subprocess.run([folder / "bin/python", "-c", "import only_outside"], env=env, check=True)


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/readme.py on a project of its own, which has markers and results but nothing generated."""
    module = tool("readme")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ops_table", lambda: "the ops")
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "# x\n<!-- begin gains -->\nold\n<!-- end gains -->\n<!-- begin strengths -->\n<!-- end strengths -->\n"
    )
    parts = ("<!-- begin figures -->\n<!-- end figures -->", "<!-- begin ops -->\n<!-- end ops -->")
    (tmp_path / "docs/benchmarks.md").write_text("\n".join(parts) + "\n")
    return module


def write_results(root: Path, **more: object) -> None:
    names = ("gpu", "driver", "torch", "compiler", "commit", "date")
    group = {"name": "few", "title": "few rows", "peer": "torch.mm", "geomean": 0.9, "worst": 0.8, "worst_label": "w"}
    group["rows"] = [{"m": 4, "ratio": 0.8}, {"m": 5, "ratio": 1.0125}]
    figures = {"host_torch_mm": 16.0, "host_op": 11.3}
    result = {
        "family": "mm",
        "environment": dict.fromkeys(names, "X"),
        "groups": [group],
        "figures": [
            {"name": name, "title": name, "value": value, "unit": "µs", "limit": None, "at_most": True}
            for name, value in figures.items()
        ],
        "failures": [{"label": "host_jit", "error": "no compiler"}],
    }
    (root / "benchmarks/results/mm.json").write_text(json.dumps(result | more))


def test_readme_checks_and_writes_what_is_generated(
    readme: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path)
    assert readme.main(["--check"]) == 1
    complaints = capsys.readouterr().err
    assert all(name in complaints for name in ("README.md", "docs/benchmarks.md", "benchmarks/results/gains.svg"))
    assert "old" in (tmp_path / "README.md").read_text()
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0
    (tmp_path / "benchmarks/results/gains.svg").write_text("another")
    assert readme.main(["--check"]) == 1


def test_readme_shows_what_was_measured_and_where_cublas_is_faster(readme: ModuleType, tmp_path: Path) -> None:
    write_results(tmp_path)
    assert readme.main([]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| host time of a call | `torch.mm` | 16 µs | 11 µs | not measured |" in text
    assert "| host time of a call | a `@triton.jit` kernel | failed | 11 µs | not measured |" in text
    assert "| M ≤ 16 | 2 listed | 0.90 × | 1 of 2 | 1.25 × |" in text
    assert "| first call" not in text and "bias" not in text, "rows of which nothing is known"
    tables = (tmp_path / "docs/benchmarks.md").read_text()
    assert "| few rows | torch.mm | 2 | 0.90 | 0.80 | w |" in tables
    assert "the ops" in tables and "1 failed: host_jit (no compiler)" in tables


def test_readme_sorts_groups_by_how_fast_they_are_and_says_where_and_when(readme: ModuleType, tmp_path: Path) -> None:
    def group(name: str, *ratios: float) -> dict[str, object]:
        more = {"name": name, "title": name, "peer": "torch", "worst": min(ratios), "worst_label": "w"}
        return more | {"geomean": sum(ratios) / len(ratios), "rows": [{"m": 4, "ratio": r} for r in ratios]}

    write_results(tmp_path, groups=[group("random_16", 0.5, 0.9), group("unnamed", 3.0), group("random_above", 2.0)])
    assert readme.main([]) == 0
    text = (tmp_path / "README.md").read_text()
    fast, slow = (
        "| products, more rows | torch | 2.00 × | 0 of 1 |",
        "| products, up to 16 rows | torch | 0.70 × | 2 of 2 |",
    )
    assert fast in text and slow in text and text.index(fast) < text.index(slow)
    assert "unnamed" not in text
    assert "Measured on X with torch X on X." in text


def test_every_group_of_readmes_table_was_measured() -> None:
    module = tool("readme")
    measured = {(r["family"], g["name"]) for r in module.gains.read(ROOT / "benchmarks/results") for g in r["groups"]}
    assert {(family, name) for _, family, name in module.STRENGTHS} <= measured


def test_readme_takes_random_shapes_where_there_are_any(readme: ModuleType, tmp_path: Path) -> None:
    listed = {"name": "few", "rows": [{"m": 4, "ratio": 2.0}, {"m": 20, "ratio": 2.0}]}
    drawn = {"name": "random_16", "rows": [{"m": 4, "ratio": 1.1}]}
    products = readme.judged(readme.gains.products([{"groups": [drawn, listed]}]))
    assert [(p.band.name, p.random, p.geomean) for p in products] == [
        ("16", True, pytest.approx(1.1)), ("256", False, pytest.approx(2.0)),
    ]  # fmt: skip


def test_readme_without_a_marker_is_an_error(readme: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing to fill")
    with pytest.raises(ValueError, match=r"README\.md has the part gains 0 times"):
        readme.main([])


def test_cubins_of_two_packs_are_compared() -> None:
    """By what is compiled, whatever the order of variants."""
    cubins = tool("cubins")
    before = {("mm", "mm_tma", "64x64"): ["a", "b"], ("mm", "mm_tma", "128x64"): ["c"], ("f", "f", "w4"): ["d+e"]}
    assert cubins.differences(before, dict(reversed(before.items()))) == []
    after = {("mm", "mm_tma", "64x64"): ["a", "x"], ("mm", "mm_tma", "128x64"): ["c"], ("g", "g", "w4"): ["h"]}
    assert cubins.differences(before, after) == [
        "f f w4: only before: 1 variants",
        "g g w4: only after: 1 variants",
        "mm mm_tma 64x64: 2 variants, then 2; gone b; new x",
    ]


def test_reasons_of_refused_ops_name_no_place_in_torchs_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_NO_LIBRARY", "1")  # which the tool would set for good
    plain = tool("torch_ops").plain
    assert plain("/__w/pytorch/build/aten/src/Register_0.cpp:4963: expected integers") == "expected integers"
    failed = '0 INTERNAL ASSERT FAILED at "/__w/torch/csrc/arg_parser.cpp":659, please report a bug to PyTorch. '
    assert plain(failed + "dispatch_on_subclass called with ") == "torch fails in its own code on symbolic sizes"
    assert plain(failed + "a reason") == "a reason"
    for unchanged in ("aten.mm cannot be generated: call tk.mm", "a size: 3 / 4: none", "kernels/mm.py: x"):
        assert plain(unchanged) == unchanged
    reasons = (ROOT / "docs/torch-ops.md").read_text()
    assert not [line for line in reasons.splitlines() if plain(line) != line or "INTERNAL ASSERT" in line]


def test_readme_names_the_alternatives_that_are_ahead() -> None:
    """The sentence above the table, held against the results: a new measurement may ask for another."""
    results = tool("readme").gains.read(ROOT / "benchmarks/results")
    speed = {(r["family"], g["name"]): g["geomean"] for r in results for g in r["groups"]}
    ahead = {("mm", name) for name in ("random_256", "random_1024", "random_above")}
    ahead |= {("other_products", "bmm_random"), ("other_products", "scaled_mm_random")}
    ahead |= {("models", "resnet_inference_compiled")}
    assert all(speed[group] < 1 for group in ahead), "README says of these that the alternative is ahead"
    assert speed["mm", "random_16"] >= 1
    assert "cuBLAS is ahead" in (ROOT / "README.md").read_text()
