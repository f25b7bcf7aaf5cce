"""Every Python block of README.md and docs/*.md runs, with small tensors on the CPU: with the names that the blocks
before it on its page have made, and no other. So does every command of tk that needs no GPU. Links lead to files and
headings that exist. What docs/ops-of-your-own.md says is taken is taken, and what it says is refused is refused.

A block that begins a file of the reader's (a decorator, a registration, a FAMILY) is written to the file that the next
`tk build` line names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tk
from tk.dropin import measured

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_LINKS = [*DOCUMENTS, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/log.md"))]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")
INLINE_BUILD = re.compile(r"`(tk build [\w.]+\.py [^`]*)`")

# Smaller sizes, and what is only there with a GPU.
SMALLER = {"14336": "112", "4096": "64", "512": "8", "1024": "16"}
NEEDS_A_GPU = "tk.preload()"


def blocks(document: Path) -> list[tuple[str, str]]:
    """Language and text."""
    return BLOCK.findall(document.read_text())


WITH_PYTHON = [d for d in DOCUMENTS if any(language == "python" for language, _ in blocks(d))]


def on_the_cpu(source: str) -> str:
    for large, small in SMALLER.items():
        source = re.sub(rf"\b{large}\b", small, source)
    source = source.replace("tk.enable(", "enable_on_the_cpu(")
    return source.replace('"cuda"', '"cpu"').replace(NEEDS_A_GPU, "pass")


REFUSED = re.compile(r"^def (\w+)\(.*# refused: (.*)$", re.MULTILINE)


def is_a_file(source: str) -> bool:
    return "@tk.op" in source or ".register(" in source


def declares(source: str) -> bool:
    """Whether it is of functions under @tk.op alone, which are plain functions to the blocks that follow."""
    return "@tk.op" in source and "import triton" not in source and not REFUSED.search(source)


def commands(text: str) -> list[list[str]]:
    """Of a shell block, those of tk that need no GPU."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    run = re.compile(r"tk (build|info|explain .*--arch|bench .*--device cpu)\b")
    return [shlex.split(line)[1:] for line in lines if run.match(line)]


def variables(text: str) -> dict[str, str]:
    """What a shell block exports."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", text, re.MULTILINE))


def run_tk(arguments: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tk", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize("document", WITH_PYTHON, ids=[d.name for d in WITH_PYTHON])
def test_the_snippets_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measured, "path_of", lambda device: tmp_path / "use.json")  # and the cache of the rest is warm
    torch.manual_seed(0)
    names: dict[str, Any] = {"enable_on_the_cpu": partial(tk.enable, device="cpu")}
    written = ""
    for language, text in blocks(document):
        if language == "python" and is_a_file(text):
            written = text
            if declares(text):
                exec(compile(text, str(document), "exec"), names)
        elif language == "python":
            exec(compile(on_the_cpu(text), str(document), "exec"), names)
        elif language == "sh":
            for name, value in variables(text).items():
                monkeypatch.setenv(name, value)
            for arguments in commands(text):
                if arguments[0] == "build":
                    (tmp_path / arguments[1]).write_text(written)
                run_tk(arguments, tmp_path)
    for line in INLINE_BUILD.findall(document.read_text()) if written else ():  # of many kernels: what would be built
        arguments = shlex.split(line)[1:]
        (tmp_path / arguments[1]).write_text(written)
        run_tk([*arguments, "--dry-run"], tmp_path)


def python_blocks(*documents: Path) -> list[str]:
    return [text for document in documents for language, text in blocks(document) if language == "python"]


def dry_run(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    pytest.importorskip("triton")
    monkeypatch.setenv("TK_CACHE_DIR", str(folder / "cache"))
    (folder / "documented.py").write_text(source)
    command = [sys.executable, "-m", "tk", "build", "documented.py", "--arch", "90", "--dry-run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


OPS_OF_YOUR_OWN = ROOT / "docs" / "ops-of-your-own.md"


def test_every_declaration_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = "\n".join(filter(declares, python_blocks(OPS_OF_YOUR_OWN)))
    names = re.findall(r"^def (\w+)\(", source, re.MULTILINE)
    status, listed, said = dry_run(source, tmp_path, monkeypatch)
    assert status == 0, said
    assert len(names) >= 15
    assert [name for name in names if not re.search(rf"^sm90 {name} ", listed, re.MULTILINE)] == []


def test_what_is_refused_is_refused_with_these_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (source,) = filter(REFUSED.search, python_blocks(OPS_OF_YOUR_OWN))
    status, _, said = dry_run(source, tmp_path, monkeypatch)
    lines = [line for line in said.splitlines() if line.startswith("tk build: ")]
    assert status == 1
    wanted = REFUSED.findall(source)
    assert len(lines) == len(wanted) >= 8, said
    missed = [n for n, words in wanted if not any(f"{n} (" in line and words in line for line in lines)]
    assert not missed, said


def anchors(document: Path) -> set[str]:
    """What a link after # may name: the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", WITH_LINKS, ids=[d.name for d in WITH_LINKS])
def test_links_resolve(document: Path):
    prose = re.sub(r"`[^`]*`", "", BLOCK.sub("", document.read_text()))
    for target in (link or source for link, source in LINK.findall(prose)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


COMMAND = re.compile(r"^(?:.*&& )?(make|tk) ([a-z][a-z-]*)", re.MULTILINE)


def named_commands(document: Path) -> set[tuple[str, str]]:
    """("make", "test"), ("tk", "info"), …, of shell blocks and of code within sentences."""
    shell = [text for language, text in blocks(document) if language == "sh"]
    inline = re.findall(r"`((?:make|tk) [^`]*)`", BLOCK.sub("", document.read_text()))
    return {found for text in (*shell, *inline) for found in COMMAND.findall(text)}


@pytest.mark.parametrize("document", WITH_LINKS, ids=[d.name for d in WITH_LINKS])
def test_commands_exist(document: Path):
    if document.name in ("CHANGELOG.md", "log.md"):
        pytest.skip("tells of what was")
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    make = {name for line in targets for name in line.split()}
    usage = subprocess.run([sys.executable, "-m", "tk", "--help"], capture_output=True, text=True, check=True).stdout
    known = {("make", name) for name in make} | {
        ("tk", name) for name in re.findall(r"^    (\w+) ", usage, re.MULTILINE)
    }
    assert ("tk", "info") in known and ("make", "docs") in known
    assert named_commands(document) <= known


def test_all_documents_are_looked_at():
    assert {"README.md", "add-a-kernel.md", "attention.md", "use.md"} <= {d.name for d in WITH_PYTHON}
