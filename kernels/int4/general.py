"""Every layout and alignment, and every group: weights are made element by element."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, Tensor, device
from tk.aot.spec import Arg, Bundle, Config, Const, Int, Kernel, Launch, Plan, Point, Pointer
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import predict_or
from tk.kernels.gemm.pointer import ARCHS, tile_coordinates
from tk.kernels.gemm.problem import OUT_AXIS, out_dtype
from tk.kernels.gemm.tiles import tiles_of
from tk.kernels.int4.op import DTYPE_AXIS, GROUP, INT4, OP, SCALES, ZEROS, A, B, serves
from tk.kernels.int4.unpack import TYPES, Elements, load_weights


@triton.jit
def int4_general(a, weight, bias, out, size, stride_am, stride_ak, stride_om, stride_on, epilogue,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                 DTYPE: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    m, n = tile_coordinates(tl.program_id(0), size.M, size.N, BLOCK_M, BLOCK_N, 8)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, size.K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        at = a + rows.to(tl.int64)[:, None] * stride_am + ks.to(tl.int64)[None, :] * stride_ak
        x = tl.load(at, mask=(rows < size.M)[:, None] & (ks < size.K)[None, :], other=0.0)
        w = load_weights(weight, ks, cols, size.K, size.N, DTYPE)
        acc = tl.dot(x, w, acc)
    finish(acc, bias, out, rows, cols, size.M, size.N, stride_om, stride_on, epilogue, "matrix")


def elements_of(b: Tensor, scales: Tensor, zeros: Tensor, group: Expr, dtype: str) -> Elements:
    return Elements(
        b=Pointer(b, "u8", aligned=False),
        scales=Pointer(scales, dtype, aligned=False),
        zeros=Pointer(zeros, dtype, aligned=False),
        group=Int(group),
        stride_bk=Int(b.stride(0), "i64"),
        stride_bn=Int(b.stride(1), "i64"),
        stride_sg=Int(scales.stride(0), "i64"),
        stride_sn=Int(scales.stride(1), "i64"),
        stride_zg=Int(zeros.stride(0), "i64"),
        stride_zn=Int(zeros.stride(1), "i64"),
        has_scales=Int(scales.present),
        has_zeros=Int(zeros.present),
    )


def _plan(point: Point) -> Plan:
    c = point.config
    out = INT4.out
    args: dict[str, Arg | Bundle] = dict(
        a=Pointer(A, point.dtype, aligned=False),
        weight=elements_of(B, SCALES, ZEROS, GROUP, point.dtype),
        bias=INT4.bias_pointer(point.dtype),
        out=Pointer(out, out_dtype(point), aligned=False),
        size=INT4.size(),
        stride_am=Int(A.stride(0), "i64"),
        stride_ak=Int(A.stride(1), "i64"),
        stride_om=Int(out.stride(0), "i64"),
        stride_on=Int(out.stride(1), "i64"),
        epilogue=INT4.epilogue(),
        BLOCK_M=Const(c.block_m),
        BLOCK_N=Const(c.block_n),
        BLOCK_K=Const(c.block_k),
        DTYPE=Const(TYPES[point.dtype]),
    )
    tiles = tiles_of(INT4, c)
    work = tiles.work(4 * device.sm_count)
    # Some thirty instructions for every weight of a tile.
    guess = 3_000_000 + work.k_blocks * (4 * 30 * c.block_n * c.block_k // 224 * 1000)
    launch = Launch(int4_general, args, grid=(tiles.count, 1, 1), num_warps=c.num_warps, num_stages=2)
    return work.plan(predict_or(point, work, guess), (launch,), serves(point), (INT4.fits_32_bits(),), general=True)


_CONFIG = Config("64x64x32_w4_general", dict(block_m=64, block_n=64, block_k=32, num_warps=4))
KERNELS = (Kernel("int4_general", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS}, dict.fromkeys(ARCHS, (_CONFIG,)), _plan),)
