"""Calls drawn for ``python -m benchmarks anywhere``: each is one that torch and tk take, with the strides that are
claimed; and the report's arithmetic."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import anywhere, calls, layouts, runner  # noqa: E402
from benchmarks.calls import Draw, Limits, Op  # noqa: E402
from benchmarks.layouts import Strided  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.runner import Options  # noqa: E402
from tk import functional, timing  # noqa: E402
from tk.generated import register  # noqa: E402
from tk.generated.declare import Declared  # noqa: E402
from tk.heuristics.described import Recording  # noqa: E402

SMALL = Limits(1, 2000)
TABLE = {op.function: op for op in calls.OPS}


@pytest.fixture(scope="module")
def users() -> dict[str, Op]:
    """examples/my_ops.py, whether a pack of it is loaded or not: only torch runs it here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(register, "find", lambda name: name)
        return {op.function: op for op in calls.users()}


# --- The table ---


def test_every_function_of_generated_ops_is_drawn_or_excluded_with_a_reason() -> None:
    assert {*TABLE, *calls.EXCLUDED} == set(functional.FUNCTIONS)
    assert not TABLE.keys() & calls.EXCLUDED.keys() and all(calls.EXCLUDED.values())


def test_every_function_of_the_users_file_is_drawn(users: dict[str, Op]) -> None:
    assert set(users) == {name for name, x in vars(calls.my_ops()).items() if isinstance(x, Declared)}
    assert {name for name, op in users.items() if op.has_grad} == {
        name for name, x in vars(calls.my_ops()).items() if isinstance(x, Declared) and x.grad
    }


def test_no_function_takes_out_which_would_have_to_be_drawn() -> None:
    for name, function in functional.FUNCTIONS.items():
        assert "out" not in inspect.signature(function).parameters, f"tk.{name} takes out=: draw its layouts"


def test_every_generated_op_is_met() -> None:
    """By what runs, backwards too: of the packs here, so that a new op has to be drawn."""
    met: set[str] = set()
    wanted = {op for op in register.names() if not op.startswith("flex_")} - {"embedding_backward"}  # CUDA's alone
    for seed in range(40):
        for draw in one_round(TABLE, seed, Limits(1, 200)):
            with torch.autograd.set_multithreading_enabled(False):
                recording = Recording(lambda op, *_, **__: met.add(op.name().split("::")[1]))
                with recording:
                    anywhere.prepared(TABLE[draw.op].ours(), draw, draw.make("cpu"))()
        if wanted <= met:
            return
    assert wanted <= met, sorted(wanted - met)


# --- Draws ---


def one_round(ops: dict[str, Op], seed: int, limits: Limits = SMALL) -> list[Draw]:
    """Every function, forward and backward."""
    ways = sum(1 + op.has_grad for op in ops.values())
    return [calls.drawn(seed, i, ops, limits) for i in range(ways)]


def test_a_round_has_every_way_once_and_a_seed_gives_the_same_again() -> None:
    first = one_round(TABLE, 5)
    assert first == one_round(TABLE, 5) != one_round(TABLE, 6)
    assert calls.drawn(5, 17, TABLE, SMALL) == first[17], "whatever was drawn before"
    names = [draw.name for draw in first]
    assert len(set(names)) == len(names)
    assert {draw.op for draw in first} == set(TABLE)


def test_a_draw_has_the_same_contents_every_time() -> None:
    draw = calls.drawn(5, 17, TABLE, SMALL)
    for a, b in zip(tree_leaves(draw.make("cpu")), tree_leaves(draw.make("cpu")), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(3))
def test_tensors_lie_as_is_claimed(seed: int) -> None:
    for draw in one_round(TABLE, seed, calls.LIMITS):
        for x in draw.tensors:
            made = x.make("meta")
            assert (made.shape, made.stride(), made.storage_offset()) == (x.shape, x.strides, x.offset)
            assert made.dtype == x.torch_dtype and made.requires_grad == x.requires_grad
            assert x.extent <= 1 << 29, f"{draw}: too much memory"


