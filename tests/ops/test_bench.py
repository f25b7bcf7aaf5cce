"""``tk bench OP`` and the benchmarks of generated ops, all but the timing itself."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tk.tune.ops as tune_ops
from tk import capi, cli, timing
from tk.cli import bench_ops
from tk.generated import inputs, register
from tk.generated.problem import Call
from tk.tune.operations import count
from tk.tune.ops import ConfigTime, OpTimes

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for benchmarks/

from benchmarks import generated, ops, parallel  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.runner import Options  # noqa: E402

# The package's, less those of lists: no test has loaded a pack yet.
NAMES = [name for name in register.names() if not register.find(name).takes_lists]  # type: ignore[union-attr]


def timed(name: str = "softmax", shape: tuple[int, ...] = (1000, 1000), us: float = 2.0) -> OpTimes:
    example = inputs.of_shape(register.find(name), shape, "bf16")
    configs = [ConfigTime("fast", "k", 1.5, 1.0), ConfigTime("1x1024_w4", "k", us, 3.0)]
    return OpTimes(example, 4_000_000, 5_000_000, "1x1024_w4", us, 5.0, 0.5, configs)


# --- The command ---


def test_a_row_says_what_was_moved_and_how_fast() -> None:
    cells = bench_ops.cells(timed(), copy=4000.0)
    assert cells == (
        "softmax",
        "1000x1000",
        "bf16",
        "1x1024_w4",
        "0.0020",
        "0.004",
        "2000",
        "50 %",
        "2.5",
        "0.0050",
        2.5,
        "ok",
    )


def test_the_best_configs_are_listed() -> None:
    said = bench_ops.report([timed()], 4000.0)
    assert "chosen 1x1024_w4; fast 1.5 us (predicted 1.0)  1x1024_w4 2.0 us" in said


def widest(name: str) -> inputs.TensorSpec:
    op = register.find(name)
    assert op is not None
    return inputs.widest(inputs.signature_of(op))


def takes_a_matrix(name: str) -> bool:
    """Whether the widest tensor of an op may have two dimensions."""
    spec = widest(name)
    return len(spec.sizes) == 2 or (spec.leading and len(spec.sizes) < 2)


def small(name: str) -> tuple[tuple[int, ...], str]:
    """A shape, with numbers where the op declares them, and a dtype."""
    sizes = widest(name).sizes
    free = (2, 2, 4, 6)[4 - (max(2, len(sizes)) if widest(name).leading else len(sizes)) :]
    front = len(free) - len(sizes)
    shape = (*free[:front], *(n if isinstance(n, int) else m for n, m in zip(sizes, free[front:], strict=True)))
    dtypes = [dtype for allowed in inputs.signature_of(register.find(name)).variables.values() for dtype in allowed]
    return shape, "bf16" if takes(name, "bf16") else "fp32" if "fp32" in dtypes else dtypes[0]


def takes(name: str, dtype: str) -> bool:
    """Whether a variable of the op's signature may be of this dtype, if it has any."""
    op = register.find(name)
    assert op is not None
    variables = inputs.signature_of(op).variables.values()
    return not variables or any(dtype in allowed for allowed in variables)


def test_ops_and_shapes_in_any_order() -> None:
    found = list(bench_ops.examples(["softmax", "64x32", "rms_norm", "16x8"], "fp16"))
    assert [(e.op.name, e.shape("x")) for e in found] == [
        ("softmax", (64, 32)), ("softmax", (16, 8)), ("rms_norm", (64, 32)), ("rms_norm", (16, 8))
    ]  # fmt: skip
    everything = {e.op.name for e in bench_ops.examples(["all", "64x32"], "bf16")}
    assert everything >= {name for name in NAMES if takes_a_matrix(name) and takes(name, "bf16")}, (
        "what takes so few dimensions is all there"
    )
    three = {e.op.name for e in bench_ops.examples(["all", "2x3x4"], "bf16")}
    assert "column_sum" in everything - three and "softmax" in three
    assert "adamw" not in everything
    lists = [e for e in bench_ops.examples(["all"], "bf16") if e.op.name == "adamw"]
    assert [(e.places, e.shape("params")) for e in lists] == [(64, (1 << 20,))]
    with pytest.raises(ValueError, match=r"no generated op 'softmux'; did you mean softmax or .*\?$"):
        list(bench_ops.examples(["softmax", "softmux"], "bf16"))
    with pytest.raises(ValueError, match=r"no generated op '-2'; .* an argument of a function by its name, as dim=-1$"):
        list(bench_ops.examples(["softmax", "4x8", "-2"], "bf16"))


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "softmax", "64x32"]) == 1
    assert "tk bench measures on a CUDA GPU" in capsys.readouterr().err
    assert cli.main(["bench", "linear", "64x32", "8x32"]) == 1
    assert capsys.readouterr().err.endswith("; --device cpu times the reference\n")


