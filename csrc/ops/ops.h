// The library's own ops: a table for each file that implements some. docs/products.md and docs/conv.md say what they
// compute. An `out` that is not empty gets the result; else the result is allocated. They throw as error.h has it.
#pragma once

#include "registration.h"
#include "settings.h"

namespace tk::ops {

extern const OpTable kMatrixOps;
extern const OpTable kGroupedOps;
extern const OpTable kScaledOps;
extern const OpTable kScaledGroupedOps;
extern const OpTable kInt4Ops;
extern const OpTable kConvolutionOps;

// Those that also serve ATen's (beneath.cpp).
Tensor mm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out);
Tensor bmm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out);

}  // namespace tk::ops
