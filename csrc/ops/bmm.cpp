// bmm and baddbmm: the products of a batch of matrices (product.h).

#include "names.h"
#include "product.h"
#include "registration.h"

namespace tk::ops {
namespace {

Tensor multiply(const char* name, const Tensor& a, const Tensor& b, const Tensor& bias, const Epilogue& epilogue,
                const Settings& settings, Tensor out) {
  Product p{.name = name, .epilogue = epilogue, .settings = settings};
  set_factors(p, 0, a, b, 3);
  return run(p, meta(bias), Sizes(p.factors[0]), std::move(out));
}

template <bool kOut>
void boxed_bmm(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Settings settings = read_settings(args);
  Tensor out = kOut ? args.tensor() : Tensor();
  args.give_back(multiply("tk.bmm", a, b, bias, {.activation = settings.activation}, settings, std::move(out)));
}

template <bool kOut>
void boxed_baddbmm(StableIValue* stack, uint64_t, uint64_t) {
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
  args.give_back(multiply("tk.baddbmm", a, b, bias, epilogue, settings, std::move(out)));
}

constexpr Op kOps[] = {
    {"bmm", "Tensor a, Tensor b, Tensor? bias=None, " TK_SETTINGS, boxed_bmm<false>, boxed_bmm<true>},
    {"baddbmm", "Tensor bias, Tensor a, Tensor b, float beta=1, float alpha=1, " TK_SETTINGS, boxed_baddbmm<false>,
     boxed_baddbmm<true>},
};

STABLE_TORCH_LIBRARY_FRAGMENT(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_bmm_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
}

}  // namespace tk::ops