def test_the_reference_of_an_op_is_timed_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "bias_gelu", "64x32", "--device", "cpu"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["op", "tensors", "dtype", "us"]
    assert row.split()[:4] == ["bias_gelu", "64x32", "32", "bf16"]


def test_an_op_that_is_a_function_too_takes_the_functions_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "softmax", "64x32", "dim=0", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("function")


def test_what_is_no_op_goes_to_the_benchmarks() -> None:
    assert bench_ops.is_meant(["softmax"]) and bench_ops.is_meant(["all"])
    assert (
        not bench_ops.is_meant([]) and not bench_ops.is_meant(["mm", "--quick"]) and not bench_ops.is_meant(["--help"])
    )


def test_timings_are_kept_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    path = tmp_path / "ops.json"
    bench_ops.write(path, [timed(us=9.0), timed("gelu")], 4000.0)
    bench_ops.write(path, [timed(us=2.0)], 4100.0)
    found = json.loads(path.read_text())
    assert [(t["op"], t["us"]) for t in found["timings"]] == [("gelu", 2.0), ("softmax", 2.0)]
    assert found["copy_gbps"] == 4100
    assert found["timings"][1]["configs"] == {"fast": ["k", 1.5, 1.0], "1x1024_w4": ["k", 2.0, 3.0]}
    assert found["timings"][1]["shapes"] == {"x": [1000, 1000]}


def test_the_plot_is_svg_with_two_bars_for_each_row() -> None:
    drawn = bench_ops.draw([timed(), timed("gelu")], 4000.0)
    root = ElementTree.fromstring(drawn)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") in ("ours", "theirs")]
    assert [float(b.get("width", 0)) for b in bars[:2]] == [bench_ops.SCALE / 2, bench_ops.SCALE / 5]
    assert len(bars) == 4 and drawn == bench_ops.draw([timed(), timed("gelu")], 4000.0)


# --- How much arithmetic ---


def operations(name: str, shape: tuple[int, ...]) -> int:
    example = inputs.of_shape(register.find(name), shape, "bf16")
    return count(Call(example.op, [*example.arguments("cpu"), -1, 0]))


def test_operations_are_those_that_an_op_is_made_of() -> None:
    """For each element one for each op; conversions and copies are none."""
    assert operations("row_sum", (7, 30)) == 7 * 30
    assert operations("softmax", (7, 30)) == 5 * 7 * 30  # maximum, difference, exp, sum, quotient
    assert operations("silu", (7, 30)) == 5 * 7 * 30  # minus, exp, 1 +, 1 /, times
    assert operations("embedding", (7, 30)) == 0


def test_every_op_can_be_counted() -> None:
    for name in NAMES:
        op = register.find(name)
        assert op is not None
        example = inputs.of_shape(op, *small(name))
        assert count(Call(op, [*example.arguments("cpu"), -1, 0])) >= 0, name


