// Stream capture, and the counters that have to survive it.

#include <algorithm>
#include <thread>

#include "fake_driver.h"

namespace tk::test {
namespace {

class CaptureTest : public CoreTest {
 protected:
  static constexpr int64_t kBytes = 300;

  // op(int n): one kernel that takes n bytes of counters.
  void load_counters() {
    Op op{.n_ints = 1};
    op.variants[0].buffers = {{format::BufferKind::Counters, int_arg(0)}, {format::BufferKind::Counters, 64}};
    op.variants[0].launches = {Launch{.args = {buffer(0), buffer(1)}}};
    load({op});
  }
  uint64_t counters(cu::Stream stream, int64_t bytes = kBytes) {
    Call c("op", {}, {bytes});
    const auto launches = launched(c, stream);
    return launches.empty() ? 0 : launches[0].parameter<uint64_t>(0);
  }
  // What the counters hold. The fake's device memory is ours to read.
  static bool all_zero(uint64_t address, int64_t bytes = kBytes) {
    const auto* const data = reinterpret_cast<const char*>(address);
    return std::all_of(data, data + bytes, [](char c) { return c == 0; });
  }
  // What a careless program does.
  cu::Result table_alloc() {
    FakeDriver::contexts().push_back(FakeDriver::primary(0));
    cu::DevicePtr address = 0;
    const cu::Result result = fake().table().cuMemAlloc(&address, 16);
    FakeDriver::contexts().pop_back();
    return result;
  }
  const cu::Stream s1 = FakeDriver::stream(1);
  const cu::Stream s2 = FakeDriver::stream(2);
};

TEST_F(CaptureTest, AModuleIsNotLoadedDuringCapture) {
  load({Op{}});
  Call c("op");
  fake().begin_capture(s1);
  expect_error(tk_launch(c.get(), s1, nullptr), TK_UNSUPPORTED, {"captured", "tk.preload", "image 0"});
  EXPECT_TRUE(fake().capture_is_valid(s1)) << "the capture must go on";
  EXPECT_EQ(fake().modules_loaded(), 0);
  fake().destroy(fake().end_capture(s1));
  EXPECT_EQ(tk_launch(c.get(), s1, nullptr), TK_OK) << tk_last_error();
}

TEST_F(CaptureTest, APreloadedOpIsCaptured) {
  load({Op{}});
  Call c("op");
  ASSERT_EQ(tk_preload(c.call.op, 0, nullptr), TK_OK);
  fake().begin_capture(s1);
  EXPECT_EQ(launched(c, s1).size(), 1u);
  EXPECT_TRUE(fake().capture_is_valid(s1));
}

TEST_F(CaptureTest, AnOpThatRanOnceIsCaptured) {
  load({Op{}});
  Call c("op");
  launched(c);
  fake().begin_capture(s1);
  EXPECT_EQ(launched(c, s1).size(), 1u);
}

TEST_F(CaptureTest, LoadingElsewhereDoesNotDisturbACapture) {
  load({Op{}});
  Call c("op");
  fake().begin_capture(s1);
  EXPECT_EQ(launched(c, s2).size(), 1u) << "another stream";
  EXPECT_TRUE(fake().capture_is_valid(s1));
  EXPECT_EQ(FakeDriver::capture_mode(), cu::CaptureMode::Global) << "the thread's mode is back";
}

TEST_F(CaptureTest, ScratchIsAllocatedInTheGraph) {
  Op op;
  op.variants[0].buffers = {{format::BufferKind::Scratch, 64}};
  op.variants[0].launches = {Launch{.args = {buffer(0)}}};
  load({op});
  Call c("op");
  launched(c);
  fake().begin_capture(s1);
  EXPECT_EQ(launched(c, s1).size(), 1u);
  EXPECT_TRUE(fake().capture_is_valid(s1));
  EXPECT_EQ(fake().scratch_in_use(), 0u);
}

// --- The id of a capture ---

TEST_F(CaptureTest, EachCaptureHasAnId) {
  const auto id_of = [](cu::Stream stream) {
    uint64_t id = 99;
    EXPECT_EQ(tk_capture_id(stream, &id), TK_OK) << tk_last_error();
    return id;
  };
  EXPECT_EQ(id_of(s1), 0u) << "none";
  fake().begin_capture(s1);
  const uint64_t first = id_of(s1);
  EXPECT_NE(first, 0u);
  EXPECT_EQ(id_of(s1), first);
  EXPECT_EQ(id_of(s2), 0u) << "another stream";
  fake().destroy(fake().end_capture(s1));
  EXPECT_EQ(id_of(s1), 0u) << "it has ended";
  fake().begin_capture(s1);
  EXPECT_NE(id_of(s1), first);
  EXPECT_NE(id_of(s1), 0u);
  expect_error(tk_capture_id(s1, nullptr), TK_INVALID_ARGUMENT, {"id is NULL"});
}

// --- Counters ---

TEST_F(CaptureTest, CountersAreZeroAndStay) {
  load_counters();
  const uint64_t address = counters(s1);
  EXPECT_TRUE(all_zero(address));
  EXPECT_EQ(address % 256, 0u);
  EXPECT_EQ(counters(s1), address);
  EXPECT_EQ(counters(s1), address);
  EXPECT_EQ(fake().calls(Entry::cuMemAlloc), 1);
  EXPECT_EQ(fake().calls(Entry::cuMemsetD8Async), 1) << "every launch leaves them zero";
}

TEST_F(CaptureTest, SeveralBuffersLieApart) {
  load_counters();
  Call c("op", {}, {kBytes});
  const FakeLaunch got = launched(c, s1).at(0);
  EXPECT_EQ(got.parameter<uint64_t>(1), got.parameter<uint64_t>(0) + 512) << "300 bytes, then on 256";
}

TEST_F(CaptureTest, StreamsHaveTheirOwnCounters) {
  load_counters();
  EXPECT_NE(counters(s1), counters(s2));
  EXPECT_EQ(counters(s1), counters(s1));
}

TEST_F(CaptureTest, TheSameCallOnAnotherStreamGetsAnotherBuffer) {
  load_counters();
  const uint64_t first = counters(s1);
  const uint64_t second = counters(s2);
  EXPECT_EQ(counters(s1), first);
  EXPECT_EQ(counters(s2), second);
}

TEST_F(CaptureTest, CountersGrow) {
  load_counters();
  const uint64_t small = counters(s1, 100);
  const uint64_t large = counters(s1, 5000);
  EXPECT_NE(small, large);
  EXPECT_TRUE(all_zero(large, 5000));
  EXPECT_EQ(counters(s1, 4000), large) << "a large one serves small needs";
}

TEST_F(CaptureTest, EachCaptureHasItsOwnCounters) {
  load_counters();
  const uint64_t eager = counters(s1);
  fake().begin_capture(s1);
  const uint64_t first = counters(s1);
  EXPECT_EQ(counters(s1), first) << "in one capture, one buffer";
  EXPECT_TRUE(fake().capture_is_valid(s1)) << "allocated without touching the capture";
  EXPECT_TRUE(all_zero(first));
  const cu::Graph graph = fake().end_capture(s1);
  fake().begin_capture(s1);
  const uint64_t second = counters(s1);
  fake().end_capture(s1);
  EXPECT_EQ(counters(s1), eager);
  EXPECT_NE(first, eager);
  EXPECT_NE(second, eager);
  EXPECT_NE(second, first) << "both graphs may run at once";
  fake().destroy(graph);
}

TEST_F(CaptureTest, CountersComeBackWhenTheirGraphIsGone) {
  load_counters();
  counters(s1);
  uint64_t address = 0;
  for (int i = 0; i < 20; i++) {
    fake().begin_capture(s1);
    const uint64_t got = counters(s1);
    if (address) {
      EXPECT_EQ(got, address);
    }
    address = got;
    EXPECT_TRUE(all_zero(address));
    std::memset(reinterpret_cast<void*>(address), 1, kBytes);  // as a graph that was stopped half way leaves it
    fake().destroy(fake().end_capture(s1));
  }
  EXPECT_EQ(fake().calls(Entry::cuMemAlloc), 2);
}

TEST_F(CaptureTest, CountersThatGrowInACaptureKeepTheFormer) {
  load_counters();
  counters(s1);
  fake().begin_capture(s1);
  const uint64_t small = counters(s1, 100);
  const uint64_t large = counters(s1, 5000);
  EXPECT_NE(small, large);
  const cu::Graph graph = fake().end_capture(s1);
  fake().begin_capture(s1);
  const uint64_t other = counters(s1, 100);
  EXPECT_NE(other, small) << "the first graph still uses it";
  EXPECT_NE(other, large);
  fake().end_capture(s1);
  fake().destroy(graph);
}

TEST_F(CaptureTest, ACaptureThatFailedIsSaid) {
  load_counters();
  counters(s1);
  fake().begin_capture(s1);
  ASSERT_NE(table_alloc(), cu::kSuccess) << "an allocation in capture ruins it";
  Call c("op", {}, {kBytes});
  expect_error(tk_launch(c.get(), s1, nullptr), TK_UNSUPPORTED, {"capture", "failed already"});
}

}  // namespace
}  // namespace tk::test
