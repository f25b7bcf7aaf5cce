// The state of the process, in one place.
#pragma once

#include "device.h"
#include "registry.h"

namespace tk {

OpNames& op_names();  // numbers are never taken back

struct Runtime {
  Registry registry;
  Devices devices;
};

// Made on first use and never destroyed: the driver may be gone by the time that static objects are.
Runtime& runtime();

// Tests only: forget all packs and devices.
void reset_runtime_for_tests(std::span<const Root> roots = {});

}  // namespace tk
