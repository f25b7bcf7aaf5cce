// Which variant runs: bucket, measured choices, constraints, modes, least predicted time.

#include "fake_driver.h"

namespace tk::test {
namespace {

// op(a): buckets by dtype; three configs, of which the predicted time depends on the rows M.
Op sample_op() {
  Variant large{.kernel = "tiles",
                .config = 0,
                .constraints = {{size(0, 1) % 64 == 0, "K a multiple of 64"}, {alignment(0) >= 16, "a on 16 bytes"}},
                .cost = 1000 + local(0),
                .bucket = 15};
  Variant small{.kernel = "rows",
                .config = 1,
                .flags = format::kNonDeterministic,
                .constraints = {{size(0, 1) % 8 == 0, "K a multiple of 8"}},
                .cost = local(0) * 100,
                .bucket = 15};
  Variant any{.kernel = "pointer", .config = 2, .flags = format::kGeneral, .cost = 1000000, .bucket = 15};
  Variant half{.kernel = "tiles", .config = 0, .cost = 5, .bucket = 5};
  return {.name = "op",
          .n_tensors = 1,
          .locals = {size(0, 0), size(0, 1)},
          .key = dtype(0),
          .dims = {0, 1},
          .configs = {"large", "small", "any", "unused"},
          .variants = {large, small, any, half},
          .pins = {{15, {32, 64}, 0}, {15, {33, 4}, 0}, {15, {34, 64}, 3}}};
}

class ChooseTest : public CoreTest {
 protected:
  void SetUp() override {
    CoreTest::SetUp();
    load({sample_op()});
  }

