#include "device.h"

#include <algorithm>
#include <iterator>

namespace tk {
namespace {

constexpr uint32_t kPortableSharedMemory = 48 << 10;  // above it a kernel must be told that it may
constexpr uint32_t kPortableCluster = 8;

size_t parameter_size(const format::Arg& arg) {
  switch (arg.kind) {
    case format::ArgKind::Int:
      return arg.width;
    case format::ArgKind::Float:
      return arg.width == 3 ? 2 : arg.width;
    case format::ArgKind::TensorMap:
      return sizeof(cu::TensorMap);
    default:
      return sizeof(cu::DevicePtr);
  }
}

std::string kernel_text(const Pack& pack, const format::Launch& launch) {
  return text("kernel ", pack.string(pack.row<format::Image>(launch.image).name), " of ", pack.path());
}

}  // namespace

Device::Device(int32_t ordinal, const Driver& driver) : ordinal_(ordinal), driver_(&driver) {
  using enum cu::DeviceAttribute;
  check(driver, driver.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  // In the order of DeviceField.
  fields_ = {attribute(MultiprocessorCount, device_),
             10 * attribute(ComputeCapabilityMajor, device_) + attribute(ComputeCapabilityMinor, device_),
             attribute(MaxSharedMemoryPerBlockOptin, device_), attribute(L2CacheSize, device_)};
  counters_ = std::make_unique<CounterPool>(driver);
}

Device::Device(int32_t ordinal, const DeviceFields& fields) : ordinal_(ordinal), driver_(nullptr), fields_(fields) {}

int64_t Device::attribute(cu::DeviceAttribute which, cu::Device device) const {
  int value = 0;
  check(*driver_, driver_->cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

const Driver& Device::driver() const {
  if (!driver_) fail(TK_UNSUPPORTED, "device ", ordinal_, " is a description: one can choose for it, not run on it");
  return *driver_;
}

cu::Context Device::context() {
  if (cu::Context context = context_.load(std::memory_order_acquire)) return context;
  std::lock_guard lock(context_mutex_);
  if (cu::Context context = context_.load(std::memory_order_relaxed)) return context;
  cu::Context context = nullptr;
  check(driver(), driver().cuDevicePrimaryCtxRetain(&context, device_), "cuDevicePrimaryCtxRetain");
  context_.store(context, std::memory_order_release);
  return context;
}

CounterPool& Device::counters() {
  driver();
  return *counters_;
}

// --- Modules ---

cu::Function Device::function(const Pack& pack, const format::Launch& launch, bool capturing) {
  if (cu::Function found = find(launch)) return found;
  if (capturing && !is_loaded({&pack, launch.image}))
    fail(TK_UNSUPPORTED, kernel_text(pack, launch),
         " is not loaded, and cannot be while its stream is being captured; call tk.preload before the capture, or run "
         "the op once");
  const RelaxedCapture relaxed(driver());
  std::unique_lock lock(modules_mutex_);
  const auto found = functions_.find(&launch);  // again: another thread may have been faster
  return found != functions_.end() ? found->second : load(pack, launch);
}

cu::Function Device::find(const format::Launch& launch) {
  std::shared_lock lock(modules_mutex_);
  const auto found = functions_.find(&launch);
  return found == functions_.end() ? nullptr : found->second;
}

bool Device::is_loaded(const ImageId& image) {
  std::shared_lock lock(modules_mutex_);
  return modules_.contains(image);
}

// What has succeeded is kept when a later step fails: the next call takes it up from there.
cu::Function Device::load(const Pack& pack, const format::Launch& launch) {
  const ImageId image{&pack, launch.image};
  auto module = modules_.find(image);
  if (module == modules_.end()) module = modules_.emplace(image, load_module(pack, launch.image)).first;
  const Driver& d = driver();
  cu::Function function = nullptr;
  check(d, d.cuModuleGetFunction(&function, module->second, pack.string(launch.entry)), "cuModuleGetFunction");
  check_parameters(pack, launch, function);
  allow_shared_memory(pack, launch, function);
  if (launch.cluster > kPortableCluster)
    check(d, d.cuFuncSetAttribute(function, cu::FunctionAttribute::NonPortableClusterSizeAllowed, 1),
          "cuFuncSetAttribute");
  // With lazy loading, the driver's default, the code would otherwise come with the first launch.
  if (d.cuFuncLoad) check(d, d.cuFuncLoad(function), "cuFuncLoad");
  functions_[&launch] = function;
  return function;
}

cu::Module Device::load_module(const Pack& pack, uint32_t image) {
  const std::vector<std::byte> bytes = pack.image(image);
  std::array<char, 8192> log{};
  cu::JitOption options[] = {cu::JitOption::ErrorLogBuffer, cu::JitOption::ErrorLogBufferSizeBytes};
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size() - 1)};
  const unsigned n_options = pack.target().is_ptx() ? std::size(options) : 0;
  cu::Module module = nullptr;
  const cu::Result result = driver().cuModuleLoadDataEx(&module, bytes.data(), n_options, options, values);
  if (result != cu::kSuccess) {
    const char* const name = pack.string(pack.row<format::Image>(image).name);
    fail_driver(driver(), result, "cuModuleLoadDataEx",
                text("kernel ", name, " of ", pack.path(), log[0] ? ": " : "", log.data()));
  }
  return module;
}

// Up to the GPU's limit once and for all, so that no launch has to.
void Device::allow_shared_memory(const Pack& pack, const format::Launch& launch, cu::Function function) {
  const Driver& d = driver();
  int own = 0;
  check(d, d.cuFuncGetAttribute(&own, cu::FunctionAttribute::SharedSizeBytes, function), "cuFuncGetAttribute");
  const int64_t limit = field(DeviceField::SharedOptin) - own;
  if (launch.shared > limit)
    fail(TK_UNSUPPORTED, kernel_text(pack, launch), " needs ", launch.shared, " bytes of shared memory; this GPU has ",
         limit);
  if (limit > kPortableSharedMemory)
    check(d, d.cuFuncSetAttribute(function, cu::FunctionAttribute::MaxDynamicSharedSizeBytes, static_cast<int>(limit)),
          "cuFuncSetAttribute");
}

// The driver reads as many bytes as the kernel has parameters, whatever the recipe gives it: so they must agree.
// Drivers before CUDA 12.4 cannot tell; then the pack's hash has to do.
void Device::check_parameters(const Pack& pack, const format::Launch& launch, cu::Function function) {
  const Driver& d = driver();
  if (!d.cuFuncGetParamInfo) return;
  size_t offset = 0;
  size_t size = 0;
  size_t index = 0;
  for (const format::Arg& arg : pack.rows<format::Arg>(launch.args)) {
    const cu::Result result = d.cuFuncGetParamInfo(function, index, &offset, &size);
    if (result != cu::kInvalidValue) check(d, result, "cuFuncGetParamInfo");
    if (result == cu::kInvalidValue || size != parameter_size(arg))
      fail(TK_PACK_ERROR, kernel_text(pack, launch), ": parameter ", index, " has ", result == cu::kSuccess ? size : 0,
           " bytes in the kernel and ", parameter_size(arg), " in the recipe");
    index++;
  }
  const cu::Result result = d.cuFuncGetParamInfo(function, index, &offset, &size);
  if (result == cu::kSuccess)
    fail(TK_PACK_ERROR, kernel_text(pack, launch), " takes more than the ", index, " parameters of its recipe");
  if (result != cu::kInvalidValue) check(d, result, "cuFuncGetParamInfo");
}

// --- Devices ---

Devices::~Devices() {
  for (auto& device : devices_) delete device.load();
}

Device& Devices::get(int32_t ordinal) {
  if (ordinal >= 0 && ordinal < static_cast<int32_t>(devices_.size())) {
    if (Device* device = devices_[ordinal].load(std::memory_order_acquire)) [[likely]]
      return *device;
  }
  return make(ordinal);
}

Device& Devices::make(int32_t ordinal) {
  const Driver& d = driver();
  int count = 0;
  check(d, d.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= std::min(count, kMaxReal))
    fail(TK_INVALID_ARGUMENT, "there is no CUDA device ", ordinal, "; this machine has ", count);
  std::lock_guard lock(mutex_);
  if (!devices_[ordinal].load(std::memory_order_relaxed))
    devices_[ordinal].store(new Device(ordinal, d), std::memory_order_release);
  return *devices_[ordinal].load(std::memory_order_relaxed);
}

int32_t Devices::describe(const DeviceFields& fields) {
  std::lock_guard lock(mutex_);
  for (int32_t ordinal = kMaxReal; ordinal < kMaxReal + kMaxDescribed; ordinal++) {
    Device* device = devices_[ordinal].load(std::memory_order_relaxed);
    if (!device) devices_[ordinal].store(device = new Device(ordinal, fields), std::memory_order_release);
    if (device->fields() == fields) return ordinal;
  }
  fail(TK_UNSUPPORTED, "more than ", kMaxDescribed, " descriptions of devices");
}

}  // namespace tk
