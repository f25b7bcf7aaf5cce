"""The calls by which tests/gpu runs every variant of a generated op do suit every variant. Nothing is compiled: the
whole grid is packed with images that are none, and asked about on a described GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tk
from tk import capi
from tk.generated import register

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for benchmarks/

from tests.gpu import op_cases  # noqa: E402

from tk.aot.assemble import Compiled, add_op  # noqa: E402
from tk.aot.compile import Target  # noqa: E402
from tk.aot.grid import enumerate_grid  # noqa: E402
from tk.aot.pack import PackWriter  # noqa: E402
from tk.build.sources import file_families  # noqa: E402

from .generated_ops import _artifact  # noqa: E402
from .test_generated_launch import CUDA, standing_for  # noqa: E402

SOURCE = """
import tk

@tk.op(x="T[..., N]", T=("bf16", "fp32"))
def every_softmax(x):
    return x.softmax(-1)

@tk.op(x="T[M, N]", T=("bf16",))
def every_column_sum(x):
    return x.sum(0)

@tk.op(x="T[...]", up="bool", T=("bf16",))
def every_shift(x, up):
    return x + 1 if up else x - 1
"""


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> int:
    """With all variants of the ops above loaded."""
    folder = tmp_path_factory.mktemp("every")
    (folder / "every.py").write_text(SOURCE)
    writer = PackWriter(90, flags=0, compiler="triton 0.0, ptxas 0.0")
    for family in file_families([folder / "every.py"]):
        grid = enumerate_grid(family, 90)
        compiled = [Compiled(v, tuple(_artifact() for _ in v.plan.launches)) for v in grid.variants]
        add_op(writer, grid, compiled, Target(90), {})
    (folder / "every.tkpack").write_bytes(writer.finish())
    tk.load_pack(folder / "every.tkpack")
    return capi.describe_device(132, 90, 232448, 60 << 20)


def run(op: Any, args: list[Any]) -> Any:
    return getattr(torch.ops.tk, op.name).default.redispatch(CUDA, *args)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_cases, "DEVICE", "cpu")


@pytest.mark.parametrize("name", ["every_softmax", "every_column_sum", "every_shift"])
def test_the_problems_suit_every_variant(h200: int, name: str) -> None:
    op = register.find(name)
    assert op is not None
    ran: set[int] = set()
    waiting: dict[int, str] = {}
    for case in op_cases.problems(op):
        args = op_cases.make(case)
        with standing_for(h200):
            runs, rests = op_cases.variants(op, args, run)
        ran |= set(runs)
        waiting |= rests
    assert len(ran) >= 6
    assert not [why for variant, why in waiting.items() if variant not in ran]


def test_few_columns_of_many_rows_are_split(h200: int) -> None:
    """A split reduction is a config that is chosen, where one program for all rows would leave the GPU idle."""

    def chosen(rows: int, columns: int) -> str:
        tensors = (capi.Matrix(torch.bfloat16, (rows, columns), (columns, 1)),
                   capi.Matrix(torch.bfloat16, (columns,), (1,)))  # fmt: skip
        return capi.choose(capi.Problem("every_column_sum", tensors, device=h200)).config_name

    assert chosen(1_000_000, 16).startswith(("split_", "interleaved_"))
    assert not chosen(100, 100_000).startswith("split_")
