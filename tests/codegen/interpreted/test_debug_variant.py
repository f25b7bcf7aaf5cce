"""The debug variant: what is out of bounds stops it, what is not finite is said, and all else is as without."""

from __future__ import annotations

import host
import pytest
import torch
import torch.nn.functional as F

from tk.codegen.family import Generated, generate
from tk.generated import op


def build(fn, debug: bool = True, **texts) -> Generated:
    return generate(fn, op(**texts)(fn).signature, "looked_up", debug=debug)


def look_up(weight, at):
    return F.embedding(at, weight), weight[at[0]]


TEXTS = {"weight": "fp32[V, D]", "at": "i64[M, K]"}


@pytest.mark.parametrize("row", [5, -6])
def test_index_out_of_bounds(row: int) -> None:
    weight, at = torch.randn(5, 16), torch.tensor([[0, row, 4]])
    with pytest.raises(Exception, match=r"tk\.looked_up: index out of bounds: dimension -2 of weight, which is read"):
        list(host.run_all(build(look_up, **TEXTS), weight, at))


def test_indices_within_bounds() -> None:
    weight, at = torch.randn(5, 16), torch.tensor([[0, 3, 4], [1, 1, 2]])
    for name, (rows, first) in host.run_all(build(look_up, **TEXTS), weight, at):
        assert torch.equal(rows, weight[at]) and torch.equal(first, weight[at[0]]), name


def test_a_write_out_of_bounds() -> None:
    found = build(lambda x, at, y: x.index_add(0, at, y), x="fp32[M, N]", at="i64[K]", y="fp32[K, N]")
    with pytest.raises(Exception, match=r"dimension -2 of out0, which is written"):
        list(host.run_all(found, torch.zeros(3, 16), torch.tensor([0, 3]), torch.ones(2, 16), only="rows 1"))


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_finite_is_said(bad: float, capsys: pytest.CaptureFixture) -> None:
    found = build(lambda x: (x * 2, x.sum(-1), x.sum()), x="bf16[M, N]")
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    list(host.run_all(found, x))
    assert "tk.looked_up" not in capsys.readouterr().out
    x[1, 2] = bad
    list(host.run_all(found, x))
    said = capsys.readouterr().out
    for name in ("out0", "out1", "out2"):
        assert f"tk.looked_up: NaN or infinity in {name}, so many times in this program: " in said


def test_without_it_the_message_is_a_trap() -> None:
    weight, at = torch.randn(6, 16)[:5], torch.tensor([[0, 5]])  # there is memory behind the last row
    with pytest.raises(Exception, match="index out of bounds: a trap"):
        list(host.run_all(build(look_up, debug=False, **TEXTS), weight, at))
