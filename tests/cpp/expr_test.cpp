#include "expr.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "pack_builder.h"

namespace tk::test {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// A problem with two tensors, the second absent.
struct Sample {
  Sample() {
    tensors[0].data = reinterpret_cast<void*>(0x1008);
    tensors[0].ndim = 2;
    tensors[0].dtype = 15;
    tensors[0].sizes[0] = 7;
    tensors[0].sizes[1] = 5;
    tensors[0].strides[0] = 5;
    tensors[0].strides[1] = 1;
    tensors[0].sizes[2] = 99;  // not of this tensor
    tensors[1].ndim = -1;
    tensors[1].dtype = 6;
    tensors[1].sizes[0] = 99;
    call.tensors = tensors;
    call.n_tensors = 2;
    call.ints = ints;
    call.n_ints = 2;
    call.mode = TK_MODE_STRICT;
  }
  std::optional<int64_t> operator()(const E& e) const {
    EXPECT_TRUE(verify(e.words).has_value());
    int64_t result = 0;
    if (!evaluate(e.words, {&call, device, locals}, result)) return std::nullopt;
    return result;
  }
  tk_tensor tensors[2] = {};
  int64_t ints[2] = {kMax, kMin};
  int64_t device[4] = {132, 90, 232448, 52428800};
  int64_t locals[3] = {-3, kMin, 11};
  tk_call call{};
};

TEST(Expr, ReadsTheProblem) {
  const Sample value;
  EXPECT_EQ(value(size(0, 0)), 7);
  EXPECT_EQ(value(size(0, 1)), 5);
  EXPECT_EQ(value(size(0, 2)), 0) << "beyond its dimensions";
  EXPECT_EQ(value(size(1, 0)), 0) << "absent";
  EXPECT_EQ(value(stride(0, 0)), 5);
  EXPECT_EQ(value(stride(1, 0)), 0);
  EXPECT_EQ(value(dtype(0)), 15);
  EXPECT_EQ(value(dtype(1)), -1);
  EXPECT_EQ(value(ndim(0)), 2);
  EXPECT_EQ(value(ndim(1)), -1);
  EXPECT_EQ(value(alignment(0)), 8);
  EXPECT_EQ(value(alignment(1)), 256);
  EXPECT_EQ(value(int_arg(0)), kMax);
  EXPECT_EQ(value(mode()), TK_MODE_STRICT);
  EXPECT_EQ(value(device(DeviceField::SmCount)), 132);
  EXPECT_EQ(value(device(DeviceField::Arch)), 90);
  EXPECT_EQ(value(device(DeviceField::SharedOptin)), 232448);
  EXPECT_EQ(value(device(DeviceField::L2Bytes)), 52428800);
  EXPECT_EQ(value(local(2)), 11);
  EXPECT_EQ(value(E(-5)), -5);
}

TEST(Expr, EmptyCodeIsZero) {
  int64_t result = 1;
  ASSERT_TRUE(verify({}).has_value());
  ASSERT_TRUE(evaluate({}, {}, result));
  EXPECT_EQ(result, 0);
}

TEST(Expr, DivisionRoundsAsNamed) {
  const Sample value;
  const auto divide = [&](Opcode op, int64_t a, int64_t b) { return value(E(op, {a, b})); };
  for (const auto& [a, b, floor, mod, ceil] : std::vector<std::array<int64_t, 5>>{{7, 2, 3, 1, 4},
                                                                                  {-7, 2, -4, 1, -3},
                                                                                  {7, -2, -4, -1, -3},
                                                                                  {-7, -2, 3, -1, 4},
                                                                                  {6, 3, 2, 0, 2},
                                                                                  {-6, 3, -2, 0, -2}}) {
    EXPECT_EQ(divide(Opcode::FloorDiv, a, b), floor) << a << " / " << b;
    EXPECT_EQ(divide(Opcode::Mod, a, b), mod) << a << " / " << b;
    EXPECT_EQ(divide(Opcode::CeilDiv, a, b), ceil) << a << " / " << b;
  }
  for (const Opcode op : {Opcode::FloorDiv, Opcode::Mod, Opcode::CeilDiv}) EXPECT_EQ(divide(op, 5, 0), 0);
}

TEST(Expr, LeavingInt64IsAnOverflow) {
  const Sample value;
  const E least = int_arg(1);
  const E most = int_arg(0);
  EXPECT_EQ(value(most + 1), std::nullopt);
  EXPECT_EQ(value(least - 1), std::nullopt);
  EXPECT_EQ(value(most * 2), std::nullopt);
  EXPECT_EQ(value(E(Opcode::Neg, {least})), std::nullopt);
  EXPECT_EQ(value(E(Opcode::FloorDiv, {least, -1})), std::nullopt);
  EXPECT_EQ(value(E(Opcode::CeilDiv, {least, -1})), std::nullopt);
  EXPECT_EQ(value(least % -1), 0);
  EXPECT_EQ(value(E(Opcode::Shl, {most, 1})), std::nullopt);
  EXPECT_EQ(value(E(Opcode::Shl, {1, 64})), std::nullopt);
  EXPECT_EQ(value(E(Opcode::Shr, {1, -1})), std::nullopt);
  EXPECT_EQ(value(E(Opcode::Shl, {-1, 63})), kMin);
  EXPECT_EQ(value(E(Opcode::Shr, {least, 63})), -1);
  EXPECT_EQ(value(E(Opcode::Select, {0, most + 1, 4})), std::nullopt) << "both branches are evaluated";
}

TEST(Expr, RefusesWhatIsNoExpression) {
  const auto bad = [](std::vector<int64_t> words) { return !verify(words).has_value(); };
  const auto word = [](Opcode op, int64_t operand = 0) { return static_cast<int64_t>(op) | operand * 256; };
  EXPECT_TRUE(bad({word(Opcode::Add)})) << "nothing to add";
  EXPECT_TRUE(bad({word(Opcode::Const), word(Opcode::Const)})) << "two values";
  EXPECT_TRUE(bad({word(Opcode::Const), word(Opcode::Const), word(Opcode::Select)}));
  EXPECT_TRUE(bad({word(Opcode::Count)}));
  EXPECT_TRUE(bad({255}));
  EXPECT_TRUE(bad({word(Opcode::Size, TK_MAX_TENSORS)}));
  EXPECT_TRUE(bad({word(Opcode::Size, int64_t{TK_MAX_DIMS} << 8)}));
  EXPECT_TRUE(bad({word(Opcode::Stride, -1)}));
  EXPECT_TRUE(bad({word(Opcode::Dtype, TK_MAX_TENSORS)}));
  EXPECT_TRUE(bad({word(Opcode::Alignment, -1)}));
  EXPECT_TRUE(bad({word(Opcode::Int, TK_MAX_INTS)}));
  EXPECT_TRUE(bad({word(Opcode::Local, kMaxLocals)}));
  EXPECT_TRUE(bad({word(Opcode::Local, -1)}));
  EXPECT_TRUE(bad({word(Opcode::Device, 4)}));
  EXPECT_TRUE(bad({word(Opcode::Mode, 1)}));
  EXPECT_TRUE(bad({word(Opcode::Const), word(Opcode::Neg, 1)}));
}

TEST(Expr, RefusesAStackThatIsTooDeep) {
  const auto nested = [](uint32_t depth) {
    std::vector<int64_t> words(depth, static_cast<int64_t>(Opcode::Const));
    words.insert(words.end(), depth - 1, static_cast<int64_t>(Opcode::Add));
    return words;
  };
  EXPECT_TRUE(verify(nested(kMaxStack)).has_value());
  EXPECT_FALSE(verify(nested(kMaxStack + 1)).has_value());
  int64_t result = 1;
  EXPECT_TRUE(evaluate(nested(kMaxStack), {}, result));
  EXPECT_EQ(result, 0);
}

TEST(Expr, SaysWhatItReads) {
  const auto needs = verify((size(3, 1) + int_arg(4) * local(7)).words);
  ASSERT_TRUE(needs.has_value());
  EXPECT_EQ(needs->tensors, 4u);
  EXPECT_EQ(needs->ints, 5u);
  EXPECT_EQ(needs->locals, 8u);
  EXPECT_TRUE(needs->within({.tensors = 4, .ints = 5, .locals = 8}));
  EXPECT_FALSE(needs->within({.tensors = 4, .ints = 5, .locals = 7}));
  EXPECT_FALSE(needs->within({.tensors = 3, .ints = 5, .locals = 8}));
  EXPECT_FALSE(needs->within({.tensors = 4, .ints = 4, .locals = 8}));
}

// --- Against arithmetic in 128 bits ---

using Wide = __int128;

bool fits(Wide x) { return x >= kMin && x <= kMax; }

std::optional<Wide> reference(Opcode op, Wide a, Wide b, Wide c) {
  const auto floor = [](Wide x, Wide y) { return x / y - (x % y != 0 && (x < 0) != (y < 0)); };
  switch (op) {
    case Opcode::Add:
      return a + b;
    case Opcode::Sub:
      return a - b;
    case Opcode::Mul:
      return a * b;
    case Opcode::FloorDiv:
      return b == 0 ? 0 : floor(a, b);
    case Opcode::Mod:
      return b == 0 ? 0 : a - floor(a, b) * b;
    case Opcode::CeilDiv:
      return b == 0 ? 0 : -floor(-a, b);
    case Opcode::Min:
      return a < b ? a : b;
    case Opcode::Max:
      return a > b ? a : b;
    case Opcode::Neg:
      return -a;
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
      return a != 0 && b != 0;
    case Opcode::Or:
      return a != 0 || b != 0;
    case Opcode::Not:
      return a == 0;
    case Opcode::BitAnd:
      return static_cast<int64_t>(a) & static_cast<int64_t>(b);
    case Opcode::Shl:
      return b < 0 || b > 63 ? std::optional<Wide>() : a * (Wide{1} << b);
    case Opcode::Shr:
      return b < 0 || b > 63 ? std::optional<Wide>() : floor(a, Wide{1} << b);
    default:
      return a != 0 ? b : c;
  }
}

class RandomExpr {
 public:
  explicit RandomExpr(uint32_t seed) : random_(seed) {}

