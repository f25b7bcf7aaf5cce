// Finding the driver, contexts, and what becomes of a fork.

#include "driver.h"

#include <sys/wait.h>
#include <unistd.h>

#include "fake_driver.h"

namespace tk::test {
namespace {

void expect_unsupported(const std::function<void()>& body, std::vector<std::string> parts) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TK_UNSUPPORTED);
    for (const auto& part : parts) EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(LoadDriver, WithoutADriver) {
  expect_unsupported([] { load_driver("libno_such_driver.so.1"); }, {"no NVIDIA driver", "libno_such_driver.so.1"});
}

// A library that has none of the entries is like a driver that is too old.
TEST(LoadDriver, WithAnOldDriver) {
  expect_unsupported([] { load_driver("libm.so.6"); }, {"cuInit", "CUDA 11.8 or newer"});
}

using DriverTest = CoreTest;

TEST_F(DriverTest, NoGpu) {
  use({});
  load({Op{}});
  Call c("op");
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_UNSUPPORTED, {"no GPU"});
}

TEST_F(DriverTest, CudaThatCannotBeInitialised) {
  load({Op{}});
  Call c("op");
  fake().fail(Entry::cuInit, 1, cu::kNotInitialized);
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_UNSUPPORTED, {"forked", "spawn"});
  fake().fail(Entry::cuInit, 1);
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_DRIVER_ERROR, {"cuInit"});
  EXPECT_EQ(tk_launch(c.get(), nullptr, nullptr), TK_OK) << tk_last_error();
}

TEST_F(DriverTest, LoadingPacksDoesNotTouchTheDriver) {
  load({Op{}});
  for (int i = 0; i < static_cast<int>(Entry::Count); i++)
    EXPECT_EQ(fake().calls(static_cast<Entry>(i)), 0) << entry_name(static_cast<Entry>(i));
}

TEST_F(DriverTest, ChoosingNeedsNoContext) {
  load({Op{}});
  Call c("op");
  tk_choice choice;
  ASSERT_EQ(tk_choose(c.get(), &choice), TK_OK) << tk_last_error();
  EXPECT_EQ(fake().calls(Entry::cuDevicePrimaryCtxRetain), 0);
  EXPECT_EQ(fake().calls(Entry::cuModuleLoadDataEx), 0);
}

TEST_F(DriverTest, AThreadWithoutAContextGetsOneForTheCallOnly) {
  load({Op{}});
  Call c("op");
  EXPECT_EQ(launched(c).size(), 1u);
  EXPECT_TRUE(FakeDriver::contexts().empty());
}

TEST_F(DriverTest, AnotherContextIsCurrentAgainAfterwards) {
  use({FakeGpu{}, FakeGpu{}});
  load({Op{}});
  Call c("op");
  FakeDriver::contexts() = {FakeDriver::primary(1)};
  EXPECT_EQ(launched(c).size(), 1u);
  EXPECT_EQ(FakeDriver::contexts(), std::vector<cu::Context>{FakeDriver::primary(1)});
  FakeDriver::contexts().clear();
}

TEST_F(DriverTest, OurContextIsNotPushedAgain) {
  load({Op{}});
  Call c("op");
  FakeDriver::contexts() = {FakeDriver::primary(0)};
  EXPECT_EQ(launched(c).size(), 1u);
  EXPECT_EQ(fake().calls(Entry::cuCtxPushCurrent), 0);
  FakeDriver::contexts().clear();
}

TEST_F(DriverTest, WhatNewerDriversHaveIsNotNeeded) {
  for (auto clear :
       {+[](Driver& t) { t.cuFuncGetParamInfo = nullptr; }, +[](Driver& t) { t.cuFuncLoad = nullptr; },
        +[](Driver& t) { t.cuStreamGetId = nullptr; }, +[](Driver& t) { t.cuTensorMapEncodeTiled = nullptr; }}) {
    use({FakeGpu{}});
    clear(fake().table());
    Op op;
    op.variants[0].buffers = {{format::BufferKind::Counters, 64}};
    op.variants[0].launches = {Launch{.args = {buffer(0)}}};
    load({op});
    Call c("op");
    EXPECT_EQ(launched(c).size(), 1u);
    EXPECT_EQ(launched(c).size(), 1u);
  }
}

TEST_F(DriverTest, TensorMapsNeedANewerDriver) {
  fake().table().cuTensorMapEncodeTiled = nullptr;
  Op op{.n_tensors = 1};
  op.variants[0].launches = {Launch{.args = {tensor_map({.sizes = {size(0, 0)}, .strides = {1}, .box = {8}})}}};
  load({op});
  Call c("op", {make_tensor({64})});
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_UNSUPPORTED, {"tensor maps", "CUDA 12.0"});
}

// --- Fork ---

// Runs `body` in a child, whose exit status says whether it was content.
bool in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(DriverTest, AForkAfterUseIsRefusedInTheChild) {
  load({Op{}});
  Call c("op");
  ASSERT_EQ(tk_launch(c.get(), nullptr, nullptr), TK_OK);
  tk_choice choice;
  EXPECT_TRUE(in_child([&] {
    const bool refused = tk_launch(c.get(), nullptr, nullptr) == TK_UNSUPPORTED &&
                         tk_choose(c.get(), &choice) == TK_UNSUPPORTED && tk_preload(0, 0, nullptr) == TK_UNSUPPORTED;
    return refused && std::string(tk_last_error()).find("forked") != std::string::npos;
  }));
  EXPECT_EQ(tk_launch(c.get(), nullptr, nullptr), TK_OK) << "the parent goes on: " << tk_last_error();
}

TEST_F(DriverTest, AForkBeforeUseIsFine) {
  load({Op{}});
  Call c("op");
  EXPECT_TRUE(in_child([&] { return tk_launch(c.get(), nullptr, nullptr) == TK_OK; }));
}

}  // namespace
}  // namespace tk::test
