"""What is announced to ``tk build``, and the file that is printed for mods that no pack has."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tk
from tk.flex import mods, own_ops, registry, source
from tk.flex.tracing import trace

from . import dense

SIZES = (2, 4, 24, 24)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", [])


def test_register() -> None:
    tk.flex.register("window", mask_mod=mods.sliding_window(3), head_dims=(64, (192, 128)), backward=False)
    tk.flex.register("window", mask_mod=mods.sliding_window(4), head_dims=(64, (192, 128)), backward=False)  # no other
    (found,) = tk.flex.registered(__file__)
    assert found.name == "window" and found.head_dims == (64, (192, 128)) and not found.backward and found.decode
    assert found.traced.fingerprint == trace.pair(None, mods.sliding_window(100)).fingerprint
    assert tk.flex.registered(registry.__file__) == []
    with pytest.raises(ValueError, match="'window' is the name of another pair"):
        tk.flex.register("window", mask_mod=mods.causal)
    for name, said in (("window", "'window' is there already"), ("band", "'band' computes what 'window' does")):
        with pytest.raises(ValueError, match=f"{said}, and equal mods are one pair: register it once, with all of its"):
            tk.flex.register(name, mask_mod=mods.sliding_window(5), head_dims=(128,))


def test_what_a_helper_registers_belongs_to_the_file_that_calls_it(tmp_path: Path) -> None:
    """But what an imported file registers by itself belongs to that one."""
    pytest.importorskip("triton")
    from tk.build.sources import file_families

    (tmp_path / "announcing_helper.py").write_text(
        "import tk\nfrom tk.flex import mods\n\n"
        "def announce(n):\n    tk.flex.register(f'window {n}', mask_mod=mods.sliding_window(n), head_dims=(n,))\n\n"
        "tk.flex.register('causal', mask_mod=mods.causal)\n"
    )
    file = tmp_path / "calls_it.py"
    file.write_text("from announcing_helper import announce\n\nannounce(64)\n")
    assert len(file_families([file])) == 2  # the result and the gradients of one pair
    assert {r.name: Path(r.file).name for r in tk.flex.registered()} == {
        "causal": "announcing_helper.py", "window 64": "calls_it.py"
    }  # fmt: skip


def test_more_tensors_than_an_op_has_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "many.py"
    file.write_text(
        "import torch, tk\n\nmany = [torch.zeros(8) for _ in range(12)]\n\n"
        "def score(s, b, h, q, k):\n    for table in many:\n        s = s + table[h]\n    return s\n\n"
        "tk.flex.register('many', score, head_dims=(64,))\n"
    )
    command = [sys.executable, "-m", "tk", "build", str(file), "--arch", "90", "-o", str(tmp_path / "many.tkpack")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "many: the mods read 12 tensors, with which its gradient has" in done.stderr
    assert "there may be 32" in done.stderr and "Traceback" not in done.stderr


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "head": (dict(head_dims=(640,)), ValueError, "640 in head_dims; a head's size is 1 to 512"),
    "three heads": (dict(head_dims=((64, 64, 64),)), ValueError, r"\(64, 64, 64\) in head_dims"),
    "one of two heads": (dict(head_dims=((64, 0),)), ValueError, r"\(64, 0\) in head_dims"),
    "no head": (dict(head_dims=()), ValueError, "head_dims is empty"),
    "no dtype": (dict(dtypes=[]), ValueError, "dtypes is empty"),
    "word": (
        dict(dtypes=("half",)),
        ValueError,
        "half in dtypes; there are bf16, fp16, fp32, or torch's names for them",
    ),
    "dtype": (dict(dtypes=(torch.int8,)), ValueError, "torch.int8 in dtypes"),
    "mod": (dict(score_mod=mods.causal), TypeError, r"must take \(score, b, h, q_idx, kv_idx\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_register_refuses(name: str) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        tk.flex.register("x", **arguments)


@pytest.mark.parametrize("score", dense.SCORES)
@pytest.mark.parametrize("mask", ["none", "natten_2d", "prefix_lm_by_entry"])
def test_the_printed_file_registers_the_same_pair(score: str, mask: str, tmp_path: Path) -> None:
    traced = trace.pair(dense.SCORES[score](*SIZES)[0], dense.MASKS[mask](*SIZES)).traced
    file = tmp_path / "printed.py"
    file.write_text(source.source_of(traced))
    runpy.run_path(str(file))
    (found,) = tk.flex.registered(str(file))
    assert found.traced.fingerprint == traced.fingerprint


def test_mods_that_no_pack_has_are_said_how_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    factor = 3.0

    def grown(score, b, h, q_idx, kv_idx):  # the package has no such pair
        return score * score.abs() * factor

    traced = trace.pair(grown, None).traced
    with pytest.raises(tk.VariantNotFoundError, match=r"tk build \S+\.py -o mods.tkpack") as caught:
        own_ops.find(traced, [], [3.0], [])
    assert not list(tmp_path.iterdir())  # nothing is ever written
    file = tmp_path / "mods.py"
    file.write_text(str(caught.value).partition("for mods.py:\n\n")[2])
    runpy.run_path(str(file))
    assert tk.flex.registered(str(file))[0].traced.fingerprint == traced.fingerprint


def test_to_declare_makes_no_folders_and_leaves_cuda_alone(tmp_path: Path) -> None:
    """So that a program may fork afterwards. In a process of its own, where CUDA seems to be there."""
    code = """
import os, torch
def started(*args, **kwargs):
    raise SystemExit("CUDA is initialised")
torch.cuda._lazy_init = torch._C._cuda_init = started
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
import tk
from tk.flex import mods
tk.flex.register("declared", score_mod=mods.alibi(4), mask_mod=lambda b, h, i, j: i * 3 >= j, head_dims=(64,))
print(os.listdir())
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TK_CACHE_DIR"), str(tmp_path))
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
