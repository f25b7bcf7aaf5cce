"""tk tune without a GPU: what is kept, how it is written, and how it comes back."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tk import _cache, capi, errors, timing
from tk.config import STATIC_WEIGHTS
from tk.tune import command, files, measure, pins, timings
from tk.tune.measure import Measured, Result, Task, cover


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> capi.Problem:
    a, b = capi.Matrix(dtype, (m, k), (k, 1)), capi.Matrix(dtype, (k, n), (1, k))
    row = capi.Matrix(dtype, (m, n), (0, 1)) if bias else None
    return capi.Problem("mm", (a, b, row, capi.Matrix(dtype, (m, n), (n, 1))), (0, 0), (1.0, 1.0))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[tuple[capi.Problem, int]]:
    """An engine whose packs hold the configs x (7) and y (8), y for bf16 alone; the pins it was given."""

    def candidates(problem: capi.Problem) -> list[capi.Candidate]:
        reason = None if problem.tensors[0].dtype == torch.bfloat16 else "bf16"
        return [capi.Candidate(0, 7, 10, "x", "k", None), capi.Candidate(1, 8, 20, "y", "k", reason)]

    given: list[tuple[capi.Problem, int]] = []
    monkeypatch.setattr(capi, "candidates", candidates)
    monkeypatch.setattr(capi, "pin", lambda problem, config: given.append((problem, config)))
    return given


# --- What is kept ---


def test_one_config_that_is_nearly_the_best_everywhere_is_enough() -> None:
    times = {1: {"p": 1.0, "q": 1.01}, 2: {"r": 2.0, "q": 2.0}, 3: {"p": 3.1, "q": 3.0}}
    assert cover(times, 1.02) == {1: "q", 2: "q", 3: "q"}


def test_each_problem_stays_within_the_slowdown_and_gets_the_fastest_kept() -> None:
    times = {1: {"p": 1.0, "q": 1.5}, 2: {"p": 2.0, "q": 1.0}, 3: {"p": 1.0, "q": 1.01}, 4: {}}
    assert cover(times, 1.02) == {1: "p", 2: "q", 3: "p"}
    assert cover(times, 2.0) == {1: "p", 2: "p", 3: "p"}


# --- Files ---


def test_newer_entries_replace_those_of_the_same_problem() -> None:
    old = [{"dims": [1, 2], "config": "x", "us": 5.0}, {"dims": [3, 4], "config": "x", "us": 1.0}]
    new = [{"dims": [1, 2], "config": "y", "us": 4.0}]
    assert files.merge(old, new) == [new[0], old[1]]


def test_a_table_is_one_line_for_each_entry(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    value = {"gpu": "G", "pins": [{"dims": [1]}, {"dims": [2]}], "empty": []}
    _cache.write_json(path, value)
    assert json.loads(path.read_text()) == value
    assert '  {"dims": [2]}\n' in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]  # nothing temporary is left


def test_pins_come_back_as_they_went(tmp_path: Path, engine: list) -> None:
    path = tmp_path / "tuned.json"
    first, second = product(16, 256, 512), replace(product(4, 256, 512, bias=True), mode=STATIC_WEIGHTS)
    pins.write(path, [pins.entry_of(first, "x", 3.0)], {"gpu": "G"})
    pins.write(path, [pins.entry_of(second, "y", 2.0)], {"gpu": "G"})
    assert pins.pin_all(path, device=1) == 2
    found = {(p.tensors[0].sizes[0], p.tensors[2] is not None, p.mode, p.device): config for p, config in engine}
    assert found == {(16, False, 0, 1): 7, (4, True, STATIC_WEIGHTS, 1): 8}
    pinned = next(p for p, config in engine if config == 7)
    assert (pinned.tensors, pinned.ints, pinned.floats) == (list(first.tensors), first.ints, first.floats)


def test_a_pin_whose_config_has_gone_is_left_out(tmp_path: Path, engine: list) -> None:
    path = tmp_path / "tuned.json"
    pins.write(path, [pins.entry_of(product(16, 256, 512), "of an older tk", 3.0)], {})
    assert pins.pin_all(path, device=0) == 0
    assert engine == []


def test_an_entry_that_cannot_be_pinned_costs_no_other(
    tmp_path: Path, engine: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op of a pack that is not loaded yet, and a config that its kernel no longer has for the problem."""
    path = tmp_path / "tuned.json"
    candidates, pin = capi.candidates, capi.pin

    def of_loaded(problem: capi.Problem) -> list[capi.Candidate]:
        if problem.op == "mine":
            raise errors.VariantNotFoundError('no pack has an op "mine"')
        return candidates(problem)

    def refuse(problem: capi.Problem, config: int) -> None:
        if config == 8:
            raise ValueError("config 8 cannot run")
        pin(problem, config)

    monkeypatch.setattr(capi, "candidates", of_loaded)
    monkeypatch.setattr(capi, "pin", refuse)
    first = product(16, 256, 512)
    entries = [pins.entry_of(replace(first, op="mine"), "x", 1.0), pins.entry_of(product(1, 2, 3), "y", 1.0)]
    pins.write(path, [*entries, pins.entry_of(first, "x", 1.0)], {})
    assert pins.pin_all(path, device=0) == 1
    assert [(p.op, config) for p, config in engine] == [("mm", 7)]


