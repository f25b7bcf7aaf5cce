#include "overlap.h"

#include <algorithm>
#include <array>

namespace tk::ops {
namespace {

struct Dimension {
  int64_t size;
  int64_t stride;  // bytes
};
using Dimensions = std::array<Dimension, 3>;

// Smallest stride first; of those of size 1, which lie nowhere, size 1 and stride 0 is left.
Dimensions dimensions(const Matrix& m, int64_t item) {
  Dimensions found{{{m.batch, m.batch_stride * item}, {m.rows, m.row_stride * item}, {m.cols, m.col_stride * item}}};
  for (Dimension& d : found)
    if (d.size == 1) d.stride = 0;
  std::sort(found.begin(), found.end(), [](const Dimension& x, const Dimension& y) { return x.stride < y.stride; });
  return found;
}

const char* end(const Extent& x) {
  int64_t last = 0;
  for (const Dimension& d : dimensions(x.matrix, x.item)) last += (d.size - 1) * d.stride;
  return x.data + last + x.item;
}

// The view as runs of bytes, each of which begins a multiple of `pitch` after the first: how long the runs are, 0 when
// it is no such view.
int64_t width_of_runs(const Extent& x, int64_t pitch) {
  int64_t width = x.item;
  for (const Dimension& d : dimensions(x.matrix, x.item)) {
    if (d.stride < pitch) {
      width += (d.size - 1) * d.stride;
    } else if (d.stride % pitch != 0) {
      return 0;
    }
  }
  return width;
}

// Side by side in rows of one pitch, as column slices of one matrix are, or the heads of one tensor.
bool interleave(const Extent& x, const Extent& y, int64_t pitch) {
  const int64_t x_width = width_of_runs(x, pitch);
  const int64_t y_width = width_of_runs(y, pitch);
  if (x_width == 0 || y_width == 0) return false;
  const int64_t shift = ((y.data - x.data) % pitch + pitch) % pitch;
  return x_width <= shift && shift + y_width <= pitch;
}

}  // namespace

bool overlaps_itself(const Matrix& m) {
  if (m.is_empty()) return false;
  int64_t inner = 0;  // where the last element of the dimensions further in lies
  for (const Dimension& d : dimensions(m, 1)) {
    if (d.size > 1 && d.stride <= inner) return true;
    inner += (d.size - 1) * d.stride;
  }
  return false;
}

bool may_overlap(const Extent& x, const Extent& y) {
  if (x.matrix.is_empty() || y.matrix.is_empty()) return false;
  if (end(x) <= y.data || end(y) <= x.data) return false;
  for (const Extent* either : {&x, &y})
    for (const Dimension& d : dimensions(either->matrix, either->item))
      if (d.stride > 0 && interleave(x, y, d.stride)) return false;
  return true;
}

}  // namespace tk::ops
