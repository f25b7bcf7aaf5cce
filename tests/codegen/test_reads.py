"""What no call brings: a function that reads it is refused, whatever way it asks. A trace would keep one answer."""

from __future__ import annotations

import datetime
import gc
import os
import random
import secrets
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
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


def writes_the_environment(x: Tensor) -> Tensor:
    os.environ["TK_OF_A_TEST"] = "1"
    return x + 1


def says_on_stderr(x: Tensor) -> Tensor:
    print("x", file=sys.stderr)
    return x + 1


LIES = "it asks how a tensor lies in memory"
AUTOGRAD = "it asks what autograd knows of a tensor"
DEVICE = "it asks which device a tensor is on"
TIME = "it asks for the time"
SYSTEM = "it asks the operating system"
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


MODULE = Scaled()
CONSTANT: dict[str, Callable[[Tensor], Tensor]] = {
    "a global, an array, a module": lambda x: MODULE(x) * SCALE + float(TABLE[1]),
    "sizes and dtypes": lambda x: x * x.shape[-1] if x.dtype == torch.float32 and x.dim() == 2 else x,
    "a device for what it makes": lambda x: x + torch.arange(x.shape[-1], device=x.device),
    "a gradient mode of its own": lambda x: x + torch.no_grad()(torch.sin)(x),
    "whether it is compiled": lambda x: x * 2 if torch.compiler.is_compiling() else x * 3,
    "a seed of the call": lambda x: x + torch.rand_like(x),
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


def test_the_run_on_the_cpu_warns_of_nothing() -> None:
    """Torch warns of a variance of one element, which no size of the trace has."""

    def fn(x):
        return x.var(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(fn, op(x="fp32[M, 1]")(fn).signature, "fn")
