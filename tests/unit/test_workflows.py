"""The hosted workflows: they run what there is, and a release is what its tag says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_tools import tool

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# A source distribution has none.
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="these sources come without workflows")


def test_every_target_that_a_workflow_makes_is_there() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    made = set(re.findall(r"run: make ([\w-]+)", text))
    made |= {part for found in re.findall(r"part: \[(.*)\]", text) for part in found.split(", ")}
    targets = set(re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.M))
    for found in re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M):
        targets |= set(found.split())
    assert len(made) >= 7 and made <= targets


def test_every_wheel_is_built_for_the_oldest_glibc_and_with_the_commits_time() -> None:
    """As `make` would run it, also in a release."""
    command = ["make", "--dry-run", "--always-make", "VENV=/none", "JOBS=1", "dist", "sample"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    built = [line for line in done.stdout.replace("\\\n", " ").splitlines() if "-DTK_GRID" in line]
    assert len(built) == 2, done.stdout + done.stderr
    assert all("-DTK_OLDEST_GLIBC=2.28" in line and re.search(r"SOURCE_DATE_EPOCH=\d{9,}", line) for line in built)


def test_every_script_that_a_workflow_runs_is_there() -> None:
    found = {name for path in WORKFLOWS for name in re.findall(r"tools/[\w.]+", path.read_text())}
    assert found and all((ROOT / name).is_file() for name in found)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_says(path: Path) -> None:
    """Rights are given job by job, every job ends, and no expression that others can write stands in a script."""
    text = path.read_text()
    assert re.search(r"^permissions:\n  contents: read$", text, re.M)
    runs = re.findall(r"run: (?:\|\n(?: {10}.*\n)+|.*)", text)
    assert not [run for run in runs if re.search(r"\$\{\{ *(github\.(event|head_ref|ref_name)|inputs)", run)]


def test_the_notes_of_a_release_are_its_section() -> None:
    changelog = (
        "# Changelog\n\n## 0.2.0 (2026-02-03)\n\n- new\n\n### Packs\n\n- more\n\n## 0.1.0 (2026-01-02)\n\n- old\n"
    )
    notes = tool("release_notes").notes
    assert notes("v0.2.0", "0.2.0", changelog) == "- new\n\n### Packs\n\n- more\n"
    assert notes("v0.1.0", "0.1.0", changelog) == "- old\n"
    with pytest.raises(ValueError, match=r"the tag must be v0\.2\.0"):
        notes("v0.1.0", "0.2.0", changelog)
    with pytest.raises(ValueError, match=r"has no section for 0\.3\.0"):
        notes("v0.3.0", "0.3.0", changelog)
    with pytest.raises(ValueError, match=r"says \(unreleased\) for 0\.3\.0"):
        notes("v0.3.0", "0.3.0", "## 0.3.0 (unreleased)\n\n- x\n")


@pytest.mark.parametrize(
    ("symbols", "upgrades", "said"),
    [
        ("manylinux_2_27_x86_64", {"manylinux_2_28_x86_64": ["libtorch_cpu.so"]}, ""),
        ("manylinux_2_28_x86_64", {"manylinux_2_28_x86_64": ["libtorch_cpu.so", "libzstd.so.1"]}, "libzstd"),
        ("manylinux_2_34_x86_64", {"manylinux_2_34_x86_64": ["libtorch_cpu.so"]}, "manylinux_2_34"),
    ],
)
def test_torch_alone_may_keep_a_wheel_from_its_tag(symbols: str, upgrades: dict[str, list[str]], said: str) -> None:
    wheel = "torch_tk-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
    audit: dict[str, object] = {"wheel": wheel, "overall_tag": "linux_x86_64", "sym_tag": symbols}
    audit["policy_upgrades"] = {name: {"libs_to_eliminate": libraries} for name, libraries in upgrades.items()}
    found = tool("check_audit").problem(audit)
    assert bool(found) == bool(said) and said in found


def test_a_tag_of_another_version_ends_the_release() -> None:
    command = [sys.executable, ROOT / "tools/release_notes.py", "v99.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "the tag is v99.0.0" in done.stderr