@pytest.mark.parametrize("seed", range(2))
def test_torch_takes_every_draw_of_full_size(seed: int, users: dict[str, Op]) -> None:
    table = TABLE | users
    for draw in one_round(table, seed, calls.LIMITS):
        args, kwargs, gradients = draw.make("meta")
        if table[draw.op].is_random and not draw.tensors:
            continue  # it makes its result on a device of its own
        results = table[draw.op].torchs(*args, **kwargs)
        if draw.is_backward:
            shapes = [(y.shape, y.dtype) for y in calls.differentiable(results)]
            assert shapes == [(g.shape, g.dtype) for g in gradients]
            assert calls.sources(args, kwargs)


@pytest.mark.parametrize("name", TABLE)
def test_tk_gives_torchs_results_for_what_is_drawn(name: str) -> None:
    ops = {name: TABLE[name]}
    for i in range(12):
        anywhere.check(TABLE[name], calls.drawn(11, i, ops, SMALL), "cpu")


def test_a_users_functions_run(users: dict[str, Op]) -> None:
    for seed in range(30):
        for draw in one_round(users, seed, Limits(1, 300)):
            args, kwargs, _ = draw.make("cpu")
            users[draw.op].torchs(*args, **kwargs)


def test_sizes_and_layouts_are_spread() -> None:
    draws = [calls.drawn(3, i, TABLE) for i in range(600)]
    assert {draw.layout for draw in draws} == set(layouts.LAYOUTS)
    assert {draw.dtype for draw in draws} > {"bfloat16", "float16", "float32", "float64", "int64"}
    tensors = [x for draw in draws for x in draw.tensors]
    assert {len(x.shape) for x in tensors} >= {1, 2, 3, 4, 5}
    largest = [max((math.prod(x.shape) for x in draw.tensors), default=1 << 12) for draw in draws]
    assert min(largest) < 1 << 14 and max(largest) > 1 << 25
    assert 0.1 < sum(n < 1 << 17 for n in largest) / len(largest) < 0.6


# --- Layouts ---


@pytest.mark.parametrize("seed", range(20))
def test_what_a_layout_means(seed: int) -> None:
    rng = Random(seed)
    shape = tuple(rng.randint(2, 9) for _ in range(rng.randint(2, 5)))

    def placed(layout: str) -> tuple[Strided, torch.Tensor]:
        strided = Strided(shape, *layouts.placed(rng, shape, layout))
        return strided, strided.make("cpu")

    assert placed("contiguous")[1].is_contiguous()
    x, made = placed("slice")
    assert made.stride(-1) == 1 and made.stride(-2) in (2 * shape[-1], 3 * shape[-1])
    x, made = placed("odd pitch")
    assert made.stride(-1) == 1 and made.stride(-2) % 2 == 1 and made.stride(-2) > shape[-1]
    x, made = placed("every other")
    assert made.stride(-1) == 2
    x, made = placed("expanded")
    assert made.stride().count(0) == 1 and x.bytes < math.prod(shape) * 4
    x, made = placed("offset")
    assert made.is_contiguous() and 0 < made.storage_offset() < 8
    for layout in ("transposed", "permuted"):
        x, made = placed(layout)
        order = sorted(range(len(shape)), key=lambda d: (-made.stride(d), d))
        assert x.extent == math.prod(shape) and made.permute(order).is_contiguous()


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 3), (1, 1)])
def test_few_dimensions_and_none_have_every_layout(layout: str, shape: tuple[int, ...]) -> None:
    strided = Strided(shape, *layouts.placed(Random(1), shape, layout))
    assert strided.make("cpu").shape == shape


@pytest.mark.parametrize("elements", [1, 2, 4096, 1 << 26])
def test_sizes_are_at_most_what_is_asked(elements: int) -> None:
    for seed in range(50):
        rng = Random(seed)
        shape = layouts.sizes(rng, rng.randint(1, 5), elements)
        assert 1 <= math.prod(shape) <= elements and min(shape) >= 1


# --- Checking ---


def wrong(function: Any) -> Op:
    class Wrong(Op):
        def ours(self) -> Any:
            return function

    return Wrong(**vars(TABLE["sort"]))


