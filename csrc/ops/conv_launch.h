// Convolutions on the GPU: the copies, products and calls of the core that one is made of (docs/conv.md).
#pragma once

#include "conv_reference.h"
#include "image.h"
#include "product.h"

namespace tk::ops {

// One convolution of the core. Padding and dilation may be negative.
struct Problem {
  View x;
  View weight;
  View bias;  // without a handle: absent
  View out;
  Spatial stride;
  Spatial padding;
  Spatial dilation;
};

void launch_forward(Problem p, const Settings& s);
// whole: x is the gradient of the result, weight as the forward pass has it, out the gradient of the input.
void launch_input_gradient(Problem whole, const Geometry& g, const Settings& s);
// out: the gradient of the weight.
void launch_weight_gradient(View grad, View x, const View& out, const Geometry& g, const Settings& s);

}  // namespace tk::ops
