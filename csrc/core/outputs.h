#pragma once

#include "problem.h"

namespace tk {

// How to allocate the index-th output of a generated op; the address is null. Throws TK_INVALID_ARGUMENT for sizes or a
// dtype that no tensor can have.
tk_tensor output(const Problem& problem, uint32_t index);

}  // namespace tk
