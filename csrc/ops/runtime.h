// What is asked of the torch and the CUDA that happen to be in the process. Symbols outside the stable ABI are looked
// up once and may be missing.
#pragma once

#include <cstdint>

namespace tk::ops {

// `name` in a library that is loaded already, or null. (RTLD_DEFAULT finds nothing: Python loads torch's libraries
// without making their symbols global.)
void* find_torch_symbol(const char* library, const char* name);

template <class Function>
Function* torch_symbol(const char* library, const char* name) {
  return reinterpret_cast<Function*>(find_torch_symbol(library, name));
}

// torch's current stream on a device, as the driver knows it. Throws where torch has no CUDA: the default stream is
// never a substitute.
void* current_stream(int32_t device);

// torch.backends.cuda.matmul.allow_tf32; false where this torch does not tell.
bool allows_tf32();

// torch.are_deterministic_algorithms_enabled(); false where this torch does not tell.
bool wants_deterministic();

}  // namespace tk::ops
