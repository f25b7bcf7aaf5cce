// Many threads at once, meant for the thread sanitizer.

#include <atomic>
#include <barrier>
#include <functional>
#include <thread>

#include "fake_driver.h"

namespace tk::test {
namespace {

constexpr int kThreads = 16;

class ConcurrencyTest : public CoreTest {
 protected:
  // Runs `body` in every thread, all beginning together.
  static void everywhere(const std::function<void(int)>& body) {
    std::barrier start(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; t++) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        body(t);
      });
    }
    for (auto& thread : threads) thread.join();
  }

  // op(a, int): a map, scratch, counters; the int is a parameter.
  static Op busy_op(const std::string& name) {
    Op op{.name = name, .n_tensors = 1, .n_ints = 1};
    op.variants[0].buffers = {{format::BufferKind::Scratch, 64}, {format::BufferKind::Counters, size(0, 0) * 4}};
    op.variants[0].launches = {
        Launch{.entry = name + "_kernel",
               .args = {tensor_map({.sizes = {size(0, 0), 16}, .strides = {16, 1}, .box = {8, 8}}),
                        integer(int_arg(0), 8), integer(size(0, 0), 8), buffer(0), buffer(1)}}};
    return op;
  }
};

TEST_F(ConcurrencyTest, FirstUseByAllThreads) {
  for (int round = 0; round < 10; round++) {
    SetUp();
    load({busy_op("op")});
    everywhere([&](int t) {
      for (int64_t i = 0; i < 20; i++) {
        Call c("op", {make_tensor({i % 5 + 1, 16}, 15, 0x10000 * static_cast<uintptr_t>(t + 1))}, {t * 1000 + i});
        ASSERT_EQ(tk_launch(c.get(), FakeDriver::stream(static_cast<uintptr_t>(t) % 4 + 1), nullptr), TK_OK)
            << tk_last_error();
      }
    });
    const auto launches = fake().launches();
    ASSERT_EQ(launches.size(), size_t{kThreads} * 20);
    for (const FakeLaunch& launch : launches) {  // no thread's parameters were mixed with another's
      const int64_t id = launch.parameter<int64_t>(1);
      EXPECT_EQ(launch.parameter<int64_t>(2), id % 1000 % 5 + 1);
      EXPECT_EQ(fake().map(launch.parameter<cu::TensorMap>(0)).address,
                0x10000u * static_cast<uint64_t>(id / 1000 + 1));
    }
    EXPECT_EQ(fake().calls(Entry::cuModuleLoadDataEx), 1);
    EXPECT_EQ(fake().calls(Entry::cuDevicePrimaryCtxRetain), 1);
    EXPECT_EQ(fake().scratch_in_use(), 0u);
  }
}

// The fake's lock orders its callers, which could hide what the core forgot to order.
TEST_F(ConcurrencyTest, FirstUseWithADriverThatOrdersNothing) {
  for (int round = 0; round < 20; round++) {
    SetUp();
    fake().keep_no_books();
    Op op = busy_op("op");
    op.variants[0].buffers[1].kind = format::BufferKind::Scratch;
    load({op});
    std::atomic<int> launched = 0;
    everywhere([&](int t) {
      for (int64_t i = 0; i < 20; i++) {
        Call c("op", {make_tensor({i % 5 + 1, 16})}, {t});
        launched += tk_launch(c.get(), nullptr, nullptr) == TK_OK;
      }
    });
    EXPECT_EQ(launched, kThreads * 20);
  }
}

TEST_F(ConcurrencyTest, StreamsOfDifferentThreadsDoNotShareCounters) {
  load({busy_op("op")});
  std::array<std::atomic<uint64_t>, kThreads> addresses{};
  everywhere([&](int t) {
    Call c("op", {make_tensor({100, 16})}, {t});
    ASSERT_EQ(tk_launch(c.get(), FakeDriver::stream(static_cast<uintptr_t>(t) + 1), nullptr), TK_OK) << tk_last_error();
  });
  for (const FakeLaunch& launch : fake().launches())
    addresses[static_cast<size_t>(launch.parameter<int64_t>(1))] = launch.parameter<uint64_t>(4);
  std::set<uint64_t> distinct;
  for (const auto& address : addresses) distinct.insert(address);
  EXPECT_EQ(distinct.size(), size_t{kThreads});
}

TEST_F(ConcurrencyTest, PacksPinsAndPreloadsWhileOthersLaunch) {
  load({busy_op("op")});
  std::vector<std::string> paths;
  for (int t = 0; t < kThreads; t++)
    paths.push_back(dir_.write("pack_of_" + std::to_string(t), {.ops = {busy_op("op" + std::to_string(t))}}));
  everywhere([&](int t) {
    Call c("op", {make_tensor({8, 16})}, {t});
    const std::string name = "op" + std::to_string(t);
    for (int i = 0; i < 10; i++) {
      ASSERT_EQ(tk_launch(c.get(), nullptr, nullptr), TK_OK) << tk_last_error();
      if (i == 2) {
        ASSERT_EQ(tk_load_pack(paths[static_cast<size_t>(t)].c_str()), TK_OK) << tk_last_error();
      }
      if (i == 4) {
        ASSERT_EQ(tk_pin(c.get(), 0), TK_OK) << tk_last_error();
      }
      if (i == 5) {
        ASSERT_EQ(tk_preload(tk_intern_op(name.c_str()), 0, nullptr), TK_OK) << tk_last_error();
      }
      if (i > 5) {
        Call own(name, {make_tensor({8, 16})}, {t});
        tk_choice choice;
        ASSERT_EQ(tk_choose(own.get(), &choice), TK_OK) << tk_last_error();
        ASSERT_EQ(tk_launch(own.get(), nullptr, nullptr), TK_OK) << tk_last_error();
      }
    }
  });
  EXPECT_EQ(fake().calls(Entry::cuModuleLoadDataEx), kThreads + 1);
}

TEST_F(ConcurrencyTest, MessagesBelongToTheirThread) {
  load({busy_op("op")});
  everywhere([&](int t) {
    const std::string name = "nothing" + std::to_string(t);
    Call c(name);
    for (int i = 0; i < 10; i++) {
      ASSERT_EQ(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND);
      ASSERT_NE(std::string(tk_last_error()).find("\"" + name + "\""), std::string::npos) << tk_last_error();
    }
  });
}

TEST_F(ConcurrencyTest, GraphsThatGoWhileOthersAreCaptured) {
  load({busy_op("op")});
  ASSERT_EQ(tk_preload(UINT32_MAX, 0, nullptr), TK_OK);
  everywhere([&](int t) {
    const cu::Stream stream = FakeDriver::stream(static_cast<uintptr_t>(t) + 1);
    for (int i = 0; i < 10; i++) {
      fake().begin_capture(stream);
      Call c("op", {make_tensor({8 + i, 16})}, {t});
      EXPECT_EQ(tk_launch(c.get(), stream, nullptr), TK_OK) << tk_last_error();
      EXPECT_TRUE(fake().capture_is_valid(stream));
      fake().destroy(fake().end_capture(stream));
    }
  });
}

}  // namespace
}  // namespace tk::test
