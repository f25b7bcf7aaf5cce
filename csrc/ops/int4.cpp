// int4_mm and uint4x2_mixed_mm: products with a weight of four bits, packed two values to a byte along K, low nibble
// first. weight = (value - zero) * scale of its group of k; plain: value - 8.
//
// Inference only. On the GPU the weight is unpacked inside of the product, or, where there are so many rows that this
// would be done too often, once before it.

#include <algorithm>

#include "launch.h"
#include "ops.h"
#include "product.h"

namespace tk::ops {
namespace {

// From as many rows on the weight is unpacked once, for mm. On an H200 256 rows of an 8192 x 8192 weight take the fused
// kernels 141 us, mm 48 and writing the weight 46; 74 rows of a 14592 x 8960 one 325 and mm 77; 67 rows of a 3840 x
// 3968 one 27 and mm 11. With 64 rows of a 4864 x 2624 one the fused ones are ahead, 17 and mm alone 11.
constexpr int64_t kRowsToDequantize = 65;

struct Weight {
  Meta b;
  Meta scales;  // absent: plain
  Meta zeros;
  int64_t group;
};

struct Call {
  Product p;
  Weight weight;
  int64_t k() const { return p.factors[0].a.matrix.cols; }
  int64_t n() const { return weight.b.sizes[1]; }
};

// --- Checks ---

void check_a(const Product& p) {
  const Meta& a = p.factors[0].a.tensor;
  check_dtype(p.name, "a", a);
  if (target(a.device) >= 0 && a.dtype == kFloat32)
    fail_unsupported(text(p.name, ": a is float32; on CUDA bfloat16 and float16 are supported"));
}

void check_packed(const char* op, const Meta& b, const Meta& a, int64_t k) {
  check_rank(op, "b", b, 2);
  if (b.dtype != kUInt8)
    fail_argument(text(op, ": b is ", dtype_name(b.dtype), ", must be uint8, two values to a byte (tk.pack_int4)"));
  check_device(op, "a", a, "b", b);
  if (k % 2 != 0 || b.sizes[0] != k / 2)
    fail_argument(text(op, ": a has ", k, " columns, b is ", describe_sizes(b.sizes),
                       ", must be [K / 2, N]: two values to a byte"));
}

void check_group(const char* op, int64_t group, int64_t k) {
  if (group != 32 && group != 64 && group != 128 && group != k)
    fail_argument(text(op, ": group_size is ", group, ", must be 32, 64, 128 or K, which is ", k));
  if (group != 0 && k % group != 0)
    fail_argument(text(op, ": group_size is ", group, ", which does not divide K, ", k));
}

void check_scaling(const char* op, const char* name, const Meta& t, const Meta& a, int64_t groups, int64_t n) {
  check_same(op, "a", a, name, t);
  if (t.dim() != 2 || t.sizes[0] != groups || t.sizes[1] != n)
    fail_argument(text(op, ": ", name, " is ", describe_sizes(t.sizes), ", must be [K / group_size, N], [", groups,
                       ", ", n, "]"));
}

void check_weight(const char* op, const Weight& w, const Meta& a, int64_t k) {
  check_packed(op, w.b, a, k);
  if (!w.scales) return;
  check_group(op, w.group, k);
  const int64_t groups = w.group == 0 ? 0 : k / w.group;
  check_scaling(op, "scales", w.scales, a, groups, w.b.sizes[1]);
  if (w.zeros) check_scaling(op, "zeros", w.zeros, a, groups, w.b.sizes[1]);
}

void set_bias(Call& call, const Meta& bias) {
  if (!bias) return;
  Product& p = call.p;
  check_same(p.name, "a", p.factors[0].a.tensor, "bias", bias);
  check_bias_of_columns(p.name, bias, call.n());
  p.bias.tensor = bias;
  p.bias.matrix = {p.factors[0].a.matrix.rows, call.n(), 0, bias.strides[0]};
}

// --- On the CPU: the weight in float32, or float64 ---

template <class T>
void unpack(const Weight& w, const T* scales, const T* zeros, T* out) {
  const auto* const bytes = static_cast<const uint8_t*>(read_pointer(w.b));
  const int64_t n = w.b.sizes[1];
  for (int64_t k = 0; k < 2 * w.b.sizes[0]; k++) {
    const uint8_t* const row = bytes + k / 2 * w.b.strides[0];
    const int64_t first = scales ? k / w.group * n : 0;
    for (int64_t i = 0; i < n; i++) {
      const int value = row[i * w.b.strides[1]] >> (4 * (k % 2)) & 15;
      const T zero = zeros ? zeros[first + i] : T{8};
      out[k * n + i] = (T(value) - zero) * (scales ? scales[first + i] : T{1});
    }
  }
}

template <class T>
Tensor unpacked(const Weight& w, int32_t dtype) {
  const int64_t sizes[] = {2 * w.b.sizes[0], w.b.sizes[1]};
  Tensor result = empty(sizes, dtype, w.b.device);
  const Tensor scales = w.scales ? copied(w.scales, dtype) : Tensor();
  const Tensor zeros = w.zeros ? copied(w.zeros, dtype) : Tensor();
  const auto data = [](const Tensor& t) { return t ? static_cast<const T*>(read_pointer(meta(t))) : nullptr; };
  unpack<T>(w, data(scales), data(zeros), static_cast<T*>(write_pointer(meta(result))));
  return result;
}

void compute_on_cpu(const Call& call) {
  const Product& p = call.p;
  const bool is_double = p.factors[0].a.tensor.dtype == kFloat64;
  const Tensor weight = is_double ? unpacked<double>(call.weight, kFloat64) : unpacked<float>(call.weight, kFloat32);
  Factors f = p.factors[0];
  f.b.tensor = meta(weight);
  f.b.matrix = matrix_of(f.b.tensor);
  f.a.is_part = true;  // not of the weight's dtype: the sum is taken in that
  reference_product({&f, 1}, p.bias, p.epilogue, p.out);
}

// --- On the GPU ---

tk_tensor core_matrix(const Meta& t) { return t ? core_operand({t, matrix_of(t)}) : absent(); }

void launch_fused(const Call& call) {
  static const tk_op op = tk_intern_op("int4_mm");
  const auto& [p, w] = call;
  const tk_tensor tensors[] = {
      core_operand(p.factors[0].a), core_matrix(w.b),  core_matrix(w.scales),
      core_matrix(w.zeros),         core_bias(p.bias), core_output(p.out),
  };
  launch_described(op, p, tensors);
}

Tensor dequantized(const Call& call) {
  static const tk_op op = tk_intern_op("int4_dequantize");
  const Weight& w = call.weight;
  const Meta& a = call.p.factors[0].a.tensor;
  const int64_t sizes[] = {call.k(), call.n()};
  Tensor result = empty(sizes, a.dtype, a.device);
  const Meta out = meta(result);
  const tk_tensor tensors[] = {core_matrix(w.b), core_matrix(w.scales), core_matrix(w.zeros),
                               core_output({out, matrix_of(out)})};
  Settings settings = call.p.settings;
  settings.config = -1;  // of int4_mm's
  launch_op(op, tensors, {}, {}, settings, a.device);
  return result;
}

// A config is one of the fused kernels; and what is chosen by the number of rows would not be invariant.
bool dequantizes_first(const Call& call) {
  const Product& p = call.p;
  return p.factors[0].a.matrix.rows >= kRowsToDequantize && p.settings.config < 0 &&
         !(p.settings.mode & TK_MODE_BATCH_INVARIANT);
}

void launch_apart(const Call& call, const Tensor& out) {
  const Tensor weight = dequantized(call);
  Product p = call.p;
  Operand& b = p.factors[0].b;
  b.tensor = meta(weight);
  b.matrix = matrix_of(b.tensor);
  p.out = {};
  run(p, p.bias.tensor, meta(out).sizes, alias(out.get()));
}

// --- All of it ---

void compute(const Call& call, const Tensor& out) {
  const Product& p = call.p;
  if (p.out.matrix.is_empty()) return;
  if (target(p.out.tensor.device) < 0 || call.k() == 0) return compute_on_cpu(call);
  dequantizes_first(call) ? launch_apart(call, out) : launch_fused(call);
}

Tensor multiply(const char* name, const Tensor& a, const Weight& weight, const Tensor& bias, const Settings& settings,
                Tensor out) {
  Call call{.p = {.name = name, .epilogue = {.activation = settings.activation}, .settings = settings},
            .weight = weight};
  Operand& x = call.p.factors[0].a;
  x.tensor = meta(a);
  if (x.tensor.dim() == 0) fail_argument(text(name, ": a must have at least 1 dimension, has none"));
  check_a(call.p);
  check_settings(name, settings);
  check_weight(name, weight, x.tensor, x.tensor.sizes.back());
  const Tensor memory = set_rows(x);
  // As it lies, so that what it shares memory with is seen.
  call.p.factors[0].b = {.tensor = weight.b, .matrix = matrix_of(weight.b)};
  set_bias(call, meta(bias));
  std::vector<int64_t> sizes(x.tensor.sizes.begin(), x.tensor.sizes.end());
  sizes.back() = call.n();
  Result result = make_result(call.p, sizes, std::move(out));
  compute(call, result.written());
  return finish(std::move(result));
}

Tensor int4_mm(const Tensor& a, const Tensor& b, const Tensor& scales, const OptionalTensor& zeros, int64_t group_size,
               const OptionalTensor& bias, const Settings& settings, Tensor out) {
  const Weight weight{meta(b), meta(scales), meta(zeros), group_size};
  return multiply("tk.int4_mm", a, weight, bias, settings, std::move(out));
}

Tensor uint4x2_mixed_mm(const Tensor& a, const Tensor& b, const Settings& settings, Tensor out) {
  const Weight weight{meta(b), {}, {}, 0};
  return multiply("tk.uint4x2_mixed_mm", a, weight, {}, settings, std::move(out));
}

constexpr Op kOps[] = {
    op<int4_mm>("int4_mm",
                "Tensor a, Tensor b, Tensor scales, Tensor? zeros=None, int group_size=128, "
                "Tensor? bias=None, " TK_SETTINGS),
    op<uint4x2_mixed_mm>("uint4x2_mixed_mm", "Tensor a, Tensor b, " TK_SETTINGS),
};

}  // namespace

constinit const OpTable kInt4Ops = op_table<kOps>();

}  // namespace tk::ops
