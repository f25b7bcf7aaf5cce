// tk.enable: kernels of tk beneath ATen's own ops, at a backend's dispatch key. ATen's autograd formulas, autocast,
// vmap and tracers stay above them as they are. A call is served by tk where it was decided so, else it is left to the
// very function of ATen that stood at the key: at::cuda::mm, called as C++ so that its exceptions stay what they are.
//
// Who decides is Python, once for a class of calls (op, dtypes, sizes, strides, device); each thread remembers the
// answers. docs/use.md, "The whole process".
#pragma once

#include <cstdint>

#include "tk/tk.h"

// Whether tk serves the calls of a class: 1, or 0. op: a place in the table. words: whether float32 products may be
// tf32, the device's index, how many tensors there are; of each its dtype, rank, sizes and strides; then the other
// arguments. Called in any thread, without the GIL. Must not throw.
using tk_ops_decide = int32_t(int32_t op, const int64_t* words, int32_t count);

// The table of ops: the name of each in ATen, null past the last.
extern "C" TK_API const char* tk_ops_beneath_name(int32_t op);
// 0 where this torch has no function to leave an op's calls to, or no pack has what serves them. is_cuda: at the CUDA
// key, else at the CPU's.
extern "C" TK_API int32_t tk_ops_beneath_is_known(int32_t op, int32_t is_cuda);
// Puts the kernels of `count` ops at a key, which nothing may be at yet. 0 where torch would not have them there.
extern "C" TK_API int32_t tk_ops_beneath_install(const int32_t* ops, int32_t count, int32_t is_cuda);
// ATen's kernels are there again.
extern "C" TK_API void tk_ops_beneath_remove();
// Who decides from now on, in all threads; null: nobody, and what is not decided is left to ATen.
extern "C" TK_API void tk_ops_beneath_ask(tk_ops_decide* decide);
// How many calls of an op were served, and left, since it was last installed.
extern "C" TK_API void tk_ops_beneath_count(int32_t op, int64_t* served, int64_t* left);
