"""`tk verify` runs every config that fits, and says what it did not run. An H100 is described to the engine; what runs
in the place of its kernels is the reference on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tk import capi, errors
from tk._packs import CoverageRow
from tk.cli import _verified, _verified_attention, verify
from tk.cli._verified import Case, Checked
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

    def held(case: Case, kernel: str, config: str) -> Checked:
        if kernel.startswith(problem.op) and config in wanted:
            chosen.append((config, capi.choose(problem).config_name))
        return right(case, kernel, config)

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

    def checked(case: Case, device: str) -> Iterator[Checked]:
        *first, exact = case.exact
        off = times * 2.0**-17 * case.sizes[-1].abs().max()
        return _verified.every_config(replace(case, run=lambda: [*first, exact + off]), device)

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


# In a process of its own, where no test has loaded another pack.
LEFT_OUT = """
from functools import partial
import tk
from tk.cli import _verified
from tk.generated import register
from tk.heuristics import described

_verified.describe = partial(described.describe, described.gpu(90))
_verified._of_example = lambda example, args, number, kernel, config: _verified.Checked(kernel, config)
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
