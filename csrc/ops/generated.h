// Generated ops: one C++ function for all of them, which does what an op's pack says.
#pragma once

#include "tk/tk.h"

// Loads a pack and registers its generated ops with torch. NULL, or why it cannot be: *status says what went wrong. The
// text is good until the next call of this thread.
extern "C" TK_API const char* tk_ops_load_pack(const char* path, tk_status* status);

namespace tk::ops {

// Registers the generated ops of all packs that were loaded since it was last called.
void define_generated_ops();

}  // namespace tk::ops
