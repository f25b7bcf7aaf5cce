"""What the package says of itself: on an index, to those who cite it, and to builds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from test_tools import tool
from tk._version import __version__

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://example.org/o/r"


def described(text: str) -> str:
    return tool("long_description").long_description(text, REPOSITORY, "v1")


@pytest.mark.parametrize(
    ("readme", "page"),
    [
        ("[a](docs/design.md)", f"[a]({REPOSITORY}/blob/v1/docs/design.md)"),
        ("[a b](CHANGELOG.md#versions).", f"[a b]({REPOSITORY}/blob/v1/CHANGELOG.md#versions)."),
        ("[d](examples/cpp), [e](docs/)", f"[d]({REPOSITORY}/tree/v1/examples/cpp), [e]({REPOSITORY}/tree/v1/docs/)"),
        ("![p\nq](benchmarks/results/gains.svg)", f"![p\nq]({REPOSITORY}/raw/v1/benchmarks/results/gains.svg)"),
        ("[`x[0](y)`](LICENSE)", f"[`x[0](y)`]({REPOSITORY}/blob/v1/LICENSE)"),
        ("[a](https://x.org/b) [c](#use-it)", "[a](https://x.org/b) [c](#use-it)"),
        ("`f[a](no)` and\n```\ng[b](no)\n```\n", "`f[a](no)` and\n```\ng[b](no)\n```\n"),
        ("<!-- begin x -->\n| a |\n<!-- end x -->\n", "| a |\n"),
    ],
)
def test_links_into_the_repository_become_absolute(readme: str, page: str) -> None:
    assert described(readme) == page


def test_a_link_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/none\.md, which is not in the repository"):
        described("[a](docs/none.md)")


def test_the_page_of_readme_has_no_relative_link() -> None:
    page = tool("long_description").of_project()
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.S)
    targets = re.findall(r"\]\(([^)]*)\)", prose)
    assert len(targets) > 10 and all(re.match(r"https://|#", target) for target in targets)
    assert f"/v{__version__}/" in page


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def test_a_build_takes_the_users_own_torch_and_triton() -> None:
    """Lower bounds: only requirements/ pins what our own builds use, and pins no less than the bounds."""
    lists = re.findall(r"^(?:requires|dependencies|build) = \[(.*)\]", project(), re.M)
    bounds = [Requirement(text) for found in lists for text in re.findall(r'"(.*?)"', found)]
    assert {"torch", "triton", "zstandard", "numpy", "cmake", "ninja", "setuptools"} == {r.name for r in bounds}
    assert [str(r) for r in bounds if {s.operator for s in r.specifier} != {">="}] == []
    pins = [Requirement(line) for name in ("build", "torch")
            for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()
            if line and not line.startswith("#")]  # fmt: skip
    for pin in pins:
        (version,) = (s.version for s in pin.specifier)
        assert all(version in r.specifier for r in bounds if r.name == pin.name), pin
    assert {r.name for r in bounds} == {pin.name for pin in pins}


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {__version__}\n" in citation
    (url,) = re.findall(r'^Repository = "(.*)"$', project(), re.M)
    assert f"repository-code: {url}\n" in citation
    assert f"{url}/security" in (ROOT / "SECURITY.md").read_text()
    assert all(found.startswith(url) for found in re.findall(r"https://github\.com/[^\"/]+/[^\"/]+", project()))


def test_the_changelog_has_this_version_first() -> None:
    found = re.findall(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found[0][0] == __version__
