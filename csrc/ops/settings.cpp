#include "settings.h"

#include "launch.h"

namespace tk::ops {
namespace {

constexpr int64_t kModeBits = TK_MODE_DETERMINISTIC | TK_MODE_BATCH_INVARIANT | TK_MODE_STRICT | TK_MODE_STATIC_WEIGHTS;

}  // namespace

void check_settings(const char* op, int64_t config, int64_t mode) {
  if (config < -1 || config > INT32_MAX) [[unlikely]]
    fail_argument(text("tk.", op, ": config is ", config, ", must be -1 (choose) or the number of one"));
  if (mode & ~kModeBits) [[unlikely]]
    fail_argument(text("tk.", op, ": mode is ", mode, ", must be 0 to ", kModeBits));
}

int32_t target_device(const char* op, Device device) {
  if (device.is_cuda()) [[likely]]
    return device.index;
  const int32_t described = described_device();
  if (described < 0)
    fail_unsupported(text("tk.", op, ": its kernels are for CUDA tensors, these are on ", describe(device)));
  return described;
}

}  // namespace tk::ops
