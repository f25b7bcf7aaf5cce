"""Whose code runs: what torch and Python's library do by themselves is not the traced function's doing."""

from __future__ import annotations

import os
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import sympy
import torch


class Owner(Enum):
    USER = "the file of the function, and what its author wrote beside it"
    TORCH = "torch, sympy and tk: they ask for their own sake"
    LIBRARY = "Python's library and other packages: they ask on behalf of who calls them"
    IMPORT = "the import of a module: it runs once, whoever asks for it"


PYTHONS = str(Path(os.__file__).parent) + os.sep
TORCHS = str(Path(torch.__file__).parent) + os.sep
_OF_TORCH = (TORCHS, *(f"{folder}{os.sep}" for folder in (Path(sympy.__file__).parent, Path(__file__).parents[2])))
_MODULES = str(Path(torch.nn.modules.__file__).parent) + os.sep  # which call what the user wrote
_PACKAGES = re.compile(rf"(.*[/\\](?:site|dist)-packages[/\\]|{re.escape(str(Path(torch.__file__).parents[1]))}[/\\])")


_OF_TEXTS = ("<string>", "<eval_with_key>")  # such as a dataclass's methods: they are their callers'


def package_of(fn: Any) -> str:
    """The installed package that the function is of, as the beginning of its files' names; "" where it is of none."""
    file = fn.__code__.co_filename if hasattr(fn, "__code__") else ""
    if file.startswith(_OF_TEXTS):
        return str(file)
    found = _PACKAGES.match(file)
    if found is None or file.startswith(_OF_TORCH):
        return ""
    name, separator, _ = file[found.end() :].partition(os.sep)
    return found.group() + name + separator


@cache
def of_file(file: str, package: str) -> Owner:
    """package: what else is the user's than files of no package (:func:`package_of`)."""
    if file.startswith("<frozen importlib"):
        return Owner.IMPORT
    if file.startswith(_MODULES):
        return Owner.LIBRARY
    if file.startswith(_OF_TORCH):
        return Owner.TORCH
    if package and file.startswith(package):
        return Owner.USER
    return Owner.LIBRARY if file.startswith((PYTHONS, "<frozen", *_OF_TEXTS)) or _PACKAGES.match(file) else Owner.USER
