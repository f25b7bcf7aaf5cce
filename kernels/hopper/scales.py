"""The epilogue of products of float8: activation(scale_rows * scale_cols * D + bias)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tk.kernels.epilogue import activate
from tk.kernels.hopper.cluster import cluster_bases


@gluon.jit
def _prefetch(vector, stride, first, size, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT of a vector's elements into L1."""
    at = vector + gl.minimum(first + gl.arange(0, COUNT, LAYOUT), size - 1) * stride
    gl.inline_asm_elementwise("prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.aggregate
class ScaleBiasActivation:
    """D is rows x cols. scale_rows, scale_cols: one for each row and column of D, or a stride of 0. bias: one for each
    column of the result, which is a row of D where SWAP_AB. terms: a ``ScaledEpilogue``."""

    rows: gl.tensor
    cols: gl.tensor
    scale_rows: gl.tensor
    scale_cols: gl.tensor
    bias: gl.tensor
    terms: object
    SWAP_AB: gl.constexpr
    KIND: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return self

    @gluon.jit
    def prefetch(self, row, col, ROWS: gl.constexpr, COLS: gl.constexpr):
        OF_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=cluster_bases(gl.num_ctas(), 0, 1))
        OF_COLS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=cluster_bases(gl.num_ctas(), 1, 1))
        _prefetch(self.scale_rows, self.terms.stride_scale_rows, row, self.rows, ROWS, OF_ROWS)
        _prefetch(self.scale_cols, self.terms.stride_scale_cols, col, self.cols, COLS, OF_COLS)
        if self.terms.has_bias != 0:
            if self.SWAP_AB:
                _prefetch(self.bias, self.terms.stride_bias, row, self.rows, ROWS, OF_ROWS)
            else:
                _prefetch(self.bias, self.terms.stride_bias, col, self.cols, COLS, OF_COLS)

    @gluon.jit
    def apply(self, acc, row, col):
        """Of the block of D at (row, col)."""
        i = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        j = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        of_row = gl.load(self.scale_rows + i * self.terms.stride_scale_rows, mask=i < self.rows, other=0.0)
        of_col = gl.load(self.scale_cols + j * self.terms.stride_scale_cols, mask=j < self.cols, other=0.0)
        acc = acc * of_col[None, :] * of_row[:, None]
        if self.terms.has_bias != 0:
            if self.SWAP_AB:
                z = gl.load(self.bias + i * self.terms.stride_bias, mask=i < self.rows, other=0.0).to(gl.float32)[
                    :, None
                ]
            else:
                z = gl.load(self.bias + j * self.terms.stride_bias, mask=j < self.cols, other=0.0).to(gl.float32)[
                    None, :
                ]
            acc = acc + z
        return activate(acc, self.terms.activation)


@gluon.aggregate
class GroupScales:
    """The same of a group of rows, whose matrix has scales and a bias of its own, `stride` and `stride_bias`
    apart."""

    of_all: ScaleBiasActivation
    stride: gl.tensor
    stride_bias: gl.tensor
    KIND: gl.constexpr

    @gluon.jit
    def of_tile(self, at):
        return gl.aggregate_replace(
            self.of_all,
            rows=at[4] - at[3],
            scale_rows=self.of_all.scale_rows + at[3].to(gl.int64) * self.of_all.terms.stride_scale_rows,
            scale_cols=self.of_all.scale_cols + at[2].to(gl.int64) * self.stride,
            bias=self.of_all.bias + at[2].to(gl.int64) * self.stride_bias,
        )
