"""What no call brings: a function that reads it is refused, whatever way it asks. A trace would keep one answer."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import io
import locale
import logging
import os
import platform
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import flags
from time import time as now
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tk.codegen.errors import TraceError
from tk.codegen.family import generate
from tk.generated import op

GENERATOR = random.Random(3)
NUMPYS = np.random.default_rng(3)
LARGE = torch.ones(4096)


def second() -> int:
    return datetime.datetime.now().second


def is_on_a_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def caught(f: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    try:
        return f()
    except Exception:
        return otherwise


def rows_added(x: Tensor) -> Tensor:
    y = x
    for row in x:
        y = y + row
    return y


def in_a_thread(x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return found[0]


def with_an_attribute(x: Tensor) -> Tensor:
    x.scale = 2.0  # type: ignore[attr-defined]
    return x + 1


def without_gradients(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x + 1


def in_float64(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return x + 1


class Index:
    def __index__(self) -> int:
        return int(time.time()) * 0


def indexes_by_an_object(x: Tensor) -> Tensor:
    return x[Index()]  # type: ignore[index]


def writes_the_environment(x: Tensor) -> Tensor:
    os.environ["TK_OF_A_TEST"] = "1"
    return x + 1


def says_on_stderr(x: Tensor) -> Tensor:
    print("x", file=sys.stderr)
    return x + 1


class Standing:
    """What stands for the standard output in a notebook."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def prints_in_a_notebook(x: Tensor) -> Tensor:
    with contextlib.redirect_stdout(Standing()):  # type: ignore[type-var]
        sys.stdout.write("x")
    return x + 1


def prints_into_a_redirection(x: Tensor) -> Tensor:
    with contextlib.redirect_stdout(io.StringIO()):
        sys.stdout.write("x")
    return x + 1


def after(does: Any, x: Tensor) -> Tensor:
    return x + 1


def with_the_flags_imported(x: Tensor) -> Tensor:
    from sys import flags as own

    return x + own.optimize


def if_assertions_are_on(x: Tensor) -> Tensor:
    return x * (2 if __debug__ else 3)


HELD = Standing()
WEAK = weakref.ref(HELD)
HOLDER = Standing()
HOLDER.weak = WEAK  # type: ignore[attr-defined]
PROXY = weakref.proxy(HELD)
GONE = weakref.proxy(Standing())
SET = weakref.WeakSet([HELD])
SAY = functools.partial(print, "x")
LOGGER = logging.getLogger(__name__)
NAME = "a text"

LIES = "it asks how a tensor lies in memory"
AUTOGRAD = "it asks what autograd knows of a tensor"
DEVICE = "it asks which device a tensor is on"
TIME = "it asks for the time"
SYSTEM = "it asks the operating system"
PRINTS = "it prints, which no kernel does"
HASH = "it takes the hash of what need not be numbers"
ADDRESS = "it makes a text of an object, which may have its address"
INTERPRETER = "it asks the interpreter for its state"
ALIVE = "it asks by a weak reference whether an object is there"
OTHER = "depends on something that no kernel knows"

