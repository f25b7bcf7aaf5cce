"""explain, supports, packs and coverage. Where an answer depends on a GPU, one is described to the engine."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import tk
from tk import _library, _packs, capi
from tk.cli import _calls
from tk.heuristics.problem import AtenCall, Described, describe
from tk.inspect import Candidates

from . import described_gpu, tiny_pack

_numbers = itertools.count()


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[str, Path]:
    """The name of an op that only this test knows, and the pack it is in, for sm_90."""
    name = f"probe{next(_numbers)}"
    path = tiny_pack.write(tmp_path / f"{name}.tkpack", name)
    tk.load_pack(path)
    return name, path


@pytest.fixture(scope="session")
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


def problem(op: str, rows: int, device: int) -> capi.Problem:
    return capi.Problem(op, (capi.Matrix(torch.bfloat16, (rows, 64), (64, 1)),), device=device)


@pytest.fixture
def explain(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """tk.explain of a problem instead of a call."""

    def run(p: capi.Problem, config: int = -1) -> tk.inspect.Explanation:  # type: ignore[name-defined]
        monkeypatch.setattr(tk.inspect, "_wrapper", lambda op: None)  # type: ignore[attr-defined]
        monkeypatch.setattr(tk.inspect.here, "steps", lambda wrapper: [Described(p, config)])  # type: ignore[attr-defined]
        return tk.explain(p.op)

    return run


def test_a_loaded_pack_is_listed(loaded: tuple[str, Path]) -> None:
    name, path = loaded
    (pack,) = [p for p in tk.packs() if name in p.ops]
    assert (Path(pack.path), pack.arch, pack.compiler) == (path, "sm_90", tiny_pack.COMPILER)
    assert (pack.variants, pack.images, pack.size, pack.is_builtin) == (2, 1, path.stat().st_size, False)
    assert name in str(pack) and "sm_90" in str(pack)


def test_coverage_of_it(loaded: tuple[str, Path]) -> None:
    name, _ = loaded
    rows = tk.coverage().only(op=name)
    assert [(r.arch, r.kernel, r.config, r.number, r.variants, r.images) for r in rows] == [
        ("sm_90", f"{name}_kernel", "wide", 0, 1, 1),
        ("sm_90", f"{name}_kernel", "narrow", 1, 1, 1),
    ]
    assert all(r.size == len(tiny_pack.IMAGE) for r in rows)
    assert tk.coverage().only(op=name, arch="90") == tk.coverage().only(op=name, arch=90) == rows
    assert not tk.coverage().only(op=name, arch="80")
    table = str(tk.coverage().only(op=name)).splitlines()
    assert table[0].split()[:4] == ["arch", "op", "kernel", "config"] and len(table) == 4


def test_what_is_listed_is_a_sequence_that_prints_as_a_table(loaded: tuple[str, Path]) -> None:
    name, path = loaded
    rows = tk.coverage().only(op=name)
    assert (len(rows), [r.config for r in rows], rows[1].config, rows[-1].config) == (
        *(2, ["wide", "narrow"]),
        *("narrow", "narrow"),
    )
    first = rows[:1]
    assert type(first) is type(rows) and len(first) == 1 and first[0] == rows[0] and rows[0] in rows
    assert len(str(rows).splitlines()) == 2 + len(rows) and len(repr(first).splitlines()) == 3
    assert str(rows[2:]).splitlines()[0].split()[:2] == ["arch", "op"]
    packs = tk.packs()
    assert type(packs[:0]) is type(packs) and len(packs) == len(list(packs))
    lines = str(packs).splitlines()
    assert lines[0].split() == ["path", "arch", "ops", "variants", "images", "MB", "compiler", "shared"]
    (line,) = [x for x in lines if str(path) in x]
    assert line.split()[1:3] == ["sm_90", name]


def test_a_pack_that_cannot_be_used_says_why_in_the_table() -> None:
    lost = tk.inspect.Pack("/packs/lost.tkpack", "", "", (), 0, 0, 0, True, "No such file")  # type: ignore[attr-defined]
    assert "not used: No such file" in str(tk.inspect.Packs([lost])).splitlines()[2]  # type: ignore[attr-defined]


def test_verify_counts_images_and_finds_damage(loaded: tuple[str, Path]) -> None:
    _, path = loaded
    assert _packs.verify(path) == 1
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(tk.PackError, match=str(path)):
        _packs.verify(path)
    with pytest.raises(tk.PackError, match="No such file"):
        _packs.verify("/no/such.tkpack")


def test_a_pack_with_an_op_that_is_there_already_is_refused(loaded: tuple[str, Path], tmp_path: Path) -> None:
    name, path = loaded
    tk.load_pack(path)  # the same bytes once more are no clash
    again = tiny_pack.write(tmp_path / "again.tkpack", name, compiler="another")
    with pytest.raises(tk.PackError, match=name):
        tk.load_pack(again)
    tk.load_pack(tiny_pack.write(tmp_path / "other_arch.tkpack", name, arch=80))


def test_explain_what_is_predicted(loaded: tuple[str, Path], h100: int, explain) -> None:  # type: ignore[no-untyped-def]
    name, path = loaded
    found = explain(problem(name, 32, h100))
    assert found.choice is not None
    assert (found.choice.config_name, found.choice.cost, found.choice.pinned) == ("wide", 1_000_000, 0)
    assert "lowest predicted time" in found.reason and str(path) in found.reason
    assert [c.config_name for c in found.candidates] == ["wide", "narrow"]
    assert type(found.candidates[1:]) is type(found.candidates) and found.candidates[1].cost == 2_000_000
    assert str(found.candidates[1:]).splitlines()[2].split()[:2] == [f"{name}_kernel", "narrow"]
    lines = str(found).splitlines()
    assert lines[0].startswith(f"tk.{name}: ") and "1.00" in lines[3] and "2.00" in lines[4]


def test_explain_a_constraint_that_fails(loaded: tuple[str, Path], h100: int, explain) -> None:  # type: ignore[no-untyped-def]
    name, _ = loaded
    found = explain(problem(name, 33, h100))
    assert found.choice is not None and found.choice.config_name == "narrow"
    assert [c.config_name for c in found.candidates] == ["narrow", "wide"]
    assert found.candidates[1].failed_constraint == "M a multiple of 16"
    header, *_, row = str(found).splitlines()[1:]
    assert header.split()[-1] == "needs" and row.endswith("M a multiple of 16")


def test_the_table_has_a_config_once() -> None:
    """It has a variant for each class of strides."""
    rows = [(1, 5, None), (0, 6, None), (1, 7, None), (0, -1, "M <= 8"), (2, -1, "M <= 4"), (2, -1, "M <= 2"),
            (2, -1, "M <= 4")]  # fmt: skip
    found = Candidates(
        capi.Candidate(i, config, cost * 10**6, f"c{config}", "k", need) for i, (config, cost, need) in enumerate(rows)
    )
    shown = [" ".join(line.split()) for line in str(found).splitlines()[2:]]
    assert shown == ["k c1 1 5.00", "k c0 0 6.00", "k c2 2 - M <= 4", "k c2 2 - M <= 2"]


def test_explain_a_config_that_is_given(loaded: tuple[str, Path], h100: int, explain) -> None:  # type: ignore[no-untyped-def]
    name, _ = loaded
    found = explain(problem(name, 32, h100), config=1)
    assert found.choice is not None and found.choice.config_name == "narrow" and "named" in found.reason
    refused = explain(problem(name, 33, h100), config=0)
    assert refused.choice is None and "M a multiple of 16" in refused.reason and len(refused.candidates) == 2


def test_explain_a_config_that_was_measured(loaded: tuple[str, Path], h100: int, explain) -> None:  # type: ignore[no-untyped-def]
    name, _ = loaded
    capi.pin(problem(name, 32, h100), 1)
    found = explain(problem(name, 32, h100))
    assert found.choice is not None and found.choice.config_name == "narrow" and "measured" in found.reason
    other = explain(problem(name, 48, h100))
    assert other.choice is not None and other.choice.config_name == "wide"


def test_explain_an_op_that_no_pack_has(h100: int, explain) -> None:  # type: ignore[no-untyped-def]
    found = explain(problem("no_such_op", 32, h100))
    assert found.choice is None and found.candidates == () and "no_such_op" in found.reason


def test_on_the_cpu_explain_says_how_to_ask_as_on_a_gpu() -> None:
    reason = tk.explain("mm", torch.ones(4, 4), torch.ones(4, 4)).reason
    assert "the tensors are on the CPU" in reason and "arch=90" in reason


def test_nothing_is_launched_on_the_cpu() -> None:
    a = torch.randn(4, 4)
    assert describe(tk.mm, a, a) is None
    found = tk.explain("mm", a, a, activation="gelu")
    assert found.problem is None and found.choice is None and "ATen" in str(found)


def test_explain_makes_the_ops_checks() -> None:
    with pytest.raises(ValueError, match="the inner sizes differ"):
        tk.explain("mm", torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"no op 'mul', and no .*; there are .*addmm, .*linear, .*mm"):
        tk.explain("mul", torch.randn(4))


def test_supports() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    assert tk.supports("mm", a, b)
    for wrong in ((a, a), (a.int(), b.int()), (a, "b")):
        answer = tk.supports("mm", *wrong)
        assert not answer and answer.reason and str(answer).startswith("no: ")


def test_config_names_become_numbers(loaded: tuple[str, Path]) -> None:
    from tk.heuristics import overrides

    name, _ = loaded
    assert [overrides._number_of(name, c) for c in ("wide", "narrow")] == [0, 1]
    with pytest.raises(ValueError, match="no config 'huge'; there are narrow, wide"):
        overrides._number_of(name, "huge")


# --- Every function ---


@pytest.mark.parametrize("name", sorted({call.name for call in _calls.calls()}))
def test_explain_and_supports_take_the_arguments_of_every_function(name: str) -> None:
    for call in _calls.calls():
        if call.name != name:
            continue
        before, state = copy.deepcopy((call.args, call.kwargs)), torch.get_rng_state()
        explanation = tk.explain(name, *call.args, **call.kwargs)
        assert explanation.runs and explanation.problem is None and "ATen" in explanation.reason
        assert tk.supports(name, *call.args, **call.kwargs)
        tensors, copies = (
            [x for x in tree_leaves(y) if torch.is_tensor(x)] for y in ((call.args, call.kwargs), before)
        )
        assert all(
            torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
            for x, y in zip(tensors, copies, strict=True)
        )
        assert torch.equal(torch.get_rng_state(), state)


def test_they_say_what_is_wrong_in_an_argument() -> None:
    x = torch.ones(3, 4)
    for name, args in (
        ("softmax", (x, 2)),
        ("topk", (x, 9)),
        ("sum", ("x",)),
        ("conv2d", (x, x)),
        ("sdpa", (x, x[0], x)),
    ):
        answer = tk.supports(name, *args)
        named = f"tk.{name}" in answer.reason.replace("tk::", "tk.") or "expected" in answer.reason
        assert not answer and named, name
    with pytest.raises(IndexError, match=r"tk\.softmax: dim is 2"):
        tk.explain("softmax", x, 2)


@pytest.mark.parametrize("name", sorted({call.name for call in _calls.calls()}))
def test_supports_answers_for_every_dtype(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where torch's own op says what is wrong, on this machine and on a GPU that is described."""
    caplog.set_level(logging.WARNING, "torch._subclasses.fake_tensor")
    for call in _calls.calls():
        for dtype in (torch.int8, torch.bool, torch.uint16, torch.float64, torch.complex64, torch.float8_e5m2):
            cast = partial(_cast, dtype=dtype)
            args, kwargs = tree_map_only(torch.Tensor, cast, (call.args, call.kwargs))
            for arch in ({}, {"arch": 90}) if call.name == name else ():
                answer = tk.supports(name, *args, **kwargs, **arch)
                assert isinstance(answer.reason, str) and (answer or answer.reason)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def test_what_does_not_broadcast_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs a traceback for what an op refuses of fake tensors."""
    caplog.set_level(logging.WARNING, "torch._subclasses.fake_tensor")
    answer = tk.supports("max", torch.ones(5, 10), torch.ones(3), arch=90)
    assert not answer and "broadcast" in answer.reason
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_dropout_without_a_seed_draws_nothing() -> None:
    state = torch.get_rng_state()
    assert tk.supports("dropout", torch.ones(4), 0.5)
    assert torch.equal(torch.get_rng_state(), state)


# --- What ATen computes ---

_TO_ATEN = {
    "gelu": lambda x: ((x.double(),), {}),
    "layer_norm": lambda x: ((x.double(), (4,)), {}),
    "cross_entropy": lambda x: ((x.double(), torch.zeros(3, dtype=torch.int64, device=x.device)), {}),
    "logcumsumexp": lambda x: ((x.double(), -1), {}),
    "embedding": lambda x: ((torch.zeros(3, dtype=torch.int64, device=x.device), x), {"max_norm": 1.0}),
    "norm": lambda x: ((x, "nuc"), {}),
    "dropout": lambda x: ((x.double(), 0.5), {"seed": torch.zeros((), dtype=torch.int64, device=x.device)}),
    "quantize_fp8": lambda x: ((x.double(),), {}),
}


@pytest.mark.parametrize("name", _TO_ATEN)
def test_explain_says_what_goes_to_aten(name: str) -> None:
    """Off the CPU: where the tensors are, the function decides as on CUDA, and nothing is computed."""
    args, kwargs = _TO_ATEN[name](torch.empty(3, 4, device="meta"))
    found = tk.explain(name, *args, **kwargs)
    assert found.runs and found.choice is None
    assert "ATen computes it" in found.reason and f"tk.{name}: " in found.reason
    assert tk.supports(name, *args, **kwargs).reason == found.reason
    with tk.config.strict(), pytest.raises(tk.UnsupportedError):
        tk.explain(name, *args, **kwargs)
    on_cpu = [torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x for x in args]
    here = {k: torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
    assert "ATen computes it" not in tk.explain(name, *on_cpu, **here).reason


def test_what_a_kernel_takes_does_not_go_to_aten() -> None:
    assert "ATen computes it" not in tk.explain("gelu", torch.empty(3, 4, device="meta")).reason


# --- Calls of several launches, as on an H100 ---

_CALLS = [
    pytest.param(call, id=f"{call.name}-{dtype}-{scale}")
    for dtype in (torch.bfloat16, torch.float32)
    for scale in ("small", "medium")
    for call in _calls.calls("meta", dtype, scale)
]


def _planned(d: Described) -> tuple[int, list[str]]:
    """How many launches the core has prepared for a call, and those of the plan that it took them from."""
    choice = capi._Choice()
    _library.check(_library.core().tk_choose(capi.Prepared(d.problem, d.config).pointer, choice))
    op = d.problem.op.encode()
    return choice.n_launches, [
        row.entry.decode()
        for pack in _packs.listed("tk_list_packs", _packs.PackInfo)
        if pack.path == choice.pack_path
        for row in _packs.listed("tk_list_launches", _packs.LaunchInfo, ctypes.c_void_p(pack.pack), op)
        if row.variant == choice.variant
    ]


def _stand_in_order(names: tuple[str, ...], plan: list[str]) -> bool:
    rest = iter(plan)
    return all(name in rest for name in names)


@pytest.mark.parametrize("call", _CALLS)
def test_explain_names_every_launch(call: _calls.Call) -> None:
    try:
        found = tk.explain(call.name, *call.args, arch=90, **call.kwargs)
    except tk.UnsupportedError as error:
        assert "looks into its arguments" in str(error)
        return
    if not found.steps:
        assert not found.runs  # no pack has an op for these mods
        return
    called = described_gpu.describe_all(getattr(tk, call.name), *call.args, **call.kwargs)
    of_tk = [step for step in found.steps if not step.op.startswith("aten.")]
    assert [step.op for step in of_tk] == [d.problem.op for d in called]
    for step, d in zip(of_tk, called, strict=True):
        if step.choice is None:
            assert not found.runs
            continue
        count, plan = _planned(d)
        assert len(step.launches) == count and _stand_in_order(step.launches, plan)
        assert "what fits" in step.reason
    if found.runs and called:
        assert found.choice in [step.choice for step in of_tk]
    shown = str(found)
    n_launches = sum(len(step.launches) or 1 for step in found.steps)
    assert ("The call launches:" in shown) == (n_launches > 1)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_STEPS = {
    "a reduction in two passes": (
        lambda: tk.explain("sum", _meta(1 << 24), arch=90),
        [("total_sum", ("total_sum_split_0", "total_sum_split_1"))],
    ),
    "as many passes as the size needs": (
        lambda: tk.explain("sort", _meta(8, 100000), arch=90),
        [("sort", ("sort_radix_0", *("count_digits", "scan_counts", "scatter_digits") * 2, "sort_split_1"))],
    ),
    "weights that are made": (
        lambda: tk.explain("layer_norm", _meta(512, 4096), (4096,), arch=90),
        [("aten.full", ()), ("aten.full", ()), ("layer_norm", ("layer_norm",))],
    ),
    "casts": (
        lambda: tk.explain("bucketize", _meta(64, 64), _meta(5), arch=90),
        [("aten._to_copy", ()), ("aten._to_copy", ()), ("bucketize", ("bucketize",))],
    ),
    "copies of operands": (
        lambda: tk.explain("conv2d", _meta(8, 64, 56, 56), _meta(64, 64, 3, 3), padding=1, arch=90),
        [("conv_layout", ("conv_layout",)), ("conv_layout", ("conv_layout",)), ("conv", ("conv_tma",))],
    ),
    "a weight that is unpacked": (
        lambda: tk.explain("int4_mm", _meta(512, 512), _meta(256, 256, dtype=torch.uint8), _meta(4, 256), arch=90),
        [("int4_dequantize", ("int4_dequantize",)), ("mm", ("mm_tma",))],
    ),
    "a list's table": (
        lambda: tk.explain("adamw_", *([_meta(64)] for _ in range(4)), [_meta(dtype=torch.float32)], lr=0.1, arch=90),
        [("store_table", ("store_table",)), ("adamw", ("adamw_0", "adamw_1"))],
    ),
    "ATen alone": (
        lambda: tk.explain("unpack_int4", _meta(64, 64, dtype=torch.uint8), arch=90),
        [("aten.bitwise_and", ()), ("aten.__rshift__", ()), ("aten.stack", ())],
    ),
}


@pytest.mark.parametrize("name", _STEPS)
def test_steps_are(name: str) -> None:
    explain, wanted = _STEPS[name]
    found = explain()
    assert [(step.op, step.launches) for step in found.steps] == wanted
    lines = str(found.steps).splitlines()[2:]
    assert len(lines) == sum(len(step.launches) or 1 for step in found.steps)
    assert all(step.reason for step in found.steps)


def test_a_step_that_nothing_fits_keeps_the_call_from_running() -> None:
    a, b, target = _meta(128, 192), _meta(192, 192), _meta(128, dtype=torch.int64)
    found = tk.explain("linear_cross_entropy", a, b, target, arch=90)
    lacking = [step for step in found.steps if step.choice is None and step.op == "mm"]
    assert lacking and not found.runs and found.choice is None and found.reason == lacking[0].reason


def test_zeros_that_an_op_writes_are_a_step() -> None:
    """Those that stand for what a kernel would have written are none."""
    a, b = _meta(64, 64), _meta(2, 64, 64)
    op = torch.ops.tk.grouped_mm.default
    offs = torch.empty(2, dtype=torch.int32, device="meta")
    names = [step.name for step in described_gpu.steps(op, a, b, offs, zero_rest=True) if isinstance(step, AtenCall)]
    assert names == ["aten.zero_"]
    assert not any(isinstance(step, AtenCall) for step in described_gpu.steps(tk.gelu, a))


@tk.op(x="T[...]", T=("fp32",))
def declared_here(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _checked() -> Any:
    with tk.check() as found:
        tk.mm(_meta(64, 64), _meta(64, 64))
    return found


REPORTS: list[Any] = [
    lambda: tk.explain("mm", _meta(64, 64), _meta(64, 64), arch=90),
    lambda: tk.explain("mm", torch.ones(4, 4), torch.ones(4, 4)),
    lambda: tk.explain("sort", _meta(8, 100), arch=90).steps,
    lambda: tk.supports("mm", torch.ones(4, 4), torch.ones(4, 4)),
    _checked,
    tk.coverage,
    tk.packs,
    lambda: declared_here,
]


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_is_pickled_and_copied(report: Any) -> None:
    found = report()
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    for again in (
        pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found), torch.load(file, weights_only=False),
    ):  # fmt: skip
        assert type(again) is type(found) and str(again) == str(found)
    assert pickle.loads(pickle.dumps(declared_here)) is declared_here