# --- Measuring ---


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Calls run on the CPU; what they take is said by config. Config 3 gives an error, config 2 a wrong result."""
    us = {-1: 10.0, 0: 12.0, 1: 10.0, 2: 1.0, 3: 1.0}
    original, running = tune_ops.call, []

    def call(example, args, config=-1):
        running.append(config)
        if config == 3:
            raise RuntimeError("no such luck")
        result = original(example, args)
        return result + 1 if config == 2 else result

    def capture(calls, **_):
        running.clear()
        for one in calls:
            one()
        return timing.Capture(None, 1, us[running[0]] if running else 25.0)

    rows = [capi.Candidate(n, n, 1000 * n, f"c{n}", "k", "needs more" if n == 4 else None) for n in range(5)]
    arguments = inputs.Example.arguments
    monkeypatch.setattr(inputs.Example, "arguments", lambda self, device: arguments(self, "cpu"))
    monkeypatch.setattr(tune_ops, "call", call)
    monkeypatch.setattr(tune_ops, "describe", lambda *args: SimpleNamespace(problem=None))
    monkeypatch.setattr(capi, "candidates", lambda problem: rows)
    monkeypatch.setattr(capi, "choose", lambda problem, config=1: rows[config])
    monkeypatch.setattr(timing, "copies_to_rotate", lambda size, most: 2)
    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(
        timing, "device_times", lambda captures, **_: {k: timing.Timing(c.us, c.us, c.us) for k, c in captures.items()}
    )
    return us


def test_all_configs_are_timed_and_the_wrong_ones_named(no_gpu: dict[int, float]) -> None:
    found = tune_ops.measure(inputs.of_shape(register.find("softmax"), (8, 16), "bf16"), all_configs=True)
    assert (found.us, found.torch_us, found.config, found.bytes) == (10.0, 25.0, "c1", 2 * 8 * 16 * 2)
    assert [(c.config, c.us) for c in found.configs] == [("c1", 10.0), ("c0", 12.0)]
    assert set(found.failures) == {"c2", "c3"}
    assert "wrong result" in found.failures["c2"] and "no such luck" in found.failures["c3"]
    assert found.is_right


def test_what_is_filled_is_not_read(no_gpu: dict[int, float]) -> None:
    filled = tune_ops.measure(inputs.of_shape(register.find("fill_uniform"), (8, 16), "bf16"))
    assert filled.bytes == 8 * 16 * 2 + 8  # the seed
    assert inputs.overwritten(register.find("fill_uniform")) == {"out"}
    assert inputs.overwritten(register.find("adamw")) == set() == inputs.overwritten(register.find("softmax"))


def test_lists_are_timed_too(no_gpu: dict[int, float]) -> None:
    found = tune_ops.measure(inputs.of_shape(register.find("adamw"), (3, 5, 7), "fp32"))
    assert found.bytes == 3 * (4 * 35 * 4 + 4) + 3 * (3 * 35 * 4 + 4), "all are read, all but the gradients written"
    assert found.is_right and found.operations > 3 * 35 * 10
    assert bench_ops.cells(found, 4000.0)[:3] == ("adamw", "3x5x7", "fp32")


def test_wrong_integers_are_infinitely_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    example = inputs.of_shape(register.find("row_argmax"), (8, 16), "bf16")
    args = example.arguments("cpu")
    assert tune_ops.worst_error(example, args) == 0.0
    monkeypatch.setattr(tune_ops, "call", lambda *_: torch.full((8,), 3))
    assert tune_ops.worst_error(example, args) == math.inf


# --- The family ---


def test_every_peer_computes_what_the_op_does() -> None:
    for name, prepare in generated.PEERS.items():
        if name == "rms_norm_backward" and not torch.cuda.is_available():
            continue  # torch's own has no CPU kernel
        args = generated.Task(name, (6, 32), "fp32").example().arguments("cpu")
        function, given = prepare(*args)
        expected = ops.run_tk(register.find(name), args)
        for mine, torchs in zip(expected, inputs.listed(function(*given)), strict=True):
            torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


def test_random_tasks_depend_on_the_seed_alone() -> None:
    tasks = list(generated.random_tasks(60))
    assert tasks == list(generated.random_tasks(60)) != list(generated.random_tasks(60, seed=1))
    assert {t.op for t in tasks} == set(generated.RANDOM_OPS)
    columns = [t.shape[1] for t in tasks]
    assert sum(c % 128 == 0 for c in columns) == 40 and sum(c % 2 for c in columns) == 20
    assert all(t.shape[0] * t.shape[1] * 2 >= generated.LEAST_BYTES for t in tasks)


def test_tasks_come_in_the_order_of_their_worth() -> None:
    tasks = generated.tasks(quick=False)
    assert len(set(tasks)) == len(tasks)
    kinds = [t.kind for t in tasks]
    assert kinds.index("random") == len(generated.PEERS) + 2
    assert {t.shape[1] for t in tasks if t.op == "softmax"} >= {2**n for n in range(10, 19)}
    assert 0 < len(generated.tasks(quick=True)) < len(tasks) / 4


def rows_of(us: dict[str, float], *tasks: generated.Task) -> Report:
    report = Report("generated", {"copy_gbps": 4000.0})
    for task in tasks:
        generated.add_rows(report, task, us, {"bytes": 400_000_000, "config": "c", "error_ratio": 1.0})
    return report


def test_rows_are_judged_against_compiled_torch_and_a_copy() -> None:
    task = generated.Task("softmax", generated.MAIN)
    report = rows_of({"tk": 110.0, "eager": 330.0, "max-autotune": 220.0}, task)
    ratios = {name: round(g.rows[0].ratio, 3) for name, g in report.groups.items()}
    assert ratios == {"softmax_long": 2.0, "softmax_long_eager": 3.0, "copy": 0.909}
    assert report.groups["softmax_long"].met and report.groups["copy"].met
    assert report.groups["softmax_long_eager"].goal is None


def test_without_compiled_torch_there_is_no_goal_but_a_copy() -> None:
    report = rows_of({"tk": 200.0, "eager": 330.0}, generated.Task("row_sum", (9, 9), kind="random"))
    assert set(report.groups) == {"memory_random_eager", "copy_random"}
    assert report.groups["copy_random"].met is False


def test_groups() -> None:
    def group(op: str, columns: int = 4096) -> str:
        return generated.group_name(generated.Task(op, (1, columns)))

    assert (group("softmax"), group("softmax", 4095), group("log_softmax", 8192)) == (
        "softmax_long", "memory", "softmax_long"
    )  # fmt: skip
    assert (group("row_argmax"), group("gelu"), group("gelu_backward")) == ("argmax", "gelu", "memory")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_row_that_fails_is_named_and_the_others_go_on(jobs: int) -> None:
    tasks = [generated.Task(f"no_such_{i}", (64, 64)) for i in range(3)]
    options = Options(Path(), jobs=jobs)
    ended = dict(parallel.rows(tasks, options, generated.measure))
    assert set(ended) == set(tasks)
    for task, row in ended.items():
        with pytest.raises(ValueError, match=f"no op {task.op}"):
            row()
