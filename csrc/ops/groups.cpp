#include "groups.h"

namespace tk::ops {

void check_offs(const char* op, const Meta& offs, const Meta& a) {
  check_rank(op, "offs", offs, 1);
  if (offs.dtype != kInt32) fail_argument(text(op, ": offs are ", dtype_name(offs.dtype), ", must be int32"));
  if (offs.device != a.device)
    fail_argument(text(op, ": offs are on ", describe(offs.device), ", a on ", describe(a.device)));
}

void check_groups(const char* op, const char* name, const Meta& tensor, const Meta& offs) {
  if (tensor.sizes[0] != offs.sizes[0])
    fail_argument(text(op, ": ", name, " has ", tensor.sizes[0], " groups, offs has ", offs.sizes[0]));
}

bool group_rows(const Meta& tensor, int64_t groups, int64_t cols, Matrix& out) {
  const bool for_all = tensor.dim() == 1;
  if (!(for_all || (tensor.dim() == 2 && tensor.sizes[0] == groups)) || tensor.sizes.back() != cols) return false;
  out = {1, cols, 0, tensor.strides.back(), true, groups, for_all ? 0 : tensor.strides[0]};
  return true;
}

void set_group_bias(Product& p, const Meta& bias, int64_t groups, int64_t cols) {
  if (bias && !group_rows(bias, groups, cols, p.bias.matrix))
    fail_argument(
        text(p.name, ": bias is ", describe_sizes(bias.sizes), ", must be [", cols, "] or [", groups, ", ", cols, "]"));
  p.bias.tensor = bias;
}

tk_tensor core_offs(const Meta& offs) { return core_tensor({offs, {1, offs.sizes[0], 0, offs.strides[0]}}); }

Operand matrix_at(const Operand& batch, int64_t i) {
  Operand one = batch;
  one.matrix.is_batch = false;
  one.matrix.batch = 1;
  one.offset = i * batch.matrix.batch_stride;
  one.is_part = true;
  return one;
}

Operand rows_of(const Operand& x, int64_t begin, int64_t end) {
  Operand part = x;
  part.matrix.rows = end - begin;
  part.offset = begin * x.matrix.row_stride;
  part.is_part = true;
  return part;
}

}  // namespace tk::ops
