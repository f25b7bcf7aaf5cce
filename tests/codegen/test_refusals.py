"""What a user's function may meet is said in words; what only tk can have wrong asks for a report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk.aot.errors import BuildError
from tk.codegen import family, ways
from tk.codegen.errors import InternalError, TraceError, reported
from tk.codegen.family import generate
from tk.codegen.tile import ALIGNED
from tk.generated import op


def unsigned(x):
    return x.to(torch.uint16)


def complex_numbers(x):
    return torch.complex(x, x).abs()


@pytest.mark.parametrize(("fn", "dtype"), [(unsigned, "uint16"), (complex_numbers, "complex64")])
def test_a_dtype_that_no_kernel_has(fn: Callable[..., Any], dtype: str) -> None:
    with pytest.raises(TraceError, match=rf"{fn.__name__} \(.*test_refusals.py:\d+\): a tensor of {dtype}, a dtype"):
        generate(fn, op(x="fp32[M]")(fn).signature, fn.__name__)


ON_THE_DEFAULT_DEVICE = {
    "added": lambda x: x + torch.arange(x.shape[0]),
    "compared": lambda x: x > torch.zeros(x.shape[0]),
    "joined": lambda x: torch.cat((x, torch.ones(3))),
    "chosen": lambda x: torch.where(torch.ones(x.shape[0], dtype=torch.bool), x, 0.0),
    "an index": lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64)),
    "written in place": lambda x: torch.zeros(x.shape[0]).add_(x),
}


@pytest.mark.parametrize("name", ON_THE_DEFAULT_DEVICE)
def test_a_tensor_on_the_default_device(name: str) -> None:
    """Where the arguments are on a GPU eager torch refuses it, too."""
    fn = ON_THE_DEFAULT_DEVICE[name]
    with pytest.raises(TraceError, match=r"test_refusals.py:\d+\): .*make it on theirs, as torch.arange"):
        generate(fn, op(x="fp32[M]")(fn).signature, "f")


def twice(x):
    return x * 2


def test_a_mistake_of_ours_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, with the function, and with what went wrong as the cause."""
    signature = op(x="fp32[M]")(twice).signature
    made = generate(twice, signature, "twice")

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("v7")

    monkeypatch.setattr(ways, "lower", broken)
    with pytest.raises(InternalError, match=r"twice \(.*test_refusals.py:\d+\): .*KeyError: 'v7'\.") as error:
        generate(twice, signature, "twice")
    assert isinstance(error.value.__cause__, KeyError) and isinstance(error.value, BuildError)
    monkeypatch.setattr(family, "schedule", broken)
    graph = made.graphs[0]
    with pytest.raises(InternalError, match=r"twice, only, aligned: .*Please report"):
        made.plan(graph, ALIGNED, made.choices(graph, ALIGNED, "whole")[0])


def test_what_is_meant_for_the_user_stays_as_it_is() -> None:
    with pytest.raises(TraceError, match=r"^a reason$"), reported("f"):
        raise TraceError("a reason")


@pytest.mark.parametrize("logs_to", ("torch._subclasses.fake_tensor", __name__))
def test_another_thread_logs_meanwhile(logs_to: str, caplog: pytest.LogCaptureFixture) -> None:
    """Torch's tracebacks of what it refuses are kept from the log, in the thread that traces alone."""
    asked, answered = threading.Lock(), threading.Lock()
    asked.acquire()
    answered.acquire()
    runs = []

    def log() -> None:
        while asked.acquire(timeout=60) and len(runs) < 100:
            logging.getLogger(logs_to).error("of another thread")
            answered.release()

    def fn(x, i):
        runs.append(1)
        asked.release()
        answered.acquire()
        return torch.cholesky_inverse(x) + i.reshape(-1)

    thread = threading.Thread(target=log)
    thread.start()
    with caplog.at_level(logging.WARNING, logs_to), pytest.raises(TraceError):
        generate(fn, op(x="fp32[M, M]", i="fp32[M, M]")(fn).signature, "fn")
    n = len(runs)
    runs.extend([1] * 100)
    asked.release()
    thread.join()
    assert n > 1, "the function was not called on tensors of the CPU"
    assert [r.getMessage() for r in caplog.records if r.thread != threading.get_ident()] == n * ["of another thread"]
    assert not [r for r in caplog.records if r.thread == threading.get_ident()]
