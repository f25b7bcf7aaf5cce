"""Every variant of the op mm: which buckets there are, and problems that each variant of a bucket can take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks import products
from tk import capi
from tk.heuristics.problem import describe

from .cases import KINDS, Kind
from .device import DEVICE
from .layouts import place

ORDERS = ("nn", "nt", "tn", "tt", "ss")
EPILOGUES = ("plain", "vector", "matrix")
_LAYOUTS = {"n": "row", "t": "column", "s": "strided"}
_ODD_LAYOUTS = {"n": "row_offset", "t": "column_offset", "s": "strided"}

# M, N, K: what the variants of a bucket ask for between them. One row, few and many; K a multiple of every block, of 16
# alone and of nothing; few tiles with a long K, which is cut; nothing a multiple of anything, at odd addresses.
SIZES = (
    (16, 256, 4096), (8, 264, 4104), (32, 272, 1040), (48, 512, 2064), (208, 528, 1040), (256, 512, 512),
    (300, 1000, 1032), (64, 272, 1035), (1, 264, 4104), (2, 272, 1040),
)  # fmt: skip
ODD_SIZES = ((33, 77, 95), (7, 130, 1999), (200, 301, 65), (1, 131, 1999), (2, 77, 4101), (3, 130, 1999))


@dataclass(frozen=True)
class Bucket:
    """Problems that share a list of variants."""

    kind: Kind
    order: str
    epilogue: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.order}-{self.epilogue}"


BUCKETS = tuple(Bucket(*axes) for axes in itertools.product(KINDS, ORDERS, EPILOGUES))


@dataclass(frozen=True)
class Operands:
    """A problem of a bucket, its tensors made."""

    label: str
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    activation: int
    kind: Kind

    def run(self, config: int = -1) -> torch.Tensor:
        precision = products.PRECISIONS[self.kind.precision]
        return torch.ops.tk.mm(self.a, self.b, self.bias, self.activation, self.kind.out_dtype, precision, config)

    def name(self, row: capi.Candidate) -> str:
        return f"{self.label} {row.kernel_name}/{row.config_name}"

    def problem(self) -> capi.Problem:
        described = describe(self.run)
        assert described is not None
        return described.problem

    def candidates(self) -> tuple[list[capi.Candidate], list[capi.Candidate]]:
        """Those that their config runs, and those that it does not: a config may have several variants."""
        problem = self.problem()
        runs, rests = [], []
        for row in capi.candidates(problem):
            taken = row.fits and capi.choose(problem, row.config).variant == row.variant
            (runs if taken else rests).append(row)
        return runs, rests

    def reference(self) -> torch.Tensor:
        return products.reference(self.a, self.b, self.bias, self.activation)


def problems(bucket: Bucket, sizes: tuple[tuple[int, int, int], ...] = SIZES) -> Iterator[Operands]:
    """One for each size, and some at odd addresses."""
    rng = random.Random(str(bucket))
    for odd, (m, n, k) in [(False, size) for size in sizes] + [(True, size) for size in ODD_SIZES]:
        if m == 1 and (bucket.order[0] == "t" or bucket.epilogue == "matrix"):
            continue  # a single row is one however it was made, of a as of bias: that is another bucket
        layouts = _ODD_LAYOUTS if odd else _LAYOUTS
        a = place(m, k, bucket.kind.dtype, layouts[bucket.order[0]], rng).view
        b = place(k, n, bucket.kind.dtype, layouts[bucket.order[1]], rng).view
        shape = {"plain": None, "vector": (n,), "matrix": (m, n)}[bucket.epilogue]
        bias = None if shape is None else torch.randn(shape, device=DEVICE).to(bucket.kind.dtype)
        activation = 0 if bucket.epilogue == "plain" else 1 + (m + n) % 4
        yield Operands(f"{bucket} {m}x{n}x{k}{' odd' if odd else ''}", a, b, bias, activation, bucket.kind)
