// What every product says the same way: its settings, what its operands must be, where its result goes, and how it gets
// to the core. An op of the family reads its arguments, fills in a Product, and calls `run` (docs/products.md).
#pragma once

#include "reference.h"
#include "settings.h"

namespace tk::ops {

inline constexpr uint32_t kMaxFactors = 2;

// out = activation(alpha * (a @ b of all factors, summed) + beta * bias).
struct Product {
  const char* name;  // "tk.mm", for messages
  Factors factors[kMaxFactors] = {};
  uint32_t n_factors = 1;
  tk_op op_of_sum = 0;  // of the core, for more than one factor
  Operand bias = {};
  Operand out = {};
  Epilogue epilogue = {};
  Settings settings = {};

  std::span<Factors> all() { return {factors, n_factors}; }
  std::span<const Factors> all() const { return {factors, n_factors}; }
};

void check_rank(const char* op, const char* what, const Meta& tensor, int64_t rank);
void check_device(const char* op, const char* a_name, const Meta& a, const char* b_name, const Meta& b);
// One device, one dtype.
void check_same(const char* op, const char* a_name, const Meta& a, const char* b_name, const Meta& b);

// Of a and b: as many columns as rows.
void check_inner_sizes(const char* op, const Factors& f);
// Sizes that go together.
void check_shapes(const Product& p);
// A bias of one number for each of `cols` columns.
void check_bias_of_columns(const char* op, const Meta& bias, int64_t cols);
// bfloat16, float16 and float32; float64 on the CPU.
void check_dtype(const char* op, const char* name, const Meta& tensor);
// What settings.out_dtype asks for. Throws for what the operands' dtype does not have.
int32_t out_dtype(const Product& p);
// An `out` that was given: shape, dtype, device.
void check_out(const Product& p, std::span<const int64_t> sizes, int32_t dtype);
// That it shares no memory with itself or the operands.
void check_out_memory(const Product& p);
// Nor with `x`, of that name.
void check_out_beside(const Product& p, const char* name, const Operand& x);

// Makes operands of two tensors of `rank` 2, or of 3: batches.
void set_factors(Product& p, uint32_t which, const Tensor& a, const Tensor& b, int64_t rank = 2);

// [rows, cols], with the batch in front where there is one.
class Sizes {
 public:
  explicit Sizes(const Factors& factors);
  operator std::span<const int64_t>() const { return {sizes_ + (is_batch_ ? 0 : 1), size_t{is_batch_ ? 3u : 2u}}; }

 private:
  int64_t sizes_[3];
  bool is_batch_;
};

// As the core takes them: an operand and a result, with the strides that kernels are chosen by (matrix.h); what is read
// as it lies, or absent.
tk_tensor core_operand(const Operand& x);
tk_tensor core_output(const Operand& x);
tk_tensor core_tensor(const Operand& x);
tk_tensor core_bias(const Operand& x);

// Calls the core, with the settings' mode and config. ints: activation and precision; floats: alpha and beta.
void launch_described(tk_op op, const Product& p, std::span<const tk_tensor> tensors);

// x as [rows, K]; where its leading dimensions do not run together of a copy, which is returned.
Tensor set_rows(Operand& x);

// `out`, once its shape, dtype and device are checked, or allocated. p.out has its tensor.
Tensor set_out(Product& p, std::span<const int64_t> sizes, int32_t dtype, Tensor out);

// Where the result goes: `out`, or memory whose rows run together, as a given `out` may not have them.
struct Result {
  Tensor out;
  Tensor staging;
  const Tensor& written() const { return staging ? staging : out; }
};

// Checks an `out` that was given, its memory too; p.out is what is written.
Result make_result(Product& p, std::span<const int64_t> sizes, Tensor out);
// `out`, with the result in it.
Tensor finish(Result result);

// Checks what is left, allocates unless there is an `out`, and computes. sizes: of the result.
Tensor run(Product& p, const Meta& bias, std::span<const int64_t> sizes, Tensor out);

}  // namespace tk::ops
