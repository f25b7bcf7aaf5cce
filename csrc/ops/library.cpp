// Every op that the library has itself, whatever packs there are: its schema and its function, in one table. The rest
// of torch.ops.tk comes from packs (generated.cpp). And every name that no pack's op can have.

#include "ops.h"
#include "registration.h"

namespace tk::ops {
namespace {

#define TK_MULTIPLY "Tensor a, Tensor b, Tensor? bias=None, " TK_SETTINGS
#define TK_ADD "Tensor bias, Tensor a, Tensor b, float beta=1, float alpha=1, " TK_SETTINGS
#define TK_CONV(n)                                                                                       \
  "Tensor input, Tensor weight, Tensor? bias=None, int[" #n "] stride=1, int[" #n "] padding=0, int[" #n \
  "] dilation=1, int groups=1, int activation=0, int precision=-1, int config=-1, int mode=0"
#define TK_CONV_GRADIENT                                                                                  \
  "Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups=1, " \
  "int precision=-1, int mode=0"

constexpr Op kOps[] = {
    op<mm>("mm", TK_MULTIPLY),
    op<addmm>("addmm", TK_ADD),
    op<linear>("linear", "Tensor x, Tensor weight, Tensor? bias=None, " TK_SETTINGS),
    op<bmm>("bmm", TK_MULTIPLY),
    op<baddbmm>("baddbmm", TK_ADD),
    op<mm_plus_mm>("mm_plus_mm", "Tensor a, Tensor b, Tensor c, Tensor d, Tensor? bias=None, " TK_SETTINGS),
    op<grouped_mm>("grouped_mm",
                   "Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, bool zero_rest=False, " TK_SETTINGS),
    op<scaled_mm>("scaled_mm",
                  "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
                  "bool use_fast_accum=False, " TK_SETTINGS),
    op<scaled_grouped_mm>("scaled_grouped_mm",
                          "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, "
                          "Tensor? bias=None, bool use_fast_accum=False, " TK_SETTINGS),
    op<int4_mm>("int4_mm",
                "Tensor a, Tensor b, Tensor scales, Tensor? zeros=None, int group_size=128, "
                "Tensor? bias=None, " TK_SETTINGS),
    op<uint4x2_mixed_mm>("uint4x2_mixed_mm", "Tensor a, Tensor b, " TK_SETTINGS),
    op<conv1d>("conv1d", TK_CONV(1)),
    op<conv2d>("conv2d", TK_CONV(2)),
    op<conv3d>("conv3d", TK_CONV(3)),
    op<conv_input_grad>("conv_input_grad", TK_CONV_GRADIENT),
    op<conv_weight_grad>("conv_weight_grad", TK_CONV_GRADIENT),
};

// What the core calls beneath these, and beneath ops of lists (lists.h).
constexpr const char* kBeneath[] = {
    "grouped_mm_inner", "int4_dequantize", "conv",        "conv_blocks",
    "conv_contained",   "conv_layout",     "conv_unfold", "store_table",
};

// Python's, over the ops of attention's pairs (tk/ops/flex.py) and of b2b_gemm's functions (tk/ops/b2b.py).
constexpr const char* kOfPython[] = {"flex_attention", "flex_attention_backward", "b2b_gemm"};

STABLE_TORCH_LIBRARY(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
  for (const char* const name : kBeneath) check_status(tk_reserve_op(name));
  for (const char* const name : kOfPython) check_status(tk_reserve_op(name));
}

}  // namespace tk::ops
