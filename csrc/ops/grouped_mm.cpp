// grouped_mm: a product for each group of a ragged dimension, whose groups end where `offs` says on the device.
//
//   a [T, K],    b [G, K, N]  ragged rows: rows of a times their group's matrix -> [T, N]
//   a [G, M, K], b [K, T]     ragged columns -> [M, T]: the same, transposed
//   a [M, T],    b [T, N]     ragged inner size -> [G, M, N]
//   a [G, M, K], b [G, K, N]  a batch -> [G, M, N]: bmm
//
// Group g is [offs[g - 1], offs[g]) of the ragged dimension. What of it lies outside is cut off; what comes after the
// last end is neither read nor written.

#include <algorithm>

#include "groups.h"
#include "launch.h"
#include "ops.h"

namespace tk::ops {
namespace {

constexpr const char* kName = "tk.grouped_mm";

struct Call {
  Product p;
  Meta offs;
  bool zero_rest;  // 0 where nothing is written
  bool is_ragged_inside = false;
  int64_t sizes[3] = {};
  uint32_t dim = 2;
  std::span<const int64_t> out_sizes() const { return {sizes, dim}; }
  int64_t groups() const { return offs.sizes[0]; }
};

void set_sizes(Call& call, std::initializer_list<int64_t> sizes) {
  std::copy(sizes.begin(), sizes.end(), call.sizes);
  call.dim = static_cast<uint32_t>(sizes.size());
}

// --- Checks ---

void check_operand(const char* name, const Meta& t) {
  if (t.dim() != 2 && t.dim() != 3)
    fail_argument(text(kName, ": ", name, " must have 2 or 3 dimensions, is ", describe_sizes(t.sizes)));
}

void check_offs(const Meta& offs, const Meta& a, bool is_ragged) {
  if (!is_ragged && offs) fail_argument(text(kName, ": offs are of 2-dimensional operands, a and b have 3 dimensions"));
  if (!is_ragged) return;
  if (!offs) fail_argument(text(kName, ": offs, the groups' ends, are needed where a or b has 2 dimensions"));
  ops::check_offs(kName, offs, a);
}

void check_cuda_dtype(const Meta& a) {
  if (target(a.device) >= 0 && a.dtype != kBFloat16 && a.dtype != kFloat16)
    fail_unsupported(text(kName, ": a is ", dtype_name(a.dtype), "; on CUDA bfloat16 and float16 are supported"));
}

void set_bias(Call& call, const Meta& bias, int64_t groups, int64_t cols) {
  if (bias) check_same(kName, "a", call.p.factors[0].a.tensor, "bias", bias);
  set_group_bias(call.p, bias, groups, cols);
}

// --- The three kinds ---

// Turns ragged columns into ragged rows: out^T = b^T a^T.
void set_ragged_rows(Call& call, const Meta& bias) {
  Factors& f = call.p.factors[0];
  const bool by_columns = f.a.tensor.dim() == 3;
  const Meta& of_groups = by_columns ? f.a.tensor : f.b.tensor;
  check_groups(kName, by_columns ? "a" : "b", of_groups, call.offs);
  set_sizes(call, {f.a.matrix.rows, f.b.matrix.cols});
  if (!by_columns) return set_bias(call, bias, call.groups(), f.b.matrix.cols);
  if (bias) fail_argument(text(kName, ": a bias is of columns, which are ragged here: add it to the result"));
  std::swap(f.a, f.b);
  std::swap(f.a_name, f.b_name);
  f.a.matrix = f.a.matrix.transposed();
  f.b.matrix = f.b.matrix.transposed();
}

void set_ragged_inside(Call& call, const Meta& bias) {
  const Factors& f = call.p.factors[0];
  call.is_ragged_inside = true;
  set_sizes(call, {call.groups(), f.a.matrix.rows, f.b.matrix.cols});
  set_bias(call, bias, call.groups(), f.b.matrix.cols);
}

void set_out_matrix(Call& call) {
  Product& p = call.p;
  p.out.matrix = matrix_of(p.out.tensor);
  const bool by_columns = !call.is_ragged_inside && p.factors[0].a_name[0] == 'b';
  if (by_columns) p.out.matrix = p.out.matrix.transposed();
}

// --- On the CPU: group by group ---

Operand columns_of(const Operand& x, int64_t begin, int64_t end) {
  Operand part = x;
  part.matrix.cols = end - begin;
  part.offset = begin * x.matrix.col_stride;
  part.is_part = true;
  return part;
}

void compute_group(const Call& call, int64_t g, int64_t begin, int64_t end) {
  const Product& p = call.p;
  const auto& [a, b, a_name, b_name] = p.factors[0];
  const bool inside = call.is_ragged_inside;
  const Factors part{inside ? columns_of(a, begin, end) : rows_of(a, begin, end),
                     inside ? rows_of(b, begin, end) : matrix_at(b, g)};
  const Operand out = inside ? matrix_at(p.out, g) : rows_of(p.out, begin, end);
  if (out.matrix.is_empty()) return;
  Operand bias = p.bias.tensor ? matrix_at(p.bias, g) : Operand();
  bias.matrix.rows = out.matrix.rows;
  reference_product({&part, 1}, bias, p.epilogue, out);
}

void compute_on_cpu(const Call& call) {
  const Factors& f = call.p.factors[0];
  for_each_group(call.offs, call.is_ragged_inside ? f.a.matrix.cols : f.a.matrix.rows,
                 [&](int64_t g, int64_t begin, int64_t end) { compute_group(call, g, begin, end); });
}

// --- On the GPU ---

void launch_groups(const Call& call) {
  static const tk_op ragged_rows = tk_intern_op("grouped_mm");
  static const tk_op ragged_inside = tk_intern_op("grouped_mm_inner");
  const Product& p = call.p;
  const auto& [a, b, a_name, b_name] = p.factors[0];
  const tk_tensor tensors[] = {
      core_operand(a), core_operand(b), core_offs(call.offs), core_tensor(p.bias), core_output(p.out),
  };
  launch_described(call.is_ragged_inside ? ragged_inside : ragged_rows, p, tensors);
}

Tensor run_groups(Call& call, Tensor out) {
  Product& p = call.p;
  const Device device = p.factors[0].a.tensor.device;
  const int32_t dtype = out_dtype(p);
  const bool given = static_cast<bool>(out);
  out = set_out(p, call.out_sizes(), dtype, std::move(out));
  set_out_matrix(call);
  if (given) check_out_memory(p);
  if (call.zero_rest) check_shim(aoti_torch_zero_(out.get()), "fill the result with zeros");
  if (p.out.matrix.is_empty() || call.groups() == 0) return out;
  target(device) >= 0 ? launch_groups(call) : compute_on_cpu(call);
  return out;
}

Tensor multiply_batch(Call& call, const Tensor& a, const Tensor& b, const Meta& bias, Tensor out) {
  set_factors(call.p, 0, a, b, 3);
  const Factors& f = call.p.factors[0];
  if (!bias) return run(call.p, {}, Sizes(f), std::move(out));
  set_bias(call, bias, f.a.matrix.batch, f.b.matrix.cols);
  const int64_t sizes[] = {f.a.matrix.batch, 1, f.b.matrix.cols};
  const int64_t strides[] = {call.p.bias.matrix.batch_stride, 0, call.p.bias.matrix.col_stride};
  Meta rows = bias;
  rows.sizes = sizes;
  rows.strides = strides;
  return run(call.p, rows, Sizes(f), std::move(out));
}

Tensor grouped_mm(const Tensor& a, const Tensor& b, const OptionalTensor& offs, const OptionalTensor& bias,
                  bool zero_rest, const Settings& settings, Tensor out) {
  Call call{.p = {.name = kName, .epilogue = {.activation = settings.activation}, .settings = settings},
            .offs = meta(offs),
            .zero_rest = zero_rest};
  Factors& f = call.p.factors[0];
  f.a.tensor = meta(a);
  f.b.tensor = meta(b);
  check_operand("a", f.a.tensor);
  check_operand("b", f.b.tensor);
  const bool is_ragged = f.a.tensor.dim() == 2 || f.b.tensor.dim() == 2;
  check_offs(call.offs, f.a.tensor, is_ragged);
  check_cuda_dtype(f.a.tensor);
  if (!is_ragged) return multiply_batch(call, a, b, meta(bias), std::move(out));
  check_same(kName, "a", f.a.tensor, "b", f.b.tensor);
  check_dtype(kName, "a", f.a.tensor);
  check_settings(kName, settings);
  f.a.matrix = matrix_of(f.a.tensor);
  f.b.matrix = matrix_of(f.b.tensor);
  check_inner_sizes(kName, f);
  f.a.tensor.dim() == f.b.tensor.dim() ? set_ragged_inside(call, meta(bias)) : set_ragged_rows(call, meta(bias));
  return run_groups(call, std::move(out));
}

constexpr Op kOps[] = {
    op<grouped_mm>("grouped_mm",
                   "Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, bool zero_rest=False, " TK_SETTINGS),
};

}  // namespace

constinit const OpTable kGroupedOps = op_table<kOps>();

}  // namespace tk::ops
