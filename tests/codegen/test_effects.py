"""What a kernel would not do, and what it cannot know: refused with the line of the function that asks for it."""

from __future__ import annotations

import datetime
import io
import itertools
import logging
import random
import time
import types
import warnings
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tk.codegen.errors import SideEffect, TraceError
from tk.codegen.family import generate, generate_any
from tk.generated import op

logger = logging.getLogger(__name__)
log: list[Any] = []
calls = 0
WEIGHT = torch.ones(())
LARGE = torch.ones(4096)
notes = types.SimpleNamespace(last=None)
TABLE = {"scale": 2.0}


def appends(x):
    y = x + 1
    log.append(y.shape)
    return y


def counts(x):
    global calls
    calls += 1
    return x + calls


def notes_down(x):
    y = x * 2
    notes.last = y
    return y


def puts_into_a_dict(x):
    y = x * TABLE["scale"]
    TABLE["seen"] = 1.0
    return y


def prints(x):
    y = x + 1
    print(y)
    return y


def logs(x):
    y = x + 1
    logger.debug(y)
    return y


def asks_for_the_time(x):
    y = x + 1
    return y * time.time()


def asks_by_its_own_name(x):
    y = x + 1
    return y * perf_counter()


def asks_for_the_date(x):
    y = x + 1
    return y * datetime.datetime.now().second


def asks_for_a_day_imported_here(x):
    from datetime import date

    return x * date.today().day


def warns(x):
    y = x + 1
    warnings.warn("hello", stacklevel=2)
    return y


def opens_a_file(x):
    with open(__file__) as file:
        return x * file.fileno()


def draws_from_python(x):
    return x * random.random()


def draws_from_numpy(x):
    return x * float(np.random.rand())


def seeds(x):
    torch.manual_seed(20_261_122)
    return torch.rand_like(x)


def writes_a_tensor_of_its_own(x):
    y = x + 1
    WEIGHT.add_(1)
    return y


def writes_a_tensor_of_its_own_by_index(x):
    y = x + 1
    WEIGHT[...] = 2
    return y


def writes_a_tensor_of_its_own_by_out(x):
    y = x + 1
    torch.neg(WEIGHT, out=WEIGHT)
    return y


def reads_a_large_tensor_of_its_own(x):
    y = x + 1
    return y * LARGE.sum()


def assigns_data(x):
    y = x * 2
    x.data = y
    return y


def assigns_a_gradient(x):
    y = x * 2
    x.grad = y
    return y


def makes_a_number(x):
    y = x + 1
    return y * y.sum().item()


def loops_over_rows(x):
    y = x
    for row in y:
        y = y + row
    return y


def counts_rows(x):
    y = x
    for i in range(x.shape[0]):
        y = y + i
    return y


def branches(x):
    y = x + 1
    if y.sum() > 0:
        return y
    return x


def repeats(x, n):
    y = x
    while n > 0:
        y, n = y + 1, n - 1
    return y


def asserts(x):
    y = x + 1
    assert (y > 0).all()
    return y


def counts_elements(x):
    y = x + 1
    return y.nonzero()


def has_no_kernel(x):
    y = x + 1
    return y.cholesky_inverse()


def mixes_dtypes(x, i):
    y = x + 1
    return torch.where(i, y, x)


def multiplies_other_shapes(x, i):
    y = x + 1
    return y + i.reshape(-1)


