// The CUDA driver as a table of function pointers, found with dlopen on first use. Tests put a fake in its place.
#pragma once

#include "cuda_types.h"
#include "error.h"

namespace tk {

// X(name, symbol, CUDA version that brought it as 1000 * major + 10 * minor, parameters...)
// What came after kOldestCuda may be missing: its users ask first, or say what it would take.
#define TK_DRIVER_ENTRIES(X)                                                                                           \
  X(cuInit, "cuInit", 2000, unsigned)                                                                                  \
  X(cuDriverGetVersion, "cuDriverGetVersion", 2020, int*)                                                              \
  X(cuGetErrorName, "cuGetErrorName", 6000, cu::Result, const char**)                                                  \
  X(cuGetErrorString, "cuGetErrorString", 6000, cu::Result, const char**)                                              \
  X(cuDeviceGetCount, "cuDeviceGetCount", 2000, int*)                                                                  \
  X(cuDeviceGet, "cuDeviceGet", 2000, cu::Device*, int)                                                                \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", 2000, int*, cu::DeviceAttribute, cu::Device)                         \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, cu::Context*, cu::Device)                              \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", 4000, cu::Context*)                                                            \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", 4000, cu::Context)                                                        \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", 4000, cu::Context*)                                                         \
  X(cuModuleLoadDataEx, "cuModuleLoadDataEx", 2010, cu::Module*, const void*, unsigned, cu::JitOption*, void**)        \
  X(cuModuleGetFunction, "cuModuleGetFunction", 2000, cu::Function*, cu::Module, const char*)                          \
  X(cuFuncGetAttribute, "cuFuncGetAttribute", 2020, int*, cu::FunctionAttribute, cu::Function)                         \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", 9000, cu::Function, cu::FunctionAttribute, int)                          \
  X(cuFuncLoad, "cuFuncLoad", 12040, cu::Function)                                                                     \
  X(cuFuncGetParamInfo, "cuFuncGetParamInfo", 12040, cu::Function, size_t, size_t*, size_t*)                           \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", 11080, const cu::LaunchConfig*, cu::Function, void**, void**)                \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled", 12000, cu::TensorMap*, int, uint32_t, void*, const uint64_t*,    \
    const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int)                                             \
  X(cuTensorMapEncodeIm2col, "cuTensorMapEncodeIm2col", 12000, cu::TensorMap*, int, uint32_t, void*, const uint64_t*,  \
    const uint64_t*, const int*, const int*, uint32_t, uint32_t, const uint32_t*, int, int, int, int)                  \
  X(cuMemAlloc, "cuMemAlloc_v2", 3020, cu::DevicePtr*, size_t)                                                         \
  X(cuMemAllocAsync, "cuMemAllocAsync", 11020, cu::DevicePtr*, size_t, cu::Stream)                                     \
  X(cuMemFreeAsync, "cuMemFreeAsync", 11020, cu::DevicePtr, cu::Stream)                                                \
  X(cuMemsetD8Async, "cuMemsetD8Async", 3020, cu::DevicePtr, unsigned char, size_t, cu::Stream)                        \
  X(cuStreamCreate, "cuStreamCreate", 2000, cu::Stream*, unsigned)                                                     \
  X(cuStreamSynchronize, "cuStreamSynchronize", 2000, cu::Stream)                                                      \
  X(cuStreamGetId, "cuStreamGetId", 12000, cu::Stream, unsigned long long*)                                            \
  X(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2", 11030, cu::Stream, cu::CaptureStatus*, uint64_t*, cu::Graph*, \
    const cu::GraphNode**, size_t*)                                                                                    \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", 10010, cu::CaptureMode*)                   \
  X(cuUserObjectCreate, "cuUserObjectCreate", 11030, cu::UserObject*, void*, cu::HostFunction*, unsigned, unsigned)    \
  X(cuUserObjectRelease, "cuUserObjectRelease", 11030, cu::UserObject, unsigned)                                       \
  X(cuGraphRetainUserObject, "cuGraphRetainUserObject", 11030, cu::Graph, cu::UserObject, unsigned, unsigned)

inline constexpr int kOldestCuda = 11080;

struct Driver {
#define TK_ENTRY(name, symbol, since, ...) cu::Result (*name)(__VA_ARGS__) = nullptr;
  TK_DRIVER_ENTRIES(TK_ENTRY)
#undef TK_ENTRY
};

// The initialised driver. Throws TK_UNSUPPORTED when there is none, it is too old, or there is no GPU.
const Driver& driver();

// Throws TK_UNSUPPORTED in a process forked after driver() succeeded: CUDA does not survive a fork.
void check_not_forked();

// Fills the table from a library. Throws TK_UNSUPPORTED naming what is missing.
Driver load_driver(const char* library);

// Tests only (a release library does not export it): this table from now on, nullptr for the real driver.
void set_driver_for_tests(const Driver* table);

[[noreturn]] void fail_driver(const Driver& driver, cu::Result result, const char* call,
                              const std::string& detail = {});

inline void check(const Driver& driver, cu::Result result, const char* call) {
  if (result != cu::kSuccess) [[unlikely]]
    fail_driver(driver, result, call);
}

// Makes a context current for a scope. Most threads have it already: then nothing is done.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, cu::Context context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Driver& driver_;
  cu::Context pushed_ = nullptr;
};

// Lets this thread allocate and load while some stream is being captured. Legal for work that is not captured itself.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  cu::CaptureMode previous_ = cu::CaptureMode::Relaxed;
};

struct Capture {
  uint64_t id = 0;  // 0: the stream is not being captured
  cu::Graph graph = nullptr;
};
Capture capture_of(const Driver& driver, cu::Stream stream);

}  // namespace tk
