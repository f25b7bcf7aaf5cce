"""What `tk verify` and `tk bench` do on a GPU: every op of the packs against float64, and times of every function."""

from __future__ import annotations

import re

import pytest

import tk
from tk.cli import _calls, _verified, _verified_attention, bench_calls, main, verify

from .device import DEVICE


def hold(checked: list[_verified.Checked]) -> None:
    """What is wrong is said with the whole case, and with the command that makes it again."""
    wrong = [c for c in checked if c.was_run and not c.is_good]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(checked)} runs are wrong:", *map(str, wrong)])


def test_functions():
    checked = list(_verified.functions(DEVICE))
    assert len(checked) > 100
    hold(checked)


@pytest.mark.slow
def test_generated_ops():
    checked = list(_verified.generated_ops(DEVICE))
    assert len(checked) > 200
    hold(checked)


def test_convolutions_and_their_gradients():
    checked = list(_verified.convolutions(DEVICE))
    assert len(checked) > 200
    hold(checked)


def test_mods_and_their_gradients():
    checked = list(_verified_attention.mods(DEVICE))
    names = {c.kernel for c in checked if c.was_run}
    assert any("_backward" in name for name in names) and len(names) > 2
    hold(checked)


@pytest.mark.skipif(DEVICE != "cuda", reason="the command runs kernels on a GPU alone")
@pytest.mark.slow
def test_the_command_says_what_it_did_not_run(capsys: pytest.CaptureFixture[str]):
    status = main(["verify"])
    said, errors = capsys.readouterr()
    assert status == 0, said + errors
    found = re.search(r"(\d+) of (\d+) compiled configs were run", said)
    assert found, said
    ran, there = map(int, found.groups())
    assert ran > 0.8 * there and (ran == there or "not run, since" in said), said


@pytest.mark.skipif(DEVICE != "cuda", reason="products are verified on a GPU alone")
def test_tf32_of_one_row_is_right():
    """Where torch itself rounds to nothing: its error is not what ours is judged by."""
    sizes = [(1, 1024, 1024)]
    report = verify.Report()
    for call in verify._calls():
        if call.precision == "tf32" and (call.a.shape[0], call.b.shape[1], call.a.shape[1]) in sizes:
            verify._run_candidates(call, report)
    assert report.tallies and report.is_good, "\n".join(map(str, report.failures))


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
