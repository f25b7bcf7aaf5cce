"""Settings of rows: vectors at any address, rows that a walk fetches ahead or reads again, and blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import host
import pytest
import torch

from tk.codegen.family import Generated, generate
from tk.codegen.scheduling.settings import SETTINGS, Setting, replaced
from tk.generated import Declared, op
from tk.kernels.generated import norms, softmax


@cache
def generated(declared: Declared, grad: bool = False) -> Generated:
    return generate(declared.fn, declared.signature, declared.name, grad)


@cache
def backward_of(norm: str) -> Generated:
    found = generated(getattr(norms, norm), grad=True).backward
    assert found is not None
    return found


def results_of(g: Generated, kind: str, layout: str, settings: Sequence[Setting], args: Sequence[object]) -> dict:
    """What the variants with these settings instead of a kind's own give, by setting. All must suit the call."""
    table = {**SETTINGS, kind: {**SETTINGS[kind], layout: tuple(settings)}}
    found = {}
    with replaced(table):
        for one in settings:
            name = f"{layout} {'walk_' if kind == 'walk' else ''}{one.name}"
            runs = [results for variant, results in host.run_all(g, *args, only=name) if variant == name]
            assert len(runs) == 1, f"{name} suits no such call"
            found[one] = runs[0]
    return found


@op(x="fp32[M, N]", y="fp32[N]")
def every_reduction(x, y):
    variance, mean = torch.var_mean(x, -1)
    scaled = (x - mean.unsqueeze(-1)) * y
    return (variance, mean, scaled, x.argmin(-1), x.argmax(-1), x.amin(-1), (x > 2).any(-1), (x > -9).all(-1),
            (x * 0.01 + 1).prod(-1), torch.logsumexp(x, -1), scaled.flip(-1))  # fmt: skip


@op(x="fp32[M, N]")
def drawn(x):
    return torch.rand_like(x) + x.sum(-1, keepdim=True)


def test_every_segment_draws_its_own_numbers() -> None:
    settings = [Setting(1, 256, 1), Setting(1, 64, 1, segments=3)]
    args = (torch.zeros(3, 176), torch.tensor(7), 4)
    one, other = results_of(generated(drawn), "inner", "aligned", settings, args).values()
    assert torch.equal(one[0], other[0]) and one[0].unique().numel() > 500


@pytest.mark.parametrize(("columns", "segments"), [(65, 2), (128, 2), (161, 3), (250, 4)])
def test_rows_in_segments(columns: int, segments: int) -> None:
    """Only the last is masked, whatever ends in it."""
    torch.manual_seed(columns)
    x, y = torch.randn(3, columns), torch.randn(columns)
    expected = every_reduction.fn(x.double(), y.double())
    settings = [Setting(1, 64, 1, segments=segments), Setting(2, 64, 4, segments=segments)]
    for setting, found in results_of(generated(every_reduction), "inner", "rows", settings, (x, y)).items():
        for i, (mine, exact) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-4, atol=1e-5,
                                       msg=lambda m: f"{setting.name}, result {i}: {m}")  # noqa: B023  # fmt: skip


VECTORS = (Setting(1, 128, 1, vectors=True), Setting(1, 64, 4, segments=2, vectors=True),
           Setting(4, 128, 4, vectors=True), Setting(2, 256, 1, vectors=True))  # fmt: skip


@pytest.mark.parametrize("columns", [78, 97, 101, 104, 112, 127, 128, 135])
def test_rows_in_vectors_at_any_address(columns: int) -> None:
    """Eleven rows begin at every distance from a vector's address that there is."""
    torch.manual_seed(columns)
    x, y = torch.randn(11, columns), torch.randn(columns)
    expected = every_reduction.fn(x.double(), y.double())
    for setting, found in results_of(generated(every_reduction), "inner", "rows", VECTORS, (x, y)).items():
        for i, (mine, exact) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-4, atol=1e-5,
                                       msg=lambda m: f"{setting.name}, result {i}: {m}")  # noqa: B023  # fmt: skip


@pytest.mark.parametrize("setting", VECTORS, ids=lambda s: s.name)
def test_vectors_stay_inside_of_their_rows(setting: Setting) -> None:
    """Between rows that lie apart nothing is written, and what lies there is not read."""
    columns, pitch = 101, 109
    whole = torch.full((9, pitch), float("nan"))
    whole[:, :columns] = torch.randn(9, columns)

    @op(x="fp32[M, N]")
    def shifted(x):
        x.copy_(x - x.amax(-1, keepdim=True))

    changed = whole.clone()
    x = changed[:, :columns]
    (found,) = results_of(generated(shifted), "inner", "rows", [setting], (x,))[setting]
    exact = whole[:, :columns] - whole[:, :columns].amax(-1, keepdim=True)
    assert torch.equal(found, exact)


