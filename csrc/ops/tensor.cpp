#include "tensor.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <vector>

namespace tk::ops {

Meta meta(const Tensor& tensor) {
  if (!tensor) return {};
  Meta m;
  m.handle = tensor.get();
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_shim(aoti_torch_get_dim(m.handle, &dim), "read a tensor's rank");
  check_shim(aoti_torch_get_sizes(m.handle, &sizes), "read a tensor's sizes");
  check_shim(aoti_torch_get_strides(m.handle, &strides), "read a tensor's strides");
  check_shim(aoti_torch_get_dtype(m.handle, &m.dtype), "read a tensor's dtype");
  check_shim(aoti_torch_get_device_type(m.handle, &m.device.type), "read a tensor's device");
  check_shim(aoti_torch_get_device_index(m.handle, &m.device.index), "read a tensor's device");
  m.sizes = {sizes, static_cast<size_t>(dim)};
  m.strides = {strides, static_cast<size_t>(dim)};
  return m;
}

bool is_defined(AtenTensorHandle tensor) {
  bool found = false;
  check_shim(aoti_torch_is_defined(tensor, &found), "look at a tensor");
  return found;
}

int32_t read_device_type(AtenTensorHandle tensor, std::string_view op, std::string_view name) {
  int32_t type = 0;
  if (aoti_torch_get_device_type(tensor, &type) != 0) [[unlikely]]
    fail_missing(op, name);
  return type;
}

const void* read_pointer(const Meta& tensor) {
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(tensor.handle, &data), "read a tensor's address");
  return data;
}

void* write_pointer(const Meta& tensor) {
  void* data = nullptr;
  check_shim(torch_get_mutable_data_ptr(tensor.handle, &data), "read a tensor's address");
  return data;
}

Tensor empty(std::span<const int64_t> sizes, int32_t dtype, Device device) {
  constexpr size_t kUsualRank = 8;
  int64_t few[kUsualRank];
  std::vector<int64_t> many;
  int64_t* strides = few;
  if (sizes.size() > kUsualRank) {
    many.resize(sizes.size());
    strides = many.data();
  }
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  return empty_strided(sizes, {strides, sizes.size()}, dtype, device);
}

Tensor alias(AtenTensorHandle tensor) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_new_tensor_handle(tensor, &handle), "refer to a tensor");
  return Tensor(handle);
}

Tensor view(AtenTensorHandle tensor, std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t offset) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                            offset, &handle),
             "view a tensor");
  return Tensor(handle);
}

void resize(const Tensor& tensor, std::span<const int64_t> sizes) {
  if (std::ranges::equal(meta(tensor).sizes, sizes)) return;
  std::array stack{torch::stable::detail::from(alias(tensor.get()).release()),
                   torch::stable::detail::from(std::vector<int64_t>(sizes.begin(), sizes.end())),
                   torch::stable::detail::from(std::optional<int64_t>())};
  check_shim(torch_call_dispatcher("aten::resize_", "", stack.data(), TORCH_ABI_VERSION), "resize a tensor");
  Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));  // the same tensor once more
}

void copy(AtenTensorHandle to, AtenTensorHandle from) { check_shim(aoti_torch_copy_(to, from, 0), "copy a tensor"); }

Tensor copied(const Meta& tensor, int32_t dtype) {
  Tensor result = empty(tensor.sizes, dtype, tensor.device);
  copy(result.get(), tensor.handle);
  return result;
}

int64_t item_size(int32_t dtype) { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }

const char* dtype_name(int32_t dtype) {
  static constexpr std::pair<int32_t, const char*> kNames[] = {
      {0, "uint8"},       {1, "int8"},    {2, "int16"},     {3, "int32"},        {4, "int64"},
      {5, "float16"},     {6, "float32"}, {7, "float64"},   {8, "complex32"},    {9, "complex64"},
      {10, "complex128"}, {11, "bool"},   {15, "bfloat16"}, {23, "float8_e5m2"}, {24, "float8_e4m3fn"},
  };
  for (const auto& [number, name] : kNames)
    if (number == dtype) return name;
  return "another dtype";
}

std::string describe(Device device) {
  const char* name = device.is_cuda() ? "cuda" : device.type == aoti_torch_device_type_cpu() ? "cpu" : "another device";
  return device.is_cuda() ? text(name, ":", device.index) : name;
}

std::string describe_sizes(std::span<const int64_t> sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d ? ", " : "") + std::to_string(sizes[d]);
  return out + "]";
}

}  // namespace tk::ops
