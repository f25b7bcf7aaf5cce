// mm, addmm and linear: the product of two matrices (product.h), whatever the leading dimensions of linear's x are. bmm
// and baddbmm: those of a batch.

#include "names.h"
#include "product.h"
#include "registration.h"

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

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, const Settings& settings, Tensor out) {
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
  if (bias_meta && bias_meta.sizes[0] != sizes.back())
    fail_argument(text("tk.linear: bias is ", describe_sizes(bias_meta.sizes), ", must be [", sizes.back(), "]"));
  return run(p, bias_meta, sizes, std::move(out));
}

// Boxed, with and without `out`.

template <int64_t kRank, bool kOut>
void boxed_multiply(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Settings settings = read_settings(args);
  Tensor out = kOut ? args.tensor() : Tensor();
  const Epilogue epilogue = {.activation = settings.activation};
  args.give_back(multiply<kRank>(kRank == 2 ? "tk.mm" : "tk.bmm", a, b, bias, epilogue, settings, std::move(out)));
}

template <int64_t kRank, bool kOut>
void boxed_add(StableIValue* stack, uint64_t, uint64_t) {
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
  args.give_back(
      multiply<kRank>(kRank == 2 ? "tk.addmm" : "tk.baddbmm", a, b, bias, epilogue, settings, std::move(out)));
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

constexpr const char* kMultiply = "Tensor a, Tensor b, Tensor? bias=None, " TK_SETTINGS;
constexpr const char* kAdd = "Tensor bias, Tensor a, Tensor b, float beta=1, float alpha=1, " TK_SETTINGS;
constexpr const char* kLinear = "Tensor x, Tensor weight, Tensor? bias=None, " TK_SETTINGS;
constexpr Op kOps[] = {
    {"mm", kMultiply, boxed_multiply<2, false>, boxed_multiply<2, true>},
    {"addmm", kAdd, boxed_add<2, false>, boxed_add<2, true>},
    {"linear", kLinear, boxed_linear<false>, boxed_linear<true>},
    {"bmm", kMultiply, boxed_multiply<3, false>, boxed_multiply<3, true>},
    {"baddbmm", kAdd, boxed_add<3, false>, boxed_add<3, true>},
};

STABLE_TORCH_LIBRARY(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_mm_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
}

}  // namespace tk::ops