@pytest.mark.parametrize(("columns", "pitch", "offset", "fits"), [
    (101, 101, 0, True), (101, 109, 0, True), (101, 102, 0, False), (101, 101, 1, False), (15, 15, 0, False),
])  # fmt: skip
def test_what_vectors_ask_of_a_call(columns: int, pitch: int, offset: int, fits: bool) -> None:
    """That rows of all tensors begin alike, at an address of 16 bytes the first, and are not too short."""
    x = torch.randn(8 * pitch + offset)[offset:].as_strided((8, columns), (pitch, 1))
    setting = Setting(1, 128, 1, vectors=True)
    with replaced({**SETTINGS, "inner": {**SETTINGS["inner"], "rows": (setting,)}}):
        runs = list(host.run_all(generated(softmax.softmax), x, only=f"rows {setting.name}"))
    assert len(runs) == fits


@pytest.mark.parametrize(("count", "offset", "fits"), [
    (1000, 0, True), (1001, 0, True), (1007, 0, True), (1001, 1, False),
])  # fmt: skip
def test_elements_that_end_in_no_vector(count: int, offset: int, fits: bool) -> None:
    """The last few are there once. Where an operand begins elsewhere, nothing is in vectors."""

    @op(x="fp32[...]", y="fp32[...]")
    def added(x, y):
        return x + y * 2

    x, y = torch.randn(count), torch.randn(count + offset)[offset:]
    setting = Setting(1, 256, 4, vectors=True)
    with replaced({**SETTINGS, "flat": {**SETTINGS["flat"], "rows": (setting,)}}):
        runs = list(host.run_all(generated(added), x, y, only=f"rows {setting.name}"))
    assert len(runs) == fits
    for _, (found,) in runs:
        assert torch.equal(found, x + y * 2)


WALKS = (Setting(1, 128, 4), Setting(2, 128, 1, stages=2), Setting(4, 128, 1, ahead=True),
         Setting(1, 64, 2, segments=2), Setting(1, 64, 2, segments=2, ahead=True, rereads=True),
         Setting(1, 128, 4, rereads=True), Setting(2, 64, 4, segments=2, rereads=True))  # fmt: skip
WALKS_IN_VECTORS = (Setting(1, 128, 4, vectors=True), Setting(1, 64, 1, segments=2, vectors=True, stages=2),
                    Setting(1, 64, 1, segments=2, vectors=True, ahead=True, rereads=True))  # fmt: skip


@pytest.mark.parametrize(("columns", "layout", "settings"), [
    (112, "aligned", WALKS), (128, "aligned", WALKS), (101, "rows", (*WALKS, *WALKS_IN_VECTORS)),
    (127, "rows", WALKS_IN_VECTORS), (112, "rows", WALKS_IN_VECTORS),
])  # fmt: skip
@pytest.mark.parametrize("rows", [37, 5])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_walks(norm: str, rows: int, columns: int, layout: str, settings: Sequence[Setting],
               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of eight programs, and of fewer where there are fewer rows."""
    monkeypatch.setitem(host.H200, "sm_count", 2)
    g = backward_of(norm)
    torch.manual_seed(rows)
    grad, x, weight = torch.randn(rows, columns), torch.randn(rows, columns) + 1, torch.randn(columns)
    wide = [t.double().requires_grad_() for t in (x, weight, torch.zeros(columns))]
    if norm == "layer_norm":
        torch.nn.functional.layer_norm(wide[0], (columns,), *wide[1:], 1e-5).backward(grad.double())
    else:
        torch.nn.functional.rms_norm(wide[0], (columns,), wide[1], 1e-5).backward(grad.double())
    args = {"grad_0": grad, "x": x, "weight": weight, "eps": 1e-5}
    found = results_of(g, "walk", layout, settings, [args[n] for n in g.signature.params])
    for setting, results in found.items():
        for mine, exact in zip(results, wide, strict=False):
            torch.testing.assert_close(mine.double(), exact.grad, rtol=2e-4, atol=2e-4,
                                       msg=lambda m: f"{setting.name}: {m}")  # noqa: B023  # fmt: skip


def test_rows_that_are_fetched_ahead_are_those_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but each program's first, every line of them, and nothing that is not there."""
    monkeypatch.setitem(host.H200, "sm_count", 2)
    g = backward_of("rms_norm")
    rows, columns = 21, 96
    grad, x, weight = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    args = {"grad_0": grad, "x": x, "weight": weight, "eps": 1e-5}
    host.FETCHED.clear()
    setting = Setting(1, 128, 4, ahead=True)
    results_of(g, "walk", "aligned", [setting], [args[n] for n in g.signature.params])
    lines = range(0, columns * 4, 128)
    to_come = {t.data_ptr() + row * columns * 4 + at for t in (grad, x) for row in range(8, rows) for at in lines}
    assert set(host.FETCHED) == to_come


def test_vectors_walk_only_where_all_rows_of_a_program_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twelve programs the next row of each begins elsewhere."""
    monkeypatch.setitem(host.H200, "sm_count", 3)
    g = backward_of("rms_norm")
    setting = Setting(1, 128, 4, vectors=True)
    with replaced({**SETTINGS, "walk": {**SETTINGS["walk"], "rows": (setting,)}}):
        for rows, fits in ((12, True), (13, False)):
            x, weight = torch.randn(rows, 101), torch.randn(101)
            args = {"grad_0": x, "x": x, "weight": weight, "eps": 1e-5}
            runs = host.run_all(g, *(args[n] for n in g.signature.params), only=f"rows walk_{setting.name}")
            assert len(list(runs)) == fits
