// How an op of the library is registered: a schema and a C++ function are all that it takes. The function's arguments
// are read by its parameters' types, and an op whose schema has others does not compile. An op `f` is three names, each
// with an `.out` overload where the function's last parameter is a `Tensor` by value, empty where there is no out:
//
//   tk::f            what callers call and tracers see
//   tk::_f           the same without autograd: where the gate (gate.h) goes when no gradient is at stake
//   tk::_f_autograd  where the gate goes when one is; Python registers the formula there (python/tk/ops/_register.py)
#pragma once

#include <span>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "arguments.h"
#include "gate.h"

namespace tk::ops {

// arguments: of the schema, as torch writes them.
struct Op {
  const char* name;
  const char* arguments;
  Boxed* function;
  Boxed* out_function;  // null: there is no `.out`

  std::string schema_arguments(bool is_out) const {
    return std::string(arguments) + (is_out ? ", *, Tensor(a!) out" : "");
  }
  Boxed* kernel(bool is_out) const { return is_out ? out_function : function; }
};

namespace detail {

// The type of a schema's next argument; lists of a given length are lists.
constexpr std::string_view next_type(std::string_view& arguments) {
  const std::string_view argument = next_argument(arguments);
  const std::string_view type = argument.substr(0, argument.find(' '));
  return type.starts_with("int[") ? "int[]" : type;
}

// A tensor that must be given is None. place: among those that must. Looked for where a call has failed, so that others
// do not pay for it.
struct MissingTensor : std::runtime_error {
  explicit MissingTensor(int place) : std::runtime_error("a tensor is missing"), place(place) {}
  int place;
};

template <class... Values>
int first_missing(const Values&... values) {
  int place = -1, next = 0;
  const auto look = [&]<class Value>(const Value& value) {
    if constexpr (std::is_same_v<Value, Tensor>) {
      if (value && !is_defined(value.get()) && place < 0) place = next;
      next++;
    }
  };
  (look(values), ...);
  return place;
}

template <auto kFunction>
struct Function;

template <class... Parameters, Tensor (*kFunction)(Parameters...)>
struct Function<kFunction> {
  template <class Parameter>
  static constexpr bool is_out = std::is_same_v<Parameter, Tensor>;
  static constexpr bool has_out = (is_out<Parameters> || ...);

  static constexpr bool takes(std::string_view arguments) {
    bool does = true;
    const auto match = [&]<class Parameter>(std::type_identity<Parameter>) {
      if constexpr (!is_out<Parameter>)
        for (const std::string_view type : Reading<std::remove_cvref_t<Parameter>>::kTypes)
          does = does && next_type(arguments) == type;
    };
    (match(std::type_identity<Parameters>()), ...);
    return does && arguments.empty();
  }

  template <class Parameter, bool kOut>
  static std::remove_cvref_t<Parameter> read(Arguments& args) {
    if constexpr (is_out<Parameter> && !kOut)
      return {};
    else
      return Reading<std::remove_cvref_t<Parameter>>::read(args);
  }

