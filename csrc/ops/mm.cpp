// mm, addmm and linear: check, make matrices of the arguments, allocate, launch.

#include "arguments.h"
#include "launch.h"
#include "names.h"
#include "overlap.h"
#include "reference.h"
#include "registration.h"
#include "runtime.h"

namespace tk::ops {
namespace {

constexpr int64_t kActivations = 5;  // none, relu, gelu, gelu_tanh, silu
constexpr int64_t kModeBits = TK_MODE_DETERMINISTIC | TK_MODE_BATCH_INVARIANT | TK_MODE_STRICT | TK_MODE_STATIC_WEIGHTS;

// What the arguments are called, for messages.
struct Names {
  const char* op;
  const char* a;
  const char* b;
};
constexpr Names kMm = {"tk.mm", "a", "b"};
constexpr Names kAddmm = {"tk.addmm", "a", "b"};
constexpr Names kLinear = {"tk.linear", "x", "weight"};

struct Settings {
  int64_t activation = 0;
  std::optional<int32_t> out_dtype;
  int64_t precision = -1;
  int64_t config = -1;
  int64_t mode = 0;
};

Settings read_settings(Arguments& args) {
  Settings s;  // in the order of the schemas
  s.activation = args.integer();
  s.out_dtype = args.optional_dtype();
  s.precision = args.integer();
  s.config = args.integer();
  s.mode = args.integer();
  return s;
}

// One product: out = activation(alpha * a @ b + beta * bias).
struct Product {
  Operand a;
  Operand b;
  Operand bias;
  Operand out;
  Epilogue epilogue;
  Settings settings;
};

// --- Checks ---

void check_range(const Names& names, const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) [[unlikely]]
    fail_argument(text(names.op, ": ", what, " is ", value, ", must be ", low, " to ", high));
}

void check_settings(const Names& names, const Settings& s) {
  check_range(names, "activation", s.activation, 0, kActivations - 1);
  check_range(names, "precision", s.precision, -1, 1);
  check_range(names, "config", s.config, -1, INT32_MAX);
  check_range(names, "mode", s.mode, 0, kModeBits);
}

void check_rank(const Names& names, const char* what, const Meta& t, int64_t rank) {
  if (t.dim() != rank) [[unlikely]]
    fail_argument(text(names.op, ": ", what, " must have ", rank, " dimensions, is ", describe_sizes(t.sizes)));
}

void check_same(const Names& names, const char* a_name, const Meta& a, const char* b_name, const Meta& b) {
  if (a.device != b.device) [[unlikely]]
    fail_argument(text(names.op, ": ", a_name, " is on ", describe(a.device), ", ", b_name, " on ", describe(b.device),
                       "; all tensors must be on one device"));
  if (a.dtype != b.dtype) [[unlikely]]
    fail_argument(text(names.op, ": ", a_name, " is ", dtype_name(a.dtype), ", ", b_name, " is ", dtype_name(b.dtype),
                       "; they must have one dtype"));
}

void check_dtype(const Names& names, const char* a_name, const Meta& a) {
  const bool half = a.dtype == kBFloat16 || a.dtype == kFloat16;
  if (half || a.dtype == kFloat32 || (a.dtype == kFloat64 && !a.device.is_cuda())) return;
  fail_unsupported(text(names.op, ": ", a_name, " is ", dtype_name(a.dtype),
                        "; bfloat16, float16 and float32 are supported, and float64 on the CPU"));
}

int32_t out_dtype(const Names& names, const Meta& a, const Settings& s) {
  const int32_t dtype = s.out_dtype.value_or(a.dtype);
  if (dtype == a.dtype || (dtype == kFloat32 && a.dtype != kFloat64)) return dtype;
  fail_unsupported(text(names.op, ": out_dtype is ", dtype_name(dtype), "; for ", dtype_name(a.dtype), " operands ",
                        dtype_name(a.dtype), a.dtype == kFloat64 ? " is" : " and float32 are", " supported"));
}

void check_inner(const Names& names, const Operand& a, const Operand& b) {
  if (a.matrix.cols != b.matrix.rows) [[unlikely]]
    fail_argument(text(names.op, ": the inner sizes differ: ", names.a, " is ", describe_sizes(a.tensor.sizes), ", ",
                       names.b, " is ", describe_sizes(b.tensor.sizes)));
}

// A bias that ATen would broadcast. Not read at all when beta is 0, so that its NaN and inf do not count.
void set_bias(const Names& names, const Meta& bias, Product& p) {
  if (!bias) return;
  check_same(names, names.a, p.a.tensor, "bias", bias);
  const int64_t rows = p.a.matrix.rows;
  const int64_t cols = p.b.matrix.cols;
  if (!broadcast(bias, rows, cols, p.bias.matrix)) [[unlikely]]
    fail_argument(text(names.op, ": bias is ", describe_sizes(bias.sizes), ", which does not broadcast to [", rows,
                       ", ", cols, "]"));
  if (p.epilogue.beta != 0) p.bias.tensor = bias;
}

// --- Out ---

Extent extent(const Operand& x) {
  return {static_cast<const char*>(read_pointer(x.tensor)), x.matrix, item_size(x.tensor.dtype)};
}

bool same_elements(const Extent& x, const Extent& y) {
  return x.data == y.data && x.item == y.item && x.matrix.row_stride == y.matrix.row_stride &&
         x.matrix.col_stride == y.matrix.col_stride;
}

void check_out(const Names& names, const Meta& out, std::span<const int64_t> sizes, int32_t dtype, Device device) {
  if (out.sizes.size() != sizes.size() || !std::equal(sizes.begin(), sizes.end(), out.sizes.begin())) [[unlikely]]
    fail_argument(text(names.op, ": out is ", describe_sizes(out.sizes), ", must be ", describe_sizes(sizes),
                       "; it is not resized"));
  if (out.dtype != dtype) [[unlikely]]
    fail_argument(text(names.op, ": out is ", dtype_name(out.dtype), ", must be ", dtype_name(dtype)));
  if (out.device != device) [[unlikely]]
    fail_argument(text(names.op, ": out is on ", describe(out.device), ", must be on ", describe(device)));
}

void check_out_memory(const Names& names, const Product& p) {
  if (p.out.matrix.is_empty()) return;
  if (overlaps_itself(p.out.matrix)) [[unlikely]]
    fail_argument(text(names.op, ": elements of out share memory: give it one place for each (out.clone())"));
  const Extent out = extent(p.out);
  const auto refuse = [&](const char* name) {
    fail_argument(text(names.op, ": out overlaps ", name, " in memory; clone one of them"));
  };
  if (may_overlap(out, extent(p.a))) refuse(names.a);
  if (may_overlap(out, extent(p.b))) refuse(names.b);
  // A bias is read where the result is written, and before it: the same elements are fine.
  if (p.bias.tensor && may_overlap(out, extent(p.bias)) && !same_elements(out, extent(p.bias))) refuse("bias");
}

// --- Launch ---

int64_t precision_of(const Product& p) {
  if (p.a.tensor.dtype != kFloat32) return 0;
  return p.settings.precision >= 0 ? p.settings.precision : allows_tf32();
}

void launch_product(const Product& p) {
  static const tk_op op = tk_intern_op("mm");
  const Meta& a = p.a.tensor;
  const tk_tensor tensors[] = {
      to_core(normalized_operand(p.a.matrix), read_pointer(a), a.dtype),
      to_core(normalized_operand(p.b.matrix), read_pointer(p.b.tensor), a.dtype),
      p.bias.tensor ? to_core(normalized_bias(p.bias.matrix), read_pointer(p.bias.tensor), a.dtype) : absent(),
      to_core(normalized_output(p.out.matrix), write_pointer(p.out.tensor), p.out.tensor.dtype),
  };
  const int64_t ints[] = {p.epilogue.activation, precision_of(p)};
  const double floats[] = {p.epilogue.alpha, p.epilogue.beta};
  uint32_t mode = static_cast<uint32_t>(p.settings.mode);
  if (wants_deterministic()) mode |= TK_MODE_DETERMINISTIC;
  tk_call call;
  call.op = op;
  call.mode = mode;
  call.config = static_cast<int32_t>(p.settings.config);
  call.device = a.device.index;
  call.n_tensors = std::size(tensors);
  call.n_ints = std::size(ints);
  call.n_floats = std::size(floats);
  call.tensors = tensors;
  call.ints = ints;
  call.floats = floats;
  launch(call, a.device);
}

void compute(const Product& p) {
  if (p.out.matrix.is_empty()) return;
  if (p.a.tensor.device.is_cuda() && p.a.matrix.cols != 0) {
    launch_product(p);
  } else {
    reference_product(p.a, p.b, p.bias, p.epilogue, p.out);
  }
}

// --- The ops ---

// Checks what is left, allocates unless there is an `out`, and computes. sizes: of the result.
Tensor run(const Names& names, Product& p, const Meta& bias, std::span<const int64_t> sizes, Tensor out) {
  check_same(names, names.a, p.a.tensor, names.b, p.b.tensor);
  check_dtype(names, names.a, p.a.tensor);
  check_settings(names, p.settings);
  check_inner(names, p.a, p.b);
  set_bias(names, bias, p);
  const int32_t dtype = out_dtype(names, p.a.tensor, p.settings);
  const bool given = static_cast<bool>(out);
  if (!given) out = empty(sizes, dtype, p.a.tensor.device);
  p.out.tensor = meta(out);
  Tensor staging;
  if (given) check_out(names, p.out.tensor, sizes, dtype, p.a.tensor.device);
  if (!flatten(p.out.tensor, p.out.matrix)) {  // an `out` whose leading dimensions are no single dimension
    staging = empty(sizes, dtype, p.a.tensor.device);
    p.out.tensor = meta(staging);
    flatten(p.out.tensor, p.out.matrix);
  } else if (given) {
    check_out_memory(names, p);
  }
  compute(p);
  if (staging) check_shim(aoti_torch_copy_(out.get(), staging.get(), 0), "copy the result to out");
  return out;
}

Tensor multiply(const Names& names, const Tensor& a, const Tensor& b, const Tensor& bias, const Epilogue& epilogue,
                const Settings& settings, Tensor out) {
  Product p;
  p.settings = settings;
  p.epilogue = epilogue;
  p.a.tensor = meta(a);
  p.b.tensor = meta(b);
  check_rank(names, names.a, p.a.tensor, 2);
  check_rank(names, names.b, p.b.tensor, 2);
  p.a.matrix = matrix_of(p.a.tensor);
  p.b.matrix = matrix_of(p.b.tensor);
  const int64_t sizes[] = {p.a.matrix.rows, p.b.matrix.cols};
  return run(names, p, meta(bias), sizes, std::move(out));
}

Tensor contiguous(const Meta& tensor) {
  Tensor result = empty(tensor.sizes, tensor.dtype, tensor.device);
  check_shim(aoti_torch_copy_(result.get(), tensor.handle, 0), "make x contiguous");
  return result;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Settings& settings, Tensor out) {
  Product p;
  p.settings = settings;
  p.epilogue.activation = settings.activation;
  p.a.tensor = meta(x);
  p.b.tensor = meta(weight);
  if (p.a.tensor.dim() == 0) fail_argument("tk.linear: x must have at least 1 dimension, has none");
  check_rank(kLinear, "weight", p.b.tensor, 2);
  Tensor copied;
  if (!flatten(p.a.tensor, p.a.matrix)) {
    copied = contiguous(p.a.tensor);
    p.a.tensor = meta(copied);
    flatten(p.a.tensor, p.a.matrix);
  }
  p.b.matrix = matrix_of(p.b.tensor).transposed();
  const Meta bias_meta = meta(bias);
  if (bias_meta) check_rank(kLinear, "bias", bias_meta, 1);
  std::vector<int64_t> sizes(p.a.tensor.sizes.begin(), p.a.tensor.sizes.end());
  sizes.back() = p.b.matrix.cols;
  if (bias_meta && bias_meta.sizes[0] != sizes.back())
    fail_argument(text("tk.linear: bias is ", describe_sizes(bias_meta.sizes), ", must be [", sizes.back(), "]"));
  return run(kLinear, p, bias_meta, sizes, std::move(out));
}

// Boxed, with and without `out`.

template <bool kOut>
void boxed_mm(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Settings settings = read_settings(args);
  Tensor out = kOut ? args.tensor() : Tensor();
  args.give_back(multiply(kMm, a, b, bias, {.activation = settings.activation}, settings, std::move(out)));
}

template <bool kOut>
void boxed_addmm(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor bias = args.tensor();
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  Epilogue epilogue;
  epilogue.beta = args.number();
  epilogue.alpha = args.number();
  const Settings settings = read_settings(args);
  epilogue.activation = settings.activation;
  Tensor out = kOut ? args.tensor() : Tensor();
  args.give_back(multiply(kAddmm, a, b, bias, epilogue, settings, std::move(out)));
}

template <bool kOut>
void boxed_linear(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor x = args.tensor();
  const Tensor weight = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Settings settings = read_settings(args);
  Tensor out = kOut ? args.tensor() : Tensor();
  args.give_back(linear(x, weight, bias, settings, std::move(out)));
}

// --- Registration ---

#define TK_SETTINGS "int activation=0, ScalarType? out_dtype=None, int precision=-1, int config=-1, int mode=0"

constexpr Op kOps[] = {
    {"mm", "Tensor a, Tensor b, Tensor? bias=None, " TK_SETTINGS, boxed_mm<false>, boxed_mm<true>},
    {"addmm", "Tensor bias, Tensor a, Tensor b, float beta=1, float alpha=1, " TK_SETTINGS, boxed_addmm<false>,
     boxed_addmm<true>},
    {"linear", "Tensor x, Tensor weight, Tensor? bias=None, " TK_SETTINGS, boxed_linear<false>, boxed_linear<true>},
};

STABLE_TORCH_LIBRARY(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_mm_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
}

}  // namespace tk::ops
