"""A file with several bad declarations: each is told, none hides another, and what is good is still listed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tk import cli

START = """
import torch
import tk
from torch import nn
from tk.aot.spec import Family
"""

# name -> (the text of a declaration, what is said of it)
BAD = {
    "signature": ("@tk.op(x='fp33[M]')\ndef signature(x):\n    return x + 1\n", r"@tk\.op on signature \(.*fp33"),
    "parameters": ("@tk.op(x='fp32[M]')\ndef parameters(x, y):\n    return x + y\n", r"@tk\.op on parameters"),
    "no_texts": ("@tk.op\ndef no_texts(x):\n    return x + 1\n", r"@tk\.op on no_texts .*needs a keyword"),
    "product": ("@tk.op(x='fp32[M, M]')\ndef product(x):\n    return x @ x\n", r"product \(.*call tk\.mm"),
    "softmax": ("@tk.op(x='fp32[M, N]')\ndef softmax(x):\n    return x + 1\n", r"softmax \(.*of tk's own"),
    "mm": ("@tk.op(x='fp32[M, N]')\ndef mm(x):\n    return x + 1\n", r"mm \(.*of tk's own"),
    "mode": ("@tk.op(x='fp32[M, N]', mode='float')\ndef of_mode(x, mode):\n    return x * mode\n", r"parameter mode"),
    "left_out": (
        "@tk.op(x='fp32[M, N]', b='fp32[N]')\ndef left_out(x, b=None):\n    return x if b is None else x + b\n",
        r"parameter b has the default None",
    ),
    "wrong_default": (
        "@tk.op(x='fp32[M, N]', n='int')\ndef wrong_default(x, n=0.5):\n    return x * n\n",
        r"default 0\.5 is no finite int",
    ),
    "unnamed": ("unnamed = tk.op(x='fp32[M]')(lambda x: x + 1)\n", r"@tk\.op on <lambda> \(.*a lambda has no name"),
    "logs": (
        "import logging\n@tk.op(x='fp32[M]')\ndef logs(x):\n    logging.info('x')\n    return x + 1\n",
        r"logs \(.*it logs",
    ),
    "flow": ("@tk.op(x='fp32[M]')\ndef flow(x):\n    return x if x.sum() > 0 else -x\n", r"flow \(.*control flow"),
    "mistake": ("@tk.op(x='fp32[M]')\ndef mistake(x):\n    return x.summ()\n", r"mistake \(.*summ"),
    "gradient": ("@tk.op(x='fp32[M]', grad=True)\ndef gradient(x):\n    x.add_(1)\n", r"gradient \(.*grad=True"),
    "head": ("tk.flex.register('head', head_dims=(4096,))\n", r"4096 in head_dims; a head's size is 1 to 512"),
    "mod": ("tk.flex.register('mod', lambda s, b, h, q, k: s if s > 0 else -s)\n", r"score_mod"),
    "dtype": ("tk.b2b.register(torch.relu, dtypes=(torch.int8,))\n", r"torch\.int8 in dtypes"),
    "no_family": ("FAMILIES = ['no family']\n", r"'no family' is no Family"),
    "twice": (
        "first = good\n@tk.op(x='fp32[M]')\ndef good(x):\n    return x - 1\n",
        r"@tk\.op on good \(.*has this name already",
    ),
}
GOOD = "@tk.op(x='fp32[M, N]')\ndef good(x):\n    return x.sum(-1)\n"
LISTED = re.compile(r"^sm90 good good: \d+ combinations", re.MULTILINE)


def dry_run(*files: Path) -> int:
    return cli.main(["build", *map(str, files), "--arch", "90", "--dry-run"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))


def told(names: list[str], error: str) -> bool:
    """Whether each has a line of its own, and there are no other lines."""
    lines = [line for line in error.splitlines() if line.startswith("tk build: ")]
    assert "Traceback" not in error
    return len(lines) == len(names) and all(any(re.search(BAD[n][1], line) for line in lines) for n in names)


@pytest.mark.parametrize("seed", range(5))
def test_each_is_told(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = random.Random(seed).sample(sorted(BAD), 4 if seed else len(BAD))
    file = tmp_path / f"bad{seed}.py"
    file.write_text("\n".join([START, GOOD, *(BAD[n][0] for n in names)]))
    assert dry_run(file) == 1
    said = capsys.readouterr()
    assert told(names, said.err), said.err
    assert LISTED.search(said.out)


@pytest.mark.parametrize("name", BAD)
def test_alone(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --dry-run, too, where nothing is built."""
    file = tmp_path / f"alone_{name}.py"
    file.write_text("\n".join([START, GOOD, BAD[name][0]]))
    assert cli.main(["build", str(file), "--arch", "90", "-o", str(tmp_path / "x.tkpack")]) == 1
    assert told([name], capsys.readouterr().err)
    assert not (tmp_path / "x.tkpack").exists()


def test_files_hide_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that cannot be imported, which has declared something by then; one that declares nothing; and a good one."""
    texts = {"broken": f"{START}{BAD['signature'][0]}\n1 / 0\n", "empty": "x = 1\n", "fine": START + GOOD}
    files = [tmp_path / f"{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    assert dry_run(*files) == 1
    said = capsys.readouterr()
    for pattern in (
        r"broken.py cannot be imported: ZeroDivisionError",
        BAD["signature"][1],
        r"empty.py declares nothing",
    ):
        assert re.search(pattern, said.err), said.err
    assert LISTED.search(said.out)
