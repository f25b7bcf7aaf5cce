#include "fake_driver.h"

#include <cstdlib>
#include <sstream>

namespace tk::test {
namespace {

constexpr cu::Result kInvalidContext = 201;
constexpr cu::Result kInvalidHandle = 400;
constexpr cu::Result kCaptureUnsupported = 900;

FakeDriver* g_fake = nullptr;

}  // namespace

const char* entry_name(Entry entry) {
  static constexpr const char* kNames[] = {
#define TK_ENTRY(name, symbol, since, ...) #name,
      TK_DRIVER_ENTRIES(TK_ENTRY)
#undef TK_ENTRY
  };
  return kNames[static_cast<size_t>(entry)];
}

// The entries. Each begins by counting itself, which may make it fail.
struct FakeEntries {
  using Kernel = FakeDriver::Kernel;

#define ENTER(name)                     \
  FakeDriver& f = *g_fake;              \
  const std::lock_guard lock(f.mutex_); \
  if (const cu::Result failure = f.enter(Entry::name)) return failure

  static cu::Result cuInit(unsigned) {
    ENTER(cuInit);
    return f.gpus_.empty() ? cu::kNoDevice : cu::kSuccess;
  }
  static cu::Result cuDriverGetVersion(int* version) {
    ENTER(cuDriverGetVersion);
    *version = 13000;
    return cu::kSuccess;
  }
  static cu::Result cuGetErrorName(cu::Result result, const char** name) {
    ENTER(cuGetErrorName);
    *name = result == cu::kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return cu::kSuccess;
  }
  static cu::Result cuGetErrorString(cu::Result, const char** text) {
    ENTER(cuGetErrorString);
    *text = "a failure made by a test";
    return cu::kSuccess;
  }
  static cu::Result cuDeviceGetCount(int* count) {
    ENTER(cuDeviceGetCount);
    *count = static_cast<int>(f.gpus_.size());
    return cu::kSuccess;
  }
  static cu::Result cuDeviceGet(cu::Device* device, int ordinal) {
    ENTER(cuDeviceGet);
    *device = ordinal;
    return cu::kSuccess;
  }
  static cu::Result cuDeviceGetAttribute(int* value, cu::DeviceAttribute attribute, cu::Device device) {
    ENTER(cuDeviceGetAttribute);
    const FakeGpu& gpu = f.gpus_.at(device);
    switch (attribute) {
      case cu::DeviceAttribute::MultiprocessorCount:
        *value = gpu.sm_count;
        break;
      case cu::DeviceAttribute::L2CacheSize:
        *value = gpu.l2_bytes;
        break;
      case cu::DeviceAttribute::ComputeCapabilityMajor:
        *value = gpu.major;
        break;
      case cu::DeviceAttribute::ComputeCapabilityMinor:
        *value = gpu.minor;
        break;
      case cu::DeviceAttribute::MaxSharedMemoryPerBlockOptin:
        *value = gpu.shared_optin;
        break;
    }
    return cu::kSuccess;
  }

  // --- Contexts ---

  static cu::Result cuDevicePrimaryCtxRetain(cu::Context* context, cu::Device device) {
    ENTER(cuDevicePrimaryCtxRetain);
    *context = FakeDriver::primary(device);
    return cu::kSuccess;
  }
  static cu::Result cuCtxGetCurrent(cu::Context* context) {
    ENTER(cuCtxGetCurrent);
    *context = current();
    return cu::kSuccess;
  }
  static cu::Result cuCtxPushCurrent(cu::Context context) {
    ENTER(cuCtxPushCurrent);
    FakeDriver::contexts().push_back(context);
    return cu::kSuccess;
  }
  static cu::Result cuCtxPopCurrent(cu::Context* context) {
    ENTER(cuCtxPopCurrent);
    if (FakeDriver::contexts().empty()) return kInvalidContext;
    *context = FakeDriver::contexts().back();
    FakeDriver::contexts().pop_back();
    return cu::kSuccess;
  }
  static cu::Context current() { return FakeDriver::contexts().empty() ? nullptr : FakeDriver::contexts().back(); }

