// The boxed calling convention of the stable ABI: a stack of 64-bit words, in the order of the schema. Reading an
// argument takes it over, so every argument is read before anything can fail.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensor.h"

namespace tk::ops {

// An argument that may be left out.
class OptionalTensor : public Tensor {
 public:
  using Tensor::Tensor;
};

class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack), next_(stack) {}

  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  OptionalTensor optional_tensor() { return OptionalTensor(take<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
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
  std::string text() { return take<std::string>(); }
  std::vector<int64_t> integers() { return take<std::vector<int64_t>>(); }
  // A ScalarType travels as its number.
  int32_t dtype() { return take<int32_t>(); }
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

// How a parameter of a C++ function is read from a call: which types it stands for in the schema, and how they become
// one value. Groups of arguments have specialisations of their own (settings.h, conv.cpp).
template <class T>
struct Reading;

template <>
struct Reading<Tensor> {
  static constexpr std::string_view kTypes[] = {"Tensor"};
  static Tensor read(Arguments& args) { return args.tensor(); }
};
template <>
struct Reading<OptionalTensor> {
  static constexpr std::string_view kTypes[] = {"Tensor?"};
  static OptionalTensor read(Arguments& args) { return args.optional_tensor(); }
};
template <>
struct Reading<int64_t> {
  static constexpr std::string_view kTypes[] = {"int"};
  static int64_t read(Arguments& args) { return args.integer(); }
};
template <>
struct Reading<double> {
  static constexpr std::string_view kTypes[] = {"float"};
  static double read(Arguments& args) { return args.number(); }
};
template <>
struct Reading<bool> {
  static constexpr std::string_view kTypes[] = {"bool"};
  static bool read(Arguments& args) { return args.boolean(); }
};

// Takes the first argument off those of a schema: "Tensor a" off "Tensor a, int[2] stride=1".
constexpr std::string_view next_argument(std::string_view& arguments) {
  const size_t comma = arguments.find(", ");
  const std::string_view argument = arguments.substr(0, comma);
  arguments.remove_prefix(comma == arguments.npos ? arguments.size() : comma + 2);
  return argument;
}

// "a" of "Tensor a", "stride" of "int[2] stride=1".
constexpr std::string_view name_of(std::string_view argument) {
  argument = argument.substr(0, argument.find('='));
  return argument.substr(argument.rfind(' ') + 1);
}

// Where an op of several results, or none, puts them. Takes the handles over.
class Results {
 public:
  explicit Results(StableIValue* stack) : next_(stack) {}

  void give_back(AtenTensorHandle result) { *next_++ = torch::stable::detail::from(result); }

 private:
  StableIValue* next_;
};

}  // namespace tk::ops
