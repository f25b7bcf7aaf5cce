// A call, and what the pack that serves it says of it.
#pragma once

#include <optional>
#include <string>

#include "runtime.h"

namespace tk {

// Throws TK_INVALID_ARGUMENT where a call is no call: what later code relies on. Cheap; run on every launch.
void check_call(const tk_call* call);

struct Problem {
  // Finds device, op and bucket. The op is of the pack that serves the call: of those that have it the first with a
  // kernel for it, else the first whose checks it passes. Throws as Devices::get and Registry::find, and
  // TK_INVALID_ARGUMENT for a call that does not have the op's arguments, or whose arguments fail one of its checks.
  explicit Problem(const tk_call& call);
  // As one of the packs has the op.
  Problem(const tk_call& call, const OpInPack& found);

  Scope scope() const { return {&call, device.fields().data(), locals.data()}; }
  const char* op_name() const { return pack.string(op.name); }
  const char* config_name(uint32_t config) const;
  // "mm(bfloat16[512, 4096], bfloat16[4096, 4096], absent, bfloat16[512, 4096]; 0, 1)"
  std::string text() const;
  PinKey pin_key() const;
  // Writes those locals from place `first` on; false where one leaves 64 bits.
  bool evaluate_locals(format::Range range, uint32_t first);

  const tk_call& call;
  Device& device;
  const OpInPack found;
  const Pack& pack;
  const format::Op& op;
  std::array<int64_t, kMaxLocals> locals;  // those of the op; room for a variant's
  int64_t key = 0;
  const format::Bucket* bucket = nullptr;  // nullptr: nothing was compiled for this key

 private:
  void check_arguments() const;
  void evaluate_op();
  void check_values() const;
};

}  // namespace tk
