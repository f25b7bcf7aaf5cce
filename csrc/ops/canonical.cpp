#include "canonical.h"

#include <algorithm>

namespace tk::ops {
namespace {

bool is_expanded(const Layout& t) {
  for (uint32_t d = 0; d < t.n_leading; d++)
    if (t.sizes[d] > 1 && t.strides[d] == 0) return true;
  return false;
}

const Layout* first_with_leading(std::span<const Layout> tensors) {
  const Layout* first = nullptr;
  for (const Layout& t : tensors) {
    if (!t.has_leading) continue;
    if (!first) first = &t;
    if (!is_expanded(t)) return &t;
  }
  return first;
}

// Stable, and fast for the few dimensions there are, which mostly are in order.
void sort_by_stride(const int64_t* strides, uint32_t* dims, uint32_t count) {
  for (uint32_t i = 1; i < count; i++)
    for (uint32_t j = i; j > 0 && strides[dims[j - 1]] < strides[dims[j]]; j--) std::swap(dims[j - 1], dims[j]);
}

// The leading dimensions that count, in the order in which all tensors are read; 0 is returned for no elements.
int64_t ordered(std::span<const Layout> tensors, uint32_t* dims, uint32_t& count) {
  count = 0;
  const Layout* const reference = first_with_leading(tensors);
  if (!reference) return 1;
  for (uint32_t d = 0; d < reference->n_leading; d++) {
    if (reference->sizes[d] == 0) return 0;
    if (reference->sizes[d] != 1) dims[count++] = d;
  }
  if (!reference->in_order && !is_expanded(*reference)) sort_by_stride(reference->strides.data(), dims, count);
  return 1;
}

bool run_together(const Layout& t, uint32_t outer, uint32_t inner) {
  int64_t step = 0;
  return !__builtin_mul_overflow(t.strides[inner], t.sizes[inner], &step) && t.strides[outer] == step;
}

int64_t normalized(int64_t stride, int64_t size) { return size == 1 ? 0 : stride; }

void set(tk_tensor& out, uint32_t d, int64_t size, int64_t stride) {
  out.sizes[d] = size;
  out.strides[d] = normalized(stride, size);
}

void describe_rest(const Layout& t, uint32_t first, tk_tensor& out) {
  const auto ndim = static_cast<uint32_t>(t.sizes.size());
  for (uint32_t d = t.n_leading; d < ndim; d++) set(out, first++, t.sizes[d], t.strides[d]);
  out.ndim = static_cast<int32_t>(first);
}

}  // namespace

void memory_order(std::span<const int64_t> sizes, std::span<const int64_t> strides, uint32_t* order) {
  const auto n = static_cast<uint32_t>(sizes.size());
  uint32_t count = 0;
  uint32_t dims[kMaxLeading];
  bool repeats = false;
  for (uint32_t d = 0; d < n; d++) {
    if (sizes[d] == 1) continue;
    dims[count++] = d;
    repeats = repeats || strides[d] == 0;
  }
  if (!repeats) sort_by_stride(strides.data(), dims, count);
  if (repeats || std::is_sorted(dims, dims + count)) {
    for (uint32_t d = 0; d < n; d++) order[d] = d;
    return;
  }
  uint32_t at = 0;
  for (uint32_t d = 0; d < n; d++)
    if (sizes[d] == 1) order[at++] = d;
  std::copy_n(dims, count, order + at);
}

void join_leading(std::span<const Layout> tensors, Leading& out) {
  uint32_t dims[kMaxLeading];
  uint32_t count = 0;
  out.count = 0;
  if (ordered(tensors, dims, count) == 0) {
    out.count = 1;
    out.sizes[0] = 0;
    out.inner[0] = 0;
    return;
  }
  const Layout* const sizes_of = first_with_leading(tensors);
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t d = dims[i];
    const auto joins = [&](const Layout& t) { return !t.has_leading || run_together(t, out.inner[out.count - 1], d); };
    if (out.count > 0 && std::ranges::all_of(tensors, joins)) {
      out.sizes[out.count - 1] *= sizes_of->sizes[d];
    } else {
      out.sizes[out.count++] = sizes_of->sizes[d];
    }
    out.inner[out.count - 1] = d;
  }
}

