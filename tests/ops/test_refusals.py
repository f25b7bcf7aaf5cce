"""All that cannot be built of a file is said at once, with where it is, and without what torch logs of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tk.cli import main

pytest.importorskip("triton")

SOURCE = """
import torch

import tk


@tk.op(x="T[N]", T=("bf16",))
def good(x):
    return x + 1


@tk.op(x="T[N]", T=("bf16",))
def branches(x):
    return x if x.sum() > 0 else x * 2


@tk.op(x="T[M, N]", y="T[N, K]", T=("bf16",))
def multiplies(x, y):
    return x @ y


@tk.op(x="T[N]")
def undeclared(x):
    return x


def decides(score, b, h, q, k):
    return score.item()


tk.flex.register("decides", score_mod=decides)
tk.b2b.register(lambda x: x if x > 0 else -x)
"""


def test_all_refusals_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.py"
    file.write_text(SOURCE)
    assert main(["build", str(file), "-o", str(tmp_path / "bad.tkpack")]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("tk build: ") for line in lines), lines
    for name, line in (("branches", 13), ("multiplies", 18), ("undeclared", 23), ("decides", 28)):
        (found,) = [text for text in lines if name in text]
        assert re.search(rf"bad\.py:{line - 1}|bad\.py:{line}|bad\.py:{line + 1}", found), found
    assert len(lines) == 5
    assert not list(tmp_path.glob("*.tkpack"))


def test_a_name_of_tks_own_is_refused_before_anything_is_compiled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "named.py"
    file.write_text('import tk\n\n\n@tk.op(x="fp32[N]")\ndef softmax(x):\n    return x + 1\n')
    assert main(["build", str(file), "-o", str(tmp_path / "named.tkpack")]) == 1
    said = f"tk build: @tk.op on softmax ({file}:4): it has the name of an op of tk's own: call it something else\n"
    assert capfd.readouterr() == ("", said)
    assert not list(tmp_path.glob("*.tkpack"))


def test_a_declaration_is_refused_at_once_elsewhere() -> None:
    import tk

    with pytest.raises(ValueError, match="undeclared"):

        @tk.op(x="T[N]")
        def undeclared(x):
            return x
