"""Few rows of float8 on Hopper, with swap-AB: the kernel of kernels/mm/cluster_split_k.py, with scales."""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import ceil_div, const, device
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work
from tk.kernels.gemm.problem import batch_invariant, out_dtype
from tk.kernels.hopper.plans import resident_clusters, tensor_map
from tk.kernels.mm.cluster_split_k import sum_by_cluster
from tk.kernels.scaled_mm.op import OP, OUT, SCALE_A, SCALE_B, SCALED, A, B
from tk.kernels.scaled_mm.pointer import scale
from tk.kernels.scaled_mm.tma_plans import AXES, predict, scale_args, serves, takes

M, N, K = SCALED.M, SCALED.N, SCALED.K


@gluon.jit
def scaled_mm_tma_cluster_split_k(a_desc, b_desc, out, scale_rows, scale_cols, bias, rows, cols, K, k_per_split,
                                  stride_om, stride_scale_rows, stride_scale_cols, stride_bias, activation, has_bias,
                                  BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
                                  STAGES: gl.constexpr, BLOCKS: gl.constexpr, PROMOTED: gl.constexpr):  # fmt: skip
    """D = A B^T, rows x cols: columns of b by rows of a, whose scales are scale_rows and scale_cols."""
    x, i, j = sum_by_cluster(a_desc, b_desc, cols, K, k_per_split, BLOCK_M, BLOCK_N, BLOCK_K, True, STAGES, BLOCKS,
                             PROMOTED)  # fmt: skip
    x = scale(x, scale_rows, scale_cols, i, j, rows, cols, stride_scale_rows, stride_scale_cols)
    finish(x, bias, out, i, j, rows, cols, stride_bias, 0, 1, stride_om, 1.0, 1.0, activation, has_bias, "matrix")


def _plan(point: Point) -> Plan | None:
    c = point.config
    if not takes(point):
        return None
    tiles = ceil_div(N, c.block_m) * ceil_div(M, c.block_n)
    k_per_split = ceil_div(ceil_div(K, c.block_k), c.cluster) * c.block_k
    constants = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, STAGES=c.num_stages, BLOCKS=c.cluster,
                     PROMOTED=point.accumulation == "slow")  # fmt: skip
    args = scale_args(SCALED, point, SCALE_A, SCALE_B, swap_ab=True)
    args |= {name: Const(x) for name, x in constants.items()}
    args |= dict(
        a_desc=tensor_map(B, point.b_dtype, 0, (c.block_k, c.block_m), 1, c.cluster),
        b_desc=tensor_map(A, point.dtype, 1, (c.block_n, c.block_k), multicast=c.cluster),
        out=Pointer(OUT, out_dtype(point), aligned=False),
        rows=Int(N),
        cols=Int(M),
        K=Int(K),
        k_per_split=Int(k_per_split),
        stride_om=Int(OUT.stride(0), "i64"),
    )
    launch = Launch(
        scaled_mm_tma_cluster_split_k,
        args,
        grid=(tiles, 1, 1),
        num_warps=c.block_m // 16,
        num_ctas=c.cluster,
        dependent=SCALED.pdl,
    )
    k_blocks = k_per_split // c.block_k
    waves = ceil_div(tiles, resident_clusters(c.cluster, c.occupancy))
    work = Work(
        SCALED,
        waves=waves,
        k_blocks=waves * k_blocks,
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=SCALED.traffic(),
        tile=(c.block_n, c.block_m),
        boxes=(c.block_n, c.block_m),
        sm_k_blocks=ceil_div(tiles * c.cluster, device.sm_count) * k_blocks if c.occupancy > 1 else const(0),
    )
    return Plan(
        constraints=(
            *SCALED.suits_tma(point),
            batch_invariant(),
            require(M <= 4 * c.block_n, f"M <= {4 * c.block_n}"),
        ),
        serves=serves(point),
        launches=(launch,),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---

# Rows of out in a tile, blocks of a cluster, occupancy (programs that a multiprocessor holds at once).
_SHAPES = ((16, 1, 2), (16, 2, 2), (16, 4, 2), (32, 1, 2), (64, 4, 1))


def _configs() -> Iterator[Config]:
    """As mm's of as many bytes in the ring; what accumulates slowly adds up after 128 values of K."""
    for rows, cluster, occupancy in _SHAPES:
        for accumulation, block_k in (("fast", 256), ("slow", 128)):
            stages, like_stages = (200 * 1024 // occupancy // ((64 + rows) * n) for n in (block_k, 256))
            params = dict(block_m=64, block_n=rows, block_k=block_k, num_stages=stages, cluster=cluster,
                          occupancy=occupancy, accumulations=accumulation, all_types=False,
                          like=f"{rows}x64x128_s{like_stages}_cluster_split_k_c1x1x{cluster}",
                          like_block_k=256)  # fmt: skip
            yield Config(f"{rows}x64x{block_k}_s{stages}_cluster_split_k_c1x1x{cluster}", params)


KERNELS = (Kernel("scaled_mm_tma_cluster_split_k", OP, AXES, {90: tuple(_configs())}, _plan),)
