// Generated ops as the core tells of them, their checks, and their outputs.

#include "fake_driver.h"

namespace tk::test {
namespace {

// scale(x[..., N], y[N], int n, float alpha) -> a tensor like x
Op scale_op(const std::string& name = "scale") {
  return {.name = name,
          .n_tensors = 3,
          .n_ints = 1,
          .n_floats = 1,
          .locals = {size(0, 3)},
          .variants = {Variant{.launches = {Launch{.args = {pointer(0), pointer(1), pointer(2), integer(local(0))}}}}},
          .outputs = {{dtype(0), {local(0)}, {1}, 1}},
          .schema = name + "(Tensor x, Tensor y, SymInt n, float alpha=0.5, int config=-1, int mode=0) -> Tensor",
          .params = {{.name = "x", .flags = format::kLeading, .rank = 1},
                     {.name = "y", .rank = 1},
                     {.name = "n", .kind = format::ParamKind::Int},
                     {.name = "alpha", .kind = format::ParamKind::Float, .default_value = "0.5"}},
          .checks = {{size(1, 0) == local(0), "N of x and y are equal"}, {dtype(0) == dtype(1), "one dtype"}},
          .meta = "{\"doc\": \"\"}"};
}

class GeneratedTest : public CoreTest {
 protected:
  tk_status try_load(std::vector<Op> ops, uint32_t arch = 90) {
    const std::string name = "pack" + std::to_string(n_++);
    return tk_load_pack(dir_.write(name, {.ops = std::move(ops), .arch = arch}).c_str());
  }
  static uint32_t count() {
    uint32_t n = 0;
    while (tk_generated_op_at(n)) n++;
    return n;
  }
  static Call call(int64_t n, int64_t y, int32_t y_dtype = 15) {
    return Call("scale", {make_tensor({1, 1, 4, n}), make_tensor({y}, y_dtype), absent_tensor()}, {0}, {1});
  }
  int n_ = 0;
};

TEST_F(GeneratedTest, TheCoreTellsWhatToRegister) {
  load({Op{.name = "plain"}, scale_op()});
  ASSERT_EQ(count(), 1u) << "an op without a schema is registered by a library";
  const tk_generated_op& op = *tk_generated_op_at(0);
  EXPECT_STREQ(op.name, "scale");
  EXPECT_STREQ(op.schema, scale_op().schema.c_str());
  EXPECT_STREQ(op.meta, "{\"doc\": \"\"}");
  EXPECT_EQ(op.op, tk_intern_op("scale"));
  ASSERT_EQ(op.n_params, 4u);
  EXPECT_EQ(op.params[0].leading, 1);
  EXPECT_EQ(op.params[0].rank, 1u);
  EXPECT_EQ(op.params[1].leading, 0);
  EXPECT_EQ(op.params[2].kind, TK_PARAM_INT);
  EXPECT_STREQ(op.params[3].default_value, "0.5");
  ASSERT_EQ(op.n_results, 1u);
  EXPECT_EQ(op.results[0].leading, 0);
  EXPECT_EQ(op.results[0].ndim, 1u);
  ASSERT_EQ(op.n_locals, 1u);
  EXPECT_EQ(op.locals[0].words[0], size(0, 3).words[0]);
  ASSERT_EQ(op.n_checks, 2u);
  EXPECT_STREQ(op.checks[1].message, "one dtype");
}

TEST_F(GeneratedTest, AnOpWithAGradientHasATwin) {
  Op op = scale_op();
  op.n_tensors = 4;
  op.outputs.push_back({E(6), {}, {}});
  op.backward = "scale_backward";
  op.n_saved = 1;
  load({op, scale_op("without")});
  const tk_generated_op& row = *tk_generated_op_at(0);
  EXPECT_STREQ(row.schema, scale_op().schema.c_str());
  EXPECT_STREQ(row.twin_schema,
               "_scale(Tensor x, Tensor y, SymInt n, float alpha=0.5, int config=-1, int mode=0) -> (Tensor, Tensor)");
  EXPECT_STREQ(row.backward, "scale_backward");
  EXPECT_EQ(row.n_results, 2u);
  EXPECT_EQ(row.n_saved, 1u);
  EXPECT_STREQ(tk_generated_op_at(1)->twin_schema, "");
}

// shifted(x[..., N], bias[N] or none) -> a tensor like x
Op optional_op() {
  return {.name = "shifted",
          .n_tensors = 3,
          .locals = {size(0, 3)},
          .variants = {Variant{.launches = {Launch{.args = {pointer(0), pointer(1), pointer(2)}}}}},
          .outputs = {{dtype(0), {local(0)}, {1}, 1}},
          .schema = "shifted(Tensor x, Tensor? bias=None, int config=-1, int mode=0) -> Tensor",
          .params = {{.name = "x", .flags = format::kLeading, .rank = 1},
                     {.name = "bias", .kind = format::ParamKind::OptionalTensor, .rank = 1, .default_value = "None"}},
          .checks = {{(dtype(1) == E(-1)) + (size(1, 0) == local(0)), "N of x and bias are equal"}}};
}

TEST_F(GeneratedTest, ATensorMayBeAbsent) {
  load({optional_op()});
  EXPECT_EQ(tk_generated_op_at(0)->params[1].kind, TK_PARAM_OPTIONAL_TENSOR);
  EXPECT_STREQ(tk_generated_op_at(0)->params[1].default_value, "None");
  const auto outputs = [](const tk_tensor& bias) {
    Call call("shifted", {make_tensor({1, 1, 4, 8}), bias, absent_tensor()});
    tk_tensor found[1];
    uint32_t n = 0;
    return tk_outputs(call.get(), found, 1, &n);
  };
  EXPECT_EQ(outputs(absent_tensor()), TK_OK) << tk_last_error();
  EXPECT_EQ(outputs(make_tensor({8})), TK_OK) << tk_last_error();
  expect_error(outputs(make_tensor({7})), TK_INVALID_ARGUMENT, {"N of x and bias are equal"});
}

TEST_F(GeneratedTest, WhatAnAbsentTensorMayNotBeIsRefused) {
  const auto refuse = [&](const std::function<void(Op&)>& change, const char* why) {
    Op op = optional_op();
    change(op);
    expect_error(try_load({op}), TK_PACK_ERROR, {why});
  };
  const auto bias = [](Op& op) -> auto& { return op.params[1]; };
  refuse([&](Op& op) { bias(op).flags = format::kLeading; }, "unknown flags");
  refuse([&](Op& op) { bias(op).flags = format::kMutated; }, "unknown flags");
  refuse([&](Op& op) { bias(op).default_value = "0"; }, "no such default");
  refuse([](Op& op) { op.params[0] = {.name = "x", .kind = format::ParamKind::OptionalTensor, .rank = 1}; },
         "always there");
}

TEST_F(GeneratedTest, ListsOfTensors) {
  load({Op{.name = "add",
           .n_tensors = 2,
           .variants = {Variant{.launches = {Launch{.args = {pointer(0), pointer(1)}}}}},
           .schema = "add(Tensor(a!)[] xs, Tensor[] ys, int config=-1, int mode_bits=0) -> ()",
           .params = {{.name = "xs", .kind = format::ParamKind::Tensors, .flags = format::kLeading | format::kMutated},
                      {.name = "ys", .kind = format::ParamKind::Tensors, .flags = format::kLeading}}}});
  const tk_generated_op& op = *tk_generated_op_at(0);
  EXPECT_EQ(op.params[0].kind, TK_PARAM_TENSORS);
  EXPECT_EQ(op.params[0].mutated, 1);
  EXPECT_EQ(op.params[1].leading, 1);
  EXPECT_EQ(op.n_results, 0u);
}

TEST_F(GeneratedTest, RecordsStayWhereTheyAre) {
  load({scale_op("first")});
  const tk_generated_op* const first = tk_generated_op_at(0);
  for (int i = 0; i < 50; i++) load({scale_op("op" + std::to_string(i))});
  EXPECT_EQ(tk_generated_op_at(0), first);
  EXPECT_STREQ(first->params[0].name, "x");
  EXPECT_EQ(count(), 51u);
}

TEST_F(GeneratedTest, AnOpOfSeveralArchitecturesComesOnce) {
  ASSERT_EQ(try_load({scale_op()}, 90), TK_OK) << tk_last_error();
  ASSERT_EQ(try_load({scale_op()}, 80), TK_OK) << tk_last_error();
  EXPECT_EQ(count(), 1u);
}

TEST_F(GeneratedTest, AnotherOpOfThatNameIsRefused) {
  load({scale_op()});
  const auto refuse = [&](const std::function<void(Op&)>& change) {
    Op other = scale_op();
    change(other);
    expect_error(try_load({scale_op("fine"), other}, 80), TK_PACK_ERROR, {"\"scale\"", "another one", "rename"});
    EXPECT_EQ(count(), 1u) << "of a refused pack nothing is registered";
  };
  refuse([](Op& op) { op.meta = "{}"; });
  refuse([](Op& op) { op.params[0].rank = 2; });
  refuse([](Op& op) { op.params[0].flags = 0, op.outputs[0].leading = 0; });
  refuse([](Op& op) { op.outputs[0].leading = 0; });
  refuse([](Op& op) { op.params[3].default_value = "", op.schema.erase(op.schema.find("=0.5"), 4); });
  expect_error(try_load({Op{.name = "scale"}}, 80), TK_PACK_ERROR, {"\"scale\"", "without a schema"});
}

TEST_F(GeneratedTest, ReservedNamesAreRefused) {
  ASSERT_EQ(tk_reserve_op("linear"), TK_OK);
  expect_error(try_load({scale_op("linear")}), TK_PACK_ERROR, {"\"linear\"", "tk's own", "rename"});
  EXPECT_EQ(count(), 0u);
  EXPECT_EQ(try_load({Op{.name = "linear"}}), TK_OK) << "the library's own op may have kernels";
  load({scale_op()});
  expect_error(tk_reserve_op("scale"), TK_PACK_ERROR, {"\"scale\"", "already"});
}

TEST_F(GeneratedTest, ThereCanBeSoManyOnly) {
  std::vector<Op> ops;
  for (int i = 0; i < TK_MAX_GENERATED_OPS - 1; i++) ops.push_back(scale_op("op" + std::to_string(i)));
  load(ops);
  expect_error(try_load({scale_op("a"), scale_op("b")}), TK_PACK_ERROR, {"2 generated ops", "511", "512"});
  EXPECT_EQ(count(), 511u);
  EXPECT_EQ(try_load({scale_op("a")}), TK_OK) << tk_last_error();
}

TEST_F(GeneratedTest, ChecksComeBeforeKernels) {
  load({scale_op()});
  Call right = call(8, 8), sizes = call(8, 7), dtypes = call(8, 8, 6);
  EXPECT_EQ(tk_launch(right.get(), nullptr, nullptr), TK_OK) << tk_last_error();
  tk_tensor row;
  uint32_t n = 0;
  tk_choice choice;
  for (int i = 0; i < 2; i++) {  // the second time as the first
    expect_error(tk_outputs(sizes.get(), &row, 1, &n), TK_INVALID_ARGUMENT, {"tk.scale: N of x and y are equal"});
    expect_error(tk_launch(dtypes.get(), nullptr, nullptr), TK_INVALID_ARGUMENT, {"tk.scale: one dtype"});
    expect_error(tk_choose(dtypes.get(), &choice), TK_INVALID_ARGUMENT, {"tk.scale: one dtype"});
  }
}

TEST_F(GeneratedTest, OutputsAreRememberedForACallsNumbers) {
  load({scale_op()});
  tk_tensor row;
  uint32_t n = 0;
  for (const int64_t size : {8, 9, 8, 9}) {
    Call c = call(size, size);
    ASSERT_EQ(tk_outputs(c.get(), &row, 1, &n), TK_OK) << tk_last_error();
    EXPECT_EQ(n, 1u);
    EXPECT_EQ(row.sizes[0], size);
    EXPECT_EQ(row.ndim, 1);
  }
}

TEST_F(GeneratedTest, OutputsOfAnotherPackAreNotRemembered) {
  load({scale_op()});
  Call c = call(8, 8);
  tk_tensor row;
  uint32_t n = 0;
  ASSERT_EQ(tk_outputs(c.get(), &row, 1, &n), TK_OK);
  reset_runtime_for_tests();
  Op other = scale_op();
  other.outputs[0].sizes[0] = 5;
  load({other});
  ASSERT_EQ(tk_outputs(c.get(), &row, 1, &n), TK_OK);
  EXPECT_EQ(row.sizes[0], 5);
}

}  // namespace
}  // namespace tk::test
