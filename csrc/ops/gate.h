// The gate at an op's Autograd key: decides in C++ whether a gradient is at stake, since a Python kernel there costs
// every call microseconds. If none is, the op goes on below autograd; if one may be, Python's formula is called.
//
// It also counts what an op writes in place, as ATen's kernels at the key below do, so that autograd refuses to go on
// with what it has saved of it.
//
// The stable ABI has no dispatch-key guard, so "below" is the op's twin, tk::_f, which autograd falls through. Only a
// profiler sees that name: a dispatch mode, a tensor subclass or a functorch transform, which would see it too, sends a
// call the other way, where Python redispatches the public op.
#pragma once

#include <torch/csrc/stable/library.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "tensor.h"
#include "tk/tk.h"

// Puts the gate at the Autograd key of an op: "mm", "mm.out". Returns 0 where this torch does not tell all that the
// gate asks, or for an op that has none. A generated op has its twins only from then on.
extern "C" TK_API int32_t tk_ops_gate(const char* op);

namespace tk::ops {

using Boxed = void(StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs);

class Gate {
 public:
  // arguments: of the schema. n_plain: how many results the twin has; those past the op's own, which are last, are
  // dropped. is_on_cpu: whether the twin runs there too, or the CPU's kernel is Python, as the formula is. Throws
  // std::logic_error for arguments among which it may overlook a tensor.
  Gate(const char* name, const char* overload, const std::string& arguments, uint64_t n_inputs, uint64_t n_results,
       uint64_t n_plain, bool is_on_cpu);
  void call(StableIValue* stack) const;

 private:
  struct TensorArgument {
    size_t index;
    bool is_optional;
    bool is_written;
    std::string name;
  };
  bool is_served(AtenTensorHandle tensor, const std::string& name) const;
  bool is_gradient_at_stake(const StableIValue* stack) const;
  void count_writes(const StableIValue* stack) const;
  void call_plain(StableIValue* stack) const;
  void call_tracked(StableIValue* stack) const;

  std::vector<TensorArgument> tensors_;
  bool writes_ = false;
  std::string name_;
  std::string plain_;    // tk::_f
  std::string tracked_;  // tk::_f_autograd
  std::string overload_;
  uint64_t n_inputs_;
  uint64_t n_results_;
  uint64_t n_plain_;
  bool is_on_cpu_;
};

// What tk_ops_gate finds under `op`. define_twins: called before the gate is there, where it is given.
void add_gate(const std::string& op, Boxed* kernel, std::function<void()> define_twins = {});

// Calls the kernel of a twin. torch's C API keeps nothing of an exception but its text, and before 2.13 not even that:
// so what the kernel throws goes to the gate that called it as it is, and empty tensors past torch.
void call_carrying(Boxed* kernel, StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs);

}  // namespace tk::ops
