"""The pictures of docs/attention.md are those of the library's masks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tk.flex import mods

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def masks() -> Any:
    spec = importlib.util.spec_from_file_location("masks", ROOT / "tools" / "masks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_up_to_date(masks: Any) -> None:
    assert masks.main(["--check"]) == 0


def test_a_picture_that_is_not_is_noticed(masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(masks.MASKS, "causal", mods.sliding_window(3))
    assert masks.main(["--check"]) == 1


def test_every_mask_has_its_picture_in_the_text(masks: Any) -> None:
    text = (ROOT / "docs" / "attention.md").read_text()
    score_mods = {"alibi", "relative_bias", "per_head_bias", "soft_cap", "learned_bias"}
    assert set(mods.__all__) - score_mods == set(masks.MASKS)
    for name in mods.__all__:
        assert f"`{name}" in text
    for name in masks.MASKS:
        assert f"masks/{name}.svg" in text
