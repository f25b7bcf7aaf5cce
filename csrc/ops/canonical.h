// How a generated op's tensors are put before the core: any leading dimensions as exactly three. Plain arithmetic on
// sizes and strides.
#pragma once

#include <cstdint>
#include <span>

#include "tk/tk.h"

namespace tk::ops {

inline constexpr uint32_t kLeadingDims = 3;
inline constexpr uint32_t kMaxLeading = 64;  // more than any torch tensor has

// A tensor as it lies: leading dimensions, then declared ones.
struct Layout {
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  uint32_t n_leading = 0;
  bool has_leading = false;  // whether it may have them; then the core sees three, whatever there are
  bool in_order = false;     // they are not ordered by stride: the op counts them
};

// The leading dimensions of several tensors, which share their sizes, ordered by stride and joined where they run
// together in all of them. Outermost first.
struct Leading {
  uint32_t count = 0;
  int64_t sizes[kMaxLeading];
  uint32_t inner[kMaxLeading];  // the dimension whose stride the joined one has

  bool fits() const { return count <= kLeadingDims; }
};

// The order in memory of the first `n` dimensions, largest stride first; those of size 1 come outermost. As they are
// where they lie in that order already, and for a tensor that repeats elements.
void memory_order(std::span<const int64_t> sizes, std::span<const int64_t> strides, uint32_t* order);

// Joins the leading dimensions of all of `tensors` that have some.
void join_leading(std::span<const Layout> tensors, Leading& out);

// Whether the leading dimensions of one tensor run together in the order of `all`.
bool runs_together(const Layout& tensor, std::span<const Layout> all);

// Strides of a dense tensor of the same sizes, whose leading dimensions run together in the order of `all`.
void joined_strides(const Layout& tensor, std::span<const Layout> all, int64_t* strides);

// [L0, L1, L2, *declared], or *declared alone. The stride of a dimension of size 1 is 0.
void describe(const Layout& tensor, const Leading& leading, tk_tensor& out);

// The same with the leading dimensions as one, [1, 1, n, *declared], whose strides are 0: all that checks and the
// shapes of outputs are about. The address is null.
void describe_declared(const Layout& tensor, tk_tensor& out);

// Strides of a dense tensor: leading dimensions in the order in memory of `like` (whose first dimensions they are),
// then the declared ones, whose sizes and strides are given.
void dense_strides(const Layout& like, std::span<const int64_t> declared_sizes, std::span<const int64_t> declared,
                   int64_t* strides);

// How many elements there are in memory from the first to past the last; 0 without any.
int64_t reach(const Layout& tensor);

// Two elements lie in one place.
bool overlaps_itself(const Layout& tensor);

}  // namespace tk::ops
