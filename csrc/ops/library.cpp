// Registers every op that the library has itself, whatever packs there are. The rest of torch.ops.tk comes from packs
// (generated.cpp). And every name that no pack's op can have.

#include "ops.h"

namespace tk::ops {
namespace {

constexpr const OpTable* kTables[] = {&kMatrixOps,        &kGroupedOps, &kScaledOps,
                                      &kScaledGroupedOps, &kInt4Ops,    &kConvolutionOps};

// What the core calls beneath these, and beneath ops of lists (lists.h).
constexpr const char* kBeneath[] = {
    "grouped_mm_inner", "int4_dequantize", "conv",        "conv_blocks",
    "conv_contained",   "conv_layout",     "conv_unfold", "store_table",
};

// Python's, over the ops of attention's pairs (tk/ops/flex.py) and of b2b_gemm's functions (tk/ops/b2b.py).
constexpr const char* kOfPython[] = {"flex_attention", "flex_attention_backward", "b2b_gemm"};

STABLE_TORCH_LIBRARY(tk, library) {
  for (const OpTable* const table : kTables) table->define(library);
}
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) {
  for (const OpTable* const table : kTables) table->implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) {
  for (const OpTable* const table : kTables) table->implement(library);
}

}  // namespace

void reserve_names() {
  for (const OpTable* const table : kTables)
    for (const Op& op : table->ops) check_status(tk_reserve_op(op.name));
  for (const char* const name : kBeneath) check_status(tk_reserve_op(name));
  for (const char* const name : kOfPython) check_status(tk_reserve_op(name));
}

}  // namespace tk::ops
