// mm, addmm and linear: the product of two matrices (product.h), whatever the leading dimensions of linear's x are. bmm
// and baddbmm: those of a batch. mm_plus_mm: two products in one accumulator.

#include "ops.h"
#include "product.h"

namespace tk::ops {
namespace {

// kRank: 2, or 3 of batches.
template <int64_t kRank>
Tensor multiply(const char* name, const Tensor& a, const Tensor& b, const Tensor& bias, const Epilogue& epilogue,
                const Settings& settings, Tensor out) {
  Product p{.name = name, .epilogue = epilogue, .settings = settings};
  set_factors(p, 0, a, b, kRank);
  return run(p, meta(bias), Sizes(p.factors[0]), std::move(out));
}

}  // namespace

Tensor mm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out) {
  return multiply<2>("tk.mm", a, b, bias, {.activation = settings.activation}, settings, std::move(out));
}

Tensor bmm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out) {
  return multiply<3>("tk.bmm", a, b, bias, {.activation = settings.activation}, settings, std::move(out));
}

namespace {

Tensor addmm(const Tensor& bias, const Tensor& a, const Tensor& b, double beta, double alpha, const Settings& settings,
             Tensor out) {
  return multiply<2>("tk.addmm", a, b, bias, {alpha, beta, settings.activation}, settings, std::move(out));
}

Tensor baddbmm(const Tensor& bias, const Tensor& a, const Tensor& b, double beta, double alpha,
               const Settings& settings, Tensor out) {
  return multiply<3>("tk.baddbmm", a, b, bias, {alpha, beta, settings.activation}, settings, std::move(out));
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Settings& settings, Tensor out) {
  Product p{.name = "tk.linear", .epilogue = {.activation = settings.activation}, .settings = settings};
  p.factors[0] = {.a = {meta(x), {}}, .b = {meta(weight), {}}, .a_name = "x", .b_name = "weight"};
  auto& [a, b, a_name, b_name] = p.factors[0];
  if (a.tensor.dim() == 0) fail_argument("tk.linear: x must have at least 1 dimension, has none");
  check_rank(p.name, b_name, b.tensor, 2);
  const Tensor memory = set_rows(a);
  b.matrix = matrix_of(b.tensor).transposed();
  const Meta bias_meta = meta(bias);
  if (bias_meta) check_rank(p.name, "bias", bias_meta, 1);
  std::vector<int64_t> sizes(a.tensor.sizes.begin(), a.tensor.sizes.end());
  sizes.back() = b.matrix.cols;
  if (bias_meta) check_bias_of_columns(p.name, bias_meta, sizes.back());
  return run(p, bias_meta, sizes, std::move(out));
}

Tensor mm_plus_mm(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const OptionalTensor& bias,
                  const Settings& settings, Tensor out) {
  Product p{.name = "tk.mm_plus_mm", .epilogue = {.activation = settings.activation}, .settings = settings};
  static const tk_op op_of_sum = tk_intern_op("mm_plus_mm");
  p.op_of_sum = op_of_sum;
  p.n_factors = 2;
  p.factors[1].a_name = "c";
  p.factors[1].b_name = "d";
  set_factors(p, 0, a, b);
  set_factors(p, 1, c, d);
  return run(p, meta(bias), Sizes(p.factors[0]), std::move(out));
}

#define TK_MULTIPLY "Tensor a, Tensor b, Tensor? bias=None, " TK_SETTINGS
#define TK_ADD "Tensor bias, Tensor a, Tensor b, float beta=1, float alpha=1, " TK_SETTINGS

constexpr Op kOps[] = {
    op<mm>("mm", TK_MULTIPLY),
    op<addmm>("addmm", TK_ADD),
    op<linear>("linear", "Tensor x, Tensor weight, Tensor? bias=None, " TK_SETTINGS),
    op<bmm>("bmm", TK_MULTIPLY),
    op<baddbmm>("baddbmm", TK_ADD),
    op<mm_plus_mm>("mm_plus_mm", "Tensor a, Tensor b, Tensor c, Tensor d, Tensor? bias=None, " TK_SETTINGS),
};

}  // namespace

constinit const OpTable kMatrixOps = op_table<kOps>();

}  // namespace tk::ops
