"""The examples run, learn, and are right."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples import example

import tk


def test_gpt_learns() -> None:
    losses = example("gpt").train(steps=12, B=2, S=128)
    assert losses[0] == pytest.approx(8, abs=0.5)  # all bytes alike
    assert losses[-1] < 6.2


def test_gpt_needs_no_checkout(tmp_path: Path) -> None:
    """The example's file alone, beside an installed tk."""
    copied = shutil.copy(Path(example("gpt").__file__), tmp_path / "gpt.py")
    done = subprocess.run([sys.executable, copied, "--steps", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_documents_do_not_see_each_other() -> None:
    gpt = example("gpt")
    model = gpt.GPT(width=32, heads=2, layers=1, longest=64)
    tokens, documents = torch.randint(0, 256, (1, 48)), (torch.arange(48) // 20)[None].int()
    assert gpt.position_in_document(documents)[0].tolist() == [*range(20), *range(20), *range(8)]
    whole = model(tokens, documents)
    alone = model(tokens[:, 20:40], torch.zeros(1, 20, dtype=torch.int32))
    torch.testing.assert_close(whole[:, 20:40], alone)


def test_decode() -> None:
    decode = example("decode")
    assert decode.decode(steps=20) < 1e-5
    assert any(r.name == "alibi_at_the_end" for r in tk.flex.registered(decode.__file__))
    cache = decode.PagedCache(4, 2, 1, 16, 8)
    with pytest.raises(RuntimeError, match="no page is left for sequence 0, which has 32 keys"):
        cache.append(0, torch.zeros(1, 33, 8), torch.zeros(1, 33, 8))
