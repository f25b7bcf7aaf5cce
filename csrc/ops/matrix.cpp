#include "matrix.h"

namespace tk::ops {
namespace {

int64_t round_up_16(int64_t x) { return (x + 15) / 16 * 16; }

Matrix with_normalized_batch(Matrix m) {
  if (m.batch == 1) m.batch_stride = 0;
  return m;
}

}  // namespace

Matrix matrix_of(const Meta& t) {
  if (t.dim() == 2) return {t.sizes[0], t.sizes[1], t.strides[0], t.strides[1]};
  return {t.sizes[1], t.sizes[2], t.strides[1], t.strides[2], true, t.sizes[0], t.strides[0]};
}

bool flatten(const Meta& t, Matrix& out) {
  const size_t last = t.sizes.size() - 1;
  out = {1, t.sizes[last], 0, t.strides[last]};
  bool stride_known = false;
  int64_t next_stride = 0;  // what the dimension further out must have
  for (size_t d = last; d-- > 0;) {
    out.rows *= t.sizes[d];
    if (t.sizes[d] == 1) continue;
    if (!stride_known) {
      out.row_stride = t.strides[d];
      stride_known = true;
    } else if (t.strides[d] != next_stride) {
      return t.sizes[d] == 0;  // nothing lies anywhere
    }
    next_stride = t.strides[d] * t.sizes[d];
  }
  return true;
}

bool broadcast(const Meta& bias, const Matrix& like, Matrix& out) {
  out = {like.rows, like.cols, 0, 0, like.is_batch, like.batch, 0};
  const int64_t dim = bias.dim();
  if (dim > (like.is_batch ? 3 : 2)) return false;
  const auto place = [&](int64_t d, int64_t size, int64_t& stride) {
    if (d < 0) return true;
    if (bias.sizes[d] == 1 && size != 1) return true;  // repeated
    stride = bias.strides[d];
    return bias.sizes[d] == size;
  };
  return place(dim - 1, like.cols, out.col_stride) && place(dim - 2, like.rows, out.row_stride) &&
         place(dim - 3, like.batch, out.batch_stride);
}

Matrix normalized_operand(Matrix m) {
  if (m.cols == 1 && m.row_stride == 1 && m.rows != 1) {
    m.col_stride = round_up_16(m.rows);
    return with_normalized_batch(m);
  }
  return normalized_output(m);
}

Matrix normalized_output(Matrix m) {
  if (m.cols == 1) m.col_stride = 1;
  if (m.rows == 1) m.row_stride = m.col_stride == 1 ? round_up_16(m.cols) : 1;
  return with_normalized_batch(m);
}

Matrix normalized_bias(Matrix m) {
  if (m.rows == 1) m.row_stride = 0;
  if (m.cols == 1) m.col_stride = 1;
  return with_normalized_batch(m);
}

tk_tensor to_core(const Matrix& m, const void* data, int32_t dtype) {
  tk_tensor t;
  t.data = const_cast<void*>(data);
  int32_t dim = 0;
  if (m.is_batch) {
    t.sizes[0] = m.batch;
    t.strides[0] = m.batch_stride;
    dim = 1;
  }
  t.sizes[dim] = m.rows;
  t.strides[dim] = m.row_stride;
  t.sizes[dim + 1] = m.cols;
  t.strides[dim + 1] = m.col_stride;
  t.dtype = dtype;
  t.ndim = dim + 2;
  return t;
}

tk_tensor absent() {
  tk_tensor t;
  t.data = nullptr;
  t.dtype = -1;
  t.ndim = -1;
  return t;
}

}  // namespace tk::ops
