import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", metavar="FILE", help="the wheel that tests/install looks into and installs")
    parser.addoption(
        "--other-python",
        metavar="FILE",
        action="append",
        help="a Python of another version that tests/install runs the wheel in (default: those on PATH and of pyenv)",
    )
