#include "launch.h"

#include "runtime.h"

namespace {

struct Capture {
  void (*function)(const tk_call*, void*) = nullptr;
  void* context = nullptr;
  int32_t device = -1;
};
thread_local Capture capture;

}  // namespace

extern "C" void tk_ops_capture(void (*function)(const tk_call*, void*), void* context) {
  capture.function = function;
  capture.context = context;
}

extern "C" void tk_ops_capture_device(int32_t device) { capture.device = device; }

namespace tk::ops {
namespace {

// Freed when the call ends, which is after the launch; the caching allocator gives the memory to later work of the same
// stream alone.
class Scratch {
 public:
  explicit Scratch(Device device) : device_(device) {}

  tk_allocator allocator() {
    return {this,
            [](void* self, size_t bytes, size_t, int32_t, void*) {
              return static_cast<Scratch*>(self)->allocate(static_cast<int64_t>(bytes));
            },
            [](void*, void*, int32_t, void*) {}};
  }

 private:
  // Blocks of the caching allocator lie on 512-byte boundaries, which is more than any kernel asks for.
  void* allocate(int64_t bytes) noexcept {
    try {
      if (used_ == std::size(blocks_)) return nullptr;
      blocks_[used_] = empty({&bytes, 1}, kUInt8, device_);
      return write_pointer(meta(blocks_[used_++]));
    } catch (const std::exception&) {
      return nullptr;  // the core says what it could not have
    }
  }

  Device device_;
  size_t used_ = 0;
  Tensor blocks_[8];
};

}  // namespace

int32_t described_device() { return capture.function ? capture.device : -1; }

bool is_described() { return capture.function != nullptr; }

void launch(const tk_call& call, Device device) {
  if (capture.function) [[unlikely]] {
    capture.function(&call, capture.context);
    return;
  }
  Scratch scratch(device);
  const tk_allocator allocator = scratch.allocator();
  check_status(tk_launch(&call, current_stream(device.index), &allocator));
}

void launch_op(tk_op op, std::span<const tk_tensor> tensors, std::span<const int64_t> ints,
               std::span<const double> floats, const Settings& settings, Device device) {
  const tk_call call = {
      .op = op,
      .mode = static_cast<uint32_t>(settings.mode) | (wants_deterministic() ? TK_MODE_DETERMINISTIC : 0),
      .config = static_cast<int32_t>(settings.config),
      .device = target(device),
      .n_tensors = static_cast<uint32_t>(tensors.size()),
      .n_ints = static_cast<uint32_t>(ints.size()),
      .n_floats = static_cast<uint32_t>(floats.size()),
      .tensors = tensors.data(),
      .ints = ints.data(),
      .floats = floats.data()};
  launch(call, device);
}

}  // namespace tk::ops
