"""The site of the documents is built without a warning, every link inside it leads somewhere, and the API reference has
every public name."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = "make docs installs it: requirements/docs.txt"
bs4 = pytest.importorskip("bs4", reason=NEEDS)
pytest.importorskip("sphinx", reason=NEEDS)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    given = request.config.getoption("site")
    folder = Path(given).resolve() if given else tmp_path_factory.mktemp("site")
    shutil.rmtree(folder, ignore_errors=True)
    cache = tmp_path_factory.mktemp("doctrees")
    command = [sys.executable, "-m", "sphinx", "-c", "docs", "-d", str(cache), "-W", "--keep-going", "-q", ".", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def pages(site: Path) -> dict[Path, bs4.BeautifulSoup]:
    return {p: bs4.BeautifulSoup(p.read_text(), "html.parser") for p in sorted(site.rglob("*.html"))}


def targets(page: bs4.BeautifulSoup) -> Iterator[str]:
    for name, attribute in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
        for tag in page.find_all(name):
            yield from filter(None, [tag.get(attribute)])


def broken(site: Path) -> list[str]:
    """Each link inside of the site that leads nowhere, with its page."""
    read = pages(site)
    anchors = {p: {tag.get("id") or tag.get("name") for tag in page.find_all(["a", True])} for p, page in read.items()}
    wrong = []
    for path, page in read.items():
        for target in targets(page):
            if re.match(r"(https?:|mailto:|data:)", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not there.is_file() or (anchor and there in anchors and unquote(anchor) not in anchors[there]):
                wrong.append(f"{path.relative_to(site)}: {target}")
    return wrong


def test_every_link_inside_the_site_leads_somewhere(site: Path):
    assert not broken(site)


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="#here"></a><a href="b.html#there"></a><img src="c.svg">'
    )
    (tmp_path / "b.html").write_text('<a href="a.html#here"></a><a href="https://example.org/x"></a>')
    assert broken(tmp_path) == ["a.html: b.html#there", "a.html: c.svg"]


def test_every_document_is_a_page(site: Path):
    documents = {p.stem for p in (ROOT / "docs").glob("*.md")}
    assert documents == {p.stem for p in (site / "docs").glob("*.html")}
    assert {"README.html", "CHANGELOG.html", "CONTRIBUTING.html", "index.html"} <= {p.name for p in site.glob("*.html")}


def test_the_pictures_are_there(site: Path):
    pictures = {p.name for p in (site / "_images").iterdir()}
    assert {"gains.svg", "mm.svg", "causal.svg", "natten_2d.svg", "explain.svg"} <= pictures


def test_the_reference_has_docstrings_and_schemas(site: Path):
    text = bs4.BeautifulSoup((site / "docs" / "api.html").read_text(), "html.parser").get_text()
    assert "linear(Tensor" in text, "no schema of torch.ops.tk.linear"
    for name in documented():
        assert f"{name}(" in text or name.rpartition(".")[2] in text, name
    assert "Lets a model run through" in text


def documented() -> list[str]:
    """The names in docs/api.md."""
    blocks = re.findall(r"^```\{tk-api\}\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL | re.MULTILINE)
    return [name for block in blocks for name in block.split()]


def public() -> set[str]:
    """What a user of tk may call, by the names under which documents have it."""
    import tk
    from tk import config, flex

    tops = [n for n in dir(tk) if not n.startswith("_")]
    things = {f"tk.{n}": getattr(tk, n) for n in tops}
    things |= {f"tk.config.{n}": getattr(config, n) for n in config.__all__}
    things |= {f"tk.flex.{n}": getattr(flex, n) for n in flex.__all__ if not hasattr(tk, n)}
    things |= {f"tk.flex.mods.{n}": getattr(flex.mods, n) for n in flex.mods.__all__ if not hasattr(flex, n)}
    things |= {f"tk.nn.{n}": getattr(tk.nn, n) for n in tk.nn.__all__}
    things |= {f"tk.b2b.{n}": getattr(tk.b2b, n) for n in tk.b2b.__all__}
    ours = {name: x for name, x in things.items() if str(getattr(x, "__module__", "tk")).startswith("tk")}
    return {name for name, x in ours.items() if not inspect.ismodule(x) and callable(x)}


def test_the_reference_has_every_public_name_once():
    names, wanted = documented(), public()
    assert len(wanted) > 90
    assert len(names) == len(set(names))
    assert wanted <= set(names)