OF_TENSORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "contiguous": (lambda x: x * 2 if x.is_contiguous() else x * 3, LIES),
    "contiguous result": (lambda x: x * 2 if x.t().is_contiguous() else x * 3, LIES),
    "stride": (lambda x: x * x.stride(0), LIES),
    "strides": (lambda x: x * 2 if x.stride()[1] == 1 else x * 3, LIES),
    "offset": (lambda x: x + x.storage_offset(), LIES),
    "order of dimensions": (lambda x: x * (1 + x.dim_order()[0]), LIES),
    "storage": (lambda x: x * 2 if x.untyped_storage().data_ptr() else x * 3, LIES),
    "shared": (lambda x: x * 2 if x.is_shared() else x * 3, LIES),
    "pinned": (lambda x: x * 2 if x.is_pinned() else x * 3, LIES),
    "text of its type": (lambda x: x * 2 if x.type() == "torch.FloatTensor" else x * 3, LIES),
    "needs a gradient": (lambda x: x * 2 if x.requires_grad else x * 3, AUTOGRAD),
    "version": (lambda x: x + x._version, AUTOGRAD),
    "leaf": (lambda x: x * 2 if x.is_leaf else x * 3, AUTOGRAD),
    "node": (lambda x: x * 2 if x.grad_fn is None else x * 3, AUTOGRAD),
    "gradient": (lambda x: x * 2 if x.grad is None else x * 3, AUTOGRAD),
    "cuda": (lambda x: x * 2 if x.is_cuda else x * 3, DEVICE),
    "cpu": (lambda x: x * 2 if x.is_cpu else x * 3, DEVICE),
    "meta": (lambda x: x * 2 if x.is_meta else x * 3, DEVICE),
    "number of its device": (lambda x: x * 2 if x.get_device() < 0 else x * 3, DEVICE),
    "type of its device": (lambda x: x * 2 if x.device.type == "cuda" else x * 3, DEVICE),
    "type of its device, by a helper": (lambda x: x * 2 if is_on_a_gpu(x) else x * 3, DEVICE),
    "device": (lambda x: x * 2 if x.device == torch.device("cpu") else x * 3, OTHER),
    "class": (lambda x: x * 2 if type(x) is Tensor else x * 3, OTHER),
    "text": (lambda x: x + len(repr(x)), OTHER),
    "text of sizes": (lambda x: x + len(str(x.shape)), OTHER),
    "class of a size": (lambda x: x * 2 if isinstance(x.shape[0], int) else x * 3, OTHER),
    "attribute": (with_an_attribute, "it assigns an attribute of an argument"),
}
OF_ALL_ELSE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "gradients": (lambda x: x * 2 if torch.is_grad_enabled() else x * 3, "it asks whether gradients are on"),
    "autocast": (lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x * 3, "it asks whether autocast is on"),
    "inference": (lambda x: x * 2 if torch.is_inference_mode_enabled() else x * 3, "whether inference mode is on"),
    "default dtype": (lambda x: x * torch.get_default_dtype().itemsize, "it asks for the default dtype"),
    "deterministic": (lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x, "are deterministic"),
    "precision": (lambda x: x + len(torch.get_float32_matmul_precision()), "it asks for the precision of products"),
    "threads": (lambda x: x + torch.get_num_threads(), "it asks how many threads there are"),
    "seed": (lambda x: x + torch.initial_seed() % 5, "it asks for torch's seed"),
    "gpu": (lambda x: x * 2 if torch.cuda.is_available() else x * 3, "it asks for torch.cuda.is_available"),
    "gpus": (lambda x: x + torch.cuda.device_count(), "it asks for torch.cuda.device_count"),
    "tf32": (
        lambda x: x * 2 if torch.backends.cuda.matmul.allow_tf32 else x * 3,
        "for what torch.backends has",
    ),
    "environment": (lambda x: x * 2 if os.environ.get("TK_OF_A_TEST") else x * 3, "it reads the environment"),
    "getenv": (lambda x: x * 2 if os.getenv("TK_OF_A_TEST") else x * 3, "it reads the environment"),
    "in the environment": (lambda x: x * 2 if "TK_OF_A_TEST" in os.environ else x * 3, "it reads the environment"),
    "environment that changes": (writes_the_environment, "it changes the environment"),
    "process": (lambda x: x + os.getpid() % 7, SYSTEM),
    "folder": (lambda x: x + len(os.getcwd()), SYSTEM),
    "file that is there": (lambda x: x * 2 if os.path.exists(__file__) else x * 3, SYSTEM),
    "system's random bytes": (lambda x: x + os.urandom(1)[0], SYSTEM),
    "uuid": (lambda x: x + uuid.uuid4().int % 7, SYSTEM),
    "secret": (lambda x: x + secrets.randbelow(100), SYSTEM),
    "file": (lambda x: x + len(Path(__file__).read_text()), "it reads or writes a file"),
    "local time": (lambda x: x + time.localtime().tm_sec, TIME),
    "time as a text": (lambda x: x + float(time.strftime("%S")), TIME),
    "time of a clock": (lambda x: x + time.clock_gettime(time.CLOCK_REALTIME), TIME),
    "date, by a helper": (lambda x: x + second(), TIME),
    "a generator of its own": (lambda x: x + GENERATOR.random(), "it draws from a generator of Python's"),
    "a new generator": (lambda x: x + random.Random().random(), "it draws from a generator of Python's"),
    "NumPy's generator": (lambda x: x + float(NUMPYS.random()), OTHER),
    "stderr": (says_on_stderr, "it prints, which no kernel does"),
    "gradients that it puts out": (without_gradients, "it changes whether gradients are on"),
    "dtype that it makes the default": (in_float64, "it changes the default dtype"),
    "time that an index asks for": (indexes_by_an_object, TIME),
    "time, by its own name": (lambda x: x + now(), TIME),
    "time, passed on": (lambda x: x + sum(f() for f in [now]), TIME),
    "time that a map asks for": (lambda x: x + next(map(time.gmtime, [None])).tm_sec, TIME),
    "print": (lambda x: after(print("x"), x), PRINTS),
    "print where the CPU has no such op": (lambda x: after(print("x"), x.half().to(torch.float8_e5m2).sin()), PRINTS),
    "standard output": (lambda x: after(sys.stdout.write("x"), x), PRINTS),
    "standard output of a notebook": (prints_in_a_notebook, PRINTS),
    "standard output that is redirected": (prints_into_a_redirection, PRINTS),
    "file of tensors": (lambda x: after(torch.save(1, os.devnull), x), "it reads or writes a file"),
    "command": (lambda x: after(subprocess.run(["true"], check=True), x), SYSTEM),
    "file descriptor": (lambda x: after(os.write(1, b""), x), "it reads or writes a file"),
    "log": (lambda x: after(LOGGER.debug("x"), x), "it logs, which no kernel does"),
    "log of the root": (lambda x: after(logging.debug("x"), x), "it logs, which no kernel does"),
    "log by an adapter": (lambda x: after(logging.LoggerAdapter(LOGGER, {}).debug("x"), x), "it logs"),
    "Python's generator seeded": (lambda x: after(random.seed(3), x), "it draws from Python's random, or seeds it"),
    "hash of a text": (lambda x: x + hash("text") % 7, HASH),
    "hash of a name": (lambda x: x + hash(NAME) % 7, HASH),
    "hash in a tuple": (lambda x: x + hash((1, NAME)) % 7, HASH),
    "hash of what is computed": (lambda x: x + hash(NAME.upper()) % 7, HASH),
    "print with its argument": (lambda x: after(SAY(), x), PRINTS),
    "print that is passed on": (lambda x: after([*map(print, ["x"])], x), PRINTS),
    "hash by its method": (lambda x: x + NAME.__hash__() % 7, HASH),
    "hash passed on": (lambda x: x + sum(map(hash, [NAME])) % 7, HASH),
    "id": (lambda x: x + id(x) % 7, "it asks for the id of an object"),
    "id passed on": (lambda x: x + len(sorted([HELD], key=id)), "it asks for the id of an object"),
    "address": (lambda x: x + len(repr(object())), ADDRESS),
    "address of a global": (lambda x: x + len(repr(HELD)), ADDRESS),
    "address in a list": (lambda x: x + len(ascii([1, HELD])), ADDRESS),
    "garbage": (lambda x: x + gc.collect(), "it asks or tells the collector of garbage"),
    "garbage that is counted": (lambda x: x + gc.get_count()[0], "it asks or tells the collector of garbage"),
    "references": (lambda x: x + sys.getrefcount(HELD), INTERPRETER),
    "depth": (lambda x: x + sys.getrecursionlimit(), INTERPRETER),
    "flags": (lambda x: x + sys.flags.optimize, INTERPRETER),
    "flags, by their own name": (lambda x: x + flags.optimize, INTERPRETER),
    "flags, imported in it": (with_the_flags_imported, INTERPRETER),
    "arguments of the process": (lambda x: x + len(sys.argv), INTERPRETER),
    "version of Python": (lambda x: x * 2 if sys.version_info >= (3, 12) else x * 3, INTERPRETER),
    "assertions": (if_assertions_are_on, "it asks whether assertions are on"),
    "platform": (lambda x: x + len(platform.machine()), "it asks what machine and Python these are"),
    "platform, asked before": (lambda x: x + len(platform.system()), "it asks what machine and Python these are"),
    "locale": (lambda x: x + len(locale.localeconv()), "it asks for the locale"),
    "locale that is set": (lambda x: x + len(locale.getlocale()), "it asks for the locale"),
    "name of the host": (lambda x: x + len(socket.gethostname()), SYSTEM),
    "temporary file": (lambda x: x + len(tempfile.gettempdir()), SYSTEM),
    "node of the network": (lambda x: x + uuid.getnode() % 7, SYSTEM),
    "uuid of the time": (lambda x: x + uuid.uuid1().int % 7, SYSTEM),
    "number of its thread": (lambda x: x + threading.get_ident() % 7, "it asks in which thread it runs"),
    "weak reference": (lambda x: x * 2 if WEAK() is None else x * 3, ALIVE),
    "weak reference of an object": (lambda x: x * 2 if HOLDER.weak() is None else x * 3, ALIVE),  # type: ignore
    "weak proxy": (lambda x: x + PROXY.write("x"), ALIVE),
    "weak proxy of what is gone": (lambda x: x + GONE.write("x"), ALIVE),
    "weak set": (lambda x: x + len(SET), ALIVE),
    "weak references counted": (lambda x: x + weakref.getweakrefcount(HELD), ALIVE),
    "thread": (in_a_thread, "a tensor that was made where no trace sees it"),
    "error of a number": (lambda x: caught(lambda: x * x.tolist()[0][0], x * 4), OTHER),
    "error of a loop": (lambda x: caught(lambda: rows_added(x), x * 4), OTHER),
    "error of a captured tensor": (lambda x: caught(lambda: x + LARGE.sum(), x * 4), OTHER),
}


