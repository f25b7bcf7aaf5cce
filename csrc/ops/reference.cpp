#include "reference.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <numbers>

namespace tk::ops {
namespace {

// An ATen op of tensors to one tensor.
template <class... Tensors>
Tensor aten(const char* name, const char* overload, const Tensors&... inputs) {
  const auto word = [](const Tensor& t) { return torch::stable::detail::from(alias(t.get()).release()); };
  std::array stack{word(inputs)...};
  check_shim(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

Tensor scalar(double value) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_scalar_to_tensor_float64(value, &handle), "make a scalar");
  return Tensor(handle);
}

Tensor multiply(const Tensor& x, const Tensor& y) { return aten("aten::mul", "Tensor", x, y); }
Tensor multiply(const Tensor& x, double y) { return multiply(x, scalar(y)); }

// x + factor * y. The shim that takes the factor as a number is subtraction's.
Tensor add_scaled(const Tensor& x, const Tensor& y, double factor) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_aten_subtract_Tensor(x.get(), y.get(), -factor, &handle), "add the bias");
  return Tensor(handle);
}

// The same memory as a matrix, or a batch of them.
Tensor view(AtenTensorHandle x, const Matrix& m, int64_t offset) {
  const int64_t sizes[] = {m.batch, m.rows, m.cols};
  const int64_t strides[] = {m.batch_stride, m.row_stride, m.col_stride};
  const size_t first = m.is_batch ? 0 : 1;
  return ops::view(x, std::span(sizes).subspan(first), std::span(strides).subspan(first), offset);
}

Tensor view(const Tensor& x, const Matrix& m) { return view(x.get(), m, 0); }
Tensor view(const Operand& x) { return view(x.tensor.handle, x.matrix, x.offset); }

// In the order of memory that x has: a conversion that transposes is many times slower.
Tensor converted(const Operand& x, int32_t dtype) {
  const Matrix& m = x.matrix;
  if (x.tensor.dtype == dtype) return view(x);
  const bool by_columns = m.row_stride < m.col_stride;
  const int64_t sizes[] = {m.batch, by_columns ? m.cols : m.rows, by_columns ? m.rows : m.cols};
  const Tensor memory = empty(sizes, dtype, x.tensor.device);
  const int64_t batch_stride = m.rows * m.cols;
  const Matrix rows = {m.rows, m.cols, m.cols, 1, m.is_batch, m.batch, batch_stride};
  const Matrix columns = {m.rows, m.cols, 1, m.rows, m.is_batch, m.batch, batch_stride};
  Tensor result = view(memory, by_columns ? columns : rows);
  copy(result.get(), view(x).get());
  return result;
}

// ATen's gelu takes its form as a string, which leaks at every call through the stable ABI before torch 2.14. These are
// the same functions: gelu(x) = x ndtr(x), and (1 + tanh u) / 2 = sigmoid(2 u).
Tensor gelu(const Tensor& x) { return multiply(x, aten("aten::special_ndtr", "", x)); }

Tensor gelu_tanh(const Tensor& x) {
  const double k = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  const Tensor u = add_scaled(multiply(x, k), multiply(multiply(x, x), x), k * 0.044715);
  return multiply(x, aten("aten::sigmoid", "", u));
}

}  // namespace

NoGrad::NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
NoGrad::~NoGrad() { aoti_torch_grad_mode_set_enabled(was_enabled_); }

Tensor activate(Tensor x, int64_t activation) {
  switch (activation) {
    case 1:
      return aten("aten::relu", "", x);
    case 2:
      return gelu(x);
    case 3:
      return gelu_tanh(x);
    case 4:
      return aten("aten::silu", "", x);
    default:
      return x;
  }
}

void reference_product(std::span<const Factors> factors, const Operand& bias, const Epilogue& epilogue,
                       const Operand& out) {
  const NoGrad no_grad;
  const Operand& a = factors[0].a;
  const Operand& b = factors[0].b;
  const char* const product = a.matrix.is_batch ? "aten::bmm" : "aten::mm";
  const bool plain = epilogue.alpha == 1 && !bias.tensor && epilogue.activation == 0 && factors.size() == 1;
  if (plain && a.tensor.dtype == out.tensor.dtype &&
      !a.is_part)  // ATen rounds once too, and needs no wide copy of the operands
    return copy(view(out).get(), aten(product, "", view(a), view(b)).get());
  const int32_t wide = a.tensor.dtype == kFloat64 ? kFloat64 : kFloat32;
  Tensor z = aten(product, "", converted(a, wide), converted(b, wide));
  for (const Factors& more : factors.subspan(1))
    z = add_scaled(z, aten(product, "", converted(more.a, wide), converted(more.b, wide)), 1);
  if (epilogue.alpha != 1) z = multiply(z, epilogue.alpha);
  if (bias.tensor) z = add_scaled(z, view(bias), epilogue.beta);
  copy(view(out).get(), activate(std::move(z), epilogue.activation).get());
}

void reference_scaled_product(const Operand& a, const Operand& b, const Operand& scale_a, const Operand& scale_b,
                              const Operand& bias, int64_t activation, const Operand& out) {
  const NoGrad no_grad;
  Tensor z = aten("aten::mm", "", converted(a, kFloat32), converted(b, kFloat32));
  z = multiply(multiply(z, view(scale_b)), view(scale_a));
  if (bias.tensor) z = add_scaled(z, view(bias), 1);
  copy(view(out).get(), activate(std::move(z), activation).get());
}

}  // namespace tk::ops
