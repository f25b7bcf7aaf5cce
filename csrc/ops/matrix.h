// An op's tensors as matrices, or batches of them, as the core takes them.
#pragma once

#include "tensor.h"
#include "tk/tk.h"

namespace tk::ops {

struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // elements from one row to the next
  int64_t col_stride = 0;
  bool is_batch = false;  // then three dimensions, the batch first, however many there are
  int64_t batch = 1;
  int64_t batch_stride = 0;

  Matrix transposed() const { return {cols, rows, col_stride, row_stride, is_batch, batch, batch_stride}; }
  bool is_empty() const { return rows == 0 || cols == 0 || batch == 0; }
};

// A tensor of two dimensions as it lies, or of three: a batch.
Matrix matrix_of(const Meta& tensor);

// [..., K] as [rows, K] over the same memory. False when the leading dimensions do not run together.
bool flatten(const Meta& tensor, Matrix& out);

// A bias as ATen broadcasts it to the sizes of `like`, with stride 0 where it repeats. False when it does not fit.
bool broadcast(const Meta& bias, const Matrix& like, Matrix& out);

// The stride of a dimension of size 1 says nothing, but kernels are chosen by strides. These give it the value that
// suits every test: 1 where the other dimension is not contiguous, else the other dimension's size rounded up to 16.
// That of a batch of one is 0.
Matrix normalized_operand(Matrix m);
Matrix normalized_output(Matrix m);  // row-major where it can be read so
Matrix normalized_bias(Matrix m);    // one row for all where it can be read so

tk_tensor to_core(const Matrix& m, const void* data, int32_t dtype);
tk_tensor absent();

}  // namespace tk::ops
