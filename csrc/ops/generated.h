// Generated ops: one C++ function for all of them, which does what an op's pack says.
#pragma once

#include <torch/csrc/stable/library.h>

#include "tensor.h"
#include "tk/tk.h"

// Loads a pack and registers its generated ops with torch. NULL, or why it cannot be: *status says what went wrong. The
// text is good until the next call of this thread.
extern "C" TK_API const char* tk_ops_load_pack(const char* path, tk_status* status);

namespace tk::ops {

// Registers the generated ops of all packs that were loaded since it was last called.
void define_generated_ops();

// A generated op that is registered, or null.
const tk_generated_op* find_generated(const char* name);

// The kernel for CUDA of an op of one result, without the dispatcher. The stack's words are those of its schema,
// tensors owned, and are freed.
Tensor call_generated(const tk_generated_op& op, StableIValue* stack);

}  // namespace tk::ops
