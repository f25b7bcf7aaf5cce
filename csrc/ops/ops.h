// The library's own ops as C++ functions of their arguments: what library.cpp registers. docs/products.md and
// docs/conv.md say what they compute. An `out` that is not empty gets the result; else the result is allocated. They
// throw as error.h has it.
#pragma once

#include "settings.h"

namespace tk::ops {

// --- Products (mm.cpp, grouped_mm.cpp, scaled_mm.cpp, scaled_grouped_mm.cpp, int4.cpp) ---

Tensor mm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out);
Tensor addmm(const Tensor& bias, const Tensor& a, const Tensor& b, double beta, double alpha, const Settings& settings,
             Tensor out);
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Settings& settings, Tensor out);
Tensor bmm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Settings& settings, Tensor out);
Tensor baddbmm(const Tensor& bias, const Tensor& a, const Tensor& b, double beta, double alpha,
               const Settings& settings, Tensor out);
Tensor mm_plus_mm(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d, const OptionalTensor& bias,
                  const Settings& settings, Tensor out);
Tensor grouped_mm(const Tensor& a, const Tensor& b, const OptionalTensor& offs, const OptionalTensor& bias,
                  bool zero_rest, const Settings& settings, Tensor out);
Tensor scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                 const OptionalTensor& bias, bool use_fast_accum, const Settings& settings, Tensor out);
Tensor scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                         const Tensor& offs, const OptionalTensor& bias, bool use_fast_accum, const Settings& settings,
                         Tensor out);
Tensor int4_mm(const Tensor& a, const Tensor& b, const Tensor& scales, const OptionalTensor& zeros, int64_t group_size,
               const OptionalTensor& bias, const Settings& settings, Tensor out);
Tensor uint4x2_mixed_mm(const Tensor& a, const Tensor& b, const Settings& settings, Tensor out);

// --- Convolutions (conv.cpp) ---

// What the caller says of a convolution, in as many numbers as the caller gave.
struct ConvolutionLists {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;  // for each dimension, or twice as many: in front, then behind
  std::vector<int64_t> dilation;
  int64_t groups = 1;
};
template <>
struct Reading<ConvolutionLists> {
  static constexpr std::string_view kTypes[] = {"int[]", "int[]", "int[]", "int"};
  static ConvolutionLists read(Arguments& args) {
    return ConvolutionLists{args.integers(), args.integers(), args.integers(), args.integer()};
  }
};

// Those of a product but for the result's dtype, which is the operands'.
struct ConvolutionSettings : Settings {};
template <>
struct Reading<ConvolutionSettings> {
  static constexpr std::string_view kTypes[] = {"int", "int", "int", "int"};
  static ConvolutionSettings read(Arguments& args) {
    return ConvolutionSettings{{args.integer(), {}, args.integer(), args.integer(), args.integer()}};
  }
};

Tensor conv1d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvolutionLists& lists,
              const ConvolutionSettings& settings);
Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvolutionLists& lists,
              const ConvolutionSettings& settings);
Tensor conv3d(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvolutionLists& lists,
              const ConvolutionSettings& settings);
Tensor conv_input_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, const ConvolutionLists& lists,
                       int64_t precision, int64_t mode);
Tensor conv_weight_grad(const Tensor& grad, const Tensor& input, const Tensor& weight, const ConvolutionLists& lists,
                        int64_t precision, int64_t mode);

}  // namespace tk::ops
