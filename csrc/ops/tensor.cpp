#include "tensor.h"

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
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype, device.type,
                                      device.index, &handle),
             "allocate memory");
  return Tensor(handle);
}

int64_t item_size(int32_t dtype) { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)); }

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case 0: return "uint8";
    case 1: return "int8";
    case 2: return "int16";
    case 3: return "int32";
    case 4: return "int64";
    case 5: return "float16";
    case 6: return "float32";
    case 7: return "float64";
    case 8: return "complex32";
    case 9: return "complex64";
    case 10: return "complex128";
    case 11: return "bool";
    case 15: return "bfloat16";
    case 23: return "float8_e5m2";
    case 24: return "float8_e4m3fn";
    default: return "another dtype";
  }
}

std::string describe(Device device) {
  const char* name = device.is_cuda()                                ? "cuda"
                     : device.type == aoti_torch_device_type_cpu() ? "cpu"
                                                                     : "another device";
  return device.is_cuda() ? text(name, ":", device.index) : name;
}

std::string describe_sizes(std::span<const int64_t> sizes) {
  std::string out = "[";
  for (size_t d = 0; d < sizes.size(); ++d) out += (d ? ", " : "") + std::to_string(sizes[d]);
  return out + "]";
}

}  // namespace tk::ops
