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

// One switch, and the last value in a register: to choose among hundreds of variants is to run through this.
bool evaluate(Code code, const Scope& scope, int64_t& result) {
  int64_t stack[kMaxStack];  // all values but the last; below the first lies a 0
  int64_t* top = stack;
  int64_t last = 0;
  bool overflow = false;
  const auto push = [&](int64_t value) {
    *top++ = last;
    last = value;
  };
  const auto pop = [&] { return *--top; };
  for (const int64_t word : code) {
    const int64_t value = operand(word);
    const auto tensor = [&]() -> const tk_tensor& { return scope.call->tensors[tensor_index(value)]; };
    switch (opcode(word)) {
      case Opcode::Const:
        push(value);
        break;
      case Opcode::Size:
        push(dimension(value) < tensor().ndim ? tensor().sizes[dimension(value)] : 0);
        break;
      case Opcode::Stride:
        push(dimension(value) < tensor().ndim ? tensor().strides[dimension(value)] : 0);
        break;
      case Opcode::Dtype:
        push(tensor().ndim < 0 ? -1 : tensor().dtype);
        break;
      case Opcode::Ndim:
        push(tensor().ndim);
        break;
      case Opcode::Alignment:
        push(alignment_of(tensor()));
        break;
      case Opcode::Int:
        push(scope.call->ints[value]);
        break;
      case Opcode::Mode:
        push(scope.call->mode);
        break;
      case Opcode::Device:
        push(scope.device[value]);
        break;
      case Opcode::Local:
        push(scope.locals[value]);
        break;
      case Opcode::Add:
        overflow |= __builtin_add_overflow(pop(), last, &last);
        break;
      case Opcode::Sub:
        overflow |= __builtin_sub_overflow(pop(), last, &last);
        break;
      case Opcode::Mul:
        overflow |= __builtin_mul_overflow(pop(), last, &last);
        break;
      case Opcode::FloorDiv:
        last = floor_div(pop(), last, overflow);
        break;
      case Opcode::Mod:
        last = floor_mod(pop(), last);
        break;
      case Opcode::CeilDiv:
        last = ceil_div(pop(), last, overflow);
        break;
      case Opcode::Min:
        last = std::min(pop(), last);
        break;
      case Opcode::Max:
        last = std::max(pop(), last);
        break;
      case Opcode::Neg:
        overflow |= __builtin_sub_overflow(int64_t{0}, last, &last);
        break;
      case Opcode::Eq:
        last = pop() == last;
        break;
      case Opcode::Ne:
        last = pop() != last;
        break;
      case Opcode::Lt:
        last = pop() < last;
        break;
      case Opcode::Le:
        last = pop() <= last;
        break;
      case Opcode::Gt:
        last = pop() > last;
        break;
      case Opcode::Ge:
        last = pop() >= last;
        break;
      case Opcode::And:
        last = (pop() != 0) & (last != 0);
        break;
      case Opcode::Or:
        last = (pop() != 0) | (last != 0);
        break;
      case Opcode::Not:
        last = !last;
        break;
      case Opcode::BitAnd:
        last &= pop();
        break;
      case Opcode::Shl:
        last = shift_left(pop(), last, overflow);
        break;
      case Opcode::Shr:
        last = shift_right(pop(), last, overflow);
        break;
      case Opcode::Select: {
        const int64_t then = pop();
        last = pop() ? then : last;
        break;
      }
      case Opcode::Count:
        break;
    }
  }
  result = last;
  return !overflow;
}

int64_t alignment_of(const tk_tensor& tensor) {
  if (tensor.ndim < 0) return 256;
  return int64_t{1} << std::countr_zero(reinterpret_cast<uintptr_t>(tensor.data) | 256);
}

}  // namespace tk
