"""The same call gives the same bits; in batch-invariant mode, so does the same row."""

import random

import pytest
import torch

import tk

from .cases import KINDS, Kind
from .device import DEVICE
from .layouts import place
from .variants import Bucket, problems

FEW_TILES = ((4, 512, 8192), (64, 256, 8192), (200, 384, 4096))  # K is cut


@pytest.mark.parametrize("order", ["nn", "nt"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_same_call_same_bits(kind: Kind, order: str) -> None:
    """With every config, while other work makes the programs of a launch arrive in ever different order."""
    noise, side = torch.randn(2048, 2048, device=DEVICE), torch.cuda.Stream()
    different = []
    for operands in problems(Bucket(kind, order, "vector"), FEW_TILES):
        runs, _ = operands.candidates()
        for row in runs:
            first = operands.run(row.config)
            for _ in range(5):
                with torch.cuda.stream(side):
                    noise @ noise
                if not torch.equal(operands.run(row.config), first):
                    different.append(operands.name(row))
    assert not different


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "column"), ("column", "row"), ("row_offset", "row")])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_does_not_depend_on_how_many_came_with_it(kind: Kind, layouts: tuple[str, str]) -> None:
    rng = random.Random(0)
    rows, n, k = 1100, 520, 4104
    a = place(rows, k, kind.dtype, layouts[0], rng).view
    b = place(k, n, kind.dtype, layouts[1], rng).view
    bias = torch.randn(n, device=DEVICE).to(kind.dtype)
    options = {"activation": "gelu", "out_dtype": kind.out_dtype}
    if kind.dtype == torch.float32:
        options["precision"] = kind.precision
    with tk.config.batch_invariant():
        all_rows = tk.mm(a, b, bias, **options)
        some = (1, 2, 7, 16, 17, 64, 100, 128, 256, 300, 512, 1024)
        different = [m for m in some if not torch.equal(tk.mm(a[:m], b, bias, **options), all_rows[:m])]
    assert not different


def test_deterministic_algorithms_are_honoured() -> None:
    """torch's switch takes variants out that do not always give the same bits: none of them may be chosen."""
    a, b = torch.randn(4, 8192, device=DEVICE).bfloat16(), torch.randn(8192, 512, device=DEVICE).bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        by_switch = tk.mm(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    with tk.config.deterministic():
        by_mode = tk.mm(a, b)
    assert torch.equal(by_switch, by_mode)
