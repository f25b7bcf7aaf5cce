#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

namespace tk {
namespace {

std::mutex g_mutex;  // guards what follows but for the atomics
const Driver* g_table_for_tests = nullptr;
std::atomic<const Driver*> g_ready{nullptr};  // set once cuInit has succeeded
std::atomic<bool> g_forked{false};

void mark_fork() {
  if (g_ready.load(std::memory_order_relaxed)) g_forked.store(true, std::memory_order_relaxed);
}

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

// What the library calls its own version; "an unknown version" when it cannot say.
std::string driver_version(void* library) {
  const auto get_version = reinterpret_cast<decltype(Driver::cuDriverGetVersion)>(dlsym(library, "cuDriverGetVersion"));
  int version = 0;
  if (!get_version || get_version(&version) != cu::kSuccess) return "an unknown version";
  return "CUDA " + version_text(version);
}

void* find_symbol(void* library, const char* symbol, int since) {
  void* const address = dlsym(library, symbol);
  if (!address && since <= kOldestCuda) {
    fail(TK_UNSUPPORTED, "the NVIDIA driver (", driver_version(library), ") has no ", symbol,
         ": tk needs a driver for CUDA ", version_text(kOldestCuda), " or newer");
  }
  return address;
}

const Driver* real_driver() {
  static const Driver table = load_driver("libcuda.so.1");
  return &table;
}

void initialize(const Driver& table) {
  const cu::Result result = table.cuInit(0);
  if (result == cu::kNoDevice) fail(TK_UNSUPPORTED, "the NVIDIA driver finds no GPU");
  if (result == cu::kNotInitialized)
    fail(TK_UNSUPPORTED,
         "CUDA cannot be initialised in this process: it was probably forked from one that used CUDA; start workers "
         "with the \"spawn\" method instead");
  check(table, result, "cuInit");
}

}  // namespace

Driver load_driver(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    fail(TK_UNSUPPORTED, "there is no NVIDIA driver on this machine (", dlerror(),
         "); ops of tk on a GPU need one, on the CPU they need none");
  Driver table;
#define TK_ENTRY(name, symbol, since, ...) \
  table.name = reinterpret_cast<decltype(table.name)>(find_symbol(handle, symbol, since));
  TK_DRIVER_ENTRIES(TK_ENTRY)
#undef TK_ENTRY
  return table;
}

const Driver& driver() {
  check_not_forked();
  if (const Driver* ready = g_ready.load(std::memory_order_acquire)) return *ready;
  std::lock_guard lock(g_mutex);
  if (const Driver* ready = g_ready.load(std::memory_order_relaxed)) return *ready;
  const Driver* const table = g_table_for_tests ? g_table_for_tests : real_driver();
  initialize(*table);
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, mark_fork);
  g_ready.store(table, std::memory_order_release);
  return *table;
}

void check_not_forked() {
  if (g_forked.load(std::memory_order_relaxed)) [[unlikely]]
    fail(TK_UNSUPPORTED,
         "this process was forked after tk had used CUDA, which does not survive a fork; start workers with the "
         "\"spawn\" method, or use tk on the GPU only in the children");
}

void set_driver_for_tests(const Driver* table) {
  std::lock_guard lock(g_mutex);
  g_table_for_tests = table;
  g_ready.store(nullptr);
}

void fail_driver(const Driver& driver, cu::Result result, const char* call, const std::string& detail) {
  const char* name = nullptr;
  const char* reason = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &reason);
  fail(TK_DRIVER_ERROR, call, " failed: ", name ? name : "error ", name ? "" : std::to_string(result), " (",
       reason ? reason : "the driver has no text for it", ")", detail.empty() ? "" : ": ", detail);
}

// --- ContextGuard ---

ContextGuard::ContextGuard(const Driver& driver, cu::Context context) : driver_(driver) {
  cu::Context current = nullptr;
  check(driver, driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == context) [[likely]]
    return;
  check(driver, driver.cuCtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = context;
}

ContextGuard::~ContextGuard() {
  if (!pushed_) return;
  cu::Context popped = nullptr;
  if (driver_.cuCtxPopCurrent(&popped) == cu::kSuccess) return;
  // The driver may report the failure of earlier work here, having popped or not. Earlier failures come back on the
  // next call; what must not happen is that the caller is left with our context.
  cu::Context current = nullptr;
  if (driver_.cuCtxGetCurrent(&current) == cu::kSuccess && current == pushed_) driver_.cuCtxPopCurrent(&popped);
}

// --- Stream capture ---

RelaxedCapture::RelaxedCapture(const Driver& driver) : driver_(driver) {
  check(driver, driver.cuThreadExchangeStreamCaptureMode(&previous_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCapture::~RelaxedCapture() {
  // As with contexts: a failure may be that of earlier work, and the caller's mode must come back.
  if (driver_.cuThreadExchangeStreamCaptureMode(&previous_) != cu::kSuccess)
    driver_.cuThreadExchangeStreamCaptureMode(&previous_);
}

Capture capture_of(const Driver& driver, cu::Stream stream) {
  cu::CaptureStatus status = cu::CaptureStatus::None;
  Capture capture;
  check(driver, driver.cuStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph, nullptr, nullptr),
        "cuStreamGetCaptureInfo");
  if (status == cu::CaptureStatus::None) return {};
  if (status == cu::CaptureStatus::Invalidated)
    fail(TK_UNSUPPORTED, "the capture of this stream has failed already; end it and begin again");
  return capture;
}

}  // namespace tk