  // --- Modules. An image is "FAKE name size size …", or PTX that is compiled to it ---

  static cu::Result cuModuleLoadDataEx(cu::Module* module, const void* image, unsigned n_options,
                                       cu::JitOption* options, void** values) {
    ENTER(cuModuleLoadDataEx);
    if (!current()) return kInvalidContext;
    if (const cu::Result unsafe = f.unsafe_in_capture()) return unsafe;
    std::istringstream text(static_cast<const char*>(image));
    std::string magic;
    auto kernel = std::make_unique<Kernel>();
    text >> magic >> kernel->name;
    if (magic != "FAKE") {
      for (unsigned i = 0; i < n_options; i++)
        if (options[i] == cu::JitOption::ErrorLogBuffer) std::strcpy(static_cast<char*>(values[i]), "ptxas: no FAKE");
      return cu::kNoBinaryForGpu;
    }
    for (size_t size = 0; text >> size;) kernel->parameter_sizes.push_back(size);
    f.modules_.push_back(std::make_unique<FakeDriver::Module>());
    f.modules_.back()->kernels.push_back(std::move(kernel));
    *module = reinterpret_cast<cu::Module>(f.modules_.back().get());
    return cu::kSuccess;
  }
  static cu::Result cuModuleGetFunction(cu::Function* function, cu::Module module, const char* name) {
    ENTER(cuModuleGetFunction);
    for (const auto& kernel : reinterpret_cast<FakeDriver::Module*>(module)->kernels) {
      if (kernel->name != name) continue;
      *function = reinterpret_cast<cu::Function>(kernel.get());
      return cu::kSuccess;
    }
    return cu::kNotFound;
  }
  static Kernel& kernel_of(cu::Function function) { return *reinterpret_cast<Kernel*>(function); }
  static cu::Result cuFuncGetAttribute(int* value, cu::FunctionAttribute attribute, cu::Function function) {
    ENTER(cuFuncGetAttribute);
    if (attribute != cu::FunctionAttribute::SharedSizeBytes) return cu::kInvalidValue;
    *value = kernel_of(function).static_shared;
    return cu::kSuccess;
  }
  static cu::Result cuFuncSetAttribute(cu::Function function, cu::FunctionAttribute attribute, int value) {
    ENTER(cuFuncSetAttribute);
    if (attribute == cu::FunctionAttribute::MaxDynamicSharedSizeBytes) kernel_of(function).max_dynamic_shared = value;
    if (attribute == cu::FunctionAttribute::NonPortableClusterSizeAllowed)
      kernel_of(function).non_portable_cluster = value != 0;
    return cu::kSuccess;
  }
  static cu::Result cuFuncLoad(cu::Function function) {
    ENTER(cuFuncLoad);
    kernel_of(function).loaded = true;
    return cu::kSuccess;
  }
  static cu::Result cuFuncGetParamInfo(cu::Function function, size_t index, size_t* offset, size_t* size) {
    ENTER(cuFuncGetParamInfo);
    const Kernel& kernel = kernel_of(function);
    if (index >= kernel.parameter_sizes.size()) return cu::kInvalidValue;
    *offset = 0;
    *size = kernel.parameter_sizes[index];
    return cu::kSuccess;
  }

