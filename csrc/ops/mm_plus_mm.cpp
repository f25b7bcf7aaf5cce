// mm_plus_mm: two products in one accumulator (product.h).

#include "names.h"
#include "product.h"
#include "registration.h"

namespace tk::ops {
namespace {

template <bool kOut>
void boxed_mm_plus_mm(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  const Tensor c = args.tensor();
  const Tensor d = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Settings settings = read_settings(args);
  Tensor out = kOut ? args.tensor() : Tensor();
  Product p{.name = "tk.mm_plus_mm", .epilogue = {.activation = settings.activation}, .settings = settings};
  p.n_factors = 2;
  p.factors[1].a_name = "c";
  p.factors[1].b_name = "d";
  set_factors(p, 0, a, b);
  set_factors(p, 1, c, d);
  args.give_back(run(p, meta(bias), Sizes(p.factors[0]), std::move(out)));
}

constexpr Op kOps[] = {
    {"mm_plus_mm", "Tensor a, Tensor b, Tensor c, Tensor d, Tensor? bias=None, " TK_SETTINGS, boxed_mm_plus_mm<false>,
     boxed_mm_plus_mm<true>},
};

STABLE_TORCH_LIBRARY_FRAGMENT(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_mm_plus_mm_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
}

}  // namespace tk::ops
