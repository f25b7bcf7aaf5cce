"""A product as tiles of out: the figures that a plan's launch and its predicted time are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tk.aot.expr import Expr, ceil_div
from tk.aot.spec import Config
from tk.kernels.gemm.cost import Work
from tk.kernels.gemm.problem import Gemm


@dataclass(frozen=True)
class Tiles:
    """count: how many tiles a launch has. expected: as many as a choice takes it for. shape: rows and columns of a
    tile, which a cluster of so many thread blocks has together. k_blocks: of one tile, each of block_k. b_reads: see
    ``Work``."""

    gemm: Gemm
    shape: tuple[int, int]
    block_k: int
    count: Expr
    expected: Expr
    k_blocks: Expr
    cluster: int = 1
    b_reads: Expr | None = None

    def work(self, at_once: Expr, boxes: tuple[int, int] = (1, 1), sharing: int = 1) -> Work:
        """at_once: tiles that the GPU works on at a time, `sharing` of them by the same tensor cores. boxes: see
        ``Work``."""
        rows, cols = self.shape
        waves = ceil_div(self.expected, at_once)
        return Work(
            self.gemm,
            waves=waves,
            k_blocks=waves * self.k_blocks * sharing,
            flops=2 * rows * cols * self.block_k // self.cluster,
            dram=self.gemm.traffic(),
            tile=self.shape,
            boxes=boxes,
            b_reads=self.b_reads,
        )


def tiles_of(gemm: Gemm, config: Config, shape: tuple[int, int] | None = None, cluster: int = 1) -> Tiles:
    """Cuts one product into tiles. shape: in place of the config's block_m and block_n."""
    rows, cols = shape = shape or (config.block_m, config.block_n)
    block_k = config.block_k
    count, expected = (ceil_div(m, rows) * ceil_div(gemm.N, cols) for m in (gemm.M, gemm.M_choice))
    return Tiles(gemm, shape, block_k, count, expected, ceil_div(gemm.K, block_k), cluster)
