#include "conv_reference.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <vector>

#include "reference.h"

namespace tk::ops {
namespace {

constexpr Spatial kNone = {0, 0, 0};

Tensor wide(const Tensor& x) {
  const Meta m = meta(x);
  return m.dtype == kFloat32 || m.dtype == kFloat64 ? alias(x.get()) : copied(m, kFloat32);
}

// The pixels of a padded image that are those of the image itself.
Tensor interior(const Tensor& padded, std::span<const int64_t> sizes, const Spatial& low) {
  const Meta m = meta(padded);
  const int64_t offset = low[0] * m.strides[2] + low[1] * m.strides[3] + low[2] * m.strides[4];
  return view(padded.get(), sizes, m.strides, offset);
}

// What ATen cannot say itself: padding that differs at the two ends.
bool is_uneven(const Geometry& g) { return g.padding != g.padding_high; }

Tensor padded(const Tensor& input, const Geometry& g) {
  const Meta m = meta(input);
  std::vector<int64_t> sizes(m.sizes.begin(), m.sizes.end());
  for (size_t d = 0; d < 3; d++) sizes[2 + d] += g.padding[d] + g.padding_high[d];
  Tensor result = empty(sizes, m.dtype, m.device);
  check_shim(aoti_torch_zero_(result.get()), "pad");
  copy(interior(result, m.sizes, g.padding).get(), input.get());
  return result;
}

}  // namespace

void reference_conv(const Tensor& input, const Tensor& weight, const Tensor& bias, const Geometry& g,
                    int64_t activation, const Tensor& out) {
  const NoGrad no_grad;
  const bool uneven = is_uneven(g);
  const Tensor x = uneven ? padded(wide(input), g) : wide(input);
  const Tensor w = wide(weight);
  const Tensor b = bias ? wide(bias) : Tensor();
  AtenTensorHandle bias_handle = b.get();
  AtenTensorHandle result = nullptr;
  check_shim(aoti_torch_cpu_convolution(x.get(), w.get(), b ? &bias_handle : nullptr, g.stride.data(), 3,
                                        uneven ? kNone.data() : g.padding.data(), 3, g.dilation.data(), 3, 0,
                                        kNone.data(), 3, g.groups, &result),
             "convolve");
  copy(out.get(), activate(Tensor(result), activation).get());
}

void reference_conv_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight, const Geometry& g,
                             bool of_input, const Tensor& out) {
  const NoGrad no_grad;
  const bool uneven = is_uneven(g);
  const Tensor dy = wide(grad);
  const Tensor x = uneven ? padded(wide(input), g) : wide(input);
  const Tensor w = wide(weight);
  const int32_t mask[] = {of_input, !of_input, 0};
  AtenTensorHandle results[3] = {};
  check_shim(aoti_torch_cpu_convolution_backward(
                 dy.get(), x.get(), w.get(), nullptr, 0, g.stride.data(), 3, uneven ? kNone.data() : g.padding.data(),
                 3, g.dilation.data(), 3, 0, kNone.data(), 3, g.groups, mask, 3, &results[0], &results[1], &results[2]),
             "work out a gradient");
  const Tensor owned[] = {Tensor(results[0]), Tensor(results[1]), Tensor(results[2])};
  const Tensor& result = owned[of_input ? 0 : 1];
  const bool is_padded = of_input && uneven;
  copy(out.get(), is_padded ? interior(result, meta(out).sizes, g.padding).get() : result.get());
}

}  // namespace tk::ops
