// tk for C++ programs with libtorch: link libtk_ops, include this, call tk::mm.
//
// Everything here is inline and goes through torch's dispatcher, so that it is compiled against the program's own
// torch; libtk_ops itself works with every torch from 2.11 on. Autograd formulas are registered from Python: in a
// program without Python the ops run under inference mode or without inputs that require gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "tk/tk.h"

// Defined by libtk_ops; a reference to it is what keeps the library linked.
extern "C" TK_API uint32_t tk_ops_abi_version(void);
// tk_load_pack, and its generated ops become torch's. NULL, or why it cannot be.
extern "C" TK_API const char* tk_ops_load_pack(const char* path, tk_status* status);

namespace tk {

enum class Activation : int64_t { None, Relu, Gelu, GeluTanh, Silu };

// Of fp32 products. Torch: as torch's own switch says.
enum class Precision : int64_t { Torch = -1, Ieee = 0, Tf32 = 1 };

// What every product takes beyond its operands. out_dtype: that of the operands (the default) or float32.
// config: the number of one, or -1 to choose. mode: bits of tk.h.
struct Options {
  Activation activation = Activation::None;
  std::optional<at::ScalarType> out_dtype = std::nullopt;
  Precision precision = Precision::Torch;
  int64_t config = -1;
  int64_t mode = 0;
};

namespace detail {

struct Mm {
  static constexpr const char* kName = "tk::mm";
  using Signature = at::Tensor(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                               int64_t activation, std::optional<at::ScalarType> out_dtype, int64_t precision,
                               int64_t config, int64_t mode);
};

struct Addmm {
  static constexpr const char* kName = "tk::addmm";
  using Signature = at::Tensor(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b, double beta,
                               double alpha, int64_t activation, std::optional<at::ScalarType> out_dtype,
                               int64_t precision, int64_t config, int64_t mode);
};

struct Linear {
  static constexpr const char* kName = "tk::linear";
  using Signature = Mm::Signature;
};

template <class Op>
const auto& op() {
  static const auto handle = [] {
    if (tk_ops_abi_version() != TK_ABI_VERSION) throw std::runtime_error("tk/ops.h and libtk_ops are of two versions");
    return c10::Dispatcher::singleton().findSchemaOrThrow(Op::kName, "").template typed<typename Op::Signature>();
  }();
  return handle;
}

}  // namespace detail

// Brings the kernels of a file in; its generated ops are then found in torch's dispatcher as tk::<name>. Of a pack
// built for several architectures, my.sm80.tkpack and my.sm90.tkpack, "my.tkpack" stands for all files. Throws
// std::runtime_error when it is missing, damaged or clashes with a loaded one.
inline void load_pack(const std::string& path) {
  tk_status status = TK_OK;
  if (const char* const error = tk_ops_load_pack(path.c_str(), &status)) throw std::runtime_error(error);
}

// A generated op of a pack that was loaded, to be called on CUDA tensors. Its signature ends in config (-1: choose) and
// mode (bits of tk.h). Throws c10::Error when there is no op of this name, or none of this signature.
//
//   using Gelu = at::Tensor(const at::Tensor& x, double alpha, int64_t config, int64_t mode);
//   at::Tensor y = tk::generated<Gelu>("scaled_gelu").call(x, 1.5, -1, 0);
template <class Signature>
c10::TypedOperatorHandle<Signature> generated(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("tk::" + name).c_str(), "").template typed<Signature>();
}

// activation(a @ b + bias): a [M, K], b [K, N], bias broadcast to [M, N] or absent.
inline at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias = std::nullopt,
                     const Options& o = {}) {
  return detail::op<detail::Mm>().call(a, b, bias, static_cast<int64_t>(o.activation), o.out_dtype,
                                       static_cast<int64_t>(o.precision), o.config, o.mode);
}

// activation(beta * bias + alpha * a @ b).
inline at::Tensor addmm(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b, double beta = 1,
                        double alpha = 1, const Options& o = {}) {
  return detail::op<detail::Addmm>().call(bias, a, b, beta, alpha, static_cast<int64_t>(o.activation), o.out_dtype,
                                          static_cast<int64_t>(o.precision), o.config, o.mode);
}

// activation(x @ weight^T + bias): x [..., K], weight [N, K], bias [N] or absent.
inline at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = std::nullopt, const Options& o = {}) {
  return detail::op<detail::Linear>().call(x, weight, bias, static_cast<int64_t>(o.activation), o.out_dtype,
                                           static_cast<int64_t>(o.precision), o.config, o.mode);
}

}  // namespace tk
