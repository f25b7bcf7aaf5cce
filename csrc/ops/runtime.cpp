#include "runtime.h"

#include <dlfcn.h>

#include "tensor.h"

namespace tk::ops {
namespace {

// at::Context is only ever handled by address.
struct Context;
using GlobalContext = Context&();
using ContextFlag = bool(const Context*);
// Of at::Float32Backend, at::Float32Op and at::Float32Precision, what is asked for here.
enum class Float32Backend : int { Cuda = 1 };
enum class Float32Op : int { Conv = 1, Matmul = 3 };
enum class Float32Precision : int { Tf32 = 2 };

// A const member function of at::Context that takes nothing: called like a function of the object's address.
bool context_flag(ContextFlag* flag) {
  static auto* const global = torch_symbol<GlobalContext>("libtorch_cpu.so", "_ZN2at13globalContextEv");
  return global && flag && flag(&global());
}

// What a setting comes to, with those above it that it inherits from. allowTF32CuBLAS and allowTF32CuDNN, which tell of
// the older switches, raise an error where the newer ones say something else.
bool is_tf32(Float32Op op) {
  using Precision = Float32Precision(const Context*, Float32Backend, Float32Op);
  static auto* const global = torch_symbol<GlobalContext>("libtorch_cpu.so", "_ZN2at13globalContextEv");
  static auto* const precision = torch_symbol<Precision>(
      "libtorch_cpu.so", "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE");
  return global && precision && precision(&global(), Float32Backend::Cuda, op) == Float32Precision::Tf32;
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

bool allows_tf32() { return is_tf32(Float32Op::Matmul); }
bool allows_tf32_in_convolutions() { return is_tf32(Float32Op::Conv); }

bool wants_deterministic() {
  static auto* const flag = torch_symbol<ContextFlag>("libtorch_cpu.so", "_ZNK2at7Context23deterministicAlgorithmsEv");
  return context_flag(flag);
}

const TorchState& TorchState::get() {
  static const TorchState state;
  return state;
}

TorchState::TorchState() {
  const auto find = [](auto& function, const char* library, const char* name) {
    function = torch_symbol<std::remove_pointer_t<std::remove_reference_t<decltype(function)>>>(library, name);
  };
  constexpr const char* kTorch = "libtorch_cpu.so";
  constexpr const char* kC10 = "libc10.so";
  find(has_mode_, kC10, "_ZN3c104impl21dispatch_mode_enabledEv");
  find(functorch_stack_, kTorch, "_ZN2at9functorch20getDynamicLayerStackEv");
  find(forward_level_, kTorch, "_ZN5torch8autograd14ForwardADLevel14try_get_by_idxEm");
  find(is_subclass_, kTorch, "_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE");
  find(bump_version_, kTorch, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  find(requires_grad_, kC10, "_ZNK3c1010TensorImpl13requires_gradEv");
  find(tangent_, kC10, "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE");
}

bool TorchState::is_known() const {
  return has_mode_ && functorch_stack_ && forward_level_ && is_subclass_ && requires_grad_;
}

bool TorchState::is_transforming() const {
  if (has_mode_()) return true;
  const Vector& layers = functorch_stack_();
  return layers.begin != layers.end || is_forward_mode();
}

// Levels do not nest: there is no other.
bool TorchState::is_forward_mode() const { return forward_level_(0) != nullptr; }

// A handle is the address of an at::Tensor, which is nothing but the address of its implementation.
bool TorchState::is_subclass(AtenTensorHandle tensor) const { return is_subclass_(tensor); }
bool TorchState::requires_grad(AtenTensorHandle tensor) const {
  return requires_grad_(*reinterpret_cast<const void* const*>(tensor));
}
bool TorchState::has_tangent(AtenTensorHandle tensor) const {
  if (!tangent_) return true;  // for all that is known
  const void* tangent = tangent_(*reinterpret_cast<const void* const*>(tensor), 0, tensor);
  return is_defined(static_cast<AtenTensorHandle>(const_cast<void*>(tangent)));
}
void TorchState::bump_version(AtenTensorHandle tensor) const {
  if (bump_version_) bump_version_(tensor);
}

}  // namespace tk::ops
