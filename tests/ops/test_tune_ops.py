"""``tk tune`` of generated ops: a walk over real configs by a made-up timer, and what the engine makes of it."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tk
import tk.kernels
import tk.tune
from tk import capi, cli, codegen, timing
from tk.aot.expr import Problem, TensorValue, evaluate_locals
from tk.generated import Declared, inputs, register
from tk.kernels import tuned_tables
from tk.tune import command, generated, loading, ops, pins
from tk.tune.ops import Prepared

from .test_generated_launch import Kernel

SHAPE = (4096, 1024)


@pytest.fixture(scope="module")
def h200() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, and no more."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def prepared(name: str, device: int, shape: tuple[int, ...] = SHAPE, dtype: str = "bf16") -> Prepared:
    op = register.find(name)
    assert op is not None
    example = inputs.of_shape(op, shape, dtype)
    args = example.arguments("cpu")
    described = Kernel(name, device)(*args, -1, 0)
    assert described is not None
    return Prepared(example, described.problem, [args])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """config -> µs, to be filled in; a config without any is wrong."""
    us: dict[str, float] = {}

    def capture(self: Prepared, row: capi.Candidate) -> timing.Capture:
        if row.config_name not in us:
            raise RuntimeError("wrong result")
        return timing.Capture(None, 1, us[row.config_name])

    def device_times(captures: Mapping[str, timing.Capture], **_: object) -> dict[str, timing.Timing]:
        return {name: timing.Timing(c.us, c.us, c.us) for name, c in captures.items()}

    monkeypatch.setattr(Prepared, "capture", capture)
    monkeypatch.setattr(timing, "device_times", device_times)
    return us


def test_the_walk_begins_at_the_prediction_and_ends_at_the_fastest(h200: int, clock: dict[str, float]) -> None:
    call = prepared("softmax", h200)
    fitting = call.fitting()
    chosen = capi.choose(call.problem).config_name
    assert next(iter(fitting)) == chosen and len(fitting) >= 3
    fastest = max(fitting, key=lambda name: fitting[name].cost)  # the least likely
    clock.update(dict.fromkeys(fitting, 20.0) | {chosen: 19.0, fastest: 5.0})
    found = generated.tune(call)
    assert found.found.steps[0] == found.start == chosen and found.found.config == fastest
    assert (found.us, found.gain, found.failures) == (5.0, 19.0 / 5.0, {})


def test_a_wrong_config_is_named_and_never_the_best(h200: int, clock: dict[str, float]) -> None:
    call = prepared("softmax", h200)
    names = list(call.fitting())
    clock.update(dict.fromkeys(names[:-1], 10.0))
    found = generated.tune(call)
    assert set(found.failures) == {names[-1]} and "wrong result" in found.failures[names[-1]]
    clock.clear()
    with pytest.raises(ValueError, match="was chosen and cannot be timed"):
        generated.tune(call)


def test_the_choice_reads_what_was_written(
    h200: int, clock: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, other = prepared("softmax", h200), prepared("softmax", h200, (4096, 2048))
    before = capi.choose(other.problem)
    fastest = list(call.fitting())[-1]
    clock.update(dict.fromkeys(call.fitting(), 20.0) | {fastest: 5.0})
    monkeypatch.setattr(pins, "user_file", lambda device: tmp_path / "tuned.json")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    try:
        (path,) = generated.write_user_file([generated.tune(call)])
        assert json.loads(path.read_text())["gpu"] == "a GPU"
        assert pins.pin_all(path, h200) == 1
        found = capi.choose(call.problem)
        assert (found.config_name, found.pinned) == (fastest, 1)
        assert capi.choose(other.problem) == before
        assert capi.choose(prepared("softmax", h200, dtype="fp32").problem).pinned == 0
        # What ran is where the next walk starts.
        assert generated.tune(call).start == fastest
    finally:
        capi.pin(call.problem, -1)


@pytest.mark.parametrize(("name", "shape"), [("softmax", SHAPE), ("layer_norm", (3, 5, 64)), ("row_sum", (2, 64))])
def test_a_build_reads_the_tables(
    name: str,
    shape: tuple[int, ...],
    h200: int,
    clock: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name graph and sizes as the op's declaration does, and packs get them."""
    call = prepared(name, h200, shape, "fp32")
    clock.update(dict.fromkeys(call.fitting(), 7.0))
    folder = tmp_path / "tuned" / "sm90"
    (path,) = generated.write_tables(folder, [generated.tune(call)])
    (path,) = generated.write_tables(folder, [generated.tune(call)])  # replaces what it wrote
    (pin,) = tuned_tables.read(path)["pins"]
    modules = [importlib.import_module(f"tk.kernels.generated.{m}") for m in ("softmax", "norms", "reductions")]
    declared = next(x for m in modules for x in vars(m).values() if isinstance(x, Declared) and x.name == name)
    module = SimpleNamespace(__name__=declared.fn.__module__, found=declared)
    family = codegen.families_of(module)[0]  # type: ignore[arg-type]
    monkeypatch.setattr(tk.kernels, "__path__", [str(tmp_path)])
    tuned_tables.load.cache_clear()
    assert tuned_tables.load(family.tuned, 90)["pins"] == [pin]
    tuned_tables.load.cache_clear()
    tensors = [TensorValue(t.sizes, t.strides, capi.DTYPES[t.dtype]) for t in call.problem.tensors if t]
    locals_ = evaluate_locals(family.op.locals.values(), Problem(tensors, device={"sm_count": 132}))
    named = dict(zip(family.op.locals, locals_, strict=True))
    assert pin == {
        "key": {"graph": named["graph"]},
        "dims": [named[d] for d in family.op.dims],
        "config": capi.choose(call.problem).config_name,
    }