  static cu::Result cuLaunchKernelEx(const cu::LaunchConfig* config, cu::Function function, void** parameters, void**) {
    ENTER(cuLaunchKernelEx);
    const Kernel& kernel = kernel_of(function);
    if (!current()) return kInvalidContext;
    if (config->shared > static_cast<unsigned>(kernel.max_dynamic_shared)) return cu::kInvalidValue;
    FakeLaunch launch{.kernel = kernel.name,
                      .config = *config,
                      .attributes = {config->attributes, config->attributes + config->n_attributes},
                      .parameters = {}};
    const cu::LaunchAttribute* const cluster = launch.attribute(cu::LaunchAttributeId::ClusterDimension);
    if (cluster && cluster->value.cluster[0] > 8 && !kernel.non_portable_cluster) return cu::kInvalidValue;
    for (size_t i = 0; i < kernel.parameter_sizes.size(); i++)
      launch.parameters.emplace_back(static_cast<const char*>(parameters[i]), kernel.parameter_sizes[i]);
    f.launches_.push_back(std::move(launch));
    return cu::kSuccess;
  }
  static cu::Result cuTensorMapEncodeTiled(cu::TensorMap* map, int type, uint32_t rank, void* address,
                                           const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                                           const uint32_t* element_strides, int interleave, int swizzle,
                                           int l2_promotion, int oob_fill) {
    ENTER(cuTensorMapEncodeTiled);
    if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16) return cu::kInvalidValue;
    for (uint32_t d = 0; d < rank; d++)
      if (sizes[d] == 0 || element_strides[d] != 1) return cu::kInvalidValue;
    map->opaque[0] = f.maps_.size();
    f.maps_.push_back({type,
                       reinterpret_cast<uintptr_t>(address),
                       {sizes, sizes + rank},
                       {strides, strides + rank - 1},
                       {box, box + rank},
                       interleave,
                       swizzle,
                       l2_promotion,
                       oob_fill});
    return cu::kSuccess;
  }

  static cu::Result cuTensorMapEncodeIm2col(cu::TensorMap* map, int type, uint32_t rank, void* address,
                                            const uint64_t* sizes, const uint64_t* strides, const int* lower,
                                            const int* upper, uint32_t channels, uint32_t pixels, const uint32_t* steps,
                                            int interleave, int swizzle, int l2_promotion, int oob_fill) {
    ENTER(cuTensorMapEncodeIm2col);
    if (rank < 3 || steps[0] != 1 || steps[rank - 1] != 1) return cu::kInvalidValue;
    map->opaque[0] = f.maps_.size();
    f.maps_.push_back({type,
                       reinterpret_cast<uintptr_t>(address),
                       {sizes, sizes + rank},
                       {strides, strides + rank - 1},
                       {pixels, channels},
                       interleave,
                       swizzle,
                       l2_promotion,
                       oob_fill,
                       true,
                       {lower, lower + rank - 2},
                       {upper, upper + rank - 2},
                       {steps, steps + rank}});
    return cu::kSuccess;
  }

  // --- Memory and streams ---

  static cu::Result cuMemAlloc(cu::DevicePtr* address, size_t bytes) {
    ENTER(cuMemAlloc);
    if (!current()) return kInvalidContext;
    if (const cu::Result unsafe = f.unsafe_in_capture()) return unsafe;
    return f.allocate(bytes, false, *address);
  }
  static cu::Result cuMemAllocAsync(cu::DevicePtr* address, size_t bytes, cu::Stream) {
    ENTER(cuMemAllocAsync);
    if (!current()) return kInvalidContext;
    return f.allocate(bytes, true, *address);
  }
  static cu::Result cuMemFreeAsync(cu::DevicePtr address, cu::Stream) {
    ENTER(cuMemFreeAsync);
    return f.release(address, true);
  }
  static cu::Result cuMemsetD8Async(cu::DevicePtr address, unsigned char value, size_t bytes, cu::Stream stream) {
    ENTER(cuMemsetD8Async);
    if (f.captures_.contains(stream)) return kCaptureUnsupported;  // a memset in the graph would run on each replay
    const auto memory = f.memory_.find(address);
    if (memory == f.memory_.end() || memory->second.size < bytes) return cu::kInvalidValue;
    std::memset(memory->second.data, value, bytes);
    return cu::kSuccess;
  }
  static cu::Result cuStreamCreate(cu::Stream* stream, unsigned flags) {
    ENTER(cuStreamCreate);
    if (!current()) return kInvalidContext;
    if (flags != cu::kStreamNonBlocking) return cu::kInvalidValue;
    *stream = reinterpret_cast<cu::Stream>(0x77000000 + f.next_id_++);
    f.streams_.insert(*stream);
    return cu::kSuccess;
  }
  static cu::Result cuStreamSynchronize(cu::Stream) {
    ENTER(cuStreamSynchronize);
    return f.unsafe_in_capture();
  }
  static cu::Result cuStreamGetId(cu::Stream stream, unsigned long long* id) {
    ENTER(cuStreamGetId);
    if (const auto capture = f.captures_.find(stream); capture != f.captures_.end()) {
      capture->second.valid = false;
      return kCaptureUnsupported;
    }
    *id = reinterpret_cast<uintptr_t>(stream) + 7;
    return cu::kSuccess;
  }

