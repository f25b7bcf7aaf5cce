"""`tk verify` runs every config that fits, and says what it did not run. An H100 is described to the engine; what runs
in the place of its kernels is the reference on the CPU."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tk
from tk import capi, errors
from tk._packs import CoverageRow
from tk.cli import _verified, _verified_attention, _wrong, main, verify
from tk.cli._shown import as_json
from tk.cli._verified import Case, Checked
from tk.cli._wrong import Asked, fill_free_memory, free_blocks
from tk.flex import mods
from tk.flex.tracing import trace
from tk.generated import register
from tk.ops import flex

from . import described_gpu


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_verified, "describe_all", described_gpu.describe_all)
    monkeypatch.setattr(_verified, "describe", described_gpu.describe)


@pytest.fixture
def case() -> Case:
    x, weight = torch.randn(2, 64, 16, 16).bfloat16(), torch.randn(64, 64, 3, 3).bfloat16()
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    conv = torch.ops.tk.conv2d
    return Case("tk.conv2d", "bf16", lambda: conv(x, weight, None, [1, 1], [1, 1], [1, 1]), lambda: exact)


def test_each_config_that_fits_is_what_the_engine_would_run(
    on_h100: None, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = described_gpu.describe_all(case.run)[-1].problem
    before, wanted = capi.choose(problem), {row.config_name for row in capi.candidates(problem) if row.fits}
    chosen, right = [], _verified._held

    def held(case: Case, kernel: str, config: str, *settings: Any) -> Iterator[Checked]:
        if kernel.startswith(problem.op) and config in wanted:
            chosen.append((config, capi.choose(problem).config_name))
        return right(case, kernel, config, *settings)

    monkeypatch.setattr(_verified, "_held", held)
    checked = list(_verified.every_config(case, "cuda"))
    assert len(wanted) > 3 and {c for c, _ in chosen} == wanted and all(a == b for a, b in chosen)
    assert capi.choose(problem) == before, "the pins are lifted"
    assert all(c.is_good for c in checked if c.was_run)
    assert all(c.problem != _verified.NOT_RUN for c in checked)


def test_a_config_that_is_wrong_or_raises_is_bad_and_others_are_not(on_h100: None, case: Case) -> None:
    problem = described_gpu.describe_all(case.run)[-1].problem
    fitting = [row for row in capi.candidates(problem) if row.fits]
    names, kernels = sorted({row.config_name for row in fitting}), {row.kernel_name for row in fitting}

    def run() -> torch.Tensor:
        name = capi.choose(problem).config_name
        if name == names[1]:
            raise errors.DriverError("the launch failed")
        return case.run() * (1.1 if name == names[0] else 1.0)

    checked = _verified.every_config(Case(case.function, case.what, run, case.exactly), "cuda")
    of_product = [c for c in checked if c.was_run and c.kernel in kernels]
    bad = {c.config: c.problem for c in of_product if not c.is_good}
    assert len(of_product) == len(names) and bad.keys() == set(names[:2])
    assert "the launch failed" in bad[names[1]]


def test_a_call_without_a_kernel_is_said(on_h100: None) -> None:
    x = torch.ones(3)
    (checked,) = _verified.every_config(Case("tk.f", "fp32", lambda: x + 1, lambda: x.double() + 1), "cuda")
    assert not checked.was_run and "ATen" in checked.problem


def test_a_tensor_without_elements_has_no_address(on_h100: None) -> None:
    x = torch.empty(3, 0)
    case = Case("tk.sum", "fp32", lambda: tk.sum(x, 1), lambda: x.double().sum(1))
    problem = described_gpu.describe_all(case.run)[-1].problem
    assert problem.tensors[0] is not None and problem.tensors[0].address == 0
    assert list(_verified.every_config(case, "cuda"))


@pytest.mark.parametrize("place", range(3))
def test_wrong_gradients_of_attention_are_seen(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [n for n in register.attention_names() if n.startswith("flex_")][:2]

    def wrong(*args: object) -> list[torch.Tensor]:
        found = flex.backward(*args)
        is_exact = found[0].dtype is torch.float64
        return [x if i != place or is_exact else x * 1.1 for i, x in enumerate(found)]

    monkeypatch.setattr(register, "attention_names", lambda: names)
    assert all(c.is_good for c in _verified_attention.mods("cpu"))
    monkeypatch.setattr(_verified_attention, "flex", SimpleNamespace(**{**vars(flex), "backward": wrong}))
    checked = list(_verified_attention.mods("cpu"))
    assert {c.kernel.endswith("_backward") for c in checked if not c.is_good} == {True}
    assert len([c for c in checked if not c.is_good]) == len(checked) // 2


def test_gradients_of_what_a_mod_captures_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []

    def counted(*args: object) -> list[torch.Tensor]:
        found = flex.backward(*args)
        numbers.append(len(found))
        return found

    monkeypatch.setattr(_verified_attention, "flex", SimpleNamespace(**{**vars(flex), "backward": counted}))
    assert not [c for c in _verified_attention.mods("cpu", queries=(1,)) if c.was_run and not c.is_good]
    assert max(numbers) > 3


def _with_captured_gradients() -> dict[str, trace.Traced]:
    """Backward ops of the packs."""
    named = {n: register.find(n) for n in register.attention_names() if n.endswith("_backward")}
    traced = {n: trace.parse(str(op.meta["flex"])) for n, op in named.items() if op is not None}
    return {n: t for n, t in traced.items() if t.differentiable}


def test_a_captured_tensors_gradient_is_held_against_its_terms() -> None:
    """Against the terms of a bias that no two scores share."""
    slopes, rows = torch.full((2,), 2.0**-4), 40
    traced = trace.pair(mods.alibi(slopes), mods.causal).traced
    call = _verified_attention._Pair("alibi", traced, torch.float32, 64, rows)
    query, key, value = (x.double() for x in call.operands)
    distance = torch.arange(_verified_attention.KEYS) - torch.arange(rows).unsqueeze(-1)
    bias = (slopes[0] * distance).double().expand(2, -1, -1).clone().requires_grad_()
    scores = (query @ key.mT * 64**-0.5 + bias).masked_fill(distance > 0, -torch.inf)
    lse = scores.logsumexp(-1)
    (terms,) = torch.autograd.grad((scores.softmax(-1) @ value, lse), bias, [g.double() for g in call.grads])
    gradients = [torch.empty(0)] * 3 + [torch.empty(2)]
    assert [x is y for x, y in zip(call.magnitudes(lse.detach(), gradients)[:3], gradients, strict=False)] == [True] * 3
    found = call.magnitudes(lse.detach(), gradients)[3]
    torch.testing.assert_close(found[:2], (terms * distance).abs().sum((1, 2)))


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_captured_tensors_gradient_may_be_wrong_by_a_rounding_of_its_terms(
    times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by no more, in the captured tensor's own dtype."""
    slopes = next(
        n
        for n, t in _with_captured_gradients().items()
        if [(c.rank, c.dtype) for c in t.captures] == [(1, torch.float32)]
    )

    def checked(case: Case, device: str, **settings: Any) -> Iterator[Checked]:
        *first, exact = case.exact
        off = times * 2.0**-17 * case.sizes[-1].abs().max()
        return _verified.every_config(replace(case, run=lambda: [*first, exact + off]), device, **settings)

    monkeypatch.setattr(register, "attention_names", lambda: [slopes])
    monkeypatch.setattr(_verified_attention, "every_config", checked)
    found = list(_verified_attention.mods("cpu", queries=(256,)))
    assert found and all(c.was_run and c.is_good == (times < 1) for c in found)


