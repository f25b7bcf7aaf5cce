// Which memory two views share. Only asked when the caller brings `out`.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace tk::ops {

// A view in bytes.
struct Extent {
  const char* data;
  Matrix matrix;
  int64_t item;  // bytes of an element
};

// Two elements of the view lie in the same place.
bool overlaps_itself(const Matrix& m);

// False only when it is certain that no byte is shared.
bool may_overlap(const Extent& x, const Extent& y);

}  // namespace tk::ops