# function -> (how many lines below its def, what is said)
CASES: dict[Callable[..., Any], tuple[int, str]] = {
    appends: (2, "it changes log, which is not its own"),
    counts: (2, "it changes calls, which is not its own"),
    notes_down: (2, "it changes notes, which is not its own"),
    puts_into_a_dict: (1, "it changes TABLE, which is not its own"),
    prints: (2, "it prints, which no kernel does"),
    logs: (2, "it logs, which no kernel does"),
    asks_for_the_time: (2, "it asks for the time, which would be that of the build"),
    asks_by_its_own_name: (2, "it asks for the time, which would be that of the build"),
    asks_for_the_date: (2, "it asks for the time, which would be that of the build"),
    asks_for_a_day_imported_here: (3, "it asks for the time, which would be that of the build"),
    warns: (2, "it warns, which no kernel does"),
    opens_a_file: (1, "it opens a file"),
    draws_from_python: (1, "it draws from Python's random"),
    draws_from_numpy: (0, "it draws from NumPy's random"),
    seeds: (0, "it draws from torch's generator, or seeds it"),
    writes_a_tensor_of_its_own: (2, "it changes WEIGHT, which is not its own"),
    writes_a_tensor_of_its_own_by_index: (2, "it changes WEIGHT, which is not its own"),
    writes_a_tensor_of_its_own_by_out: (2, "it changes WEIGHT, which is not its own"),
    reads_a_large_tensor_of_its_own: (2, "a tensor of 4096 elements that is not among the function's parameters"),
    assigns_data: (2, "it assigns .data of a tensor"),
    assigns_a_gradient: (2, "it assigns .grad of a tensor"),
    makes_a_number: (2, "a number made of a tensor's contents"),
    loops_over_rows: (2, "something that needs M as a number, such as a loop over a dimension"),
    counts_rows: (3, "something that needs M as a number, such as a loop over a dimension"),
    branches: (2, "control flow that depends on the contents of a tensor"),
    repeats: (2, "control flow that depends on the contents of a tensor or on a number"),
    asserts: (2, "control flow that depends on the contents of a tensor"),
    counts_elements: (2, "the size of a result depends on a tensor's contents"),
    has_no_kernel: (2, "aten.cholesky_inverse cannot be generated"),
    mixes_dtypes: (2, "bool"),
    multiplies_other_shapes: (2, "The size of tensor a (N) must match the size of tensor b"),
}
TEXTS = {
    repeats: {"n": "int"},
    mixes_dtypes: {"i": "fp32[M, N]"},
    multiplies_other_shapes: {"i": "fp32[M, N]"},
    has_no_kernel: {"x": "fp32[M, M]"},
}


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_refused_with_its_line(fn: Callable[..., Any]) -> None:
    below, message = CASES[fn]
    declared = op(**{"x": "fp32[M, N]", **TEXTS.get(fn, {})})(fn)
    with pytest.raises(TraceError) as caught:
        generate(fn, declared.signature, fn.__name__)
    said = str(caught.value)
    assert message in said, said
    line = fn.__code__.co_firstlineno + below
    assert f"{fn.__name__} ({__file__}:{line})" in said or f"line {line}: " in said, said


NESTED = {"a": {"n": 0}, "list": [[0]], "tuple": ([],)}
HOLDER = types.SimpleNamespace(inner=types.SimpleNamespace(n=0))
QUEUE: deque[int] = deque()
VARIABLE: ContextVar[float] = ContextVar("VARIABLE", default=1.0)
NUMBERS = np.zeros(3)
TEXT = io.StringIO("text" * 9)
module = types.ModuleType("a_module_of_the_users")
module.n = 0  # type: ignore[attr-defined]


class Remembering:
    seen = 0
    names: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.calls = 0
        self.last: dict[str, Any] = {}

    def doubled(self, x):
        self.last["x"] = 1
        return x * 2

    @property
    def scale(self) -> float:
        self.calls += 1
        return 2.0


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


remembering, counting = Remembering(), Counting()


class Slotted:
    __slots__ = ("__weakref__", "n")

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


slotted = Slotted()


def appended(x):
    log.append(1)
    return x * 2


def counted(x):
    global calls
    calls += 1
    return x * 2


def with_a_list(x, found=[]):  # noqa: B006
    found.append(1)
    return x * 2


def set_of_a_module(x):
    module.n += 1
    return x * 2


def set_of_a_class(x):
    Remembering.seen += 1
    return x * 2


def set_of_an_object_in_another(x):
    HOLDER.inner.n += 1
    return x * 2


