// scaled_grouped_mm: the products of groups of rows of float8, a [T, K] by b [G, K, N], a scale for each row of a and
// each column of each of b's matrices.

#include "groups.h"
#include "launch.h"
#include "ops.h"
#include "scaled.h"

namespace tk::ops {
namespace {

constexpr const char* kName = "tk.scaled_grouped_mm";

struct Call {
  ScaledProduct s;
  Meta offs;
  const Factors& factors() const { return s.p.factors[0]; }
  int64_t groups() const { return offs.sizes[0]; }
};

void set_factors(Call& call, const Meta& a, const Meta& b) {
  Factors& f = call.s.p.factors[0];
  f.a.tensor = a;
  f.b.tensor = b;
  if (a.dim() != 2 || b.dim() != 3)
    fail_unsupported(text(kName, ": a is ", describe_sizes(a.sizes), ", b is ", describe_sizes(b.sizes),
                          "; groups of rows, [T, K] by [G, K, N], are supported"));
  check_float8(call.s);
  f.a.matrix = matrix_of(a);
  f.b.matrix = matrix_of(b);
  check_inner_sizes(kName, f);
}

void set_scales(Call& call, const Meta& scale_a, const Meta& scale_b) {
  ScaledProduct& s = call.s;
  const Matrix &a = call.factors().a.matrix, &b = call.factors().b.matrix;
  check_scale(s, "scale_a", scale_a);
  check_scale(s, "scale_b", scale_b);
  if (scale_a.dim() != 1 || scale_a.sizes[0] != a.rows)
    fail_argument(text(kName, ": scale_a is ", describe_sizes(scale_a.sizes), ", must be [", a.rows, "]"));
  s.scale_a = {scale_a, {a.rows, 1, scale_a.strides[0], 1}};
  s.scale_b.tensor = scale_b;
  if (scale_b.dim() != 2 || !group_rows(scale_b, call.groups(), b.cols, s.scale_b.matrix))
    fail_argument(
        text(kName, ": scale_b is ", describe_sizes(scale_b.sizes), ", must be [", call.groups(), ", ", b.cols, "]"));
}

void compute_on_cpu(const Call& call) {
  const ScaledProduct& s = call.s;
  const auto& [a, b, a_name, b_name] = call.factors();
  for_each_group(call.offs, a.matrix.rows, [&](int64_t g, int64_t begin, int64_t end) {
    if (begin == end) return;
    const Operand bias = s.p.bias.tensor ? matrix_at(s.p.bias, g) : Operand();
    reference_scaled_product(rows_of(a, begin, end), matrix_at(b, g), rows_of(s.scale_a, begin, end),
                             matrix_at(s.scale_b, g), bias, s.p.settings.activation, rows_of(s.p.out, begin, end));
  });
}

void launch_groups(const Call& call) {
  static const tk_op op = tk_intern_op("scaled_grouped_mm");
  const ScaledProduct& s = call.s;
  const auto& [a, b, a_name, b_name] = call.factors();
  const tk_tensor tensors[] = {
      core_operand(a),      core_operand(b),       core_tensor(s.scale_a), core_tensor(s.scale_b),
      core_offs(call.offs), core_tensor(s.p.bias), core_output(s.p.out),
  };
  launch_scaled(op, s, tensors);
}

Tensor scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                         const Tensor& offs, const OptionalTensor& bias, bool use_fast_accum, const Settings& settings,
                         Tensor out) {
  Call call{.s = {.p = {.name = kName, .settings = settings}, .use_fast_accum = use_fast_accum}, .offs = meta(offs)};
  set_factors(call, meta(a), meta(b));
  const Matrix &of_a = call.factors().a.matrix, &of_b = call.factors().b.matrix;
  check_settings(kName, settings);
  check_offs(kName, call.offs, call.factors().a.tensor);
  check_groups(kName, "b", call.factors().b.tensor, call.offs);
  set_scales(call, meta(scale_a), meta(scale_b));
  const Tensor wide = widened_bias(call.s, meta(bias));
  set_group_bias(call.s.p, meta(wide ? wide : bias), call.groups(), of_b.cols);
  const int64_t sizes[] = {of_a.rows, of_b.cols};
  Tensor result = scaled_out(call.s, sizes, std::move(out));
  const bool is_nothing = call.s.p.out.matrix.is_empty() || call.groups() == 0;
  if (!is_nothing) target(call.factors().a.tensor.device) >= 0 ? launch_groups(call) : compute_on_cpu(call);
  return result;
}

constexpr Op kOps[] = {
    op<scaled_grouped_mm>("scaled_grouped_mm",
                          "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, "
                          "Tensor? bias=None, bool use_fast_accum=False, " TK_SETTINGS),
};

}  // namespace

constinit const OpTable kScaledGroupedOps = op_table<kOps>();

}  // namespace tk::ops
