// Products of float8 operands with scales: what their ops share.
//
//   out = activation(scale_a * scale_b * (a @ b) + bias)
#pragma once

#include "product.h"

namespace tk::ops {

struct ScaledProduct {
  Product p;  // factors, bias, out, settings
  Operand scale_a = {};
  Operand scale_b = {};
  bool use_fast_accum = false;
};

// Dtypes of the operands, and the devices of all that there is. `float8` also of the GPU, where it is one.
void check_float8(const ScaledProduct& s);
// Float32, on a's device.
void check_scale(const ScaledProduct& s, const char* name, const Meta& scale);
// Of the result's dtype, or of 16 bits for a float32 result; on a's device.
void check_scaled_bias(const ScaledProduct& s, const Meta& bias);
// A copy of the result's dtype, which kernels take alone; nothing where the bias has it, or there is none.
Tensor widened_bias(const ScaledProduct& s, const Meta& bias);
// bfloat16 (also where settings name none), float16 or float32.
int32_t scaled_out_dtype(const ScaledProduct& s);

// The result: `out`, or allocated. Throws unless it has `sizes`, the dtype and memory of its own; p.out is its tensor
// and matrix.
Tensor scaled_out(ScaledProduct& s, std::span<const int64_t> sizes, Tensor out);

// ints: activation and use_fast_accum.
void launch_scaled(tk_op op, const ScaledProduct& s, std::span<const tk_tensor> tensors);

}  // namespace tk::ops