def test_tables_are_of_the_packages_ops_alone() -> None:
    def softmax(x):  # type: ignore[no-untyped-def]
        return x + 1

    module = SimpleNamespace(__name__=__name__, found=tk.op(x="fp32[M]")(softmax))
    assert [(f.op.name, f.tuned) for f in codegen.families_of(module)] == [("softmax", "")]  # type: ignore[arg-type]


def test_every_choice_of_dtype_and_flag_is_a_call() -> None:
    found = list(generated.examples(["sort", "64x32"], ["bf16", "fp32"]))
    assert [(e.dtypes["T"], e.flags["descending"]) for e in found] == [
        ("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True)
    ]  # fmt: skip
    shapes = {e.shape("x") for e in generated.examples(["softmax"], ["bf16"])}
    assert shapes == set(generated.SHAPES)
    with pytest.raises(ValueError, match="no generated op 'softmux'"):
        list(generated.examples(["softmax", "softmux"], ["bf16"]))


def test_the_command(
    h200: int, clock: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One call that is tuned and one that cannot be: it costs the first nothing, and shows in the status."""

    def prepare(example: inputs.Example) -> Prepared:
        if example.op.name == "gelu":
            raise ValueError("nothing is launched for it")
        return prepared(example.op.name, h200, example.shape("x"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(generated, "prepare", prepare)
    clock.update(dict.fromkeys(prepared("softmax", h200).fitting(), 7.0))
    path = tmp_path / "softmax.json"
    assert cli.main(["tune", "softmax", "gelu", "4096x1024", "--write", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAILED gelu(x bf16[4096, 1024], tanh=True)" in said and f"written: {path}\n" in said
    assert len(tuned_tables.read(path)["pins"]) == 1
    assert cli.main(["tune", "softmax", "4096x1024", "--write", str(tmp_path)]) == 0
    assert cli.main(["tune", "softmax", "4096x1024", "--seconds", "-1", "--write", str(tmp_path)]) == 1
    assert "out of time: 1 of 1 calls not measured" in capsys.readouterr().out


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["tune", "softmax", "64x32"]) == 1
    assert "tk tune measures on a CUDA GPU" in capsys.readouterr().err


def test_names_decide_what_is_tuned() -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    for argv, meant in ((["tune", "softmax"], True), (["tune", "all", "8x8"], True), (["tune", "1x2x3"], False)):
        assert generated.is_meant(parser.parse_args(argv).what) == meant


def test_a_pack_that_is_loaded_later_is_tuned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of its ops were left out when CUDA began: then there were none."""
    loads: list[str] = []
    monkeypatch.setattr(loading, "load", lambda: loads.append("again"))
    monkeypatch.setattr(tk._library, "ops", lambda: SimpleNamespace(tk_ops_load_pack=lambda path, status: None))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    tk.load_pack("a.tkpack")
    assert loads == []  # they come with CUDA
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    tk.load_pack("b.tkpack")
    assert loads == ["again"]


def test_what_is_written_in_place_is_timed_on_copies_alone_where_it_is_judged() -> None:
    op = register.find("fill_uniform")
    assert op is not None
    args = inputs.of_shape(op, (8, 16), "fp32").arguments("cpu")
    before = args[0].clone()
    (found,) = ops.results(inputs.of_shape(op, (8, 16), "fp32"), args)
    assert torch.equal(args[0], before) and not torch.equal(found, before)
    assert ops.worst_error(inputs.of_shape(op, (8, 16), "fp32"), args) <= 1.0


def test_scans_may_carry_their_sum_through_many_blocks() -> None:
    """One by one is the order with the most roundings; a term that is left out is more than they come to."""
    op = register.find("cumsum")
    assert op is not None
    example = inputs.of_shape(op, (3, 20_000), "fp32")
    (x,) = args = example.arguments("cpu")
    for step in range(1, 5):
        x.mul_(1 + step)  # other roundings
        (one,) = ops.References(example, args).of_each
        found = torch.from_numpy(np.cumsum(x.numpy(), -1))  # one by one in fp32
        assert one.error_of(found) <= 2.0
        assert one.error_of(found + (torch.arange(20_000) > 19_000) * 0.1 * x.std()) > 2.0
