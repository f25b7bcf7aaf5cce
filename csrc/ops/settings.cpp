#include "settings.h"

#include "launch.h"

namespace tk::ops {
namespace {

constexpr int64_t kActivations = 5;
constexpr int64_t kModeBits = TK_MODE_DETERMINISTIC | TK_MODE_BATCH_INVARIANT | TK_MODE_STRICT | TK_MODE_STATIC_WEIGHTS;

void check_range(const char* op, const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) [[unlikely]]
    fail_argument(text(op, ": ", what, " is ", value, ", must be ", low, " to ", high));
}

}  // namespace

void check_settings(const char* op, const Settings& s) {
  check_range(op, "activation", s.activation, 0, kActivations - 1);
  check_range(op, "precision", s.precision, -1, 1);
  check_range(op, "config", s.config, -1, INT32_MAX);
  check_range(op, "mode", s.mode, 0, kModeBits);
}

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