# (function, the variable that is said to change)
FURTHER: dict[str, tuple[Callable[..., Any], str]] = {
    "a dict in a dict": (lambda x: (NESTED["a"].update(n=1), x * 2)[1], "NESTED"),
    "a list in a list": (lambda x: (NESTED["list"][0].append(1), x * 2)[1], "NESTED"),
    "a list in a tuple": (lambda x: (NESTED["tuple"][0].append(1), x * 2)[1], "NESTED"),
    "an object in another": (set_of_an_object_in_another, "HOLDER"),
    "a deque": (lambda x: (QUEUE.append(1), x * 2)[1], "QUEUE"),
    "a context variable": (lambda x: (VARIABLE.set(2.0), x * 2)[1], "VARIABLE"),
    "an array": (lambda x: (NUMBERS.__setitem__(0, 7), x * 2)[1], "NUMBERS"),
    "a text in memory": (lambda x: (TEXT.write("x"), x * 2)[1], "TEXT"),
    "an object of slots": (lambda x: x + next(slotted), "slotted"),
    "a place in a text in memory": (lambda x: x + len(TEXT.readline()), "TEXT"),
    "a module": (set_of_a_module, "module"),
    "a class": (set_of_a_class, "Remembering"),
    "a list of a class": (lambda x: (Remembering.names.append("x"), x * 2)[1], "Remembering"),
    "a method's object": (lambda x: remembering.doubled(x), "remembering"),
    "a property's object": (lambda x: x * remembering.scale, "remembering"),
    "a module of torch's": (lambda x: counting(x), "counting"),
    "a helper's list": (lambda x: appended(x), "log"),
    "a helper's global": (lambda x: counted(x), "calls"),
    "a helper's default": (lambda x: with_a_list(x), "with_a_list"),
    "a function in it": (lambda x: (lambda y: (QUEUE.append(1), y * 2)[1])(x), "QUEUE"),
}


@pytest.mark.parametrize("name", FURTHER)
def test_a_change_that_lies_deeper(name: str) -> None:
    fn, changed = FURTHER[name]
    with pytest.raises(SideEffect, match=f"it changes {changed}, which is not its own"):
        generate(fn, op(x="fp32[M]")(fn).signature, "fn")


def iterators() -> dict[str, Any]:
    """New ones, of which the function may take the next."""
    file = open(__file__)  # noqa: SIM115
    next(file)  # from then on it does not tell where it is
    cycled = itertools.cycle([1, 2])
    for _ in range(3):
        next(cycled)  # it has no iterator of its own any more
    return {
        "list": iter([1, 2]),
        "tuple": iter((1, 2)),
        "range": iter(range(3)),
        "dict": iter({1: 2, 3: 4}),
        "set": iter({1, 2}),
        "text": iter("12"),
        "reversed": reversed([1, 2]),
        "generator": (x for x in (1, 1, 1)),
        "generator of a list": with_next(iter([1, 1, 1])),
        "enumerate": enumerate([1, 2]),
        "zip": zip([1, 2], [3, 4], strict=True),
        "map": map(int, [1, 2]),
        "filter": filter(None, [1, 2]),
        "count": itertools.count(),
        "count by fractions": itertools.count(0.5, 0.5),
        "cycle": cycled,
        "chain": itertools.chain([1, 2], [3]),
        "islice": itertools.islice(itertools.count(), 9),
        "repeat": itertools.repeat(1, 3),
        "tee": itertools.tee([1, 2])[0],
        "calls": iter(iter([1, 2]).__next__, 9),
        "groups": itertools.groupby([1, 2]),
        "file": file,
        "file of bytes": open(__file__, "rb"),
    }


def with_next(xs):
    for x in xs:
        yield x * 1


def taken(way: str, held: Any) -> None:
    if way == "next":
        next(held)
    elif way == "loop":
        for _ in held:
            break
    elif way == "zip":
        list(zip(range(1), held, strict=False))


def of_an_iterator(held: Any, way: str) -> Callable[..., Any]:
    def fn(x):
        taken(way, held)
        return x + 1

    return fn


