"""Groups of rows for Hopper: the persistent kernel of kernels/mm/tma.py, with a tile scheduler that walks the groups.

The rows of all groups are one tensor map, the groups' matrices one of three dimensions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import Expr, ceil_div, minimum
from tk.aot.spec import Arg, Bundle, Config, Const, Constraint, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import OUT_AXIS, Gemm, out_dtype
from tk.kernels.grouped_mm.op import BIAS, DTYPE_AXIS, GROUPS, OF_ROWS, OFFS, OUT, ROWS, STRIDE_OFFS, A, B, longest
from tk.kernels.grouped_mm.pointer import serves
from tk.kernels.hopper.arguments import Maps
from tk.kernels.hopper.epilogue import BatchBiasActivation, BiasActivation, store_group_rows
from tk.kernels.hopper.plans import batch_tensor_map, k_major, resident_clusters, subtile, tensor_map, tile_of
from tk.kernels.hopper.product import multiply, schedule_groups
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tma_load import group_operands
from tk.kernels.hopper.wgmma import wgmma

M, N, K = OF_ROWS.M, OF_ROWS.N, OF_ROWS.K


@gluon.jit
def grouped_mm_tma(maps, offs, bias, out, size, groups, stride_offs, b_step, stride_bias_b, epilogue, stride_om,
                   TILE: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma`` and ``bmm_tma``."""
    a, b = group_operands(maps, b_step, TILE, A_K_MAJOR, B_K_MAJOR)
    store = store_group_rows(maps.out, out, stride_om, size.N, TILE)
    scheduler = schedule_groups(offs, stride_offs, groups, size, TILE)
    of_group = BiasActivation(size.M, size.N, bias, epilogue, False, "vector")
    finish = BatchBiasActivation(of_group, stride_bias_b, "vector")
    multiply(a, b, wgmma(a, b, TILE), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)


# --- The plan ---


def _arguments(point: Point) -> dict[str, Arg | Bundle]:
    c = point.config
    rows = c.block_m // c.cooperative
    a_k, b_k = k_major(point)
    maps = Maps(
        a=tensor_map(A, point.dtype, 1 if a_k else 0, (rows, c.block_k)),
        b=batch_tensor_map(B, point.dtype, 0 if b_k else 1, (c.block_k, c.block_n), is_shared=True),
        out=tensor_map(OUT, out_dtype(point), 1, (rows, subtile(point)), round_to_tf32=False),
    )
    # A group's bias is one row.
    epilogue = OF_ROWS.epilogue()._replace(stride_bias_m=Const(0))
    return dict(
        maps=maps,
        offs=Pointer(OFFS, "i32", aligned=False),
        bias=OF_ROWS.bias_pointer(point.dtype),
        out=Pointer(OUT, out_dtype(point)),
        size=OF_ROWS.size(),
        groups=Int(GROUPS),
        stride_offs=Int(STRIDE_OFFS, "i64"),
        b_step=Int(B.batch_stride != 0),
        stride_bias_b=Int(BIAS.batch_stride, "i64"),
        epilogue=epilogue,
        stride_om=Int(OUT.stride(0), "i64"),
        TILE=Const(tile_of(point)),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
    )


def tiles_of_groups(
    gemm: Gemm, groups: Expr, c: Config, each_reads_b: bool = False
) -> tuple[Work, Expr, tuple[Constraint, ...]]:
    """What a persistent kernel has to do for groups of rows, with how many programs, and what it cannot count.

    each_reads_b: a row of tiles reads its own group's part of b alone."""
    n_tiles = ceil_div(gemm.N, c.block_n)
    of_group = ceil_div(longest(gemm.M_choice, groups), c.block_m)
    waves = ceil_div(groups * of_group * n_tiles, resident_clusters(1))
    work = Work(
        gemm,
        waves=waves,
        k_blocks=waves * ceil_div(gemm.K, c.block_k),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=gemm.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(c.block_m, c.block_n),
        b_reads=of_group if each_reads_b else None,
    )
    # No more programs than there can be tiles.
    most_tiles = (gemm.M // c.block_m + groups) * n_tiles
    constraints = (
        require(groups < 2**20, "fewer than 2**20 groups"),
        require(most_tiles < 2**31 - 2**16, "tiles that 32 bits can count"),
    )
    return work, minimum(resident_clusters(1), most_tiles), constraints


def _plan(point: Point) -> Plan | None:
    if point.out == "fp32" and not point.config.fp32_out:
        return None
    work, grid, countable = tiles_of_groups(OF_ROWS, GROUPS, point.config)
    constraints = (
        *OF_ROWS.suits_tma(point),
        OF_ROWS.out_suits_tma(point),
        require(K > 0, "K > 0"),
        require(B.batch_stride % 8 == 0, "b's matrices a multiple of 8 elements apart"),
        *countable,
    )
    return Plan(
        constraints=constraints,
        serves=serves(point),
        launches=(Launch(grouped_mm_tma, _arguments(point), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---


def _tile(block_m: int, block_n: int, num_stages: int, subtile_n: int, subtile_n_fp32: int, pingpong: bool = True,
          fp32_out: bool = False) -> Config:  # fmt: skip
    """fp32_out: compiled for a result of float32 too."""
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages, subtile_n=subtile_n,
                  subtile_n_fp32=subtile_n_fp32, pingpong=pingpong, cooperative=1 if pingpong else 2,
                  fp32_out=fp32_out)  # fmt: skip
    return Config(f"{block_m}x{block_n}x64_s{num_stages}_{'pingpong' if pingpong else 'coop'}", params)


_CONFIGS = (
    _tile(64, 128, 8, 64, 32),
    _tile(64, 256, 4, 64, 32),
    _tile(128, 128, 6, 32, 16),
    _tile(128, 128, 6, 64, 32, pingpong=False, fp32_out=True),
    _tile(128, 256, 4, 64, 32, pingpong=False),
)
_AXES = {"dtype": DTYPE_AXIS, "precision": ("ieee",), "out": OUT_AXIS, "order": ("nn", "nt")}
KERNELS = (Kernel("grouped_mm_tma", ROWS, _AXES, {90: _CONFIGS}, _plan),)
