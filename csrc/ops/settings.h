// What every generated op does with its config, its mode and its device.
#pragma once

#include "tensor.h"
#include "tk/tk.h"

namespace tk::ops {

// Throws std::invalid_argument for a config or a mode that there cannot be.
void check_settings(const char* op, int64_t config, int64_t mode);

// The CUDA device that a call on tensors of `device` is for. Tensors on the CPU stand for some on a device that is
// described (launch.h); without one they are refused.
int32_t target_device(const char* op, Device device);

}  // namespace tk::ops
