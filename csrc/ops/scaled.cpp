#include "scaled.h"

#include "launch.h"
#include "reference.h"

namespace tk::ops {
namespace {

bool is_float8(int32_t dtype) { return dtype == kFloat8E4M3 || dtype == kFloat8E5M2; }

const Factors& factors(const ScaledProduct& s) { return s.p.factors[0]; }

void check_gpu(const ScaledProduct& s) {
  const Device device = factors(s).a.tensor.device;
  if (target(device) < 0) return;
  int64_t arch = 0;
  check_status(tk_device_arch(target(device), &arch));
  if (arch < 89)
    fail_unsupported(text(s.p.name, ": ", describe(device), " has compute capability ", arch / 10, ".", arch % 10,
                          "; float8 products need 8.9 or newer"));
}

}  // namespace

void check_float8(const ScaledProduct& s) {
  const auto& [a, b, a_name, b_name] = factors(s);
  for (const auto& [name, t] : {std::pair(a_name, &a.tensor), std::pair(b_name, &b.tensor)})
    if (!is_float8(t->dtype))
      fail_unsupported(
          text(s.p.name, ": ", name, " is ", dtype_name(t->dtype), "; float8_e4m3fn and float8_e5m2 are supported"));
  if (a.tensor.dtype == kFloat8E5M2 && b.tensor.dtype == kFloat8E5M2)
    fail_unsupported(text(s.p.name, ": the product of two float8_e5m2 matrices is not supported"));
  check_device(s.p.name, a_name, a.tensor, b_name, b.tensor);
  check_gpu(s);
}

void check_scale(const ScaledProduct& s, const char* name, const Meta& scale) {
  if (scale.dtype != kFloat32)
    fail_argument(text(s.p.name, ": ", name, " is ", dtype_name(scale.dtype), ", must be float32"));
  check_device(s.p.name, factors(s).a_name, factors(s).a.tensor, name, scale);
}

void check_scaled_bias(const ScaledProduct& s, const Meta& bias) {
  const int32_t dtype = scaled_out_dtype(s);
  const bool is_narrower = dtype == kFloat32 && (bias.dtype == kBFloat16 || bias.dtype == kFloat16);
  if (bias.dtype != dtype && !is_narrower)
    fail_argument(text(s.p.name, ": bias is ", dtype_name(bias.dtype), ", must be ", dtype_name(dtype),
                       " as the result is", dtype == kFloat32 ? ", or bfloat16 or float16" : ""));
  check_device(s.p.name, factors(s).a_name, factors(s).a.tensor, "bias", bias);
}

Tensor widened_bias(const ScaledProduct& s, const Meta& bias) {
  if (!bias) return Tensor();
  check_scaled_bias(s, bias);
  if (bias.dtype == scaled_out_dtype(s)) return Tensor();
  const NoGrad no_grad;
  return copied(bias, kFloat32);
}

int32_t scaled_out_dtype(const ScaledProduct& s) {
  const int32_t dtype = s.p.settings.out_dtype.value_or(kBFloat16);
  if (dtype == kBFloat16 || dtype == kFloat16 || dtype == kFloat32) return dtype;
  fail_unsupported(
      text(s.p.name, ": out_dtype is ", dtype_name(dtype), "; bfloat16, float16 and float32 are supported"));
}

Tensor scaled_out(ScaledProduct& s, std::span<const int64_t> sizes, Tensor out) {
  Product& p = s.p;
  const bool given = static_cast<bool>(out);
  out = set_out(p, sizes, scaled_out_dtype(s), std::move(out));
  p.out.matrix = matrix_of(p.out.tensor);
  if (given) {
    check_out_memory(p);
    check_out_beside(p, "scale_a", s.scale_a);
    check_out_beside(p, "scale_b", s.scale_b);
  }
  return out;
}

void launch_scaled(tk_op op, const ScaledProduct& s, std::span<const tk_tensor> tensors) {
  const int64_t ints[] = {s.p.settings.activation, s.use_fast_accum};
  launch_op(op, tensors, ints, {}, s.p.settings, factors(s).a.tensor.device);
}

}  // namespace tk::ops
