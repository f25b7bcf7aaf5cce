// Convolutions spelled in ATen ops: what runs on the CPU.
#pragma once

#include "image.h"

namespace tk::ops {

// padding: in front of the first pixel; padding_high: behind the last.
struct Geometry {
  Spatial stride = {1, 1, 1};
  Spatial padding = {0, 0, 0};
  Spatial padding_high = {0, 0, 0};
  Spatial dilation = {1, 1, 1};
  int64_t groups = 1;
};

// Tensors are three-dimensional with a batch; half-precision ones are worked on in float32 and rounded once.

// out = activation(conv(input, weight) + bias); a bias without a handle is absent.
void reference_conv(const Tensor& input, const Tensor& weight, const Tensor& bias, const Geometry& geometry,
                    int64_t activation, const Tensor& out);

// The gradient of the input, or of the weight, into `out`.
void reference_conv_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight, const Geometry& geometry,
                             bool of_input, const Tensor& out);

}  // namespace tk::ops
