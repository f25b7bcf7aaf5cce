#include "runtime.h"

#include <dlfcn.h>

#include "error.h"

namespace tk::ops {
namespace {

// at::Context is only ever handled by address.
struct Context;
using GlobalContext = Context&();
using ContextFlag = bool(const Context*);

// A const member function of at::Context that takes nothing: called like a function of the object's address.
bool context_flag(ContextFlag* flag) {
  static auto* const global = torch_symbol<GlobalContext>("libtorch_cpu.so", "_ZN2at13globalContextEv");
  return global && flag && flag(&global());
}

}  // namespace

void* find_torch_symbol(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (!handle) return nullptr;
  void* symbol = dlsym(handle, name);
  dlclose(handle);  // gives back the reference that dlopen took: torch keeps its libraries loaded
  return symbol;
}

void* current_stream(int32_t device) {
  using GetStream = AOTITorchError(int32_t, void**);
  static auto* const get_stream = torch_symbol<GetStream>("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
  if (!get_stream) fail_unsupported("this torch has no CUDA stream to launch on: it was built without CUDA");
  void* stream = nullptr;
  check_shim(get_stream(device, &stream), "ask torch for the current CUDA stream");
  return stream;
}

bool allows_tf32() {
  static auto* const flag = torch_symbol<ContextFlag>("libtorch_cpu.so", "_ZNK2at7Context15allowTF32CuBLASEv");
  return context_flag(flag);
}

bool wants_deterministic() {
  static auto* const flag = torch_symbol<ContextFlag>("libtorch_cpu.so", "_ZNK2at7Context23deterministicAlgorithmsEv");
  return context_flag(flag);
}

}  // namespace tk::ops
