#include "overlap.h"

#include <algorithm>

namespace tk::ops {
namespace {

// Runs of `width` bytes, one every `pitch` bytes, `count` of them.
struct Runs {
  const char* first;
  int64_t width;
  int64_t pitch;
  int64_t count;
  const char* end() const { return first + (count - 1) * pitch + width; }
};

Runs runs_of(const Extent& x) {
  Matrix m = x.matrix;
  if (m.rows == 1 || (m.cols != 1 && m.row_stride < m.col_stride)) m = m.transposed();
  const int64_t inner = m.cols == 1 ? 0 : (m.cols - 1) * m.col_stride;
  return {x.data, (inner + 1) * x.item, m.row_stride * x.item, m.rows};
}

// Side by side in rows of the same pitch, as column slices of one matrix are.
bool interleave(const Runs& x, const Runs& y) {
  const int64_t pitch = x.count > 1 ? x.pitch : y.pitch;
  if ((y.count > 1 && y.pitch != pitch) || pitch <= 0) return false;
  const int64_t shift = ((y.first - x.first) % pitch + pitch) % pitch;
  return x.width <= shift && shift + y.width <= pitch;
}

}  // namespace

bool overlaps_itself(const Matrix& m) {
  if (m.is_empty()) return false;
  Matrix outer = m;
  if (m.rows == 1 || (m.cols != 1 && m.row_stride < m.col_stride)) outer = m.transposed();
  if (outer.cols > 1 && outer.col_stride == 0) return true;
  return outer.rows > 1 && outer.row_stride <= (outer.cols - 1) * (outer.cols == 1 ? 0 : outer.col_stride);
}

bool may_overlap(const Extent& x, const Extent& y) {
  if (x.matrix.is_empty() || y.matrix.is_empty()) return false;
  const Runs a = runs_of(x);
  const Runs b = runs_of(y);
  if (a.end() <= b.first || b.end() <= a.first) return false;
  return !interleave(a, b);
}

}  // namespace tk::ops
