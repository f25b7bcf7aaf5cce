"""Every layout and alignment, and every group: weights are made element by element."""

import triton
import triton.language as tl

from tk.aot.expr import Expr, Tensor, ceil_div, device
from tk.aot.spec import Arg, Config, Const, Int, Kernel, Launch, Plan, Point, Pointer
from tk.kernels.epilogue import finish
from tk.kernels.gemm.cost import Work, predict_or
from tk.kernels.gemm.pointer import tile_coordinates
from tk.kernels.gemm.problem import OUT_AXIS, out_dtype
from tk.kernels.int4.op import DTYPE_AXIS, GROUP, INT4, OP, SCALES, ZEROS, A, B
from tk.kernels.int4.unpack import TYPES, load_weights

M, N, K = INT4.M, INT4.N, INT4.K


@triton.jit
def int4_general(a, b, scales, zeros, bias, out, M, N, K, group, stride_am, stride_ak, stride_bk, stride_bn, stride_sg,
                 stride_sn, stride_zg, stride_zn, has_scales, has_zeros, stride_bias_m, stride_bias_n, stride_om,
                 stride_on, alpha, beta, activation, has_bias, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """One program, one tile of out."""
    m, n = tile_coordinates(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, 8)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        at = a + rows.to(tl.int64)[:, None] * stride_am + ks.to(tl.int64)[None, :] * stride_ak
        x = tl.load(at, mask=(rows < M)[:, None] & (ks < K)[None, :], other=0.0)
        w = load_weights(b, scales, zeros, ks, cols, K, N, group, stride_bk, stride_bn, stride_sg, stride_sn, stride_zg,
                         stride_zn, has_scales, has_zeros, DTYPE)  # fmt: skip
        acc = tl.dot(x, w, acc)
    finish(acc, bias, out, rows, cols, M, N, stride_bias_m, stride_bias_n, stride_om, stride_on, alpha, beta,
           activation, has_bias, "matrix")  # fmt: skip


def element_args(b: Tensor, scales: Tensor, zeros: Tensor, group: Expr, dtype: str) -> dict[str, Arg]:
    """What `load_weights` has of them."""
    return dict(
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
        DTYPE=Const(TYPES[dtype]),
    )


def _plan(point: Point) -> Plan:
    c = point.config
    out, bias = INT4.out, INT4.bias
    args = (
        element_args(B, SCALES, ZEROS, GROUP, point.dtype)
        | INT4.epilogue_args(point.dtype)
        | dict(
            a=Pointer(A, point.dtype, aligned=False),
            out=Pointer(out, out_dtype(point), aligned=False),
            M=Int(M),
            N=Int(N),
            K=Int(K),
            stride_am=Int(A.stride(0), "i64"),
            stride_ak=Int(A.stride(1), "i64"),
            stride_bias_m=Int(bias.stride(0), "i64"),
            stride_bias_n=Int(bias.stride(1), "i64"),
            stride_om=Int(out.stride(0), "i64"),
            stride_on=Int(out.stride(1), "i64"),
            BLOCK_M=Const(c.block_m),
            BLOCK_N=Const(c.block_n),
            BLOCK_K=Const(c.block_k),
        )
    )
    tiles = ceil_div(M, c.block_m) * ceil_div(N, c.block_n)
    launch = Launch(int4_general, args, grid=(tiles, 1, 1), num_warps=c.num_warps, num_stages=2)
    waves = ceil_div(ceil_div(INT4.M_choice, c.block_m) * ceil_div(N, c.block_n), 4 * device.sm_count)
    k_blocks = waves * ceil_div(K, c.block_k)
    work = Work(INT4, waves, k_blocks, 0, INT4.traffic(), tile=(c.block_m, c.block_n), boxes=(1, 1))
    # Some thirty instructions for every weight of a tile.
    guess = 3_000_000 + k_blocks * (4 * 30 * c.block_n * c.block_k // 224 * 1000)
    return Plan(
        constraints=(INT4.fits_32_bits(),),
        serves={"dtype": (DTYPE_AXIS.index(point.dtype),), "out": (OUT_AXIS.index(point.out),)},
        launches=(launch,),
        cost=predict_or(point, work, guess),
        terms=work.terms(point),
        general=True,
    )


_CONFIG = Config("64x64x32_w4_general", dict(block_m=64, block_n=64, block_k=32, num_warps=4))
KERNELS = (
    Kernel("int4_general", OP, {"dtype": DTYPE_AXIS, "out": OUT_AXIS}, dict.fromkeys((80, 90, 100), (_CONFIG,)), _plan),
)