@pytest.mark.parametrize("name", [*OF_TENSORS, *OF_ALL_ELSE])
def test_refused(name: str) -> None:
    fn, message = {**OF_TENSORS, **OF_ALL_ELSE}[name]
    before = torch.is_grad_enabled(), torch.get_default_dtype()
    with pytest.raises(TraceError) as caught:
        generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
    assert message in str(caught.value) and f"({__file__}:" in str(caught.value), str(caught.value)
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == before
    os.environ.pop("TK_OF_A_TEST", None)


OF_NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "class": lambda x, n: x * 2 if isinstance(n, int | float) else x * 3,
    "type": lambda x, n: x * 2 if type(n) in (int, float) else x * 3,
    "symbol": lambda x, n: x * 2 if isinstance(n, torch.SymInt | torch.SymFloat) else x * 3,
    "text": lambda x, n: x + len(f"{n}"),
    "attribute": lambda x, n: x * 2 if hasattr(n, "node") else x * 3,
    "error": lambda x, n: caught(lambda: x * 2 if n > 4 else x * 3, x * 4),
}


@pytest.mark.parametrize("kind", ("int", "float"))
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_what_a_number_is_asked(name: str, kind: str) -> None:
    fn = OF_NUMBERS[name]
    with pytest.raises(TraceError, match=OTHER):
        generate(fn, op(x="fp32[M, N]", n=kind)(fn).signature, "fn")