def test_a_wrong_choice_and_a_wrong_number_are_found() -> None:
    draw = calls.drawn(1, 0, {"sort": TABLE["sort"]}, Limits(100, 100))

    def other_order(x: torch.Tensor, dim: int, descending: bool) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=descending, stable=True)
        return values, indices.flip(dim)

    draw = replace(draw, args=(Strided((10, 10), (10, 1)), -1, False))
    with pytest.raises(anywhere.WrongResult, match="result 1: 100 of 100 elements differ"):
        anywhere.check(wrong(other_order), draw, "cpu")
    with pytest.raises(anywhere.WrongResult, match="result 0: mean error"):
        anywhere.check(wrong(lambda *args: (torch.sort(*args)[0] * 1.001, torch.sort(*args)[1])), draw, "cpu")
    with pytest.raises(anywhere.WrongResult, match=r"result 0 is torch.float64 \[10, 10\], torch's torch.float32"):
        anywhere.check(wrong(lambda *args: (torch.sort(*args)[0].double(), torch.sort(*args)[1])), draw, "cpu")
    with pytest.raises(anywhere.WrongResult, match="1 results, torch has 2"):
        anywhere.check(wrong(lambda x, *_: x), draw, "cpu")


def test_random_numbers_of_another_spread_are_found() -> None:
    x = torch.randn(1_000_000)
    anywhere._check_moments([torch.randn(1_000_000)], [x])
    for other in (x * 1.1, x + 0.1, torch.zeros_like(x)):
        with pytest.raises(anywhere.WrongResult):
            anywhere._check_moments([other], [x])


# --- A run ---


def test_a_run_writes_every_line_at_once_and_stops_at_a_broken_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(op: Op, draw: Draw) -> dict[str, Any]:
        if draw.index == 1:
            raise ValueError("this one only")
        if draw.index == 3:
            monkeypatch.setattr(anywhere, "settle", broken)
            raise RuntimeError("illegal memory access")
        return {"us": {"torch": 30.0, "tk": 20.0}, "host_us": {"torch": 5.0, "tk": 4.0}, "ratio": 1.5,
                "predicted_us": 22.0, "kernels": ["k 1x2"]}  # fmt: skip

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(anywhere, "settle", lambda: None)
    monkeypatch.setattr(anywhere, "measure", measure)
    found = Report("anywhere", {"gpu": "G"})
    anywhere.run(Options(tmp_path, draws=6, seed=7), found)
    head, *lines = [json.loads(text) for text in (tmp_path / "anywhere.jsonl").read_text().splitlines()]
    assert head["seed"] == 7 == found.environment["seed"]
    assert [line["index"] for line in lines] == [0, 1, 2, 3]
    assert "this one only" in lines[1]["error"] and "illegal" in lines[3]["error"]
    assert len(found.failures) == 2
    printed = capsys.readouterr().out
    assert str(calls.drawn(7, 3, calls.table())) in printed and "CUDA is unusable after this draw, seed 7" in printed