  static Call call(int64_t rows, int64_t cols, uint32_t mode = 0, int32_t config = -1, uintptr_t address = 0x1000) {
    Call c("op", {make_tensor({rows, cols}, 15, address)});
    c.call.mode = mode;
    c.call.config = config;
    return c;
  }
  static tk_choice choose(Call c) {
    tk_choice choice{};
    EXPECT_EQ(tk_choose(c.get(), &choice), TK_OK) << tk_last_error();
    return choice;
  }
  static void expect_choice_error(Call c, tk_status status, std::vector<std::string> parts) {
    tk_choice choice{};
    expect_error(tk_choose(c.get(), &choice), status, std::move(parts));
    expect_error(tk_launch(c.get(), nullptr, nullptr), status, {});
  }
};

TEST_F(ChooseTest, TakesTheLeastPredictedTime) {
  const tk_choice few = choose(call(4, 64));
  EXPECT_STREQ(few.config_name, "small");
  EXPECT_STREQ(few.kernel_name, "rows");
  EXPECT_EQ(few.config, 1);
  EXPECT_EQ(few.cost, 400);
  EXPECT_EQ(few.pinned, 0);
  EXPECT_EQ(few.n_launches, 1u);
  const tk_choice many = choose(call(1000, 64));
  EXPECT_STREQ(many.config_name, "large");
  EXPECT_EQ(many.cost, 2000);
  EXPECT_EQ(many.variant, 0u);
}

TEST_F(ChooseTest, ConstraintsDecideWhatCanRun) {
  EXPECT_STREQ(choose(call(1000, 72)).config_name, "small") << "K = 72 is no multiple of 64";
  EXPECT_STREQ(choose(call(1000, 64, 0, -1, 0x1008)).config_name, "small") << "not on 16 bytes";
  EXPECT_STREQ(choose(call(1000, 7)).config_name, "any");
}

TEST_F(ChooseTest, ModesDecideWhatMayRun) {
  EXPECT_STREQ(choose(call(4, 64, TK_MODE_DETERMINISTIC)).config_name, "large");
  EXPECT_STREQ(choose(call(4, 8, TK_MODE_DETERMINISTIC)).config_name, "any");
  EXPECT_STREQ(choose(call(4, 8, TK_MODE_STRICT)).config_name, "small");
  expect_choice_error(call(4, 7, TK_MODE_STRICT), TK_VARIANT_NOT_FOUND,
                      {"K a multiple of 64", "K a multiple of 8", "strict mode off", "tk build", "bfloat16[4, 7]"});
}

TEST_F(ChooseTest, AMeasuredChoiceWins) {
  const tk_choice choice = choose(call(32, 64));
  EXPECT_STREQ(choice.config_name, "large");
  EXPECT_EQ(choice.pinned, 1);
  EXPECT_EQ(choice.cost, -1);
  EXPECT_EQ(choose(call(31, 64)).pinned, 0) << "measured for exactly 32 rows";
  EXPECT_EQ(choose(call(32, 128)).pinned, 0);
}

TEST_F(ChooseTest, AMeasuredChoiceThatDoesNotFitIsPassedOver) {
  const tk_choice by_size = choose(call(33, 4));
  EXPECT_EQ(by_size.pinned, 0);
  EXPECT_STREQ(by_size.config_name, "any");
  EXPECT_EQ(choose(call(34, 64)).pinned, 0) << "its config was not compiled for this key";
  EXPECT_EQ(choose(call(32, 64, 0, -1, 0x1008)).pinned, 0) << "another alignment";
}

TEST_F(ChooseTest, BatchInvarianceIgnoresWhatWasMeasuredForOneNumberOfRows) {
  EXPECT_EQ(choose(call(32, 64, TK_MODE_BATCH_INVARIANT)).pinned, 0);
}

TEST_F(ChooseTest, TheUsersMeasurementOverridesThePacks) {
  Call c = call(32, 64);
  ASSERT_EQ(tk_pin(c.get(), 1), TK_OK) << tk_last_error();
  EXPECT_STREQ(choose(call(32, 64)).config_name, "small");
  EXPECT_EQ(choose(call(32, 64)).pinned, 1);
  EXPECT_EQ(choose(call(40, 64)).pinned, 0);
  ASSERT_EQ(tk_pin(c.get(), -1), TK_OK) << tk_last_error();
  EXPECT_STREQ(choose(call(32, 64)).config_name, "large") << "the pack's own is back";
}

TEST_F(ChooseTest, APinReachesCallsThatWereMadeBefore) {
  Call c = call(4, 64);
  const auto pointer_of = [&] { return launched(c).at(0).kernel; };
  EXPECT_EQ(pointer_of(), "kernel");
  const int prepared = fake().calls(Entry::cuModuleGetFunction);
  ASSERT_EQ(tk_pin(c.get(), 0), TK_OK);
  EXPECT_EQ(pointer_of(), "kernel");
  EXPECT_GT(fake().calls(Entry::cuModuleGetFunction), prepared) << "the other variant's launch was looked up";
}

TEST_F(ChooseTest, APinMustFit) {
  Call c = call(4, 7);
  expect_error(tk_pin(c.get(), 0), TK_INVALID_ARGUMENT, {"K a multiple of 64"});
  expect_error(tk_pin(c.get(), 9), TK_INVALID_ARGUMENT, {"config 9"});
  expect_error(tk_pin(c.get(), -2), TK_INVALID_ARGUMENT, {"-2"});
}

TEST_F(ChooseTest, AConfigCanBeGiven) {
  const tk_choice choice = choose(call(4, 64, 0, 2));
  EXPECT_STREQ(choice.config_name, "any");
  EXPECT_EQ(choice.pinned, 2);
  EXPECT_EQ(choice.cost, -1);
}

TEST_F(ChooseTest, AGivenConfigIsNeverReplaced) {
  expect_choice_error(call(4, 72, 0, 0), TK_INVALID_ARGUMENT,
                      {"config 0 (large)", "K a multiple of 64", "small would run"});
  expect_choice_error(call(4, 64, TK_MODE_DETERMINISTIC, 1), TK_INVALID_ARGUMENT, {"deterministic mode off", "large"});
  expect_choice_error(call(4, 64, 0, 4), TK_INVALID_ARGUMENT, {"no config 4", "4, from 0 to 3"});
  expect_choice_error(call(4, 64, 0, 3), TK_INVALID_ARGUMENT,
                      {"config 3 (unused)", "not compiled", "0 (large)", "1 (small)", "2 (any)"});
  expect_choice_error(call(4, 64, 0, -2), TK_INVALID_ARGUMENT, {"-2"});
}

TEST_F(ChooseTest, AKeyWithoutKernelsIsNotFound) {
  Call c("op", {make_tensor({4, 64}, 6)});
  tk_choice choice;
  expect_error(tk_choose(c.get(), &choice), TK_VARIANT_NOT_FOUND,
               {"float32[4, 64]", "sm_90", "python -m tk build FILE.py -o my.tkpack --arch 90"});
}

TEST_F(ChooseTest, EqualTimesGoToTheLowerNumber) {
  Op op{.name = "ties", .configs = {"a", "b"}};
  op.variants = {Variant{.config = 1, .cost = 7}, Variant{.config = 0, .cost = 7}};
  load({op});
  EXPECT_STREQ(choose(Call("ties")).config_name, "b");
}

TEST_F(ChooseTest, OfAConfigsVariantsTheFirstIsPreferred) {
  Op op{.name = "ties", .n_tensors = 1, .dims = {0}, .configs = {"a", "b"}};
  op.locals = {size(0, 0)};
  const Constraint even{local(0) % 2 == 0, "an even size"};
  op.variants = {Variant{.config = 0, .constraints = {even}, .cost = 9}, Variant{.config = 0, .cost = 5},
                 Variant{.config = 1, .cost = 7}};
  load({op});
  const auto variant = [](int64_t size, int32_t config) {
    Call call("ties", {make_tensor({size}, 15)});
    call.call.config = config;
    return choose(call).variant;
  };
  EXPECT_EQ(variant(4, 0), 0u);
  EXPECT_EQ(variant(5, 0), 1u);
  EXPECT_EQ(variant(4, -1), 2u);  // 7 is less than 9; what its variant 1 would take does not count
  EXPECT_EQ(variant(5, -1), 1u);
}

TEST_F(ChooseTest, CostsMayReadTheVariantsLocals) {
  Op op{.name = "costs", .n_tensors = 1, .locals = {size(0, 0)}, .configs = {"a", "b"}};
  op.variants = {Variant{.config = 0, .locals = {local(0) * local(0)}, .cost = local(1)},
                 Variant{.config = 1, .locals = {local(0) * 10}, .cost = local(1)}};
  load({op});
  EXPECT_STREQ(choose(Call("costs", {make_tensor({9})})).config_name, "a");
  EXPECT_STREQ(choose(Call("costs", {make_tensor({11})})).config_name, "b");
}

TEST_F(ChooseTest, AVariantThatCannotBePreparedIsPassedOver) {
  Op op{.name = "narrow", .n_ints = 1, .configs = {"narrow", "wide"}};
  op.variants = {Variant{.config = 0, .cost = 1, .launches = {Launch{.args = {integer(int_arg(0), 4)}}}},
                 Variant{.config = 1, .cost = 2, .launches = {Launch{.args = {integer(int_arg(0), 8)}}}}};
  load({op});
  EXPECT_STREQ(choose(Call("narrow", {}, {INT32_MAX})).config_name, "narrow");
  EXPECT_STREQ(choose(Call("narrow", {}, {int64_t{INT32_MAX} + 1})).config_name, "wide");
}

TEST_F(ChooseTest, SharedMemoryOfTheGpuCounts) {
  use({FakeGpu{.major = 8, .minor = 6, .shared_optin = 99 << 10}});
  Op op{.name = "op", .configs = {"big", "little"}};
  op.variants = {Variant{.config = 0, .cost = 1, .launches = {Launch{.shared = 160 << 10}}},
                 Variant{.config = 1, .cost = 2, .launches = {Launch{.shared = 99 << 10}}}};
  load(PackSpec{.ops = {op}, .arch = 80});
  EXPECT_STREQ(choose(Call("op")).config_name, "little");
  uint32_t modules = 0;
  EXPECT_EQ(tk_preload(UINT32_MAX, 0, &modules), TK_OK) << "what never runs here is not loaded: " << tk_last_error();
  EXPECT_EQ(modules, 1u);
}

TEST_F(ChooseTest, CandidatesSayWhyNot) {
  Call c = call(4, 72, TK_MODE_STRICT);
  tk_candidate rows[8];
  uint32_t count = 0;
  ASSERT_EQ(tk_candidates(c.get(), rows, 8, &count), TK_OK) << tk_last_error();
  ASSERT_EQ(count, 3u);
  EXPECT_STREQ(rows[0].config_name, "large");
  EXPECT_STREQ(rows[0].failed_constraint, "K a multiple of 64");
  EXPECT_EQ(rows[0].cost, -1);
  EXPECT_STREQ(rows[1].kernel_name, "rows");
  EXPECT_EQ(rows[1].failed_constraint, nullptr);
  EXPECT_EQ(rows[1].cost, 400);
  EXPECT_NE(std::string(rows[2].failed_constraint).find("strict mode off"), std::string::npos);
  ASSERT_EQ(tk_candidates(c.get(), rows, 1, &count), TK_OK);
  EXPECT_EQ(count, 3u) << "how many there are, not how many fit";
  ASSERT_EQ(tk_candidates(c.get(), nullptr, 0, &count), TK_OK);
}

TEST_F(ChooseTest, SizesPast64BitsAreRefused) {
  Op op{.name = "big", .n_tensors = 1, .locals = {size(0, 0) * size(0, 1)}};
  load({op});
  Call c("big", {make_tensor({int64_t{1} << 40, int64_t{1} << 40})});
  tk_choice choice;
  expect_error(tk_choose(c.get(), &choice), TK_INVALID_ARGUMENT, {"64 bits", "1099511627776"});
}

TEST_F(ChooseTest, ACostPast64BitsRulesAVariantOut) {
  Op op{.name = "dear", .n_ints = 1, .configs = {"dear", "cheap"}};
  op.variants = {Variant{.config = 0, .cost = int_arg(0) * int_arg(0)}, Variant{.config = 1, .cost = 1 << 20}};
  load({op});
  EXPECT_STREQ(choose(Call("dear", {}, {3})).config_name, "dear");
  EXPECT_STREQ(choose(Call("dear", {}, {int64_t{1} << 40})).config_name, "cheap");
}

TEST_F(ChooseTest, CallsThatAreNoCallsAreRefused) {
  tk_choice choice;
  uint32_t count = 0;
  expect_error(tk_choose(nullptr, &choice), TK_INVALID_ARGUMENT, {"NULL"});
  Call c = call(4, 64);
  expect_error(tk_choose(c.get(), nullptr), TK_INVALID_ARGUMENT, {"choice is NULL"});
  expect_error(tk_launches(c.get(), nullptr, 0, nullptr), TK_INVALID_ARGUMENT, {"count is NULL"});
  expect_error(tk_launches(c.get(), nullptr, 1, &count), TK_INVALID_ARGUMENT, {"rows is NULL"});
  c.tensors[0].ndim = TK_MAX_DIMS + 1;
  expect_choice_error(c, TK_INVALID_ARGUMENT, {"9 dimensions"});
  c.tensors[0].ndim = -2;
  expect_choice_error(c, TK_INVALID_ARGUMENT, {"-2 dimensions"});
  expect_choice_error(Call("op"), TK_INVALID_ARGUMENT, {"takes 1 tensors, 0 ints and 0 floats, not 0, 0 and 0"});
  Call many("op", std::vector<tk_tensor>(TK_MAX_TENSORS + 1, make_tensor({1})));
  expect_choice_error(many, TK_INVALID_ARGUMENT, {"33 tensors"});
  Call null = call(4, 64);
  null.get();
  null.call.tensors = nullptr;
  expect_error(tk_launch(&null.call, nullptr, nullptr), TK_INVALID_ARGUMENT, {"NULL"});
  Call unknown = call(4, 64);
  unknown.call.op = 1u << 30;
  expect_choice_error(unknown, TK_INVALID_ARGUMENT, {"tk_intern_op"});
  Call elsewhere = call(4, 64);
  elsewhere.call.device = 1;
  expect_choice_error(elsewhere, TK_INVALID_ARGUMENT, {"no CUDA device 1", "has 1"});
  elsewhere.call.device = -1;
  expect_choice_error(elsewhere, TK_INVALID_ARGUMENT, {"no CUDA device -1"});
}

TEST_F(ChooseTest, WorksForADeviceThatIsOnlyDescribed) {
  int32_t h200 = 0;
  int32_t other = 0;
  ASSERT_EQ(tk_describe_device(132, 90, 232448, 50 << 20, &h200), TK_OK);
  ASSERT_EQ(tk_describe_device(132, 90, 232448, 50 << 20, &other), TK_OK);
  EXPECT_EQ(other, h200);
  ASSERT_EQ(tk_describe_device(114, 90, 232448, 50 << 20, &other), TK_OK);
  EXPECT_NE(other, h200);
  int64_t arch = 0;
  EXPECT_EQ(tk_device_arch(h200, &arch), TK_OK);
  EXPECT_EQ(arch, 90);
  expect_error(tk_device_arch(-1, &arch), TK_INVALID_ARGUMENT, {"no CUDA device -1"});
  expect_error(tk_device_arch(h200, nullptr), TK_INVALID_ARGUMENT, {"arch is NULL"});
  Call c = call(4, 64);
  c.call.device = h200;
  EXPECT_STREQ(choose(c).config_name, "small");
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_UNSUPPORTED, {"description"});
}

TEST_F(ChooseTest, OpsAreNumbersForNames) {
  const tk_op op = tk_intern_op("some op");
  EXPECT_EQ(tk_intern_op("some op"), op);
  EXPECT_NE(tk_intern_op("another op"), op);
  EXPECT_STREQ(tk_op_name(op), "some op");
  EXPECT_STREQ(tk_op_name(1u << 30), "");
}

}  // namespace
}  // namespace tk::test
