"""Arguments of the wrong kind: of every public function each that is a bool, an int or a float is given something else.

What is taken for True because it is not empty, or for a number because it can be compared, is computed with in silence.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import tk
from tk.cli import _calls
from tk.flex import mods

from . import settings

ROWS, TABLE = torch.ones(2), torch.ones(2, 5)
MODS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (mods.sliding_window, (4,)), (mods.dilated_window, (4, 2)), (mods.prefix_lm, (4,)), (mods.natten_2d, (4, 4, 3)),
    (mods.alibi, (2,)), (mods.relative_bias, (TABLE, 2)), (mods.soft_cap, (2.0,)),
]  # fmt: skip
LAYERS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(tk.nn.Int4Linear, (64, 32))]

# By the kinds that a parameter is annotated with: what it is given.
WRONG: dict[frozenset[str], tuple[Any, ...]] = {
    frozenset({"bool"}): ("yes", 1, [False], torch.float32),
    frozenset({"int"}): ("3", 1.5, [3], torch.float32),
    frozenset({"float"}): ("0.5", [0.5], torch.float32),
}


def made() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    for call in (*_calls.calls(), *settings.calls("cpu")):
        yield f"tk.{call.name}", call.function, call.args, call.kwargs
    for function, args in (*MODS, *LAYERS):
        yield function.__qualname__, function, args, {}


def cases() -> Iterator[Any]:
    seen = set()
    for label, function, args, kwargs in made():
        signature = inspect.signature(function)
        for name, parameter in signature.parameters.items():
            kinds = frozenset(str(parameter.annotation).replace("Tensor", "None").split(" | ")) - {"None"}
            if (label, name) in seen or kinds not in WRONG or name.startswith("_"):
                continue
            seen.add((label, name))
            given = signature.bind(*args, **kwargs).arguments
            for value in WRONG[kinds]:
                yield pytest.param(function, {**given, name: value}, name, id=f"{label}({name}={value!r})")


def numbers_given() -> Iterator[Any]:
    """Every parameter that is a float, with what it is given, or its default."""
    seen = set()
    for label, function, args, kwargs in made():
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if type(value) is float and (label, name) not in seen:
                seen.add((label, name))
                yield pytest.param(function, bound.arguments, name, value, id=f"{label}({name})")


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int64])
@pytest.mark.parametrize(("function", "given", "name", "value"), list(numbers_given()))
def test_a_number_of_numpy_is_the_number(
    function: Callable[..., Any], given: dict[str, Any], name: str, value: float, kind: Any
) -> None:
    """As torch takes it."""
    if kind is np.int64 and not value.is_integer():
        value = 1.0
    found = []
    for number in (kind(value), float(kind(value))):
        torch.manual_seed(0)
        own = copy.deepcopy({**given, name: number})
        result = function(**own)
        tensors = [x for x in tree_flatten((result, own))[0] if isinstance(x, torch.Tensor)]
        found.append(tensors if not callable(result) else [result(torch.ones(2), *[torch.ones(2)] * 4)])
    assert found[0] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_numbers_of_numpy_in_a_tuple_and_in_a_tensors_place() -> None:
    row, betas = torch.arange(4.0), (np.float32(0.5), np.float16(0.25))
    assert tk.bucketize(np.float32(1.5), row) == 2 and tk.searchsorted(row, np.int64(3)) == 3
    states = [[torch.ones(3)] for _ in range(2)]
    for x, given in zip(states, (betas, (0.5, 0.25)), strict=True):
        tk.adamw_(x, [torch.ones(3)], [torch.ones(3)], [torch.ones(3)], [torch.tensor(1.0)], lr=0.1, betas=given)
    assert torch.equal(states[0][0], states[1][0])
    with pytest.raises(TypeError, match=r"betas must be a number, is '0.5'"):
        tk.adamw_([], [], [], [], [], lr=0.1, betas=("0.5", 0.25))


@pytest.mark.parametrize(("function", "given", "name"), list(cases()))
def test_an_argument_of_another_kind_is_refused_by_name(
    function: Callable[..., Any], given: dict[str, Any], name: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"(?<!\w){name}(?!\w)"):
        function(**given)


def test_the_cases_reach_every_kind() -> None:
    names = {case.values[2] for case in cases()}
    assert {"is_causal", "keepdim", "only_faster", "enabled", "size", "cap", "eps", "k", "scale", "groups"} <= names


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tk.config.override("mmm", 0).__enter__(), "op is 'mmm', must be an op of a loaded pack; did you mean"),
        (lambda: tk.config.override("linear", 0).__enter__(), "op is 'linear', .*; tk.linear runs the kernels of 'mm'"),
        (lambda: tk.config.override("flex_0", None).__enter__(), "op is 'flex_0', must be an op of a loaded pack"),
        (lambda: mods.sliding_window(-1), "size is -1, must be more than 0"),
        (lambda: mods.prefix_lm(-1), "length is -1, must not be negative"),
        (lambda: mods.relative_bias(TABLE, -2), "max_distance is -2, must not be negative"),
        (lambda: mods.soft_cap(float("inf")), "cap is inf, must be more than 0, and finite"),
        (lambda: mods.natten_2d(4, 4, 5), "kernel is 5, must fit into 4 x 4"),
        (lambda: tk.nn.Int4Linear(64, 32, group_size=48), "group_size is 48, must be"),
    ],
)
def test_a_value_that_nothing_has(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mods.sliding_window(True), "size must be an int, is True"),
        (lambda: mods.soft_cap(True), "cap must be a number, is True"),
        (lambda: mods.learned_bias(TABLE.to(torch.complex64)), "table is torch.complex64, must be floating-point"),
        (lambda: mods.prefix_lm(ROWS.bool()), "length is torch.bool, must be of integers"),
        (lambda: tk.quantize_fp8(ROWS.long()), "x is torch.int64, must be floating-point"),
        (lambda: tk.quantize_fp8(ROWS.bool(), "row"), "x is torch.bool, must be floating-point"),
        (lambda: tk.adamw_([ROWS], [ROWS], [ROWS], [ROWS], [ROWS[0]], lr=0.1, betas=0.9), "betas must be a tuple"),
        (lambda: tk.b2b.register(torch.tanh, dtypes=torch.half), "dtypes must be a list or a tuple"),
    ],
)
def test_a_kind_that_nothing_takes(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("64by64", "'64by64' is no argument: write the shape of a tensor, as 512x4096"),
        ("64x", "'64x' is no argument: write the shape of a tensor, as 512x4096"),
        ("sofmax", "there is no function 'sofmax'; did you mean softmax"),
    ],
)
def test_the_command_line_says_what_an_argument_is(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tk import cli

    assert cli.main(["bench", "linear", text, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err