  // An expression, with its value unless it overflows.
  std::pair<E, std::optional<Wide>> make(int depth) {
    if (depth == 0 || pick(4) == 0) return leaf();
    const auto op = static_cast<Opcode>(static_cast<int>(Opcode::Add) +
                                        pick(static_cast<int>(Opcode::Count) - static_cast<int>(Opcode::Add)));
    const auto [a, x] = make(depth - 1);
    if (op == Opcode::Neg || op == Opcode::Not) return {E(op, {a}), apply(op, x, 0, 0)};
    const auto [b, y] = make(depth - 1);
    if (op != Opcode::Select) return {E(op, {a, b}), apply(op, x, y, 0)};
    const auto [c, z] = make(depth - 1);
    return {E(op, {a, b, c}), apply(op, x, y, z)};
  }

 private:
  int pick(int n) { return static_cast<int>(random_() % static_cast<uint32_t>(n)); }

  std::pair<E, std::optional<Wide>> leaf() {
    switch (pick(6)) {
      case 0:
        return {int_arg(0), kMax};
      case 1:
        return {int_arg(1), kMin};
      case 2:
        return {size(0, 0), 7};
      case 3: {
        const int64_t small = pick(9) - 4;
        return {E(small), small};
      }
      case 4: {
        const int64_t power = int64_t{1} << pick(55);
        return {E(power), power};
      }
      default:
        return {local(0), -3};
    }
  }

