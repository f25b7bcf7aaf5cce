"""A mod that does anything besides giving a score is refused where it is traced, with its line, and does nothing."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable
from logging import info
from pathlib import Path
from typing import Any

import pytest
import torch

from tk import errors
from tk.flex.tracing import trace

LOG = logging.getLogger("of a mod")
SEEN: list[Any] = []


class Count:
    n = 0


def helper(q: Any) -> Any:
    LOG.debug("in a helper")
    return q


def counted(q: Any) -> None:
    Count.n += 1


EFFECTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a module's function": (lambda q: logging.info("hello"), "logs (logging.info)"),
    "a tensor's text": (lambda q: logging.info(f"{q}"), "makes a text of a tensor"),
    "a tensor's own text": (lambda q: repr(q), "makes a text of a tensor"),
    "a text of a list of tensors": (lambda q: str([q]), "makes a text of a tensor"),
    "one imported": (lambda q: info("q is %s", q), "logs (info)"),
    "a level that is off": (lambda q: logging.debug("hello"), "logs (logging.debug)"),
    "a logger": (lambda q: LOG.warning("at %s", q), "logs (LOG.warning)"),
    "a logger made here": (lambda q: logging.getLogger("x").error(q), "logs (logging.getLogger)"),
    "a helper": (lambda q: helper(q), "logs (LOG.debug)"),
    "print": (lambda q: print("hello"), "prints"),
    "print of an index": (lambda q: print(q), "prints"),
    "print to a file": (lambda q: print(q, file=sys.stderr), "prints"),
    "stdout": (lambda q: sys.stdout.write("hello"), "sys.stdout.write"),
    "a warning": (lambda q: warnings.warn("hello", stacklevel=2), "calls warnings.warn, which no kernel does"),
    "the time": (lambda q: time.time(), "calls time.time"),
    "a clock": (lambda q: time.perf_counter(), "calls time.perf_counter"),
    "sleep": (lambda q: time.sleep(0), "calls time.sleep"),
    "a file": (lambda q: open("tk_effect", "w"), "calls open()"),  # noqa: SIM115
    "a list": (lambda q: SEEN.append(q), "writes to SEEN"),
    "a class": (counted, "must not write n of Count"),
}


@pytest.mark.parametrize("name", EFFECTS)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_refused(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    effect, message = EFFECTS[name]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        effect(q)
        return q >= k

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        effect(q)
        return s + q

    with pytest.raises(errors.UnsupportedError) as caught:
        trace.pair(*((score, None) if kind == "score_mod" else (None, mask)))
    assert message in str(caught.value) and kind in str(caught.value)
    assert "unhashable" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
    assert not SEEN and not Count.n and not list(tmp_path.iterdir())


def test_what_is_not_called_may_stand_there() -> None:
    verbose = False

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        if verbose:
            logging.info("%s", q)
            print(q)
        return q >= k

    assert trace.pair(None, mask).mask is not None


@pytest.mark.parametrize("order", [0, 1])
def test_polygamma_is_traced(order: int) -> None:
    assert "polygamma" in str(trace.pair(lambda s, b, h, q, k: torch.polygamma(order, s), None).score)


@pytest.mark.parametrize("order", [1, 2, 5])
def test_polygamma_without_a_kernel(order: int) -> None:
    """The message has the order that no kernel has: that of the score, or the one that its gradient asks for."""
    from tk.flex import registry

    graph = trace.pair(lambda s, b, h, q, k: torch.polygamma(order, s), None).score
    assert graph is not None
    with pytest.raises(errors.UnsupportedError, match=r"polygamma of order \d: there are 0 \(digamma\) and 1"):
        registry.check_ops(graph, True, "")
    if order == 1:
        registry.check_ops(graph, False, "")