@pytest.mark.parametrize("dtype", capi.DTYPES, ids=str)
def test_every_dtype_can_be_written(dtype: torch.dtype, tmp_path: Path, engine: list) -> None:
    x = capi.Matrix(dtype, (4, 8), (8, 1))
    pins.write(tmp_path / "t.json", [pins.entry_of(capi.Problem("mm", (x, None, x), (3,), (0.5,)), "x", 1.0)], {})
    pins.pin_all(tmp_path / "t.json", device=0)
    assert [list(p.tensors) for p, _ in engine] == [[x, None, x]]


def test_no_file_no_pins(tmp_path: Path) -> None:
    assert pins.pin_all(tmp_path / "missing.json", device=0) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99, "pins": []}', '{"version": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json.*tk tune"):
        pins.pin_all(path, device=0)
    pins.write(path, [], {})  # and tuning again mends it
    assert pins.read(path) == []


@pytest.mark.parametrize("entry", [{}, {"op": "mm", "config": "x", "tensors": [["int3", [1, 1], [1, 1]]]}])
def test_an_entry_that_says_nothing_is_refused(tmp_path: Path, entry: dict, engine: list) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"version": pins.FILE_VERSION, "pins": [entry]}))
    with pytest.raises(ValueError, match="cannot be read"):
        pins.pin_all(path, device=0)


# --- Measuring ---


