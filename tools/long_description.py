"""README as the page of the package index: there links into the repository lead to the files of this version.

python tools/long_description.py
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin, urlsplit

ROOT = Path(__file__).resolve().parent.parent
# [text](target) and ![text](target); a target has no space. Code is no link, so it is matched first and kept.
_LINK = re.compile(r"```.*?```|`[^`\n]*`|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<target>[^)\s]+)\)", re.S)
_MARKER = re.compile(r"^<!-- (?:begin|end) \w+ -->\n", re.M)


def long_description(readme: str, repository: str, tag: str) -> str:
    """repository: its URL on a host that is laid out as GitHub is. Raises ValueError for a link into the repository
    that leads to no file."""

    def absolute(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or urlsplit(target).scheme or target.startswith("#"):
            return found[0]
        path = urlsplit(target).path
        if not (ROOT / path).exists():
            raise ValueError(f"README links to {target}, which is not in the repository")
        kind = "raw" if found["image"] else "tree" if (ROOT / path).is_dir() else "blob"
        return f"{found['image']}[{found['text']}]({urljoin(f'{repository}/{kind}/{tag}/', target)})"

    return _LINK.sub(absolute, _MARKER.sub("", readme))


def of_project() -> str:
    """README with the repository that pyproject.toml names, at the tag of this version."""
    # tomllib is of Python 3.11, and this runs on 3.10 too.
    url = re.findall(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    version = re.findall(r'__version__ = "(.*)"', (ROOT / "python/tk/_version.py").read_text())[0]
    return long_description((ROOT / "README.md").read_text(), url, f"v{version}")


if __name__ == "__main__":
    print(of_project(), end="")