  // --- Capture and graphs ---

  static cu::Result cuStreamGetCaptureInfo(cu::Stream stream, cu::CaptureStatus* status, uint64_t* id, cu::Graph* graph,
                                           const cu::GraphNode**, size_t*) {
    ENTER(cuStreamGetCaptureInfo);
    const auto capture = f.captures_.find(stream);
    *status = cu::CaptureStatus::None;
    if (capture == f.captures_.end()) return cu::kSuccess;
    *status = capture->second.valid ? cu::CaptureStatus::Active : cu::CaptureStatus::Invalidated;
    *id = capture->second.id;
    *graph = capture->second.graph;
    return cu::kSuccess;
  }
  static cu::Result cuThreadExchangeStreamCaptureMode(cu::CaptureMode* mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    std::swap(*mode, FakeDriver::capture_mode());
    return cu::kSuccess;
  }
  static cu::Result cuUserObjectCreate(cu::UserObject* object, void* data, cu::HostFunction* destroy, unsigned count,
                                       unsigned flags) {
    ENTER(cuUserObjectCreate);
    if (flags != cu::kUserObjectNoDestructorSync) return cu::kInvalidValue;
    auto* const made = new FakeDriver::UserObject{data, destroy, count};
    f.objects_.insert(made);
    *object = reinterpret_cast<cu::UserObject>(made);
    return cu::kSuccess;
  }
  static cu::Result cuUserObjectRelease(cu::UserObject object, unsigned) {
    ENTER(cuUserObjectRelease);
    return f.drop(reinterpret_cast<FakeDriver::UserObject*>(object));
  }
  static cu::Result cuGraphRetainUserObject(cu::Graph graph, cu::UserObject object, unsigned, unsigned) {
    ENTER(cuGraphRetainUserObject);
    auto* const retained = reinterpret_cast<FakeDriver::UserObject*>(object);
    if (!f.graphs_.contains(graph) || !f.objects_.contains(retained)) return kInvalidHandle;
    retained->references++;
    f.graphs_[graph].push_back(retained);
    return cu::kSuccess;
  }
#undef ENTER
};

// --- FakeDriver ---

FakeDriver::FakeDriver(std::vector<FakeGpu> gpus) : gpus_(std::move(gpus)) {
  g_fake = this;
#define TK_ENTRY(name, symbol, since, ...) table_.name = FakeEntries::name;
  TK_DRIVER_ENTRIES(TK_ENTRY)
#undef TK_ENTRY
  set_driver_for_tests(&table_);
  reset_runtime_for_tests();
}

FakeDriver::~FakeDriver() {
  while (!graphs_.empty()) destroy(graphs_.begin()->first);
  EXPECT_EQ(objects_.size(), expected_leaks_) << "user objects leaked";
  for (UserObject* object : objects_) {
    object->destroy(object->data);
    delete object;
  }
  reset_runtime_for_tests();
  set_driver_for_tests(nullptr);
  g_fake = nullptr;
  for (const auto& [address, memory] : memory_) std::free(memory.data);
}

