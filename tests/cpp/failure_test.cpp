// Every call of the driver may fail. Whatever was under way is then reported and undone, and the next call works.

#include "fake_driver.h"

namespace tk::test {
namespace {

// Uses every entry of the driver: a module, tensor maps, scratch, counters, and all of it again in a capture.
class FailureTest : public CoreTest {
 protected:
  static constexpr int kSteps = 4;

  void SetUp() override {
    CoreTest::SetUp();
    Op op{.n_tensors = 1};
    op.variants[0].buffers = {{format::BufferKind::Scratch, 64}, {format::BufferKind::Counters, 64}};
    op.variants[0].launches = {
        Launch{.entry = "a",
               .args = {tensor_map({.sizes = {size(0, 0), size(0, 1)}, .strides = {stride(0, 0), 1}, .box = {8, 8}}),
                        tensor_map({.sizes = {1, size(0, 0), size(0, 1)},
                                    .strides = {stride(0, 0), stride(0, 0), 1},
                                    .box = {8, 8},
                                    .lower = {E(0)},
                                    .upper = {E(0)},
                                    .steps = {E(1)}}),
                        buffer(0), buffer(1)},
               .shared = 100000,
               .cluster = 16},
        Launch{.entry = "b"}};
    load({op});
  }

  // One of the things a program does, in order.
  tk_status step(int number) {
    Call c("op", {make_tensor({8, 16}, 15, 0x10000 * static_cast<uintptr_t>(number + 1))});
    tk_choice choice;
    switch (number) {
      case 0:
        return tk_choose(c.get(), &choice);
      case 1:
        return tk_preload(UINT32_MAX, 0, nullptr);
      case 2:
        return tk_launch(c.get(), stream_, nullptr);
      default: {
        fake().begin_capture(stream_);
        const tk_status status = tk_launch(c.get(), stream_, nullptr);
        EXPECT_TRUE(fake().capture_is_valid(stream_));
        fake().destroy(fake().end_capture(stream_));
        return status;
      }
    }
  }

  // How often an entry is called when all goes well.
  std::vector<int> count_calls() {
    for (int i = 0; i < kSteps; i++) EXPECT_EQ(step(i), TK_OK) << tk_last_error();
    std::vector<int> calls;
    for (int i = 0; i < static_cast<int>(Entry::Count); i++) calls.push_back(fake().calls(static_cast<Entry>(i)));
    return calls;
  }

  const cu::Stream stream_ = FakeDriver::stream(9);
};

// Their failure changes nothing that matters: a message with a number instead of a name, a context that is set right by
// a second call, a version that is only for a message.
bool is_survivable(Entry entry) {
  return entry == Entry::cuGetErrorName || entry == Entry::cuGetErrorString || entry == Entry::cuDriverGetVersion ||
         entry == Entry::cuCtxPopCurrent;
}

TEST_F(FailureTest, EveryEntryIsUsed) {
  const std::vector<int> calls = count_calls();
  for (int i = 0; i < static_cast<int>(Entry::Count); i++) {
    const auto entry = static_cast<Entry>(i);
    if (is_survivable(entry) && entry != Entry::cuCtxPopCurrent) continue;
    EXPECT_GT(calls[static_cast<size_t>(i)], 0) << entry_name(entry) << " is not tested here";
  }
}

TEST_F(FailureTest, EveryCallMayFail) {
  const std::vector<int> calls = count_calls();
  for (int i = 0; i < static_cast<int>(Entry::Count); i++) {
    for (int nth = 1; nth <= calls[static_cast<size_t>(i)]; nth++) {
      const auto entry = static_cast<Entry>(i);
      SCOPED_TRACE(std::string(entry_name(entry)) + ", call " + std::to_string(nth));
      SetUp();
      fake().fail(entry, nth);
      int failures = 0;
      for (int s = 0; s < kSteps; s++) {
        const tk_status status = step(s);
        EXPECT_TRUE(FakeDriver::contexts().empty()) << "after step " << s;
        EXPECT_EQ(FakeDriver::capture_mode(), cu::CaptureMode::Global) << "after step " << s;
        if (status == TK_OK) continue;
        failures++;
        EXPECT_EQ(status, TK_DRIVER_ERROR) << tk_last_error();
        EXPECT_NE(std::string(tk_last_error()).find(entry_name(entry)), std::string::npos) << tk_last_error();
        EXPECT_EQ(step(s), TK_OK) << "again, after step " << s << ": " << tk_last_error();
      }
      EXPECT_TRUE(fake().failed()) << "it was not called that often";
      // The failure to restore a capture mode, too, is mended by a second call.
      const bool mended = entry == Entry::cuThreadExchangeStreamCaptureMode && failures == 0;
      EXPECT_EQ(failures, is_survivable(entry) || mended ? 0 : 1);
      EXPECT_LE(fake().scratch_in_use(), entry == Entry::cuMemFreeAsync ? 1u : 0u);
      if (entry == Entry::cuUserObjectRelease) fake().expect_leaks(1);
      EXPECT_EQ(step(2), TK_OK) << tk_last_error();
      EXPECT_EQ(step(3), TK_OK) << tk_last_error();
    }
  }
}

TEST_F(FailureTest, OutOfMemoryIsSaid) {
  fake().fail(Entry::cuMemAllocAsync, 1, cu::kOutOfMemory);
  expect_error(step(2), TK_DRIVER_ERROR, {"cuMemAllocAsync", "CUDA_ERROR_OUT_OF_MEMORY", "a failure made by a test"});
}

// The driver may know no text for an error, or fail to give it.
TEST_F(FailureTest, AnErrorWithoutANameHasItsNumber) {
  fake().table().cuGetErrorName = [](cu::Result, const char**) { return cu::kInvalidValue; };
  fake().table().cuGetErrorString = [](cu::Result, const char**) { return cu::kInvalidValue; };
  fake().fail(Entry::cuLaunchKernelEx, 1, 777);
  expect_error(step(2), TK_DRIVER_ERROR, {"cuLaunchKernelEx", "777"});
}

}  // namespace
}  // namespace tk::test