  static std::optional<Wide> apply(Opcode op, std::optional<Wide> a, std::optional<Wide> b, std::optional<Wide> c) {
    if (!a || !b || !c) return std::nullopt;
    const auto result = reference(op, *a, *b, *c);
    return result && fits(*result) ? result : std::nullopt;
  }

  std::mt19937 random_;
};

TEST(Expr, AgreesWithWideArithmetic) {
  const Sample value;
  RandomExpr random(20240607);
  int overflows = 0;
  for (int i = 0; i < 50000; i++) {
    const auto [expr, expected] = random.make(4);
    ASSERT_EQ(value(expr), expected ? std::optional(static_cast<int64_t>(*expected)) : std::nullopt) << "case " << i;
    overflows += !expected;
  }
  EXPECT_GT(overflows, 1000) << "the cases hardly overflow";
  EXPECT_LT(overflows, 40000) << "the cases hardly do anything else";
}

// Random words: whatever verify lets through must evaluate without harm (the sanitizers watch).
TEST(Expr, WhatPassesVerificationIsHarmless) {
  const Sample value;
  std::mt19937 random(7);
  int passed = 0;
  for (int i = 0; i < 200000; i++) {
    E expr;
    expr.words.clear();
    for (uint32_t n = 1 + random() % 5; n > 0; n--) {
      const int64_t operand = random() % 3 ? random() % 3 : static_cast<int32_t>(random());
      expr.words.push_back(static_cast<int64_t>(random() % 36) | operand * 256);
    }
    const auto needs = verify(expr.words);
    if (!needs || !needs->within({.tensors = 2, .ints = 2, .locals = 3})) continue;
    passed++;
    value(expr);
  }
  EXPECT_GT(passed, 1000);
}

}  // namespace
}  // namespace tk::test