void FakeDriver::keep_no_books() {
  static Module module;
  static Kernel kernel;
  table_.cuInit = [](unsigned) { return cu::kSuccess; };
  table_.cuDeviceGetCount = [](int* count) { return *count = 1, cu::kSuccess; };
  table_.cuDeviceGet = [](cu::Device* device, int ordinal) { return *device = ordinal, cu::kSuccess; };
  table_.cuDeviceGetAttribute = [](int* value, cu::DeviceAttribute attribute, cu::Device) {
    *value = attribute == cu::DeviceAttribute::ComputeCapabilityMajor ? 9 : 0;
    if (attribute == cu::DeviceAttribute::MaxSharedMemoryPerBlockOptin) *value = FakeGpu{}.shared_optin;
    return cu::kSuccess;
  };
  table_.cuDevicePrimaryCtxRetain = [](cu::Context* context, cu::Device) {
    return *context = primary(0), cu::kSuccess;
  };
  table_.cuCtxGetCurrent = [](cu::Context* context) { return *context = primary(0), cu::kSuccess; };
  table_.cuStreamGetCaptureInfo = [](cu::Stream, cu::CaptureStatus* status, uint64_t*, cu::Graph*,
                                     const cu::GraphNode**,
                                     size_t*) { return *status = cu::CaptureStatus::None, cu::kSuccess; };
  table_.cuThreadExchangeStreamCaptureMode = [](cu::CaptureMode*) { return cu::kSuccess; };
  table_.cuModuleLoadDataEx = [](cu::Module* m, const void*, unsigned, cu::JitOption*, void**) {
    return *m = reinterpret_cast<cu::Module>(&module), cu::kSuccess;
  };
  table_.cuModuleGetFunction = [](cu::Function* f, cu::Module, const char*) {
    return *f = reinterpret_cast<cu::Function>(&kernel), cu::kSuccess;
  };
  table_.cuFuncGetAttribute = [](int* value, cu::FunctionAttribute, cu::Function) { return *value = 0, cu::kSuccess; };
  table_.cuFuncSetAttribute = [](cu::Function, cu::FunctionAttribute, int) { return cu::kSuccess; };
  table_.cuFuncLoad = [](cu::Function) { return cu::kSuccess; };
  table_.cuFuncGetParamInfo = nullptr;
  table_.cuMemAllocAsync = [](cu::DevicePtr* address, size_t, cu::Stream) { return *address = 0x5000, cu::kSuccess; };
  table_.cuMemFreeAsync = [](cu::DevicePtr, cu::Stream) { return cu::kSuccess; };
  table_.cuTensorMapEncodeTiled = [](cu::TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                     const uint32_t*, const uint32_t*, int, int, int, int) { return cu::kSuccess; };
  table_.cuTensorMapEncodeIm2col = [](cu::TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                                      const int*, const int*, uint32_t, uint32_t, const uint32_t*, int, int, int,
                                      int) { return cu::kSuccess; };
  table_.cuLaunchKernelEx = [](const cu::LaunchConfig*, cu::Function, void**, void**) { return cu::kSuccess; };
}

cu::Result FakeDriver::enter(Entry entry) {
  calls_[static_cast<size_t>(entry)]++;
  if (failing_ != entry || --fail_in_ != 0) return cu::kSuccess;
  failing_.reset();
  return fail_with_;
}

void FakeDriver::fail(Entry entry, int nth, cu::Result result) {
  const std::lock_guard lock(mutex_);
  failing_ = entry;
  fail_in_ = nth;
  fail_with_ = result;
}

bool FakeDriver::failed() const {
  const std::lock_guard lock(mutex_);
  return !failing_;
}

int FakeDriver::calls(Entry entry) const {
  const std::lock_guard lock(mutex_);
  return calls_[static_cast<size_t>(entry)];
}

// What the driver refuses, and what ruins every capture, while one is under way.
cu::Result FakeDriver::unsafe_in_capture() {
  if (captures_.empty() || capture_mode() == cu::CaptureMode::Relaxed) return cu::kSuccess;
  for (auto& [stream, capture] : captures_) capture.valid = false;
  return kCaptureUnsupported;
}

cu::Result FakeDriver::allocate(size_t bytes, bool stream_ordered, cu::DevicePtr& address) {
  constexpr size_t kDeviceMemory = 64 << 20;
  if (bytes > kDeviceMemory) return cu::kOutOfMemory;
  auto* const data = static_cast<char*>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  std::memset(data, 0xcd, bytes);
  address = reinterpret_cast<uintptr_t>(data);
  memory_[address] = {data, bytes, stream_ordered};
  return cu::kSuccess;
}