@pytest.mark.parametrize("name", ["softmax", "adamw_", "dropout", "rand"])
def test_what_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the graphs and the clock: a GPU that repeats every call once."""
    counts: dict[int, int] = {}

    def capture(turn: Sequence[Callable[[], Any]]) -> int:
        for call in [*turn, *turn]:
            call()
        counts[id(turn)] = len(turn)
        return id(turn)

    def host_times(variants: Mapping[str, Callable[[], Any]], **_: Any) -> dict[str, timing.Timing]:
        for call in variants.values():
            call()
        return dict.fromkeys(variants, timing.Timing(5.0, 5.0, 5.0))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "host_times", host_times)
    times = {"torch": timing.Timing(30.0, 29.0, 31.0), "tk": timing.Timing(20.0, 19.0, 21.0)}
    monkeypatch.setattr(timing, "device_times", lambda captures, **_: {n: times[n] for n in captures})
    ops = {name: TABLE[name]}
    for i in range(1 + TABLE[name].has_grad):
        found = anywhere.measure(TABLE[name], calls.drawn(3, i, ops, SMALL), "cpu")
        assert found["ratio"] == 1.5 and found["us"] == {"torch": 30.0, "tk": 20.0}
        assert found["host_us"] == {"torch": 5.0, "tk": 5.0}
        assert found["kernels"], "named, or why they are not: packs of a part of the variants"
    assert set(counts.values()) == {anywhere.MOST_ROTATED}


def test_one_draw_is_run_again_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    monkeypatch.setattr(
        anywhere, "attempt", lambda op, draw: met.append(draw.index) or anywhere.line_of(draw) | {"error": ""}
    )
    anywhere.run(Options(tmp_path, draws=30, seed=7, only="^#17 "), Report("anywhere", {}))
    assert met == [17]
    anywhere.run(Options(tmp_path, draws=30, seed=7, seconds=-1.0), Report("anywhere", {}))
    assert met == [17], "no time, no draw"


# --- The report ---


def line(index: int, op: str, layout: str, torchs: float, tks: float, predicted: float | None = 10.0) -> dict[str, Any]:
    return {"index": index, "op": op, "dtype": "float32", "layout": layout, "given": ["float32[8](1)"], "bytes": 32,
            "us": {"torch": torchs, "tk": tks}, "host_us": {"torch": 6.0, "tk": 3.0}, "ratio": torchs / tks,
            "predicted_us": predicted, "kernels": [f"{op} 1x2"]}  # fmt: skip


LINES = [
    line(0, "gelu", "contiguous", 40.0, 10.0),
    line(1, "gelu", "slice", 10.0, 10.0, 16.0),
    line(2, "sum", "slice", 20.0, 40.0, None),  # 0.5, where torch takes 20 µs
    line(3, "sum", "slice", 5.0, 10.0),  # 0.5, of little
    line(4, "sum", "contiguous", 7.0, 10.0),
]


def test_the_reports_arithmetic() -> None:
    found = anywhere.Summary(LINES)
    assert (found.calls, found.slow, found.bad) == (5, 3, 1)
    assert found.geomean == pytest.approx((4 * 1 * 0.5 * 0.5 * 0.7) ** 0.2)
    assert found.worst == found.worst_tenth == 0.5
    assert found.host == pytest.approx(2.0)
    assert found.predicted == pytest.approx(75.0), "one of four is off by more than half"
    twenty = [line(i, "gelu", "slice", 1.0 + i, 1.0) for i in range(20)]
    assert anywhere.Summary(twenty).worst_tenth == pytest.approx(math.sqrt(1 * 2))


def test_the_report_is_printed_again_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "anywhere.jsonl"
    failed = {key: value for key, value in line(5, "sort", "offset", 1.0, 1.0).items() if "us" not in key}
    lines = [{"seed": 7, "environment": {"gpu": "G"}}, *LINES, failed | {"error": "WrongResult: off"}]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert runner.main(["--report", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gpu G, seed 7\n5 calls timed, 1 failed.")
    assert "| slice | 3 | 0.63 | 0.50 | 0.50 | 2 | 1 | 2.00 | 50 % |" in text
    assert "| all | 5 | 0.93 |" in text
    assert text.index("| sum | 3 |") < text.index("| gelu | 2 |"), "the slowest first"
    assert "| 0.50 | 20.0 | 40.0 |  | #2 sum slice: float32[8](1) | sum 1x2 |" in text
    assert "| sum, slice | 2 | 0.50 |" in text and "| gelu 1x2 | 2 | 2.00 |" in text
    assert "- #5 sort offset: float32[8](1): WrongResult: off" in text


def test_what_goes_into_the_familys_results() -> None:
    found = Report("anywhere", {})
    anywhere.add_to(found, LINES)
    assert {name: len(group.rows) for name, group in found.groups.items()} == {"contiguous": 2, "slice": 3}
    assert {f.name: (f.value, f.met) for f in found.figures} == {"slow": (60.0, False), "bad": (1, False)}
    anywhere.add_to(Report("anywhere", {}), [])
