// From a described call to the GPU: torch's current stream, scratch memory from torch's caching allocator.
#pragma once

#include "settings.h"

// Instead of being launched, the calls of this thread are handed to `function`, until it is null again. For tk.explain,
// which asks about exactly the call that an op would make. The call is valid during the callback only.
extern "C" TK_API void tk_ops_capture(void (*function)(const tk_call* call, void* context), void* context);
// While calls are handed to a function: tensors on the CPU stand for some on this device, which may be one that was
// only described to the core; -1: they do not.
extern "C" TK_API void tk_ops_capture_device(int32_t device);

namespace tk::ops {

// What tk_ops_capture_device says, -1 where no calls are captured.
int32_t described_device();

// The CUDA device that a call is for, -1 on the CPU. Tensors on the CPU may stand for some on a device that is
// described.
inline int32_t target(Device device) { return device.is_cuda() ? device.index : described_device(); }

// Whether calls are handed to a function instead of being launched.
bool is_described();

// Launches on torch's current stream of `device`. Throws by the status.
void launch(const tk_call& call, Device device);

// The same of a call with the config and the mode of `settings`, deterministic where torch wants that.
void launch_op(tk_op op, std::span<const tk_tensor> tensors, std::span<const int64_t> ints,
               std::span<const double> floats, const Settings& settings, Device device);

}  // namespace tk::ops