def test_what_is_written_is_held_against_the_function_too() -> None:
    def fn(x, n):
        x.mul_(2 if isinstance(n, int) else 3)

    with pytest.raises(TraceError, match=OTHER):
        generate(fn, op(x="fp32[M, N]", n="int")(fn).signature, "fn")


SCALE, TABLE = 2.0, np.array([1.0, 2.0])


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by if self.training else x


@dataclass(frozen=True)
class Config:
    name: str
    n: int


def asserted(x: Tensor) -> Tensor:
    assert x.dim() == 2, "two dimensions"
    return x + 1


def counted(n: int) -> int:
    return hash((n, 3, (n, -1))) % 7


def with_names_of_builtins(x: Tensor) -> Tensor:
    id, hash = 2.0, 3.0
    time = max(id, hash)

    def inner() -> float:
        return max(time, id)

    return x * max(id, hash) + inner()


def that_may_log(x: Tensor) -> Tensor:
    """What is never called is not refused."""
    if x.dim() == 7:
        LOGGER.warning(f"{x} {time.time()} {now()} {hash(NAME)}")
    return x + 1


CONFIG = Config("a", 2)
BY_CONFIG = {CONFIG: 2.0}
MODULE = Scaled()
CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "a global, an array, a module": lambda x: MODULE(x) * SCALE + float(TABLE[1]),
    "sizes and dtypes": lambda x: x * x.shape[-1] if x.dtype == torch.float32 and x.dim() == 2 else x,
    "a device for what it makes": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "a gradient mode of its own": lambda x: x + torch.no_grad()(torch.sin)(x),
    "whether it is compiled": lambda x: x * 2 if torch.compiler.is_compiling() else x * 3,
    "a seed of the call": lambda x: x + torch.rand_like(x),
    "hash of numbers": lambda x: x + hash(3) % 7 + hash((1, 2.5, True)) % 7 + hash(CONFIG.n) % 7 + counted(4),
    "hash of a key": lambda x: x * BY_CONFIG[Config("a", 2)],
    "hash of a key of its own": lambda x: x * {CONFIG: 3.0}[CONFIG],
    "text of plain values": lambda x: x + len(repr(NAME) + repr((1, x.dtype, None)) + repr(CONFIG)),
    "assertion": asserted,
    "its own names": with_names_of_builtins,
    "what is not called": that_may_log,
    "largest integer": lambda x: x.clamp(max=min(sys.maxsize, 9)),
    "a text in memory": lambda x: x + io.StringIO("text").read().count("t"),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_the_same_in_every_call_may_be_read(name: str) -> None:
    fn = CONSTANT[name]
    generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")


