// One GPU: what is known of it, its primary context, and the modules loaded there.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "counters.h"
#include "driver.h"
#include "expr.h"
#include "pack.h"

namespace tk {

using DeviceFields = std::array<int64_t, static_cast<size_t>(DeviceField::Count)>;

class Device {
 public:
  Device(int32_t ordinal, const Driver& driver);        // a GPU of this machine
  Device(int32_t ordinal, const DeviceFields& fields);  // a description: to choose for, not to launch on

  int32_t ordinal() const { return ordinal_; }
  const DeviceFields& fields() const { return fields_; }
  int64_t field(DeviceField f) const { return fields_[static_cast<size_t>(f)]; }
  uint32_t arch() const { return static_cast<uint32_t>(field(DeviceField::Arch)); }

  // The rest throws TK_UNSUPPORTED for a description.
  const Driver& driver() const;
  cu::Context context();  // the primary one, which torch and the runtime API use as well
  CounterPool& counters();

  // The kernel of a launch, its module loaded on first use; our context must be current. Throws TK_UNSUPPORTED when it
  // would have to be loaded while `capturing`, or does not fit this GPU.
  cu::Function function(const Pack& pack, const format::Launch& launch, bool capturing);

 private:
  using ImageId = std::pair<const Pack*, uint32_t>;

  int64_t attribute(cu::DeviceAttribute which, cu::Device device) const;
  cu::Function find(const format::Launch& launch);
  bool is_loaded(const ImageId& image);
  cu::Function load(const Pack& pack, const format::Launch& launch);
  cu::Module load_module(const Pack& pack, uint32_t image);
  void allow_shared_memory(const Pack& pack, const format::Launch& launch, cu::Function function);
  void check_parameters(const Pack& pack, const format::Launch& launch, cu::Function function);

  const int32_t ordinal_;
  const Driver* const driver_;
  cu::Device device_ = 0;
  DeviceFields fields_;
  std::mutex context_mutex_;
  std::atomic<cu::Context> context_{nullptr};
  std::shared_mutex modules_mutex_;
  std::map<ImageId, cu::Module> modules_;
  std::unordered_map<const format::Launch*, cu::Function> functions_;  // checked and ready
  std::unique_ptr<CounterPool> counters_;
};

// All devices of the process, each made when it is first asked for and then kept.
class Devices {
 public:
  ~Devices();

  // Throws TK_INVALID_ARGUMENT for a number that no device has, TK_UNSUPPORTED without a driver.
  Device& get(int32_t ordinal);

  // A device that is only described, for choosing on a machine without it. The same description has the same number.
  int32_t describe(const DeviceFields& fields);

 private:
  static constexpr int32_t kMaxReal = 64;
  static constexpr int32_t kMaxDescribed = 64;

  Device& make(int32_t ordinal);

  std::mutex mutex_;
  std::array<std::atomic<Device*>, kMaxReal + kMaxDescribed> devices_{};
};

}  // namespace tk