def test_terms_are_no_smaller_than_their_sum() -> None:
    for name, traced in _with_captured_gradients().items():
        call = _verified_attention._Pair(name, traced, torch.float32, 64, 256)
        results = flex.forward(*call.request("cpu", torch.float64))
        exact = call.backward("cpu", torch.float64, results)
        for gradient, terms in zip(exact, call.magnitudes(results[1], exact), strict=True):
            assert terms.shape == gradient.shape
            assert bool((gradient.abs() <= terms.abs() * (1 + 2.0**-6) + 1e-6).all()), name


def test_convolutions_come_with_both_gradients_of_every_kind_of_kernel(on_h100: None) -> None:
    checked = list(_verified.convolutions("cpu"))
    ran = {c.kernel for c in checked if c.was_run}
    assert not [c for c in checked if c.was_run and not c.is_good]
    gradients = {"input_grad_tma", "weight_grad_tma", "weight_grad_tma_whole", "weight_grad_pointer"}
    assert gradients | {"weight_grad_depthwise", "weight_grad_slide", "conv_tma", "conv_pointer"} <= ran


def test_launches_that_differ_in_their_addresses_alone_are_run_once(on_h100: None) -> None:
    """An input's gradient with a stride of 8 is a launch for each of 64 remainders. Their places in memory are aligned
    in eight ways, and the weight's taps in two."""
    _, of_input, _ = _verified._of_convolution(_verified.GEOMETRIES[7], torch.bfloat16, None, False, "cpu")
    problems = [d.problem for d in described_gpu.describe_all(of_input.run) if d.problem.op == "conv"]
    assert len(problems) == 64 and len({_verified._seen(p) for p in problems}) <= 16


