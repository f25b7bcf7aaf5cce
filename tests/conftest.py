import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", metavar="FILE", help="the wheel that tests/install looks into and installs")
