"""Products of few rows on Hopper: out^T = b^T a^T, a tile of out for each cluster of thread blocks, K cut among these.

wgmma always has 64 rows: here they are columns of b, and the few rows of a are its N. A block streams its share of b
through a ring of TMA loads; no producer warps, since one product in flight is enough to keep a memory-bound ring full.
The blocks of a cluster then exchange their partial sums through distributed shared memory: each adds one part of the
tile, always in the same order. No scratch memory, no counters, no second pass.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tk.aot.expr import ceil_div, const, device
from tk.aot.spec import Config, Const, Int, Kernel, Launch, Plan, Point, Pointer, require
from tk.kernels.epilogue import activate
from tk.kernels.mm_hopper import (
    ONCE_POLICY,
    bias_strides,
    clusters_at_once,
    descriptor,
    let_the_next_begin,
    side_by_side,
    suits_wgmma,
    wait_for_those_before,
)
from tk.kernels.mm_op import (
    DTYPE_AXIS,
    EPILOGUE_AXIS,
    OP,
    OUT,
    OUT_AXIS,
    PRECISION_AXIS,
    A,
    B,
    K,
    M,
    N,
    Work,
    batch_invariant,
    epilogue_args,
    out_dtype,
    predict,
    serves,
    suits_tma,
    traffic,
)


@gluon.constexpr_function
def _exchange(blocks, rows, num_warps):
    """[blocks, rows, cols]: every block of the cluster has all parts of its share of the rows; rows contiguous."""
    share = rows // blocks
    wide = min(8, share)
    lanes = min(32, share // wide)
    return gl.BlockedLayout([blocks, wide, 1], [1, lanes, 32 // lanes], [1, 1, num_warps], [1, 2, 0],
                            cga_layout=side_by_side(blocks, 1, 3))  # fmt: skip


@gluon.jit
def _load_p(desc, ring, full, slot, row, k, pred, P_K: gl.constexpr, BYTES: gl.constexpr):
    """Also announces the bytes of both operands."""
    mbarrier.expect(full.index(slot), BYTES, pred=pred)
    at = [row, k] if P_K else [k, row]
    tma.async_load(desc, at, full.index(slot), ring.index(slot), pred=pred, cache_policy=ONCE_POLICY)


@gluon.jit
def mm_hopper_rows(p_desc, q_desc, out, bias, rows, cols, K, k_part, stride_om, stride_bias_p, stride_bias_q,
                   alpha, beta, activation, has_bias,
                   BP: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, P_K: gl.constexpr, STAGES: gl.constexpr,
                   BLOCKS: gl.constexpr):  # fmt: skip
    """rows, cols: of P (columns of b) and Q (rows of a). k_part: how much of K each of the BLOCKS of a cluster sums, a
    multiple of BK."""
    dtype: gl.constexpr = p_desc.dtype
    BYTES: gl.constexpr = p_desc.nbytes_per_cta + q_desc.nbytes_per_cta
    p_s = gl.allocate_shared_memory(dtype, [STAGES] + p_desc.block_shape, p_desc.layout)
    q_s = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.barrier()
    let_the_next_begin()
    rank = 0
    if BLOCKS > 1:
        rank = gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], gl.int32, is_pure=True, pack=1)
    n_q = gl.cdiv(cols, BQ)
    tile = gl.program_id(0)
    p = tile // n_q
    # To the compiler P's tile has BLOCKS * BP rows, of which this block has the rank-th BP. They are the same rows, at
    # other values of k.
    row = (p - rank) * BP
    col = (tile % n_q) * BQ
    k0 = rank * k_part
    n_k = gl.cdiv(gl.minimum(k_part, K - k0), BK)

    for i in gl.static_range(STAGES - 1):
        _load_p(p_desc, p_s, full, i, row, k0 + i * BK, i < n_k, P_K, BYTES)
    wait_for_those_before()
    for i in gl.static_range(STAGES - 1):
        tma.async_load(q_desc, [col, k0 + i * BK], full.index(i), q_s.index(i), pred=i < n_k)

    K_STEP: gl.constexpr = 256 // dtype.primitive_bitwidth
    CGA: gl.constexpr = side_by_side(BLOCKS, 0, 2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BQ, K_STEP], CGA)
    acc = gl.zeros([BLOCKS * BP, BQ], gl.float32, MMA)
    slot = 0
    phase = 0
    free = STAGES - 1
    for i in range(n_k):
        mbarrier.wait(full.index(slot), phase)
        x = p_s.index(slot)
        if not P_K:
            x = x.permute([1, 0])
        acc = warpgroup_mma(x, q_s.index(slot).permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # the product before is done: its slot is free
        k = i + STAGES - 1
        _load_p(p_desc, p_s, full, free, row, k0 + k * BK, k < n_k, P_K, BYTES)
        tma.async_load(q_desc, [col, k0 + k * BK], full.index(free), q_s.index(free), pred=k < n_k)
        free = slot
        slot += 1
        wrap = slot == STAGES
        slot = gl.where(wrap, 0, slot)
        phase = gl.where(wrap, phase ^ 1, phase)
    acc = warpgroup_mma_wait(0, [acc])

    EXCHANGE: gl.constexpr = _exchange(BLOCKS, BP, gl.num_warps())
    x = gl.sum(gl.convert_layout(acc.reshape([BLOCKS, BP, BQ]), EXCHANGE), axis=0)
    L2: gl.constexpr = x.type.layout
    i = p * BP + gl.arange(0, BP, gl.SliceLayout(1, L2))
    j = col + gl.arange(0, BQ, gl.SliceLayout(0, L2))
    inside = (i < rows)[:, None] & (j < cols)[None, :]
    x = x * alpha
    if has_bias != 0:
        at = i[:, None].to(gl.int64) * stride_bias_p + j[None, :].to(gl.int64) * stride_bias_q
        x += beta * gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)
    x = activate(x, activation)
    gl.store(out + j[None, :].to(gl.int64) * stride_om + i[:, None], x.to(out.dtype.element_ty), mask=inside)


# --- The plan ---


def _plan(point: Point) -> Plan | None:
    c = point.config
    p_along_k = point.order[1] == "t"
    # tf32 has no way from shared memory to wgmma but along K.
    if not suits_wgmma(point, swap=True) or (point.dtype == "fp32" and not p_along_k):
        return None
    tiles = ceil_div(N, c.bp) * ceil_div(M, c.bq)
    k_part = ceil_div(ceil_div(K, c.bk), c.blocks) * c.bk
    constants = dict(BP=c.bp, BQ=c.bq, BK=c.bk, P_K=p_along_k, STAGES=c.stages, BLOCKS=c.blocks)
    args = epilogue_args(point.dtype) | bias_strides(swap=True) | {name: Const(x) for name, x in constants.items()}
    args |= dict(
        p_desc=descriptor(B, point.dtype, 0 if p_along_k else 1, (c.bk, c.bp), 1, c.blocks),
        q_desc=descriptor(A, point.dtype, 1, (c.bq, c.bk), shared_by=c.blocks),
        out=Pointer(OUT, out_dtype(point), aligned=False),
        rows=Int(N),
        cols=Int(M),
        K=Int(K),
        k_part=Int(k_part),
        stride_om=Int(OUT.stride(0), "i64"),
    )
    launch = Launch(
        mm_hopper_rows,
        args,
        grid=(tiles, 1, 1),
        num_warps=c.bp // 16,
        num_ctas=c.blocks,
        dependent=OP.local("begins_early"),
    )
    waves = ceil_div(tiles, clusters_at_once(c.blocks, c.resident))
    work = Work(
        waves=waves,
        steps=waves * (k_part // c.bk),
        flops=2 * c.bp * c.bq * c.bk,
        moved=traffic(),
        block=(c.bq, c.bp),
        boxes=(c.bq, c.bp),
        shared=ceil_div(tiles * c.blocks, device.sm_count) * (k_part // c.bk) if c.resident > 1 else const(0),
    )
    return Plan(
        constraints=(
            *suits_tma(point),
            batch_invariant(),
            require(M <= 4 * c.bq, f"M <= {4 * c.bq}"),
        ),
        serves=serves(point, EPILOGUE_AXIS),
        launches=(launch,),
        cost=predict(point, work),
        terms=work.terms(point),
    )


# --- The grid ---


# BQ, blocks, programs that a multiprocessor holds at once, and the itemsizes that it is for: 16-bit operands, tf32.
_SHAPES = (
    *((16, 1, 2, (2, 4)), (16, 2, 2, (2,)), (16, 4, 2, (2, 4))),
    (32, 1, 2, (2,)),
    *((64, 2, 1, (2,)), (64, 4, 1, (2, 4))),
)


def _configs() -> Iterator[Config]:
    """A ring of 200 KB for one block on a multiprocessor, or of 100 KB for two of them."""
    for bq, blocks, resident, itemsizes in _SHAPES:
        stages = 200 * 1024 // resident // (2 * (64 + bq) * 128)
        for size in itemsizes:
            name = f"rows_64x{bq}_c{blocks}_r{resident}" + ("_tf32" if size == 4 else "")
            params = dict(bp=64, bq=bq, bk=256 // size, stages=stages, blocks=blocks, resident=resident, itemsize=size)
            yield Config(name, params)


_AXES = {
    "dtype": DTYPE_AXIS,
    "precision": PRECISION_AXIS,
    "order": ("nn", "nt"),
    "epilogue": ("matrix",),
    "out": OUT_AXIS,
}

KERNELS = (Kernel("mm_hopper_rows", OP, _AXES, {90: tuple(_configs())}, _plan),)
