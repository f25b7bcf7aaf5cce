"""``tk tune bmm`` and the like: what they time is the op, and it gives what they compare it with. On the CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tk import capi, errors
from tk.tune import command, pins, products, timings
from tk.tune.measure import Measured, Result

SIZES = {"bmm": "3x8x16x24", "mm_plus_mm": "8x16x24x32", "scaled_mm": "5x16x32", "int4_mm": "5x16x256"}


@pytest.mark.parametrize("op", products.OPS)
def test_the_call_that_is_timed_gives_what_it_is_compared_with(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "DEVICE", "cpu")
    torch.manual_seed(0)
    for drawn in products.given(op, SIZES[op]):
        inputs = products.OPS[op].inputs(drawn)
        out, expected = inputs[-1].fill_(torch.nan), products.OPS[op].reference(*inputs[:-1])
        products.OPS[op].call(drawn, *inputs, config=-1)
        error = (out.float() - expected.float()).norm() / expected.float().norm()
        assert error < 2**-7, (str(drawn), error)  # each rounded to bfloat16


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["tune", *argv])


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.UnsupportedError, match="measures on a CUDA GPU"):
        command.run(parsed("bmm"))


def test_each_op_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = capi.Matrix(torch.bfloat16, (2, 16, 16), (256, 16, 1))
    problem = capi.Problem("bmm", (x, x, None, x), (0, 0), (1.0, 1.0))
    seen: list[str] = []

    def measure(drawn: products.Drawn) -> Result:
        """The second of each op fails; what is predicted to be the best takes twice as long as it could."""
        seen.append(str(drawn))
        if len(seen) % 3 == 2:
            raise RuntimeError("out of memory")
        return Result(drawn, problem, [Measured("y", 8, "k", 1.0, 9.0), Measured("x", 7, "k", 2.0, 3.0)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(products, "measure", measure)
    monkeypatch.setattr(products, "record", lambda _: {"gpu": "G"})
    assert command.run(parsed("bmm", "mm_plus_mm", "--random", "3", "--write", str(tmp_path))) == 1
    assert len(seen) == 6 and {s.split()[0] for s in seen} == {"bmm", "mm_plus_mm"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bmm_timings.json", "mm_plus_mm_timings.json"]
    said = capsys.readouterr().out
    assert (
        "out of memory" in said
        and "bmm: 2 problems; the config that is predicted to be the fastest takes 2.000" in said
    )


def test_timings_of_other_ops_hold_the_problem(tmp_path: Path) -> None:
    """As many as there were, whatever order they are written in, and what comes back is the problem."""
    drawn = products.draw("bmm", 2, 0)
    matrices = [capi.Matrix(torch.bfloat16, (2, n, n), (n * n, n, 1)) for n in (16, 32)]
    problems = [capi.Problem("bmm", (x, x, None, x), (0, 0), (1.0, 1.0)) for x in matrices]
    path = tmp_path / "bmm_timings.json"
    for d, p in zip(drawn, problems, strict=True):
        timings.write(path, [Result(d, p, [Measured("x", 7, "k", 3.0, 4.0)])], {"gpu": "G"})
    entries = json.loads(path.read_text())["timings"]
    assert [e["configs"] for e in entries] == [{"x": ["k", 3.0, 4.0]}] * 2
    found = [pins.problem_of(e, path) for e in entries]
    assert [(p.op, p.tensors, p.floats) for p in found] == [(p.op, list(p.tensors), (1.0, 1.0)) for p in problems]


def test_given_sizes_are_measured_in_every_way() -> None:
    def found(op: str, text: str) -> list[str]:
        return list(map(str, products.given(op, text)))

    assert found("bmm", "8x16x32x64") == ["bmm 8x16x32x64 nn", "bmm 8x16x32x64 nt"]
    assert found("scaled_mm", "16x32x64") == ["scaled_mm 16x32x64 slow", "scaled_mm 16x32x64 fast"]
    assert found("int4_mm", "1x4096x4096") == ["int4_mm 1x4096x4096 group 128"]
