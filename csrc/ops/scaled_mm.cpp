// scaled_mm: the product of two matrices of float8, one scale for each or one for each row of a and column of b.

#include "launch.h"
#include "ops.h"
#include "scaled.h"

namespace tk::ops {
namespace {

constexpr const char* kName = "tk.scaled_mm";

// One scale of any rank, or one for each of `count` rows (as [count, 1]) or columns (as [1, count]); as a matrix whose
// stride is 0 where it repeats.
void set_scale(const ScaledProduct& s, const char* name, const Meta& scale, bool of_rows, int64_t count, Operand& to) {
  check_scale(s, name, scale);
  const int64_t along = of_rows ? 0 : 1;
  int64_t stride = 0;
  if (scale.dim() == 2 && scale.sizes[along] == count && scale.sizes[1 - along] == 1) {
    stride = scale.strides[along];
  } else if (scale.count() != 1) {
    const std::string each = of_rows ? text("[", count, ", 1] for the rows") : text("[1, ", count, "] for the columns");
    fail_argument(text(kName, ": ", name, " is ", describe_sizes(scale.sizes), ", must be one number, or ", each,
                       of_rows ? " of a" : " of b"));
  }
  to.tensor = scale;
  to.matrix = of_rows ? Matrix{count, 1, stride, 1} : Matrix{1, count, 0, stride};
}

void set_bias(ScaledProduct& s, const Meta& bias, int64_t cols) {
  if (!bias) return;
  check_bias_of_columns(kName, bias, cols);
  s.p.bias = {bias, {1, cols, 0, bias.strides[0]}};
}

void compute(const ScaledProduct& s) {
  static const tk_op op = tk_intern_op("scaled_mm");
  const auto& [a, b, a_name, b_name] = s.p.factors[0];
  const Operand &bias = s.p.bias, &out = s.p.out;
  if (out.matrix.is_empty()) return;
  if (target(a.tensor.device) < 0 || a.matrix.cols == 0)
    return reference_scaled_product(a, b, s.scale_a, s.scale_b, bias, s.p.settings.activation, out);
  const tk_tensor tensors[] = {
      core_operand(a),        core_operand(b),   core_tensor(s.scale_a),
      core_tensor(s.scale_b), core_tensor(bias), core_output(out),
  };
  launch_scaled(op, s, tensors);
}

Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const OptionalTensor& bias, bool use_fast_accum, const Settings& settings, Tensor out) {
  ScaledProduct s{.p = {.name = kName, .settings = settings}, .use_fast_accum = use_fast_accum};
  set_factors(s.p, 0, a, b);
  const Factors& f = s.p.factors[0];
  check_float8(s);
  check_settings(kName, settings);
  check_shapes(s.p);
  set_scale(s, "scale_a", meta(scale_a), true, f.a.matrix.rows, s.scale_a);
  set_scale(s, "scale_b", meta(scale_b), false, f.b.matrix.cols, s.scale_b);
  const Tensor wide = widened_bias(s, meta(bias));
  set_bias(s, meta(wide ? wide : bias), f.b.matrix.cols);
  Tensor result = scaled_out(s, Sizes(f), std::move(out));
  compute(s);
  return result;
}

constexpr Op kOps[] = {
    op<scaled_mm>("scaled_mm",
                  "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
                  "bool use_fast_accum=False, " TK_SETTINGS),
};

}  // namespace

constinit const OpTable kScaledOps = op_table<kOps>();

}  // namespace tk::ops
