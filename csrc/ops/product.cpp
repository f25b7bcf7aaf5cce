#include "product.h"

#include <algorithm>

#include "launch.h"
#include "overlap.h"
#include "runtime.h"

namespace tk::ops {
namespace {

// --- Checks ---

[[noreturn]] void fail_shapes(const char* op, const char* what, const Factors& f) {
  fail_argument(text(op, ": the ", what, " sizes differ: ", f.a_name, " is ", describe_sizes(f.a.tensor.sizes), ", ",
                     f.b_name, " is ", describe_sizes(f.b.tensor.sizes)));
}

void check_same(const Product& p) {
  const Factors& first = p.factors[0];
  for (const Factors& f : p.all()) {
    if (&f != &first) check_same(p.name, first.a_name, first.a.tensor, f.a_name, f.a.tensor);
    check_same(p.name, first.a_name, first.a.tensor, f.b_name, f.b.tensor);
  }
}

// The shape of the result, as a matrix that lies nowhere.
Matrix result_of(const Factors& f) {
  return {f.a.matrix.rows, f.b.matrix.cols, 0, 0, f.a.matrix.is_batch, f.a.matrix.batch, 0};
}

// A bias that ATen would broadcast. Not read at all when beta is 0, so that its NaN and inf do not count.
void set_bias(const Meta& bias, Product& p) {
  if (!bias) return;
  const Factors& first = p.factors[0];
  check_same(p.name, first.a_name, first.a.tensor, "bias", bias);
  if (!broadcast(bias, result_of(first), p.bias.matrix)) [[unlikely]]
    fail_argument(text(p.name, ": bias is ", describe_sizes(bias.sizes), ", which does not broadcast to ",
                       describe_sizes(Sizes(first))));
  if (p.epilogue.beta != 0) p.bias.tensor = bias;
}

// --- Out ---

Extent extent(const Operand& x) {
  return {static_cast<const char*>(read_pointer(x.tensor)), x.matrix, item_size(x.tensor.dtype)};
}

bool same_elements(const Extent& x, const Extent& y) {
  return x.data == y.data && x.item == y.item && x.matrix.row_stride == y.matrix.row_stride &&
         x.matrix.col_stride == y.matrix.col_stride && x.matrix.batch_stride == y.matrix.batch_stride;
}

// False for an `out` whose leading dimensions are no single dimension.
bool set_out_matrix(Product& p) {
  if (!p.factors[0].a.matrix.is_batch) return flatten(p.out.tensor, p.out.matrix);
  p.out.matrix = matrix_of(p.out.tensor);
  return true;
}

// --- Launch ---

int64_t precision_of(const Product& p) {
  if (p.factors[0].a.tensor.dtype != kFloat32) return 0;
  return p.settings.precision >= 0 ? p.settings.precision : allows_tf32();
}

tk_op core_op(const Product& p) {
  static const tk_op mm = tk_intern_op("mm");
  static const tk_op bmm = tk_intern_op("bmm");
  if (p.n_factors > 1) return p.op_of_sum;
  return p.factors[0].a.matrix.is_batch ? bmm : mm;
}

void launch_product(const Product& p) {
  tk_tensor tensors[2 * kMaxFactors + 2];
  tk_tensor* next = tensors;
  for (const Factors& f : p.all()) {
    *next++ = core_operand(f.a);
    *next++ = core_operand(f.b);
  }
  *next++ = core_bias(p.bias);
  *next++ = core_output(p.out);
  launch_described(core_op(p), p, {tensors, next});
}

// Factors that add nothing are left out: those whose inner size is 0, and all where alpha is 0. As with cuBLAS their
// elements are then not read, so that NaN and inf in them do not count.
void leave_out_nothing(Product& p) {
  if (p.epilogue.alpha == 0)
    for (Factors& f : p.all()) f.a.matrix.cols = f.b.matrix.rows = 0;
  const auto is_nothing = [](const Factors& f) { return f.a.matrix.cols == 0; };
  const auto end = std::remove_if(p.factors, p.factors + p.n_factors, is_nothing);
  p.n_factors = std::max<uint32_t>(1, static_cast<uint32_t>(end - p.factors));
}

void compute(Product& p) {
  if (p.out.matrix.is_empty()) return;
  leave_out_nothing(p);
  const Operand& a = p.factors[0].a;
  if (target(a.tensor.device) >= 0 && a.matrix.cols != 0) {
    launch_product(p);
  } else {
    reference_product(p.all(), p.bias, p.epilogue, p.out);
  }
}

}  // namespace

void check_rank(const char* op, const char* what, const Meta& t, int64_t rank) {
  if (t.dim() != rank) [[unlikely]]
    fail_argument(text(op, ": ", what, " must have ", rank, " dimensions, is ", describe_sizes(t.sizes)));
}

void check_device(const char* op, const char* a_name, const Meta& a, const char* b_name, const Meta& b) {
  if (a.device != b.device) [[unlikely]]
    fail_argument(text(op, ": ", a_name, " is on ", describe(a.device), ", ", b_name, " on ", describe(b.device),
                       "; all tensors must be on one device"));
}

void check_same(const char* op, const char* a_name, const Meta& a, const char* b_name, const Meta& b) {
  check_device(op, a_name, a, b_name, b);
  if (a.dtype != b.dtype) [[unlikely]]
    fail_argument(text(op, ": ", a_name, " is ", dtype_name(a.dtype), ", ", b_name, " is ", dtype_name(b.dtype),
                       "; they must have one dtype"));
}

void check_inner_sizes(const char* op, const Factors& f) {
  if (f.a.matrix.cols != f.b.matrix.rows) [[unlikely]]
    fail_shapes(op, "inner", f);
}

void check_bias_of_columns(const char* op, const Meta& bias, int64_t cols) {
  if (bias.dim() != 1 || bias.sizes[0] != cols) [[unlikely]]
    fail_argument(text(op, ": bias is ", describe_sizes(bias.sizes), ", must be [", cols, "]"));
}

void check_shapes(const Product& p) {
  const Factors& first = p.factors[0];
  for (const Factors& f : p.all()) {
    check_inner_sizes(p.name, f);
    if (f.a.matrix.batch != f.b.matrix.batch) [[unlikely]]
      fail_shapes(p.name, "batch", f);
    if (f.a.matrix.rows != first.a.matrix.rows || f.b.matrix.cols != first.b.matrix.cols) [[unlikely]]
      fail_argument(text(p.name, ": ", f.a_name, " @ ", f.b_name, " is [", f.a.matrix.rows, ", ", f.b.matrix.cols,
                         "], ", first.a_name, " @ ", first.b_name, " is [", first.a.matrix.rows, ", ",
                         first.b.matrix.cols, "]; they must have one shape"));
  }
}

void check_dtype(const char* op, const char* name, const Meta& t) {
  const bool half = t.dtype == kBFloat16 || t.dtype == kFloat16;
  if (half || t.dtype == kFloat32 || (t.dtype == kFloat64 && target(t.device) < 0)) return;
  fail_unsupported(text(op, ": ", name, " is ", dtype_name(t.dtype),
                        "; bfloat16, float16 and float32 are supported, and float64 on the CPU"));
}

int32_t out_dtype(const Product& p) {
  const Meta& a = p.factors[0].a.tensor;
  const int32_t dtype = p.settings.out_dtype.value_or(a.dtype);
  if (dtype == a.dtype || (dtype == kFloat32 && a.dtype != kFloat64)) return dtype;
  const bool is_alone = a.dtype == kFloat32 || a.dtype == kFloat64;
  fail_unsupported(text(p.name, ": out_dtype is ", dtype_name(dtype), "; for ", dtype_name(a.dtype), " operands ",
                        is_alone ? "only " : "", dtype_name(a.dtype), is_alone ? " is" : " and float32 are",
                        " supported"));
}

void check_out(const Product& p, std::span<const int64_t> sizes, int32_t dtype) {
  const Meta& out = p.out.tensor;
  const Device device = p.factors[0].a.tensor.device;
  if (out.sizes.size() != sizes.size() || !std::equal(sizes.begin(), sizes.end(), out.sizes.begin())) [[unlikely]]
    fail_argument(text(p.name, ": out is ", describe_sizes(out.sizes), ", must be ", describe_sizes(sizes),
                       "; it is not resized"));
  if (out.dtype != dtype) [[unlikely]]
    fail_argument(text(p.name, ": out is ", dtype_name(out.dtype), ", must be ", dtype_name(dtype)));
  if (out.device != device) [[unlikely]]
    fail_argument(text(p.name, ": out is on ", describe(out.device), ", must be on ", describe(device)));
}

void check_out_memory(const Product& p) {
  if (p.out.matrix.is_empty()) return;
  if (overlaps_itself(p.out.matrix)) [[unlikely]]
    fail_argument(text(p.name, ": elements of out share memory: give it one place for each (out.clone())"));
  for (const Factors& f : p.all()) {
    check_out_beside(p, f.a_name, f.a);
    check_out_beside(p, f.b_name, f.b);
  }
  // A bias is read where the result is written, and before it: the same elements are fine.
  if (p.bias.tensor && !same_elements(extent(p.out), extent(p.bias))) check_out_beside(p, "bias", p.bias);
}

void check_out_beside(const Product& p, const char* name, const Operand& x) {
  if (p.out.matrix.is_empty() || !may_overlap(extent(p.out), extent(x))) return;
  fail_argument(text(p.name, ": out overlaps ", name, " in memory; clone one of them"));
}

tk_tensor core_operand(const Operand& x) {
  return to_core(normalized_operand(x.matrix), read_pointer(x.tensor), x.tensor.dtype);
}

tk_tensor core_output(const Operand& x) {
  return to_core(normalized_output(x.matrix), write_pointer(x.tensor), x.tensor.dtype);
}

tk_tensor core_tensor(const Operand& x) {
  return x.tensor ? to_core(x.matrix, read_pointer(x.tensor), x.tensor.dtype) : absent();
}

tk_tensor core_bias(const Operand& x) { return core_tensor({x.tensor, normalized_bias(x.matrix)}); }

void launch_described(tk_op op, const Product& p, std::span<const tk_tensor> tensors) {
  const int64_t ints[] = {p.epilogue.activation, precision_of(p)};
  const double floats[] = {p.epilogue.alpha, p.epilogue.beta};
  launch_op(op, tensors, ints, floats, p.settings, p.factors[0].a.tensor.device);
}

void set_factors(Product& p, uint32_t which, const Tensor& a, const Tensor& b, int64_t rank) {
  Factors& f = p.factors[which];
  f.a.tensor = meta(a);
  f.b.tensor = meta(b);
  check_rank(p.name, f.a_name, f.a.tensor, rank);
  check_rank(p.name, f.b_name, f.b.tensor, rank);
  f.a.matrix = matrix_of(f.a.tensor);
  f.b.matrix = matrix_of(f.b.tensor);
}

Sizes::Sizes(const Factors& f)
    : sizes_{f.a.matrix.batch, f.a.matrix.rows, f.b.matrix.cols}, is_batch_(f.a.matrix.is_batch) {}

Tensor set_rows(Operand& x) {
  if (flatten(x.tensor, x.matrix)) return {};
  Tensor copy = copied(x.tensor, x.tensor.dtype);
  x.tensor = meta(copy);
  flatten(x.tensor, x.matrix);
  return copy;
}

Tensor set_out(Product& p, std::span<const int64_t> sizes, int32_t dtype, Tensor out) {
  const bool given = static_cast<bool>(out);
  if (!given) out = empty(sizes, dtype, p.factors[0].a.tensor.device);
  if (given && meta(out).count() == 0) resize(out, sizes);
  p.out.tensor = meta(out);
  if (given) check_out(p, sizes, dtype);
  return out;
}

Result make_result(Product& p, std::span<const int64_t> sizes, Tensor out) {
  const bool given = static_cast<bool>(out);
  const int32_t dtype = out_dtype(p);
  Result result;
  result.out = set_out(p, sizes, dtype, std::move(out));
  if (!set_out_matrix(p)) {
    result.staging = set_out(p, sizes, dtype, {});
    set_out_matrix(p);
  } else if (given) {
    check_out_memory(p);
  }
  return result;
}

Tensor finish(Result result) {
  if (result.staging) copy(result.out.get(), result.staging.get());
  return std::move(result.out);
}

Tensor run(Product& p, const Meta& bias, std::span<const int64_t> sizes, Tensor out) {
  check_same(p);
  check_dtype(p.name, p.factors[0].a_name, p.factors[0].a.tensor);
  check_settings(p.name, p.settings);
  check_shapes(p);
  set_bias(bias, p);
  Result result = make_result(p, sizes, std::move(out));
  compute(p);
  return finish(std::move(result));
}

}  // namespace tk::ops
