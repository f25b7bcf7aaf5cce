// Groups of a ragged dimension, which end where `offs` says: what the ops of such products share.
#pragma once

#include <algorithm>

#include "product.h"

namespace tk::ops {

// One dimension, int32, on a's device.
void check_offs(const char* op, const Meta& offs, const Meta& a);
// As many matrices as there are groups. name: the tensor's.
void check_groups(const char* op, const char* name, const Meta& tensor, const Meta& offs);

// [N], or [groups, N], as a batch of rows, one for each group. False when it is neither.
bool group_rows(const Meta& tensor, int64_t groups, int64_t cols, Matrix& out);
// The bias of a product, if there is one, as such rows.
void set_group_bias(Product& p, const Meta& bias, int64_t groups, int64_t cols);

// As the core takes them: one row.
tk_tensor core_offs(const Meta& offs);

// Matrix i of a batch; some of a matrix's rows.
Operand matrix_at(const Operand& batch, int64_t i);
Operand rows_of(const Operand& x, int64_t begin, int64_t end);

// On the CPU: visit(g, begin, end) for each group, ends cut off to [0, total].
template <class Visit>
void for_each_group(const Meta& offs, int64_t total, const Visit& visit) {
  const auto* const ends = static_cast<const int32_t*>(read_pointer(offs));
  int64_t begin = 0;
  for (int64_t g = 0; g < offs.sizes[0]; g++) {
    const int64_t end = std::clamp<int64_t>(ends[g * offs.strides[0]], 0, total);
    visit(g, begin, std::max(begin, end));
    begin = end;
  }
}

}  // namespace tk::ops
