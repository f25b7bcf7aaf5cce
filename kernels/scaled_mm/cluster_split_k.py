"""Few rows of float8 on Hopper, with swap-AB: the kernel of kernels/mm/cluster_split_k.py, with scales."""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.spec import Config, Const, Kernel, Plan, Point
from tk.kernels.epilogue import finish
from tk.kernels.gemm.arguments import Epilogue
from tk.kernels.hopper.plans import ClusterSplitK
from tk.kernels.mm.cluster_split_k import sum_by_cluster
from tk.kernels.scaled_mm.op import OP, SCALE_A, SCALE_B, SCALED
from tk.kernels.scaled_mm.pointer import scale
from tk.kernels.scaled_mm.tma_plans import AXES, predict, scale_args, serves, takes


@gluon.jit
def scaled_mm_tma_cluster_split_k(a, b, out, scales, bias, size, k_per_split, stride_om, epilogue, TILE: gl.constexpr,
                                  PROMOTED: gl.constexpr):  # fmt: skip
    """D = A B^T of tensor maps: columns of b by rows of a, with their scales."""
    x, i, j = sum_by_cluster(a, b, size, k_per_split, TILE, True, PROMOTED)
    x = scale(x, scales.rows, scales.cols, i, j, size.M, size.N, epilogue.stride_scale_rows,
              epilogue.stride_scale_cols)  # fmt: skip
    plain = Epilogue(epilogue.stride_bias, 0, 1.0, 1.0, epilogue.activation, epilogue.has_bias)
    finish(x, bias, out, i, j, size.M, size.N, 1, stride_om, plain, "matrix")


def _plan(point: Point) -> Plan | None:
    if not takes(point):
        return None
    args = scale_args(SCALED, point, SCALE_A, SCALE_B, swap_ab=True)
    args |= dict(PROMOTED=Const(point.accumulation == "slow"))
    cut = ClusterSplitK(SCALED, point.config)
    return cut.plan(point, scaled_mm_tma_cluster_split_k, args, serves(point), predict)


# --- The grid ---

# Rows of out in a tile, blocks of a cluster, occupancy (programs that a multiprocessor holds at once).
_SHAPES = ((16, 1, 2), (16, 2, 2), (16, 4, 2), (32, 1, 2), (64, 4, 1))


def _configs() -> Iterator[Config]:
    """The configs: those of mm with as many bytes in the ring; what accumulates slowly adds up after 128 values of
    K."""
    for rows, cluster, occupancy in _SHAPES:
        for accumulation, block_k in (("fast", 256), ("slow", 128)):
            stages, like_stages = (200 * 1024 // occupancy // ((64 + rows) * n) for n in (block_k, 256))
            params = dict(block_m=64, block_n=rows, block_k=block_k, num_stages=stages, cluster=cluster,
                          occupancy=occupancy, accumulations=accumulation, all_types=False,
                          like=f"{rows}x64x128_s{like_stages}_cluster_split_k_c1x1x{cluster}",
                          like_block_k=256)  # fmt: skip
            yield Config(f"{rows}x64x{block_k}_s{stages}_cluster_split_k_c1x1x{cluster}", params)


KERNELS = (Kernel("scaled_mm_tma_cluster_split_k", OP, AXES, {90: tuple(_configs())}, _plan),)
