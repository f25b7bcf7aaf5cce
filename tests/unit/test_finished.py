"""Which builds are finished: nothing that they read has changed, and neither has what they wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tk.aot.cache import Cache
from tk.build import command, finished


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_what_was_written_must_be_there_still(cache: Cache, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    assert not finished.is_finished(cache, "key", [a, b])
    b.write_text("2")
    finished.record(cache, "key", [a, b])
    assert finished.is_finished(cache, "key", [a, b])
    assert not finished.is_finished(cache, "other", [a, b])
    assert not finished.is_finished(cache, "key", [a])
    b.write_text("3")
    assert not finished.is_finished(cache, "key", [a, b])
    b.unlink()
    assert not finished.is_finished(cache, "key", [a, b])


def test_the_digest_is_of_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("x = 1")
    monkeypatch.setattr(finished, "sources", lambda: iter([source]))
    seen = {finished.digest(["sm90"])}
    assert finished.digest(["sm90"]) in seen
    seen.add(finished.digest(["sm80"]))
    source.write_text("x = 2")
    seen.add(finished.digest(["sm90"]))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    seen.add(finished.digest(["sm90"]))
    monkeypatch.setattr(finished.metadata, "version", lambda name: "0")
    seen.add(finished.digest(["sm90"]))
    assert len(seen) == 5
    monkeypatch.setenv("TK_JOBS", "7")
    assert finished.digest(["sm90"]) in seen, "how many compile at once changes nothing"


def test_the_sources_are_the_kernels_and_what_makes_packs_of_them() -> None:
    found = {f"{p.parent.name}/{p.name}" for p in finished.sources()}
    assert {"generated/norms.py", "scheduling/settings.py", "codegen/device.py", "aot/compile.py", "sm90/mm.json",
            "tk/expr.py", "rules/reductions.py"} <= found  # fmt: skip


def test_a_finished_build_traces_nothing(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def build(packs, cache, jobs, roots, ops):
        made.append(packs)
        for path in (tmp_path / "sm90.tkpack", tmp_path / "ops.tkpack", roots):
            path.write_text("pack")

    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "package_families", lambda debug: [])
    monkeypatch.setattr(command, "_planned", lambda *args: args)
    monkeypatch.setattr(command, "definitions", lambda families: b"")
    monkeypatch.setattr(command, "build", build)
    args = argparse.Namespace(show=None, arch="90", jobs=1, files=[], out=tmp_path, dry_run=False, debug=False,
                              all=True, sample=True, only=None, roots=tmp_path / "roots.inc")  # fmt: skip
    assert command.run(args) == command.run(args) == 0
    assert len(made) == 1
    assert "sm90.tkpack, ops.tkpack, roots.inc: nothing has changed" in capsys.readouterr().out
    args.sample = False
    assert command.run(args) == 0 and len(made) == 2
    (tmp_path / "sm90.tkpack").write_text("damaged")
    assert command.run(args) == 0 and len(made) == 3