# In a process of its own, where no test has loaded another pack.
LEFT_OUT = """
from functools import partial
import tk
from tk.cli import _verified
from tk.generated import register
from tk.heuristics import described

_verified.describe = partial(described.describe, described.gpu(90))
_verified._of_example = lambda references, number, kernel, config, *_: [_verified.Checked(kernel, config)]
ran = {(c.kernel, c.config) for c in _verified.generated_ops("cpu") if c.was_run}
names = set(register.names())
compiled = {(row.kernel, row.config) for row in tk.coverage() if row.arch == "sm_90" and row.op in names}
print(len(compiled), *sorted(compiled - ran), sep="\\n")
"""


def test_every_config_of_a_generated_op_is_run_at_some_length() -> None:
    """Configs are for ranges of lengths, and for rows whose tensors are all aligned."""
    found = subprocess.run([sys.executable, "-c", LEFT_OUT], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    compiled, *left_out = found.stdout.splitlines()
    assert int(compiled) > 300 and not left_out


def _row(kernel: str, config: str, arch: str = "sm_90", op: str = "f") -> CoverageRow:
    return CoverageRow(arch, op, kernel, config, 0, 1, 1, 1)


def test_what_was_not_run_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    report = verify.Report()
    for checked in (
        Checked("f_tma", "64x64"),
        Checked("f_tma", "64x64", problem="not run: N % 8 == 0"),
        Checked("f_tma", "128x64", problem="not run: M >= 128"),
        Checked("f_tma", "128x64", problem="not run: N % 8 == 0"),
        Checked("tk.g", "bf16", problem="not run: no pack has a kernel for it"),
        Checked("tk.g", "fp16", problem="not run: no pack has a kernel for it"),
    ):
        report.add(checked)
    report.print_left_out([_row("f_tma", "64x64"), _row("f_tma", "128x64"), _row("h", "w4", op="h")])
    said = capsys.readouterr().out
    assert report.is_good and "1 of 3 compiled configs were run" in said
    (line,) = [line for line in said.splitlines() if "128x64" in line]
    assert "M >= 128 or N % 8 == 0" in line
    assert "no call of its kind was made" in said
    assert "tk.g: not run: no pack has a kernel for it: bf16 and 1 more" in said


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        ((9, 0), {("f", "sm_90"), ("g", "ptx80")}),
        ((8, 9), {("f", "sm_80"), ("g", "sm_80"), ("h", "sm_86")}),
        ((10, 0), {("f", "ptx80"), ("g", "ptx80")}),
    ],
)
def test_the_configs_of_this_gpu_are_counted(
    capability: tuple[int, int], wanted: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"f": ("sm_80", "sm_90", "ptx80"), "g": ("ptx80", "sm_80"), "h": ("sm_80", "sm_86")}
    rows = [_row("k", "a", arch, op) for op, archs in there.items() for arch in archs]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {(row.op, row.arch) for row in verify._of_this_gpu(rows)} == wanted