def test_every_config_is_timed_that_gives_the_right_result(engine: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x (7), y (8) and z (9), y is wrong and z raises."""
    three = [capi.Candidate(i, 7 + i, 10, name, "k", None) for i, name in enumerate("xyz")]
    monkeypatch.setattr(capi, "candidates", lambda _: [*three, capi.Candidate(3, 10, 1, "w", "k", "does not fit")])
    monkeypatch.setattr(measure, "_glance", lambda calls: float(len(calls)))
    monkeypatch.setattr(
        timing, "capture", lambda calls, at_least_us: timing.Capture(None, len(calls), 5.0 * len(calls))
    )  # type: ignore[arg-type]
    monkeypatch.setattr(measure, "_times", lambda captures: dict.fromkeys(captures, 5.0))

    def call(a: torch.Tensor, out: torch.Tensor, config: int) -> None:
        if config == 9:
            raise RuntimeError("out of memory")
        out.copy_(a * (1 if config == 7 else 2))

    sets = [(torch.ones(3), torch.empty(3)) for _ in range(2)]
    result = measure.time_configs(Result("a task", product(1, 1, 1)), sets, call, torch.ones(3))
    assert [(m.config, m.number, m.us) for m in result.measured] == [("x", 7, 5.0)]
    assert "wrong result" in result.failures["y"] and "out of memory" in result.failures["z"]


# --- Timings ---


def test_what_costs_the_same_is_pinned_too(engine: list) -> None:
    def kinds(config: str) -> list[tuple[torch.dtype, bool]]:
        return [(p.tensors[0].dtype, p.tensors[2] is not None) for p in timings.twins(product(16, 256, 512), config)]

    halves = [(torch.bfloat16, False), (torch.bfloat16, True)]
    assert kinds("x") == [*halves, (torch.float16, False), (torch.float16, True)]
    assert kinds("y") == halves  # fp16 does not have it
    assert kinds("z") == []


def test_the_key_of_a_bucket() -> None:
    assert timings.selector_values(product(16, 256, 512)) == {
        "dtype": 0, "order": 1, "epilogue": 0, "out": 0, "precision": 0
    }  # fmt: skip
    assert timings.selector_values(product(16, 256, 512, torch.float16, bias=True))["epilogue"] == 1


def test_timings_are_added_to(tmp_path: Path, engine: list) -> None:
    path = tmp_path / "mm_timings.json"
    task, other = Task(16, 256, 512, order="nt"), Task(16, 256, 512, order="nt", static_weights=True)

    def write(*measured: tuple[Task, float]) -> dict:
        results = [Result(t, product(16, 256, 512), [Measured("x", 7, "k", us, 4.0)]) for t, us in measured]
        timings.write(path, results, {"gpu": "G"})
        found = json.loads(path.read_text())
        assert found["gpu"] == "G"
        return {entry["static_weights"]: entry["configs"] for entry in found["timings"]}

    assert write((task, 3.0)) == {False: {"x": ["k", 3.0, 4.0]}}
    assert write((task, 2.0), (other, 1.5)) == {False: {"x": ["k", 2.0, 4.0]}, True: {"x": ["k", 1.5, 4.0]}}


# --- Arguments ---


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["tune", *argv])


def test_tasks_of_the_command() -> None:
    tasks = command.tasks_of(parsed("16x128x256", "8x128x256", "--dtype", "bf16,fp32", "--order", "nt"))
    assert [(str(t)) for t in tasks] == [
        "8x128x256 bf16 nt", "16x128x256 bf16 nt", "8x128x256 fp32 tf32 nt", "16x128x256 fp32 tf32 nt"
    ]  # fmt: skip


def test_random_sizes_depend_on_the_seed_alone() -> None:
    base = command.default_sizes(0, 0)
    assert command.default_sizes(5, 1) == command.default_sizes(5, 1) != command.default_sizes(5, 2)
    assert command.default_sizes(5, 1)[: len(base)] == base


@pytest.mark.parametrize("argv", [["--dtype", "int7"], ["--order", "n"], ["--slowdown", "0.9"]])
def test_wrong_arguments_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["16x128"], "'16x128' is neither MxNxK, a product, nor a generated op; there are .*softmax"),
        (["0x1x1"], "'0x1x1' is neither"),
        (["softmux"], "'softmux' is neither"),
        (["1x1x1", "--dtype", "fp64"], "products are of bf16, fp16, fp32, not fp64"),
        (["softmax", "1x1", "--order", "nt"], "--order: of matrix products alone"),
        (["bmm", "--order", "nt"], "--order: not of bmm, int4_mm, mm_plus_mm, scaled_mm"),
        (["bmm", "--dtype", "fp16"], "--dtype: .* in bf16, or float8, alone"),
        (["bmm", "16x16x16"], "'16x16x16' is no size of bmm, which is batchxmxnxk"),
        (["scaled_mm", "softmux"], "'softmux' is no size of scaled_mm, which is mxnxk"),
    ],
)
def test_wrong_requests_are_refused(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        command.run(parsed(*argv))