@pytest.mark.parametrize("way", ("next", "loop", "zip"))
@pytest.mark.parametrize("name", iterators())
def test_an_iterator_that_is_not_its_own(name: str, way: str) -> None:
    held = iterators()[name]
    fn = of_an_iterator(held, way)
    with pytest.raises(
        SideEffect, match=rf":{fn.__code__.co_firstlineno + 1}\): a side effect: it moves held on, which"
    ):
        generate(fn, op(x="fp32[M]")(fn).signature, "fn")


APPEND, NEXT = log.append, itertools.count().__next__


@pytest.mark.parametrize(("fn", "said"), [
    (lambda x: (APPEND(1), x + 1)[1], "it changes APPEND, which"), (lambda x: x + NEXT(), "it moves NEXT on, which")
])  # fmt: skip
def test_by_a_method_that_is_bound(fn: Callable[..., Any], said: str) -> None:
    with pytest.raises(SideEffect, match=said):
        generate(fn, op(x="fp32[M]")(fn).signature, "fn")


INSIDE = {"scales": (iter([2.0, 3.0, 4.0]),)}


def test_an_iterator_that_lies_deeper() -> None:
    def fn(x):
        return x * next(INSIDE["scales"][0])

    with pytest.raises(SideEffect, match="it moves INSIDE on, which is not its own"):
        generate(fn, op(x="fp32[M]")(fn).signature, "fn")


def test_an_iterator_of_its_own() -> None:
    """What it makes itself begins anew in every call, and what it only holds stays where it is."""
    held = iterators()

    def fn(x):
        scales, rest = iter((2.0, 3.0)), itertools.count(1)
        for scale, n in zip((s for s in scales), rest, strict=False):
            x = x * scale + n
        return x + len(held)

    generate(fn, op(x="fp32[M]")(fn).signature, "fn")


def closure() -> Callable[..., Any]:
    n = 0

    def fn(x):
        nonlocal n
        n += 1
        return x + n

    return fn


def test_a_variable_of_an_enclosing_function() -> None:
    fn = closure()
    with pytest.raises(TraceError, match=rf":{fn.__code__.co_firstlineno + 2}\): a side effect: it changes n, which"):
        generate(fn, op(x="fp32[M]")(fn).signature, "fn")


def test_a_function_of_lists() -> None:
    def fn(xs):
        for x in xs:
            log.append(1)
            x.mul_(2)

    with pytest.raises(TraceError, match="it changes log, which is not its own"):
        generate_any(fn, op(xs="fp32[...]*")(fn).signature, "fn")


def test_what_is_a_functions_own_may_change() -> None:
    """Lists, names and numbers of its own, its arguments, and what it only reads."""

    def fn(x, y):
        found = []
        for scale in (TABLE["scale"], len(log) + 1.0):
            found.append(x * scale)
        y.copy_(found[0])
        return found[-1] + torch.rand_like(x)

    generate(fn, op(x="fp32[M]", y="fp32[M]")(fn).signature, "fn")


def test_globals_stay_as_the_function_left_them() -> None:
    """Tracing puts its own associative_scan into them, and takes only that back."""
    before = calls
    with pytest.raises(TraceError):
        generate(counts, op(x="fp32[M]")(counts).signature, "counts")
    assert calls > before


seen: dict[str, float] = {}


def is_cut_and_remembers(x, y):
    """Its sizes have to be tried in another order, in which it would find what it has left behind."""
    seen["width"] = 1.0
    return x + y.gather(0, torch.zeros(x.shape, dtype=torch.int64))


@pytest.mark.parametrize("texts", [{"x": "fp32[M, N]", "y": "fp32[K, L]"}, {"x": "fp32[K, L]", "y": "fp32[M, N]"}])
def test_an_effect_is_found_though_the_function_is_traced_again(texts: dict[str, str]) -> None:
    seen.clear()
    declared = op(**texts)(is_cut_and_remembers)
    with pytest.raises(SideEffect, match="it changes seen, which is not its own"):
        generate(is_cut_and_remembers, declared.signature, "is_cut_and_remembers")