# --- What is said of a wrong run ---


def _broken(x: torch.Tensor) -> torch.Tensor:
    """Not a number in two places."""
    x = x.contiguous().clone()
    x.view(-1)[[5, 7]] = torch.tensor([torch.nan, torch.inf], dtype=x.dtype)
    return x


def test_a_wrong_run_names_its_case_and_the_command_for_it(on_h100: None) -> None:
    *_, (forward, *_) = (
        _verified._of_convolution(g, torch.bfloat16, None, True, "cpu") for g in _verified.GEOMETRIES[2:3]
    )
    case = replace(forward, run=lambda: _broken(forward.run()))
    checked = [c for c in _verified.every_config(case, "cuda") if c.was_run]
    said = str(checked[0])
    assert len(checked) > 3 and not any(c.is_good for c in checked)
    for part in (checked[0].kernel, checked[0].config, "tk.conv2d", "bfloat16[2, 64, 17, 15] of strides [", "stride=2, "
                 "padding=1, dilation=1, groups=1", "2 of 4608 elements are wrong, 2 of them NaN or infinite",
                 "; the first at [0, 0, 0, 5] is nan, where ", "of seed 0"):  # fmt: skip
        assert part in said
    (found,) = checked[0].wrong
    assert (found.count, found.not_finite, found.index, found.found) == (2, 2, (0, 0, 0, 5), "nan")
    assert float(found.right) == case.exact[0, 0, 0, 5]
    words = shlex.split(checked[0].command)
    only = Asked(re.compile(words[words.index("--only") + 1]))
    assert [only.wants(c.name) for c in checked] == [True] + [False] * (len(checked) - 1)
    assert [c.name for c in _verified.every_config(case, "cuda", asked=only) if c.was_run] == [checked[0].name]


def test_a_wrong_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = verify.Report()
    exact = torch.ones(4)
    case = Case("tk.f", "fp32", lambda: torch.tensor([1, 2, torch.nan, 1]), lambda: exact)
    for checked in _verified.every_config(case, "cpu", asked=Asked(seed=3)):
        report.add(checked)
    assert "2 of 4 elements are wrong, 1 of them NaN or infinite; the first at [1] is 2.0" in capsys.readouterr().out
    (failure,) = json.loads(as_json(report.plain()))["failures"]
    assert failure["function"] == "tk.f" and failure["call"] == "fp32" and failure["seed"] == 3
    assert failure["wrong"] == [
        {"result": 0, "shape": [4], "count": 2, "not_finite": 1, "index": [1], "found": "2.0", "right": "1.0"}
    ]
    assert "--seed 3" in failure["command"] and not report.is_good


def test_runs_that_are_repeated_are_held_each() -> None:
    """One of five is wrong, and it is that one which is described."""
    results = iter([1.0, 1.0, 1.0, torch.nan, 1.0, 1.0])  # the first is of the call that is described
    case = Case("tk.f", "fp32", lambda: torch.full((2,), next(results)), lambda: torch.ones(2))
    (checked,) = _verified.every_config(case, "cpu", asked=Asked(repeat=5))
    assert (checked.runs, checked.bad, checked.wrong[0].found) == (5, 1, "nan")
    assert "in 1 of 5 runs" in str(checked)
    report = verify.Report()
    report.add(checked)
    assert report.tallies["tk.f", "ATen"].runs == 5 and not report.is_good