def test_the_profiler_stays_the_callers() -> None:
    def profile(*_: Any) -> None:
        pass

    sys.setprofile(profile)
    try:
        fn = CONSTANT["sizes and dtypes"]
        generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_what_a_collection_of_garbage_calls_is_not_the_functions_doing() -> None:
    """hypothesis, for one, takes the time of every collection."""

    @op(x="fp32[N]")
    def fn(x):
        cycles = [[] for _ in range(9)]
        for one in cycles:
            one.append(one)
        return x + len(cycles)

    def callback(phase: str, info: Any) -> None:
        time.perf_counter()

    thresholds = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1, 1, 1)
    try:
        assert generate(fn.fn, fn.signature, "fn").graphs
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)


def test_what_a_weak_reference_calls_is_not_the_functions_doing() -> None:
    """A weak dictionary takes out what is gone, wherever the function happens to be."""
    kept: weakref.WeakKeyDictionary[Standing, int] = weakref.WeakKeyDictionary()
    found: list[Standing] = []

    def goes(x: Tensor) -> Tensor:
        found.clear()  # the last that holds it
        return x + 1

    found.append(one := Standing())
    kept[one] = 1
    del one
    with pytest.raises(TraceError, match="it changes found, which is not its own"):
        generate(goes, op(x="fp32[M, N]")(goes).signature, "goes")
    assert not kept