bool runs_together(const Layout& tensor, std::span<const Layout> all) {
  if (!tensor.has_leading) return true;
  uint32_t dims[kMaxLeading];
  uint32_t count = 0;
  ordered(all, dims, count);
  for (uint32_t i = 1; i < count; i++)
    if (!run_together(tensor, dims[i - 1], dims[i])) return false;
  return true;
}

void joined_strides(const Layout& tensor, std::span<const Layout> all, int64_t* strides) {
  int64_t step = 1;
  const auto place = [&](uint32_t d) {
    strides[d] = step;
    step *= std::max<int64_t>(tensor.sizes[d], 1);
  };
  for (auto d = static_cast<uint32_t>(tensor.sizes.size()); d-- > tensor.n_leading;) place(d);
  std::fill_n(strides, tensor.n_leading, step);  // of those of size 1
  uint32_t dims[kMaxLeading];
  uint32_t count = 0;
  ordered(all, dims, count);
  while (count-- > 0) place(dims[count]);
}

void describe(const Layout& tensor, const Leading& leading, tk_tensor& out) {
  if (!tensor.has_leading) return describe_rest(tensor, 0, out);
  const uint32_t padding = kLeadingDims - leading.count;
  for (uint32_t d = 0; d < padding; d++) set(out, d, 1, 0);
  for (uint32_t i = 0; i < leading.count; i++) {
    const int64_t size = leading.sizes[i];
    set(out, padding + i, size, size ? tensor.strides[leading.inner[i]] : 0);
  }
  describe_rest(tensor, kLeadingDims, out);
}

void describe_declared(const Layout& tensor, tk_tensor& out) {
  out.data = nullptr;
  if (!tensor.has_leading) return describe_rest(tensor, 0, out);
  int64_t n = 1;
  for (uint32_t d = 0; d < tensor.n_leading; d++) n *= tensor.sizes[d];
  set(out, 0, 1, 0);
  set(out, 1, 1, 0);
  set(out, 2, n, 0);
  describe_rest(tensor, kLeadingDims, out);
}

void dense_strides(const Layout& like, std::span<const int64_t> declared_sizes, std::span<const int64_t> declared,
                   int64_t* strides) {
  int64_t step = 1;
  for (size_t d = 0; d < declared.size(); d++) {
    strides[like.n_leading + d] = declared[d];
    step *= std::max<int64_t>(declared_sizes[d], 1);
  }
  uint32_t order[kMaxLeading];
  memory_order(like.sizes.first(like.n_leading), like.strides.first(like.n_leading), order);
  for (uint32_t i = like.n_leading; i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(like.sizes[order[i]], 1);
  }
}

int64_t reach(const Layout& tensor) {
  int64_t last = 0;
  for (size_t d = 0; d < tensor.sizes.size(); d++) {
    if (tensor.sizes[d] == 0) return 0;
    last += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  return last + 1;
}

bool overlaps_itself(const Layout& tensor) {
  // Dimensions by stride: each must step over all that those below it reach.
  uint32_t dims[kMaxLeading + TK_MAX_DIMS];
  uint32_t count = 0;
  for (uint32_t d = 0; d < tensor.sizes.size(); d++) {
    if (tensor.sizes[d] == 0) return false;
    if (tensor.sizes[d] > 1) dims[count++] = d;
  }
  sort_by_stride(tensor.strides.data(), dims, count);
  int64_t reach = 0;
  while (count-- > 0) {
    const uint32_t d = dims[count];
    if (tensor.strides[d] <= reach) return true;
    reach += (tensor.sizes[d] - 1) * tensor.strides[d];
  }
  return false;
}

}  // namespace tk::ops
