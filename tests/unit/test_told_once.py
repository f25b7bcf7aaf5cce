"""A hand-written op is told in few files: its kernels, a C++ file, one of python/tk/ops/, and tk's public list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "kernels", "python/tk", "tools")
# How many files may have the op's name as a word. More than five or six: other ops or torch's of the same name refer to
# it, or comments do.
MOST = {
    "mm": 62,
    "linear": 28,
    "mm_plus_mm": 5,
    "addmm": 10,
    "baddbmm": 6,
    "bmm": 21,
    "conv1d": 6,
    "conv2d": 7,
    "conv3d": 6,
    "conv_input_grad": 6,
    "conv_weight_grad": 6,
    "grouped_mm": 12,
    "int4_mm": 9,
    "scaled_grouped_mm": 7,
    "scaled_mm": 15,
    "uint4x2_mixed_mm": 6,
}


@pytest.fixture(scope="module")
def words() -> dict[Path, set[str]]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    skipped = ROOT / "python/tk/include"  # where CMake installs headers of csrc/
    return {p: set(re.findall(r"\w+", p.read_text())) for p in paths if not p.is_relative_to(skipped)}


@pytest.mark.parametrize("op", MOST)
def test_few_files_name_an_op(op: str, words: dict[Path, set[str]]) -> None:
    found = sorted(str(path.relative_to(ROOT)) for path, names in words.items() if op in names)
    assert 3 < len(found) <= MOST[op], found


def test_an_op_touches_one_file_of_each_language_and_the_public_list(words: dict[Path, set[str]]) -> None:
    found = {str(path.relative_to(ROOT)) for path, names in words.items() if "mm_plus_mm" in names}
    assert found == {
        "csrc/ops/mm.cpp", "kernels/mm_plus_mm/op.py", "kernels/mm_plus_mm/family.py", "python/tk/ops/mm_plus_mm.py",
        "python/tk/__init__.py",
    }  # fmt: skip
