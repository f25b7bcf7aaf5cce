#include "expr.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace tk {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

constexpr Opcode opcode(int64_t word) { return static_cast<Opcode>(word & 0xff); }
constexpr int64_t operand(int64_t word) { return word >> 8; }
constexpr uint32_t tensor_index(int64_t operand) { return operand & 0xff; }
constexpr int64_t dimension(int64_t operand) { return operand >> 8; }

// How many values an opcode takes from the stack. It leaves one.
int arity(Opcode op) {
  if (op < Opcode::Add) return 0;
  if (op == Opcode::Neg || op == Opcode::Not) return 1;
  return op == Opcode::Select ? 3 : 2;
}

bool take(uint32_t& need, int64_t index, int64_t limit) {
  if (index < 0 || index >= limit) return false;
  need = std::max(need, static_cast<uint32_t>(index) + 1);
  return true;
}

// Whether a word is one that evaluate() knows, apart from the stack.
bool verify_word(int64_t word, Needs& needs) {
  const int64_t value = operand(word);
  switch (opcode(word)) {
    case Opcode::Const:
      return true;
    case Opcode::Size:
    case Opcode::Stride:
      return dimension(value) >= 0 && dimension(value) < TK_MAX_DIMS &&
             take(needs.tensors, tensor_index(value), TK_MAX_TENSORS);
    case Opcode::Dtype:
    case Opcode::Ndim:
    case Opcode::Alignment:
      return take(needs.tensors, value, TK_MAX_TENSORS);
    case Opcode::Int:
      return take(needs.ints, value, TK_MAX_INTS);
    case Opcode::Local:
      return take(needs.locals, value, kMaxLocals);
    case Opcode::Device:
      return value >= 0 && value < static_cast<int64_t>(DeviceField::Count);
    default:
      return opcode(word) < Opcode::Count && value == 0;
  }
}

int64_t floor_mod(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;  // INT64_MIN % -1 traps
  const int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

int64_t floor_div(int64_t a, int64_t b, bool& overflow) {
  if (b == 0) return 0;
  if (b == -1) {
    overflow |= a == kMin;
    return a == kMin ? 0 : -a;
  }
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t ceil_div(int64_t a, int64_t b, bool& overflow) {
  if (b == 0) return 0;
  return floor_div(a, b, overflow) + (floor_mod(a, b) != 0);
}

int64_t shift_left(int64_t a, int64_t b, bool& overflow) {
  if (b < 0 || b > 63) {
    overflow = true;
    return 0;
  }
  const int64_t shifted = static_cast<int64_t>(static_cast<uint64_t>(a) << b);
  overflow |= shifted >> b != a;
  return shifted;
}

int64_t shift_right(int64_t a, int64_t b, bool& overflow) {
  overflow |= b < 0 || b > 63;
  return a >> (b & 63);
}

int64_t leaf(int64_t word, const Scope& scope) {
  const int64_t value = operand(word);
  const auto tensor = [&]() -> const tk_tensor& { return scope.call->tensors[tensor_index(value)]; };
  switch (opcode(word)) {
    case Opcode::Const:
      return value;
    case Opcode::Size:
      return dimension(value) < tensor().ndim ? tensor().sizes[dimension(value)] : 0;
    case Opcode::Stride:
      return dimension(value) < tensor().ndim ? tensor().strides[dimension(value)] : 0;
    case Opcode::Dtype:
      return tensor().ndim < 0 ? -1 : tensor().dtype;
    case Opcode::Ndim:
      return tensor().ndim;
    case Opcode::Alignment:
      return alignment_of(tensor());
    case Opcode::Int:
      return scope.call->ints[value];
    case Opcode::Mode:
      return scope.call->mode;
    case Opcode::Device:
      return scope.device[value];
    default:
      return scope.locals[value];
  }
}

int64_t binary(Opcode op, int64_t a, int64_t b, bool& overflow) {
  int64_t result = 0;
  switch (op) {
    case Opcode::Add:
      overflow |= __builtin_add_overflow(a, b, &result);
      return result;
    case Opcode::Sub:
      overflow |= __builtin_sub_overflow(a, b, &result);
      return result;
    case Opcode::Mul:
      overflow |= __builtin_mul_overflow(a, b, &result);
      return result;
    case Opcode::FloorDiv:
      return floor_div(a, b, overflow);
    case Opcode::Mod:
      return floor_mod(a, b);
    case Opcode::CeilDiv:
      return ceil_div(a, b, overflow);
    case Opcode::Min:
      return std::min(a, b);
    case Opcode::Max:
      return std::max(a, b);
    case Opcode::Eq:
      return a == b;
    case Opcode::Ne:
      return a != b;
    case Opcode::Lt:
      return a < b;
    case Opcode::Le:
      return a <= b;
    case Opcode::Gt:
      return a > b;
    case Opcode::Ge:
      return a >= b;
    case Opcode::And:
      return a && b;
    case Opcode::Or:
      return a || b;
    case Opcode::BitAnd:
      return a & b;
    case Opcode::Shl:
      return shift_left(a, b, overflow);
    default:
      return shift_right(a, b, overflow);
  }
}

}  // namespace

void Needs::merge(const Needs& other) {
  tensors = std::max(tensors, other.tensors);
  ints = std::max(ints, other.ints);
  floats = std::max(floats, other.floats);
  locals = std::max(locals, other.locals);
  buffers = std::max(buffers, other.buffers);
}

bool Needs::within(const Needs& available) const {
  return tensors <= available.tensors && ints <= available.ints && floats <= available.floats &&
         locals <= available.locals && buffers <= available.buffers;
}

std::optional<Needs> verify(Code code) {
  Needs needs;
  if (code.empty()) return needs;
  int depth = 0;
  for (const int64_t word : code) {
    if (!verify_word(word, needs)) return std::nullopt;
    depth -= arity(opcode(word));
    if (depth < 0 || ++depth > static_cast<int>(kMaxStack)) return std::nullopt;
  }
  return depth == 1 ? std::optional(needs) : std::nullopt;
}

bool evaluate(Code code, const Scope& scope, int64_t& result) {
  int64_t stack[kMaxStack + 1];  // `top` is the last value; the first slot is below them all
  int64_t* top = stack;
  bool overflow = false;
  for (const int64_t word : code) {
    const Opcode op = opcode(word);
    if (op < Opcode::Add) {
      *++top = leaf(word, scope);
    } else if (op == Opcode::Neg) {
      overflow |= __builtin_sub_overflow(int64_t{0}, *top, top);
    } else if (op == Opcode::Not) {
      *top = !*top;
    } else if (op == Opcode::Select) {
      top -= 2;
      *top = *top ? top[1] : top[2];
    } else {
      --top;
      *top = binary(op, top[0], top[1], overflow);
    }
  }
  result = code.empty() ? 0 : *top;
  return !overflow;
}

int64_t alignment_of(const tk_tensor& tensor) {
  if (tensor.ndim < 0) return 256;
  return int64_t{1} << std::countr_zero(reinterpret_cast<uintptr_t>(tensor.data) | 256);
}

}  // namespace tk
