"""What `tk verify` and `tk bench` do on a GPU: every op of the packs against float64, and times of every function."""

from __future__ import annotations

import pytest

import tk
from tk.cli import _calls, _verified, bench_calls, main, verify

from .device import DEVICE


def wrong(checked: list[_verified.Checked]) -> list[_verified.Checked]:
    return [c for c in checked if not c.is_good and not c.problem.startswith("not run")]


def test_functions():
    checked = list(_verified.functions(DEVICE))
    assert len(checked) > 100 and not wrong(checked)


@pytest.mark.slow
def test_generated_ops():
    checked = list(_verified.generated_ops(DEVICE))
    assert len(checked) > 200 and not wrong(checked)


def test_mods():
    checked = list(_verified.mods(DEVICE))
    assert len(checked) > 20 and not wrong(checked)


@pytest.mark.skipif(DEVICE != "cuda", reason="products are verified on a GPU alone")
def test_tf32_of_one_row_is_right():
    """Where torch itself rounds to nothing: its error is not what ours is judged by."""
    sizes = [(1, 1024, 1024)]
    tallies: dict[tuple[str, str], verify.Tally] = {}
    for call in verify._calls():
        if call.precision == "tf32" and (call.a.shape[0], call.b.shape[1], call.a.shape[1]) in sizes:
            verify._run_candidates(call, tallies)
    assert tallies and all(t.is_good for t in tallies.values()), [k for k, t in tallies.items() if not t.is_good]


def test_bench_of_every_function(capsys: pytest.CaptureFixture[str]):
    names = sorted({call.name for call in _calls.calls()})
    assert bench_calls.run([*names, "--device", DEVICE]) == 0, capsys.readouterr().out


def test_bench_with_shapes(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "linear", "512x1024", "2048x1024", "--device", DEVICE]) == 0
    assert "512x1024 2048x1024" in capsys.readouterr().out


def test_explain_and_supports_of_every_function():
    """With the kernel that would run, or that none does."""
    for call in _calls.calls(DEVICE, _verified.DTYPES[0]):
        explanation = tk.explain(call.name, *call.args, **call.kwargs)
        assert explanation.runs, explanation
        assert tk.supports(call.name, *call.args, **call.kwargs)
        assert explanation.problem is None or explanation.choice is not None
