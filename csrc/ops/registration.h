// What every op registers the same way. An op `f` of a family's table is three names, each with an `.out` overload
// where the op has one:
//
//   tk::f            what callers call and tracers see
//   tk::_f           the same without autograd: where the gate (gate.h) goes when no gradient is at stake
//   tk::_f_autograd  where the gate goes when one is; Python registers the formula there (python/tk/ops/_register.py)
#pragma once

#include "gate.h"

namespace tk::ops {

// A row of a family's table. arguments: of the schema, as torch writes them.
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

template <const auto& kOps, size_t I, bool kOut>
void gate_kernel(StableIValue* stack, uint64_t n_inputs, uint64_t) {
  static const Gate gate(kOps[I].name, kOut ? "out" : "", kOps[I].schema_arguments(kOut), n_inputs, 1, 1, true);
  gate.call(stack);
}

template <const auto& kOps, size_t I, bool kOut>
void twin_kernel(StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs) {
  call_carrying(kOps[I].kernel(kOut), stack, n_inputs, n_outputs);
}

template <const auto& kOps, bool kOut, class Visit, size_t... I>
void visit_each(std::index_sequence<I...>, const Visit& visit) {
  const auto visit_one = [&](const Op& op, Boxed* gate, Boxed* twin) {
    if (op.kernel(kOut)) visit(op, kOut, gate, twin);
  };
  (visit_one(kOps[I], gate_kernel<kOps, I, kOut>, twin_kernel<kOps, I, kOut>), ...);
}

// visit(op, is_out, gate, twin) for both overloads of every op.
template <const auto& kOps, class Visit>
void for_each_overload(const Visit& visit) {
  constexpr auto indices = std::make_index_sequence<std::size(kOps)>();
  visit_each<kOps, false>(indices, visit);
  visit_each<kOps, true>(indices, visit);
}

}  // namespace detail

template <const auto& kOps>
void define(torch::stable::detail::StableLibrary& library) {
  detail::for_each_overload<kOps>([&](const Op& op, bool is_out, Boxed* gate, Boxed*) {
    const char* const overload = is_out ? ".out" : "";
    const char* const result = is_out ? "Tensor(a!)" : "Tensor";
    for (const auto& [prefix, suffix] : {std::pair("", ""), std::pair("_", ""), std::pair("_", "_autograd")})
      library.def(text(prefix, op.name, suffix, overload, "(", op.schema_arguments(is_out), ") -> ", result).c_str());
    add_gate(std::string(op.name) + overload, gate);
  });
}

// For a backend's key.
template <const auto& kOps>
void implement(torch::stable::detail::StableLibrary& library) {
  detail::for_each_overload<kOps>([&](const Op& op, bool is_out, Boxed*, Boxed* twin) {
    const std::string name = std::string(op.name) + (is_out ? ".out" : "");
    library.impl(name.c_str(), op.kernel(is_out));
    library.impl(("_" + name).c_str(), twin);
  });
}

}  // namespace tk::ops
