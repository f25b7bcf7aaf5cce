// A product spelled in ATen ops: what runs on the CPU, and where no kernel is worth it (K = 0).
#pragma once

#include "matrix.h"

namespace tk::ops {

struct Operand {
  Meta tensor;
  Matrix matrix;
  // For the CPU path: elements from the tensor's first to the matrix's, and whether what lies beside it is none of its
  // business. (ATen's 16-bit products read it, and multiply it by 0: a NaN there comes through.)
  int64_t offset = 0;
  bool is_part = false;
};

// What is multiplied, and what the arguments are called, for messages.
struct Factors {
  Operand a;
  Operand b;
  const char* a_name = "a";
  const char* b_name = "b";
};

struct Epilogue {
  double alpha = 1;
  double beta = 1;
  int64_t activation = 0;
};

// out = activation(alpha * (a @ b of all factors, summed) + beta * bias), accumulated in float32 (float64 for float64)
// and rounded once. A bias without a tensor is absent.
void reference_product(std::span<const Factors> factors, const Operand& bias, const Epilogue& epilogue,
                       const Operand& out);

// out = activation(scale_a * scale_b * (a @ b) + bias), in float32 and rounded once. The scales: a column and a row.
void reference_scaled_product(const Operand& a, const Operand& b, const Operand& scale_a, const Operand& scale_b,
                              const Operand& bias, int64_t activation, const Operand& out);

// Of a result, by ATen ops.
Tensor activate(Tensor x, int64_t activation);

// Autograd has no part in what ATen ops do for a kernel.
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  bool was_enabled_;
};

}  // namespace tk::ops