  template <bool kOut>
  static void boxed(StableIValue* stack, uint64_t, uint64_t) {
    Arguments args(stack);
    // In braces, which are evaluated in their order.
    std::tuple<std::remove_cvref_t<Parameters>...> values{read<Parameters, kOut>(args)...};
    try {
      args.give_back(std::apply([](auto&... value) { return kFunction(std::forward<Parameters>(value)...); }, values));
    } catch (const std::exception&) {
      const int place = std::apply([](const auto&... value) { return first_missing(value...); }, values);
      if (place >= 0) throw MissingTensor(place);
      throw;
    }
  }
};

// The name of a schema's tensor that must be given, by its place among those.
inline std::string_view required_tensor(std::string_view arguments, int place) {
  while (true) {
    const std::string_view argument = next_argument(arguments);
    const bool is_required = argument.starts_with("Tensor ") || argument.starts_with("Tensor(");
    if (is_required && place-- == 0) return name_of(argument);
  }
}

}  // namespace detail

// The op that calls a function.
template <auto kFunction>
consteval Op op(const char* name, const char* arguments) {
  using Function = detail::Function<kFunction>;
  if (!Function::takes(arguments)) throw std::logic_error("the schema's types are not those of the function");
  Boxed* out_function = nullptr;
  if constexpr (Function::has_out) out_function = Function::template boxed<true>;
  return {name, arguments, Function::template boxed<false>, out_function};
}

namespace detail {

template <const auto& kOps, size_t I, bool kOut>
void gate_kernel(StableIValue* stack, uint64_t n_inputs, uint64_t) {
  static const Gate gate(kOps[I].name, kOut ? "out" : "", kOps[I].schema_arguments(kOut), n_inputs, 1, 1, true);
  gate.call(stack);
}

template <const auto& kOps, size_t I, bool kOut>
void kernel(StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs) {
  const Op& op = kOps[I];
  try {
    op.kernel(kOut)(stack, n_inputs, n_outputs);
  } catch (const MissingTensor& error) {
    fail_missing(op.name, required_tensor(op.schema_arguments(kOut), error.place));
  }
}

template <const auto& kOps, size_t I, bool kOut>
void twin_kernel(StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs) {
  call_carrying(kernel<kOps, I, kOut>, stack, n_inputs, n_outputs);
}

struct Kernels {
  Boxed* gate;
  Boxed* own;
  Boxed* twin;
};

template <const auto& kOps, bool kOut, class Visit, size_t... I>
void visit_each(std::index_sequence<I...>, const Visit& visit) {
  const auto visit_one = [&](const Op& op, const Kernels& kernels) {
    if (op.kernel(kOut)) visit(op, kOut, kernels);
  };
  (visit_one(kOps[I], {gate_kernel<kOps, I, kOut>, kernel<kOps, I, kOut>, twin_kernel<kOps, I, kOut>}), ...);
}

// visit(op, is_out, kernels) for both overloads of every op.
template <const auto& kOps, class Visit>
void for_each_overload(const Visit& visit) {
  constexpr auto indices = std::make_index_sequence<std::size(kOps)>();
  visit_each<kOps, false>(indices, visit);
  visit_each<kOps, true>(indices, visit);
}

}  // namespace detail

template <const auto& kOps>
void define(torch::stable::detail::StableLibrary& library) {
  detail::for_each_overload<kOps>([&](const Op& op, bool is_out, const detail::Kernels& kernels) {
    const char* const overload = is_out ? ".out" : "";
    const char* const result = is_out ? "Tensor(a!)" : "Tensor";
    for (const auto& [prefix, suffix] : {std::pair("", ""), std::pair("_", ""), std::pair("_", "_autograd")})
      library.def(text(prefix, op.name, suffix, overload, "(", op.schema_arguments(is_out), ") -> ", result).c_str());
    add_gate(std::string(op.name) + overload, kernels.gate);
  });
}

// For a backend's key.
template <const auto& kOps>
void implement(torch::stable::detail::StableLibrary& library) {
  detail::for_each_overload<kOps>([&](const Op& op, bool is_out, const detail::Kernels& kernels) {
    const std::string name = std::string(op.name) + (is_out ? ".out" : "");
    library.impl(name.c_str(), kernels.own);
    library.impl(("_" + name).c_str(), kernels.twin);
  });
}

// The ops of one file, for library.cpp.
struct OpTable {
  std::span<const Op> ops;
  void (*define)(torch::stable::detail::StableLibrary& library);
  void (*implement)(torch::stable::detail::StableLibrary& library);
};

template <const auto& kOps>
constexpr OpTable op_table() {
  return {kOps, define<kOps>, implement<kOps>};
}

// Keeps the names that are the library's own: no pack can have a generated op of such a name (library.cpp).
void reserve_names();

}  // namespace tk::ops
