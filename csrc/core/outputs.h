#pragma once

#include "problem.h"

namespace tk {

// How to allocate what a generated op returns; addresses are null. Good until this thread asks again. Throws
// TK_INVALID_ARGUMENT for arguments that fail a check, and for sizes or a dtype that no tensor can have.
std::span<const tk_tensor> outputs(const tk_call& call);

}  // namespace tk
