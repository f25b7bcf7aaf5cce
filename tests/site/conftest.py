"""--site DIR: where the site is left. `make docs` builds the site by these tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", help="leave the site in this folder")
