"""Two products in one accumulator for Hopper: the persistent kernel of kernels/mm/tma.py, whose ring first brings the
blocks of K of the one and then those of the other."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.aot.expr import Expr, Tensor, ceil_div, minimum
from tk.aot.spec import Arg, Bundle, Const, Int, Kernel, Launch, Plan, Point, TensorMap
from tk.kernels.gemm.cost import Work, predict
from tk.kernels.gemm.problem import EPILOGUE_AXIS, OUT_AXIS, makes_sense, out_dtype, serves
from tk.kernels.hopper.epilogue import BiasActivation, InMatrix, tma_store
from tk.kernels.hopper.plans import config, k_major, like_mm, resident_clusters, subtile, tensor_map, tile_of
from tk.kernels.hopper.product import multiply
from tk.kernels.hopper.stream_k import NoFixup
from tk.kernels.hopper.tile_scheduler import PersistentScheduler, TileOrder
from tk.kernels.hopper.tma_load import TmaOperand, TmaOperandPair, allocate_blocks
from tk.kernels.hopper.wgmma import wgmma
from tk.kernels.mm_plus_mm.op import FIRST, K2, OP, OUT, A, B, C, D, suits_tma

M, N, K = FIRST.M, FIRST.N, FIRST.K


class Maps(NamedTuple):
    """c and d as a and b: of the second product."""

    a: Any
    b: Any
    c: Any
    d: Any
    out: Any


@gluon.jit
def _operand(first, second, second_begins, TILE_ROWS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
             K_MAJOR: gl.constexpr):  # fmt: skip
    """Of the tensor maps of both."""
    smem = allocate_blocks(first, STAGES * BLOCKS)
    a = TmaOperand(first, smem, TILE_ROWS, BLOCKS, K_MAJOR, False, None, False)
    return TmaOperandPair(a, gl.aggregate_replace(a, desc=second), second_begins, smem, TILE_ROWS, K_MAJOR, False)


@gluon.jit
def mm_plus_mm_tma(maps, bias, size, K2, tiles, group, epilogue, TILE: gl.constexpr, A_K_MAJOR: gl.constexpr,
                   B_K_MAJOR: gl.constexpr, EPILOGUE: gl.constexpr):  # fmt: skip
    """Parameters as of ``mm_tma``. K is a's and b's, K2 c's and d's, which are stored the same way round."""
    k_blocks = gl.cdiv(size.K, TILE.BLOCK_K)
    second_begins = k_blocks * TILE.BLOCK_K
    a = _operand(maps.a, maps.c, second_begins, TILE.BLOCK_M, TILE.COOPERATIVE, TILE.STAGES, A_K_MAJOR)
    b = _operand(maps.b, maps.d, second_begins, TILE.BLOCK_N, 1, TILE.STAGES, B_K_MAJOR)
    store = tma_store(maps.out, InMatrix(False), TILE)
    order = TileOrder(gl.cdiv(size.M, TILE.BLOCK_M), gl.cdiv(size.N, TILE.BLOCK_N), group)
    scheduler = PersistentScheduler(tiles, k_blocks + gl.cdiv(K2, TILE.BLOCK_K), order)
    finish = BiasActivation(size.M, size.N, bias, epilogue, False, EPILOGUE)
    multiply(a, b, wgmma(a, b, TILE), scheduler, NoFixup(TILE.BLOCK_M), store, finish, TILE)


# --- The plan ---


def _maps(point: Point) -> Maps:
    c = point.config
    rows = c.block_m // c.cooperative
    a_k, b_k = k_major(point)

    def of_a(t: Tensor) -> TensorMap:
        return tensor_map(t, point.dtype, 1 if a_k else 0, (rows, c.block_k))

    def of_b(t: Tensor) -> TensorMap:
        return tensor_map(t, point.dtype, 0 if b_k else 1, (c.block_k, c.block_n), 1)

    out = tensor_map(OUT, out_dtype(point), 1, (rows, subtile(point)), round_to_tf32=False)
    return Maps(of_a(A), of_b(B), of_a(C), of_b(D), out)


def _arguments(point: Point, tiles: Expr) -> dict[str, Arg | Bundle]:
    a_k, b_k = k_major(point)
    return dict(
        maps=_maps(point),
        bias=FIRST.bias_pointer(point.dtype),
        size=FIRST.size(),
        K2=Int(K2),
        tiles=Int(tiles),
        group=Const(8),
        epilogue=FIRST.epilogue(),
        TILE=Const(tile_of(point)),
        A_K_MAJOR=Const(a_k),
        B_K_MAJOR=Const(b_k),
        EPILOGUE=Const(point.epilogue),
    )


def _plan(point: Point) -> Plan | None:
    c = point.config
    kinds = c.kinds.split()
    is_compiled = point.epilogue in kinds if point.out == "same" else "fp32" in kinds and point.epilogue == "matrix"
    if not makes_sense(point) or not is_compiled:
        return None

    def tiles(rows):  # type: ignore[no-untyped-def]
        return ceil_div(rows, c.block_m) * ceil_div(N, c.block_n)

    waves = ceil_div(tiles(FIRST.M_choice), resident_clusters(1))
    work = Work(
        FIRST,
        waves=waves,
        k_blocks=waves * (ceil_div(K, c.block_k) + ceil_div(K2, c.block_k)),
        flops=2 * c.block_m * c.block_n * c.block_k,
        dram=FIRST.traffic(),
        tile=(c.block_m, c.block_n),
        boxes=(c.block_m, c.block_n),
    )
    served = ("plain",) if point.epilogue == "plain" else EPILOGUE_AXIS[0 if point.out == "fp32" else 1 :]
    grid = minimum(resident_clusters(1), tiles(M))
    return Plan(
        constraints=suits_tma(point),
        serves=serves(point, served),
        launches=(Launch(mm_plus_mm_tma, _arguments(point, tiles(M)), grid=(grid, 1, 1), num_warps=4),),
        cost=predict(point, work, like=like_mm(point)),
        terms=work.terms(point),
    )


# --- The grid ---


_CONFIGS = (
    config(64, 128, 8, 64, 32, kinds="plain matrix"),
    config(128, 64, 8, 32, 16),
    config(128, 128, 6, 32, 16),
    config(128, 128, 6, 64, 32, pingpong=False, kinds="plain matrix fp32"),
    config(128, 256, 4, 64, 32, pingpong=False),
)
_AXES = {
    "dtype": ("bf16", "fp16"),
    "precision": ("ieee",),
    "out": OUT_AXIS,
    "order": ("nn", "nt", "tn", "tt"),
    "epilogue": ("plain", "matrix"),
}
KERNELS = (Kernel("mm_plus_mm_tma", OP, _AXES, {90: _CONFIGS}, _plan),)
