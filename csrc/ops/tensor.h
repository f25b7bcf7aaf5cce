// A torch tensor through the stable C API: an owned handle, and what is read of it once per call.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>
#include <utility>

#include "error.h"

namespace tk::ops {

// torch's ScalarType numbers, which tk.h shares.
enum Dtype : int32_t {
  kUInt8 = 0,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3 = 24,  // float8_e4m3fn
};

struct Device {
  int32_t type;
  int32_t index;
  bool operator==(const Device&) const = default;
  bool is_cuda() const {
    static const int32_t cuda = aoti_torch_device_type_cuda();
    return type == cuda;
  }
};

// Owns a handle, as torch::stable::Tensor does, without the reference count of its own that every copy of that touches.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// What a tensor looks like. Borrows from the tensor.
struct Meta {
  AtenTensorHandle handle = nullptr;  // null: an optional argument that was not given
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  int32_t dtype = 0;
  Device device = {};

  explicit operator bool() const { return handle != nullptr; }
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : sizes) n *= size;
    return n;
  }
};

Meta meta(const Tensor& tensor);

// torch hands None on as a tensor that is not defined.
bool is_defined(AtenTensorHandle tensor);

// Of a tensor that an op must be given. Throws for None, by the argument's name.
int32_t read_device_type(AtenTensorHandle tensor, std::string_view op, std::string_view name);

const void* read_pointer(const Meta& tensor);
void* write_pointer(const Meta& tensor);

// An uninitialised tensor, without going through the dispatcher.
inline Tensor empty_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides, int32_t dtype,
                            Device device) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                      device.type, device.index, &handle),
             "allocate memory");
  return Tensor(handle);
}

// The same, row-major.
Tensor empty(std::span<const int64_t> sizes, int32_t dtype, Device device);

// Another handle of the same tensor.
Tensor alias(AtenTensorHandle tensor);

// Some elements of a tensor as a tensor. offset: of the first of them, in elements.
Tensor view(AtenTensorHandle tensor, std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t offset);

// By torch, as its ops do it for an `out` without elements; nothing where the sizes are these already.
void resize(const Tensor& tensor, std::span<const int64_t> sizes);

// By torch: converts, and broadcasts.
void copy(AtenTensorHandle to, AtenTensorHandle from);

// A row-major copy, of `dtype`.
Tensor copied(const Meta& tensor, int32_t dtype);

int64_t item_size(int32_t dtype);
const char* dtype_name(int32_t dtype);
std::string describe(Device device);
std::string describe_sizes(std::span<const int64_t> sizes);

}  // namespace tk::ops