def test_code_that_is_made_of_a_text_is_its_callers() -> None:
    made: dict[str, Any] = {}
    exec("import time\ndef asks():\n    return time.time()\ndef fn(x):\n    return x + time.time()", made)

    def fn(x: Tensor) -> Tensor:
        return x + made["asks"]()

    for each in (fn, made["fn"]):
        with pytest.raises(TraceError, match="a side effect: it asks for the time"):
            generate(each, op(x="fp32[M, N]")(each).signature, "fn")


def test_the_run_on_the_cpu_warns_of_nothing() -> None:
    """Torch warns of a variance of one element, which no size of the trace has."""

    def fn(x):
        return x.var(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(fn, op(x="fp32[M, 1]")(fn).signature, "fn")


def test_another_thread_keeps_what_it_prints_and_logs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls are not the function's, and nothing is put in the place of what it calls."""
    asked, answered = threading.Lock(), threading.Lock()
    asked.acquire()
    answered.acquire()
    originals = print, open, time.time, warnings.warn, logging.Logger.warning, sys.stdout
    found = []
    is_done: list[int] = []

    def other() -> None:
        while asked.acquire(timeout=60) and not is_done:
            print("of another thread")
            LOGGER.warning("of another thread")
            time.time()
            found.append((print, open, time.time, warnings.warn, logging.Logger.warning, sys.stdout))
            answered.release()

    def fn(x: Tensor) -> Tensor:
        asked.release()
        answered.acquire()
        return x + 1

    thread = threading.Thread(target=other)
    thread.start()
    try:
        generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
    finally:
        is_done.append(1)
        asked.release()
        thread.join()
    assert len(found) >= 2
    assert capsys.readouterr().out == len(found) * "of another thread\n"
    assert [r.getMessage() for r in caplog.records if r.name == __name__] == len(found) * ["of another thread"]
    assert all(each == originals for each in found)


def test_what_a_print_says_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fn, _ = OF_ALL_ELSE["print"]
    with pytest.raises(TraceError):
        generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
    assert capsys.readouterr().out == "x\n"


def test_an_import_is_not_the_functions_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module asks for whatever it likes once, when it is first imported."""
    (tmp_path / "imported_by_a_function.py").write_text(
        "import os, time\nSCALE = 2.0 + 0 * (os.getpid() + time.time())"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def fn(x: Tensor) -> Tensor:
        from imported_by_a_function import SCALE  # type: ignore[import-not-found]

        return x * SCALE

    generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
    sys.modules.pop("imported_by_a_function")


def test_a_function_that_is_traced_in_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces_when_it_is_imported.py").write_text(
        "import time\nfrom tk.codegen.family import generate\nfrom tk.generated import op\n"
        "def fn(x):\n    return x + time.time()\n"
        "generate(fn, op(x='fp32[M, N]')(fn).signature, 'fn')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TraceError, match="py:5\\): a side effect: it asks for the time"):
        import traces_when_it_is_imported  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize("says", ("calls += 1", "time.time()"))
def test_an_installed_package_is_its_functions_own(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "a_package_of_the_users"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text(
        f"import time\ncalls = 0\ndef called(x):\n    global calls\n    {says}\n    return x\n"
    )
    (package / "ops.py").write_text("from .helpers import called\ndef fn(x):\n    return called(x) + 1\n")
    monkeypatch.syspath_prepend(str(package.parent))
    from a_package_of_the_users.ops import fn  # type: ignore[import-not-found]

    try:
        with pytest.raises(TraceError, match=r"a side effect: it (changes calls|asks for the time)"):
            generate(fn, op(x="fp32[M, N]")(fn).signature, "fn")
    finally:
        for name in [name for name in sys.modules if name.startswith("a_package_of_the_users")]:
            del sys.modules[name]