cu::Result FakeDriver::release(cu::DevicePtr address, bool stream_ordered) {
  const auto memory = memory_.find(address);
  if (memory == memory_.end() || memory->second.stream_ordered != stream_ordered) return cu::kInvalidValue;
  std::free(memory->second.data);
  memory_.erase(memory);
  return cu::kSuccess;
}

cu::Result FakeDriver::drop(UserObject* object) {
  if (!objects_.contains(object)) return kInvalidHandle;
  if (--object->references) return cu::kSuccess;
  object->destroy(object->data);
  objects_.erase(object);
  delete object;
  return cu::kSuccess;
}

std::vector<FakeLaunch> FakeDriver::launches(size_t from) const {
  const std::lock_guard lock(mutex_);
  return {launches_.begin() + static_cast<std::ptrdiff_t>(from), launches_.end()};
}

size_t FakeDriver::launch_count() const {
  const std::lock_guard lock(mutex_);
  return launches_.size();
}

FakeMap FakeDriver::map(const cu::TensorMap& encoded) const {
  const std::lock_guard lock(mutex_);
  return maps_.at(encoded.opaque[0]);
}

size_t FakeDriver::scratch_in_use() const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [address, memory] : memory_) count += memory.stream_ordered;
  return count;
}

int FakeDriver::modules_loaded() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(modules_.size());
}

std::vector<cu::Context>& FakeDriver::contexts() {
  static thread_local std::vector<cu::Context> contexts;
  return contexts;
}

cu::CaptureMode& FakeDriver::capture_mode() {
  static thread_local cu::CaptureMode mode = cu::CaptureMode::Global;
  return mode;
}

cu::Context FakeDriver::primary(int device) { return reinterpret_cast<cu::Context>(uintptr_t{0xc0} + device); }

void FakeDriver::begin_capture(cu::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto graph = reinterpret_cast<cu::Graph>(0x99000000 + next_id_);
  captures_[stream] = {next_id_++, graph};
  graphs_[graph];
}

cu::Graph FakeDriver::end_capture(cu::Stream stream) {
  const std::lock_guard lock(mutex_);
  const cu::Graph graph = captures_.at(stream).graph;
  captures_.erase(stream);
  return graph;
}

bool FakeDriver::capture_is_valid(cu::Stream stream) const {
  const std::lock_guard lock(mutex_);
  return captures_.at(stream).valid;
}

void FakeDriver::destroy(cu::Graph graph) {
  const std::lock_guard lock(mutex_);
  for (UserObject* object : graphs_.at(graph)) drop(object);
  graphs_.erase(graph);
}

const cu::LaunchAttribute* FakeLaunch::attribute(cu::LaunchAttributeId id) const {
  for (const auto& attribute : attributes)
    if (attribute.id == id) return &attribute;
  return nullptr;
}

// --- Calls ---

tk_tensor make_tensor(std::vector<int64_t> sizes, int32_t dtype, uintptr_t address) {
  tk_tensor tensor{};
  tensor.data = reinterpret_cast<void*>(address);
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(sizes.size());
  uint64_t stride = 1;  // of a tensor that is too large it wraps around
  for (int32_t d = tensor.ndim - 1; d >= 0; d--) {
    tensor.sizes[d] = sizes[static_cast<size_t>(d)];
    tensor.strides[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(tensor.sizes[d]);
  }
  return tensor;
}

tk_tensor absent_tensor() {
  tk_tensor tensor{};
  tensor.ndim = -1;
  return tensor;
}

Call::Call(const std::string& op, std::vector<tk_tensor> t, std::vector<int64_t> i, std::vector<double> f)
    : tensors(std::move(t)), ints(std::move(i)), floats(std::move(f)) {
  call.op = tk_intern_op(op.c_str());
  call.config = -1;
}

const tk_call* Call::get() {
  call.n_tensors = static_cast<uint32_t>(tensors.size());
  call.n_ints = static_cast<uint32_t>(ints.size());
  call.n_floats = static_cast<uint32_t>(floats.size());
  call.tensors = tensors.data();
  call.ints = ints.data();
  call.floats = floats.data();
  return &call;
}

}  // namespace tk::test
