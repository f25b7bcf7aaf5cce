// The hot path: a call that was seen before is looked up, patched and launched; no lock, no allocation, no string.
#pragma once

#include "cuda_types.h"
#include "tk/tk.h"

namespace tk {

// Queues a call's launches on a stream. allocator: may be null. Throws as choose(), Device::function, and
// TK_DRIVER_ERROR.
void launch(const tk_call* call, cu::Stream stream, const tk_allocator* allocator);

}  // namespace tk
