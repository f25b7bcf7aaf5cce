// Integer expressions in postfix: guards, grids, sizes, predicted times. The one language in which a pack speaks of a
// problem. A word is an opcode in the low 8 bits and a signed operand in the upper 56.
//
// verify() is run over every expression when a user's pack is opened, or any is built; evaluate() then needs no checks
// of its own beyond arithmetic: a result outside int64 (of any part, also of the branch that Select does not take) and
// a shift by other than 0 to 63 are overflows, division by 0 gives 0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tk/tk.h"

namespace tk {

enum class Opcode : uint8_t {
  Const,      // operand
  Size,       // sizes[d] of tensor t: operand t | d << 8; 0 when absent or d >= ndim
  Stride,     // likewise
  Dtype,      // of tensor t; -1 when absent
  Ndim,       // of tensor t; -1 when absent
  Alignment,  // largest power of two up to 256 that divides the address of tensor t; 256 when absent
  Int,        // call.ints[operand]
  Mode,       // call.mode
  Device,     // DeviceField
  Local,      // operand-th local
  Add,
  Sub,
  Mul,
  FloorDiv,
  Mod,
  CeilDiv,  // towards minus infinity; the sign of Mod is the divisor's; plus infinity
  Min,
  Max,
  Neg,
  Eq,
  Ne,
  Lt,
  Le,
  Gt,
  Ge,  // 0 or 1
  And,
  Or,
  Not,  // of truth values, 0 or 1
  BitAnd,
  Shl,
  Shr,
  Select,  // condition, then, else -> one of them
  Count
};

enum class DeviceField : uint32_t { SmCount, Arch, SharedOptin, L2Bytes, Count };

inline constexpr uint32_t kMaxStack = 64;
inline constexpr uint32_t kMaxLocals = 64;

using Code = std::span<const int64_t>;

// What an expression reads: how many tensors, integers and locals there must be.
struct Needs {
  uint32_t tensors = 0;
  uint32_t ints = 0;
  uint32_t floats = 0;  // these two are of a launch's arguments, see pack_verify.cpp
  uint32_t locals = 0;
  uint32_t buffers = 0;

  void merge(const Needs& other);
  bool within(const Needs& available) const;
};

// nullopt when the words are no expression. Empty code is the constant 0.
std::optional<Needs> verify(Code code);

// What an expression is evaluated over. `device` has DeviceField::Count numbers.
struct Scope {
  const tk_call* call;
  const int64_t* device;
  const int64_t* locals;
};

// False on overflow; `result` is then unspecified. Takes verified code, within whose needs `scope` is.
[[nodiscard]] bool evaluate(Code code, const Scope& scope, int64_t& result);

// The largest power of two, up to 256, that divides the address of a tensor; 256 when it is absent.
int64_t alignment_of(const tk_tensor& tensor);

}  // namespace tk