def test_wrong_results_of_generated_ops_and_mods_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _verified.generated.results
    monkeypatch.setattr(register, "names", lambda: ["softmax"])
    monkeypatch.setattr(_verified.generated, "results", lambda *args: [_broken(x) for x in right(*args)])
    monkeypatch.setattr(register, "attention_names", list)
    checked = next(c for c in _verified.generated_ops("cpu") if c.was_run)
    assert checked.wrong[0].count == 2 and checked.wrong[0].found == "nan" and checked.name.startswith("softmax(")


def test_wrong_products_are_described(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right, names, ran = tk.mm, [], []

    def mm(*args: Any, config: int, **kwargs: Any) -> torch.Tensor:
        ran.append(config)
        result = right(*args, **kwargs)
        return _broken(result) if config == ran[0] else result

    monkeypatch.setattr(verify, "describe", lambda _, *args, **kwargs: described_gpu.describe(right, *args, **kwargs))
    monkeypatch.setattr(tk, "mm", mm)
    a, b = torch.randn(256, 128).bfloat16(), torch.randn(128, 256).bfloat16()
    report = verify.Report()
    verify._run_candidates(verify.Call(a, b, None, "none", None, None), report)
    (failure,) = report.failures
    names = [name for name, tally in report.tallies.items() if not tally.is_good]
    assert len(report.tallies) > 1 and names == [(failure.kernel, failure.config)]
    assert failure.wrong[0].index == (0, 5) and "bfloat16[256, 128], bfloat16[128, 256]" in str(failure)
    assert math.isnan(report.tallies[names[0]].max), "the tables show errors over torch's"
    assert all(0 < t.max <= 2 for t in report.tallies.values() if t.is_good)


def test_only_what_is_asked_for_is_run(on_h100: None) -> None:
    only = Asked(re.compile("weight_grad.*float16.* by weight_grad_pointer"))
    checked = list(_verified.convolutions("cpu", _verified.GEOMETRIES[:1], only))
    ran = {(c.function, c.kernel) for c in checked if c.was_run}
    assert ran == {("tk.conv_weight_grad", "weight_grad_pointer")}


def test_a_seed_makes_other_arguments() -> None:
    def first(seed: int) -> torch.Tensor:
        case = next(_verified._of_convolution(_verified.GEOMETRIES[1], torch.float32, "ieee", False, "cpu", seed))
        return case.exact

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


@pytest.mark.parametrize("options", [["--only", "("], ["--repeat", "0"]])
def test_what_cannot_be_asked_for(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--no-gpu", *options]) == 2
    assert f"tk verify: {options[0]} {options[1]}: " in capsys.readouterr().err


def test_free_memory_is_asked_for_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given out is left alone, and so is what other streams have. A pool of small blocks gives none that is
    larger than 1 MiB."""
    mib = 1 << 20

    def segment(kind: str, stream: int, *blocks: tuple[str, int]) -> dict[str, Any]:
        return {"segment_type": kind, "stream": stream, "blocks": [{"state": s, "size": n} for s, n in blocks]}

    snapshot = [
        segment("small", 0, ("active_allocated", 512), ("inactive", mib + 1536), ("active_pending_free", 1024)),
        segment("large", 0, ("inactive", 3 * mib), ("active_allocated", 17 * mib)),
        segment("large", 7, ("inactive", 20 * mib)),
    ]
    assert free_blocks(snapshot, 0) == [mib, 1536, 3 * mib]
    made, nans = list[torch.Tensor](), _wrong._nans
    monkeypatch.setattr(_wrong, "_AT_LEAST", [mib])
    monkeypatch.setattr(_wrong, "_nans", lambda size, device: made.append(nans(size, device)) or made[-1])
    fill_free_memory("cpu", snapshot)
    assert [x.numel() for x in made] == [3 * mib, mib, 1536]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn):
        assert all(bool(x.view(dtype).float().isnan().all()) for x in made)
    made.clear()
    fill_free_memory("cpu", [])
    assert [x.numel() for x in made] == [mib], "some memory, where nothing has been given back yet"
