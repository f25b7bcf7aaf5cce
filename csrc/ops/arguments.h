// The boxed calling convention of the stable ABI: a stack of 64-bit words, in the order of the schema. Reading an
// argument takes it over, so every argument is read before anything can fail.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "tensor.h"

namespace tk::ops {

class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack), next_(stack) {}

  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  Tensor optional_tensor() { return Tensor(take<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  std::vector<Tensor> tensors() {
    const auto list = take<StableListHandle>();
    size_t count = 0;
    check_shim(torch_list_size(list, &count), "read a list of tensors");
    std::vector<Tensor> found;
    found.reserve(count);
    for (size_t i = 0; i < count; i++) {
      StableIValue element;
      check_shim(torch_list_get_item(list, i, &element), "read a list of tensors");
      found.emplace_back(torch::stable::detail::to<AtenTensorHandle>(element));
    }
    check_shim(torch_delete_list(list), "free a list of tensors");
    return found;
  }
  int64_t integer() { return take<int64_t>(); }
  double number() { return take<double>(); }
  bool boolean() { return take<bool>(); }
  std::vector<int64_t> integers() { return take<std::vector<int64_t>>(); }
  // A ScalarType travels as its number.
  std::optional<int32_t> optional_dtype() { return take<std::optional<int32_t>>(); }

  void give_back(Tensor&& result) { *stack_ = torch::stable::detail::from(result.release()); }

 private:
  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }

  StableIValue* stack_;
  StableIValue* next_;
};

// Where an op of several results, or none, puts them. Takes the handles over.
class Results {
 public:
  explicit Results(StableIValue* stack) : next_(stack) {}

  void give_back(AtenTensorHandle result) { *next_++ = torch::stable::detail::from(result); }

 private:
  StableIValue* next_;
};

}  // namespace tk::ops
