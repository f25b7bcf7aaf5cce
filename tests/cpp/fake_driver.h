// A CUDA driver that keeps books instead of running kernels. "Device memory" is host memory, so that tests can look at
// it.
//
// It is as strict as the real one where the core could go wrong: contexts, stream capture, stream-ordered memory, life
// of graphs. Any call can be told to fail.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "driver.h"
#include "pack_builder.h"
#include "runtime.h"

namespace tk::test {

enum class Entry {
#define TK_ENTRY(name, symbol, since, ...) name,
  TK_DRIVER_ENTRIES(TK_ENTRY)
#undef TK_ENTRY
      Count
};
const char* entry_name(Entry entry);

struct FakeGpu {
  int sm_count = 132;
  int major = 9;
  int minor = 0;
  int shared_optin = 227 << 10;
  int l2_bytes = 50 << 20;
};

struct FakeLaunch {
  std::string kernel;
  cu::LaunchConfig config;
  std::vector<cu::LaunchAttribute> attributes;
  std::vector<std::string> parameters;  // bytes

  template <class T>
  T parameter(size_t index) const {
    T value{};
    EXPECT_EQ(parameters.at(index).size(), sizeof value) << "parameter " << index;
    std::memcpy(&value, parameters[index].data(), std::min(sizeof value, parameters[index].size()));
    return value;
  }
  const cu::LaunchAttribute* attribute(cu::LaunchAttributeId id) const;
};

// What a tensor map was encoded from. Dimensions innermost first.
struct FakeMap {
  int element_type;
  uint64_t address;
  std::vector<uint64_t> sizes;
  std::vector<uint64_t> strides;
  std::vector<uint32_t> box;
  int interleave;
  int swizzle;
  int l2_promotion;
  int oob_fill;
  bool is_im2col = false;
  std::vector<int> lower = {};
  std::vector<int> upper = {};
  std::vector<uint32_t> steps = {};
};

class FakeDriver {
 public:
  explicit FakeDriver(std::vector<FakeGpu> gpus = {FakeGpu{}});
  ~FakeDriver();  // also checks that nothing leaked
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  Driver& table() { return table_; }  // entries may be replaced or nulled before first use
  // Entries that keep no books and take no lock: to measure the core, and to let a thread sanitizer see it alone.
  // Enough for ops without counters; every thread has the context of device 0.
  void keep_no_books();

  // The n-th call of an entry from now (1: the next) fails, once.
  void fail(Entry entry, int nth, cu::Result result = 999);
  bool failed() const;  // whether it has
  int calls(Entry entry) const;

  std::vector<FakeLaunch> launches(size_t from = 0) const;
  size_t launch_count() const;
  FakeMap map(const cu::TensorMap& encoded) const;
  size_t scratch_in_use() const;  // allocations
  int modules_loaded() const;
  void expect_leaks(size_t user_objects) { expected_leaks_ = user_objects; }

  // This thread's.
  static std::vector<cu::Context>& contexts();
  static cu::CaptureMode& capture_mode();

  static cu::Context primary(int device);
  static cu::Stream stream(uintptr_t number) { return reinterpret_cast<cu::Stream>(0x1000 * number); }

  void begin_capture(cu::Stream stream);
  cu::Graph end_capture(cu::Stream stream);
  bool capture_is_valid(cu::Stream stream) const;
  void destroy(cu::Graph graph);

 private:
  friend struct FakeEntries;
  struct Kernel {
    std::string name;
    std::vector<size_t> parameter_sizes;
    int static_shared = 0;
    int max_dynamic_shared = 48 << 10;
    bool non_portable_cluster = false;
    bool loaded = false;
  };
  struct Module {
    std::vector<std::unique_ptr<Kernel>> kernels;
  };
  struct CaptureState {
    uint64_t id;
    cu::Graph graph;
    bool valid = true;
  };
  struct UserObject {
    void* data;
    cu::HostFunction* destroy;
    unsigned references;
  };
  struct Memory {
    char* data;
    size_t size;
    bool stream_ordered;
  };

  cu::Result enter(Entry entry);  // counts, injects
  cu::Result unsafe_in_capture();
  cu::Result allocate(size_t bytes, bool stream_ordered, cu::DevicePtr& address);
  cu::Result release(cu::DevicePtr address, bool stream_ordered);
  cu::Result drop(UserObject* object);

  std::vector<FakeGpu> gpus_;
  Driver table_;
  mutable std::recursive_mutex mutex_;
  int calls_[static_cast<size_t>(Entry::Count)] = {};
  std::optional<Entry> failing_;
  int fail_in_ = 0;
  cu::Result fail_with_ = 0;
  std::vector<FakeLaunch> launches_;
  std::vector<FakeMap> maps_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::map<cu::DevicePtr, Memory> memory_;
  std::map<cu::Stream, CaptureState> captures_;
  std::map<cu::Graph, std::vector<UserObject*>> graphs_;
  std::set<UserObject*> objects_;
  std::set<cu::Stream> streams_;
  uint64_t next_id_ = 1;
  size_t expected_leaks_ = 0;
};

// --- A test with a fake driver, packs and calls ---

// A tensor with row-major strides at an address that is a multiple of 256.
tk_tensor make_tensor(std::vector<int64_t> sizes, int32_t dtype = 15, uintptr_t address = 0x10000);
tk_tensor absent_tensor();

// A tk_call that owns its arguments.
struct Call {
  explicit Call(const std::string& op, std::vector<tk_tensor> tensors = {}, std::vector<int64_t> ints = {},
                std::vector<double> floats = {});
  const tk_call* get();

  tk_call call{};
  std::vector<tk_tensor> tensors;
  std::vector<int64_t> ints;
  std::vector<double> floats;
};

class CoreTest : public ::testing::Test {
 protected:
  void SetUp() override { use({FakeGpu{}}); }
  void TearDown() override { EXPECT_EQ(FakeDriver::contexts().size(), contexts_before_); }

  void use(std::vector<FakeGpu> gpus) {
    fake_.reset();
    fake_ = std::make_unique<FakeDriver>(std::move(gpus));
  }
  FakeDriver& fake() { return *fake_; }

  // Loads a pack of these ops for sm_90.
  void load(std::vector<Op> ops) { load(PackSpec{.ops = std::move(ops)}); }
  void load(const PackSpec& spec) {
    ASSERT_EQ(tk_load_pack(dir_.write("pack" + std::to_string(n_packs_++), spec).c_str()), TK_OK) << tk_last_error();
  }

  // Launches on the default stream and returns what the driver got.
  std::vector<FakeLaunch> launched(Call& call, cu::Stream stream = nullptr, const tk_allocator* allocator = nullptr) {
    const size_t before = fake().launch_count();
    EXPECT_EQ(tk_launch(call.get(), stream, allocator), TK_OK) << tk_last_error();
    return fake().launches(before);
  }

  // Expects a failure whose message has every one of these parts.
  static void expect_error(tk_status got, tk_status wanted, std::vector<std::string> parts) {
    EXPECT_EQ(got, wanted) << tk_last_error();
    for (const auto& part : parts)
      EXPECT_NE(std::string(tk_last_error()).find(part), std::string::npos)
          << "\"" << part << "\" is not in: " << tk_last_error();
  }

  TempDir dir_;

 private:
  std::unique_ptr<FakeDriver> fake_;
  size_t contexts_before_ = FakeDriver::contexts().size();
  int n_packs_ = 0;
};

}  // namespace tk::test
