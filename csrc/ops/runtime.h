// What is asked of the torch and the CUDA that happen to be in the process. Symbols outside the stable ABI are looked
// up once and may be missing.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <memory>

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

// Whether torch.backends.cuda.matmul.fp32_precision comes to "tf32", which the older allow_tf32 and
// torch.set_float32_matmul_precision set as well; false where this torch does not tell.
bool allows_tf32();

// Likewise torch.backends.cudnn.conv.fp32_precision, for convolutions.
bool allows_tf32_in_convolutions();

// torch.are_deterministic_algorithms_enabled(); false where this torch does not tell.
bool wants_deterministic();

// What autograd's gate asks. C++ functions of torch, none of them in the stable ABI.
class TorchState {
 public:
  static const TorchState& get();

  // Whether this torch has all of them; without that, nothing else may be asked.
  bool is_known() const;
  // Whether a dispatch mode (fake tensors, tracing), a functorch transform or forward-mode differentiation is on.
  bool is_transforming() const;
  // Whether the tensor has a __torch_dispatch__.
  bool is_subclass(AtenTensorHandle tensor) const;
  bool requires_grad(AtenTensorHandle tensor) const;
  bool is_forward_mode() const;
  // In forward mode: whether it differentiates by the tensor, which then has a tangent.
  bool has_tangent(AtenTensorHandle tensor) const;
  // Counts a change of the tensor's contents, so that autograd notices where it has saved them. As of ATen's in-place
  // ops it throws for an inference tensor outside of inference mode. May be asked of any torch.
  void bump_version(AtenTensorHandle tensor) const;

 private:
  TorchState();
  struct Vector {  // a std::vector, as far as it takes to see that it is empty
    const void* begin;
    const void* end;
  };
  bool (*has_mode_)();
  const Vector& (*functorch_stack_)();
  std::shared_ptr<void> (*forward_level_)(uint64_t index);
  bool (*is_subclass_)(const void* tensor);
  bool (*requires_grad_)(const void* impl);
  const void* (*tangent_)(const void* impl, uint64_t level, const void* tensor);  // the address of an at::Tensor
  void (*bump_version_)(const void* tensor);
};

}  // namespace tk::ops
