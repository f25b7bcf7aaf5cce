// Recipes: what reaches the driver, byte for byte.

#include <cmath>
#include <limits>
#include <random>

#include "fake_driver.h"
#include "prepared.h"

namespace tk::test {
namespace {

class LaunchTest : public CoreTest {
 protected:
  // An op "op" of one variant that does these launches.
  void load_launches(std::vector<Launch> launches, std::vector<Buffer> buffers = {}, uint32_t n_tensors = 3,
                     uint32_t n_ints = 4, uint32_t n_floats = 2) {
    Op op{.name = "op", .n_tensors = n_tensors, .n_ints = n_ints, .n_floats = n_floats};
    op.variants = {Variant{.buffers = std::move(buffers), .launches = std::move(launches)}};
    load({op});
  }
  static Call call(std::vector<tk_tensor> tensors = {make_tensor({8, 16}), make_tensor({16, 32}, 15, 0x20000),
                                                     absent_tensor()},
                   std::vector<int64_t> ints = {0, 0, 0, 0}, std::vector<double> floats = {0, 0}) {
    return Call("op", std::move(tensors), std::move(ints), std::move(floats));
  }
};

TEST_F(LaunchTest, GridBlockAndStream) {
  load_launches(
      {Launch{.entry = "tiles", .grid = {ceil_div(size(0, 0), 3), size(0, 1), 2}, .threads = 256, .shared = 100000}});
  Call c = call();
  const auto launches = launched(c, FakeDriver::stream(5));
  ASSERT_EQ(launches.size(), 1u);
  const FakeLaunch& got = launches[0];
  EXPECT_EQ(got.kernel, "tiles");
  EXPECT_EQ(got.config.grid[0], 3u);
  EXPECT_EQ(got.config.grid[1], 16u);
  EXPECT_EQ(got.config.grid[2], 2u);
  EXPECT_EQ(got.config.block[0], 256u);
  EXPECT_EQ(got.config.block[1], 1u);
  EXPECT_EQ(got.config.block[2], 1u);
  EXPECT_EQ(got.config.shared, 100000u);
  EXPECT_EQ(got.config.stream, FakeDriver::stream(5));
  EXPECT_EQ(got.config.n_attributes, 0u);
}

TEST_F(LaunchTest, PointersIntsAndNulls) {
  load_launches({Launch{.args = {pointer(0), pointer(1, size(1, 0) * 2), pointer(2), pointer(2, 64), null_pointer(),
                                 integer(int_arg(0), 1), integer(int_arg(1), 2), integer(int_arg(2), 4),
                                 integer(int_arg(3), 8)}}});
  Call c = call();
  c.ints = {1, -2, -70000, int64_t{1} << 40};
  const FakeLaunch got = launched(c).at(0);
  EXPECT_EQ(got.parameter<uint64_t>(0), 0x10000u);
  EXPECT_EQ(got.parameter<uint64_t>(1), 0x20020u);
  EXPECT_EQ(got.parameter<uint64_t>(2), 0u) << "absent";
  EXPECT_EQ(got.parameter<uint64_t>(3), 0u) << "absent, whatever the offset";
  EXPECT_EQ(got.parameter<uint64_t>(4), 0u);
  EXPECT_EQ(got.parameter<int8_t>(5), 1);
  EXPECT_EQ(got.parameter<int16_t>(6), -2);
  EXPECT_EQ(got.parameter<int32_t>(7), -70000);
  EXPECT_EQ(got.parameter<int64_t>(8), int64_t{1} << 40);
}

TEST_F(LaunchTest, IntsThatDoNotFitAreRefused) {
  load_launches({Launch{.args = {integer(int_arg(0), 1), integer(int_arg(1), 2), integer(int_arg(2), 4)}}});
  const std::vector<std::vector<int64_t>> good = {{127, 32767, INT32_MAX, 0}, {-128, -32768, INT32_MIN, 0}};
  for (const auto& ints : good) {
    Call c = call();
    c.ints = ints;
    EXPECT_EQ(launched(c).size(), 1u);
  }
  for (size_t i = 0; i < 3; i++) {
    for (const auto& limits : good) {
      Call c = call();
      c.ints = limits;
      c.ints[i] += limits[i] > 0 ? 1 : -1;
      expect_error(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"fit the types of its parameters"});
    }
  }
}

TEST_F(LaunchTest, FloatsByWidth) {
  load_launches({Launch{.args = {floating(0, 2), floating(0, 3), floating(0, 4), floating(1, 8)}}});
  Call c = call();
  c.floats = {1.5, 0.1};
  FakeLaunch got = launched(c).at(0);
  EXPECT_EQ(got.parameter<uint16_t>(0), 0x3e00);
  EXPECT_EQ(got.parameter<uint16_t>(1), 0x3fc0);
  EXPECT_EQ(got.parameter<float>(2), 1.5f);
  EXPECT_EQ(got.parameter<double>(3), 0.1);
  c.floats = {-2, 0.2};
  got = launched(c).at(0);
  EXPECT_EQ(got.parameter<uint16_t>(0), 0xc000) << "floats are not part of what is remembered";
  EXPECT_EQ(got.parameter<double>(3), 0.2);
}

TEST(FloatBits, RoundToNearestEven) {
  const double inf = std::numeric_limits<double>::infinity();
  struct Case {
    double value;
    uint64_t half, bfloat;
  };
  for (const auto& [value, half, bfloat] : std::vector<Case>{
           {0.0, 0x0000, 0x0000},
           {-0.0, 0x8000, 0x8000},
           {1.0, 0x3c00, 0x3f80},
           {-1.0, 0xbc00, 0xbf80},
           {65504.0, 0x7bff, 0x4780},
           {65519.999, 0x7bff, 0x4780},
           {65520.0, 0x7c00, 0x4780},  // half way to what would be 65536: to even, which is infinity
           {1e300, 0x7c00, 0x7f80},
           {-1e300, 0xfc00, 0xff80},
           {inf, 0x7c00, 0x7f80},
           {-inf, 0xfc00, 0xff80},
           {std::ldexp(1, -24), 0x0001, 0x3380},  // the smallest half
           {std::ldexp(1, -25), 0x0000, 0x3300},  // half of it: to even
           {std::ldexp(1.5, -25), 0x0001, 0x3340},
           {std::ldexp(1023, -24), 0x03ff, 0x3880},  // the largest subnormal half
           {std::ldexp(1, -133), 0x0000, 0x0001},
           {std::ldexp(1, -134), 0x0000, 0x0000},
           {1 + std::ldexp(1, -11), 0x3c00, 0x3f80},  // ties
           {1 + 3 * std::ldexp(1, -11), 0x3c02, 0x3f80},
           {1 + std::ldexp(1, -8) + std::ldexp(1, -40), 0x3c04,
            0x3f81},  // rounding through float would lose the last bit
       }) {
    EXPECT_EQ(float_bits(value, 2), half) << value;
    EXPECT_EQ(float_bits(value, 3), bfloat) << value;
  }
  const uint64_t nan = float_bits(std::nan(""), 2);
  EXPECT_EQ(nan & 0x7c00, 0x7c00u);
  EXPECT_NE(nan & 0x03ff, 0u);
}

// Against the compiler's own half type.
TEST(FloatBits, AgreeWithFloat16) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 100000; i++) {
    const double value = std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % 60) - 90);
    const auto expected = static_cast<_Float16>(value);
    ASSERT_EQ(float_bits(value, 2), std::bit_cast<uint16_t>(expected)) << value;
  }
}

TEST_F(LaunchTest, SeveralLaunchesInOrder) {
  load_launches({Launch{.entry = "one"}, Launch{.entry = "two", .when = int_arg(0)}, Launch{.entry = "three"}});
  const auto names = [&](int64_t when) {
    Call c = call();
    c.ints[0] = when;
    tk_launch_info rows[3];
    uint32_t count = 0;
    EXPECT_EQ(tk_launches(c.get(), rows, std::size(rows), &count), TK_OK) << tk_last_error();
    std::string all, told;
    for (const auto& launch : launched(c)) all += launch.kernel + " ";
    for (const auto& row : std::span(rows, count)) told += row.entry + std::string(" ");
    EXPECT_EQ(told, all);
    return all;
  };
  EXPECT_EQ(names(1), "one two three ");
  EXPECT_EQ(names(0), "one three ");
}

TEST_F(LaunchTest, DependentWhereItsExpressionSaysSo) {
  load_launches({Launch{.dependent = int_arg(0)}});
  for (const int64_t dependent : {0, 1}) {
    Call c = call();
    c.ints[0] = dependent;
    const auto* const attribute = launched(c).at(0).attribute(cu::LaunchAttributeId::ProgrammaticStreamSerialization);
    EXPECT_EQ(attribute != nullptr, dependent == 1);
  }
}

TEST_F(LaunchTest, AnEmptyGridLaunchesNothing) {
  load_launches({Launch{.entry = "one", .grid = {size(0, 0), 1, 1}}, Launch{.entry = "two"}});
  Call c = call({make_tensor({0, 16}), make_tensor({1}), absent_tensor()});
  const auto launches = launched(c);
  ASSERT_EQ(launches.size(), 1u);
  EXPECT_EQ(launches[0].kernel, "two");
}

TEST_F(LaunchTest, NothingToDoTouchesNoContext) {
  load_launches({Launch{.grid = {0, 1, 1}}});
  Call c = call();
  EXPECT_TRUE(launched(c).empty());
  EXPECT_EQ(fake().calls(Entry::cuDevicePrimaryCtxRetain), 0);
}

TEST_F(LaunchTest, GridLimits) {
  load_launches({Launch{.grid = {int_arg(0), int_arg(1), int_arg(2)}, .cluster = 2}});
  const auto launch = [&](int64_t x, int64_t y, int64_t z) {
    Call c = call();
    c.ints = {x, y, z, 0};
    return tk_launch(c.get(), nullptr, nullptr);
  };
  EXPECT_EQ(launch((1 << 30) - 1, 65535, 65535), TK_OK) << tk_last_error();
  expect_error(launch(1 << 30, 1, 1), TK_VARIANT_NOT_FOUND, {"grid", "2**31"});
  expect_error(launch(1, 65536, 1), TK_VARIANT_NOT_FOUND, {"grid"});
  expect_error(launch(1, 1, 65536), TK_VARIANT_NOT_FOUND, {"grid"});
  expect_error(launch(-1, 1, 1), TK_VARIANT_NOT_FOUND, {"grid"});
  expect_error(launch(int64_t{1} << 62, 1, 1), TK_VARIANT_NOT_FOUND, {"grid"});
}

// --- Attributes ---

TEST_F(LaunchTest, Clusters) {
  load_launches({Launch{.grid = {3, 1, 1}, .cluster = 4}});
  Call c = call();
  const FakeLaunch got = launched(c).at(0);
  EXPECT_EQ(got.config.grid[0], 12u);
  ASSERT_EQ(got.attributes.size(), 2u);
  const auto* cluster = got.attribute(cu::LaunchAttributeId::ClusterDimension);
  ASSERT_NE(cluster, nullptr);
  EXPECT_EQ(cluster->value.cluster[0], 4u);
  EXPECT_EQ(cluster->value.cluster[1], 1u);
  EXPECT_EQ(cluster->value.cluster[2], 1u);
  const auto* policy = got.attribute(cu::LaunchAttributeId::ClusterSchedulingPolicyPreference);
  ASSERT_NE(policy, nullptr);
  EXPECT_EQ(policy->value.flag, cu::kClusterPolicySpread);
}

TEST_F(LaunchTest, ClustersOf16MustBeAllowed) {
  load_launches({Launch{.cluster = 16}});
  Call c = call();
  EXPECT_EQ(launched(c).at(0).config.grid[0], 16u) << "the fake refuses such a cluster unless it was allowed";
}

TEST_F(LaunchTest, DependentAndCooperativeLaunches) {
  load_launches({Launch{.entry = "a", .dependent = 1}, Launch{.entry = "b", .flags = format::kCooperative},
                 Launch{.entry = "c", .dependent = 1, .cluster = 2, .flags = format::kCooperative}});
  Call c = call();
  const auto launches = launched(c);
  ASSERT_EQ(launches.size(), 3u);
  using enum cu::LaunchAttributeId;
  ASSERT_NE(launches[0].attribute(ProgrammaticStreamSerialization), nullptr);
  EXPECT_EQ(launches[0].attribute(ProgrammaticStreamSerialization)->value.flag, 1);
  EXPECT_EQ(launches[0].attribute(Cooperative), nullptr);
  ASSERT_NE(launches[1].attribute(Cooperative), nullptr);
  EXPECT_EQ(launches[1].attribute(Cooperative)->value.flag, 1);
  EXPECT_EQ(launches[2].attributes.size(), 4u);
}

// --- Scratch ---

struct CountingAllocator {
  tk_allocator allocator{this,
                         [](void* self, size_t bytes, size_t alignment, int32_t device, void* stream) {
                           auto& a = *static_cast<CountingAllocator*>(self);
                           a.bytes.push_back(bytes);
                           EXPECT_EQ(alignment, 256u);
                           EXPECT_EQ(device, 0);
                           a.stream = stream;
                           return a.result;
                         },
                         [](void* self, void* pointer, int32_t, void* stream) {
                           auto& a = *static_cast<CountingAllocator*>(self);
                           EXPECT_EQ(pointer, a.result);
                           EXPECT_EQ(stream, a.stream);
                           a.released++;
                         }};
  void* result = reinterpret_cast<void*>(0x70000000);
  std::vector<size_t> bytes;
  void* stream = nullptr;
  int released = 0;
};

TEST_F(LaunchTest, ScratchBuffersAreOneAllocation) {
  load_launches({Launch{.args = {buffer(0), buffer(1), buffer(1, size(0, 0) * 4), buffer(2)}}},
                {{format::BufferKind::Scratch, size(0, 0) * 10},
                 {format::BufferKind::Scratch, 100, 64},
                 {format::BufferKind::Scratch, 1, 256}});
  CountingAllocator allocator;
  Call c = call();
  const FakeLaunch got = launched(c, FakeDriver::stream(3), &allocator.allocator).at(0);
  const uint64_t base = got.parameter<uint64_t>(0);
  EXPECT_EQ(base, 0x70000000u);
  EXPECT_EQ(got.parameter<uint64_t>(1), base + 128) << "80 bytes, then on 64";
  EXPECT_EQ(got.parameter<uint64_t>(2), base + 128 + 32);
  EXPECT_EQ(got.parameter<uint64_t>(3), base + 256) << "228 bytes, then on 256";
  EXPECT_EQ(allocator.bytes, std::vector<size_t>{257});
  EXPECT_EQ(allocator.stream, FakeDriver::stream(3));
  EXPECT_EQ(allocator.released, 1);
}

TEST_F(LaunchTest, WithoutAnAllocatorScratchIsTheDrivers) {
  load_launches({Launch{.args = {buffer(0)}}}, {{format::BufferKind::Scratch, 4096}});
  Call c = call();
  EXPECT_NE(launched(c).at(0).parameter<uint64_t>(0), 0u);
  EXPECT_EQ(fake().calls(Entry::cuMemAllocAsync), 1);
  EXPECT_EQ(fake().scratch_in_use(), 0u);
}

TEST_F(LaunchTest, AnAllocatorMayFail) {
  load_launches({Launch{.args = {buffer(0)}}}, {{format::BufferKind::Scratch, 4096}});
  CountingAllocator allocator;
  Call c = call();
  allocator.result = nullptr;
  expect_error(tk_launch(c.get(), nullptr, &allocator.allocator), TK_DRIVER_ERROR, {"4096 bytes"});
  EXPECT_EQ(allocator.released, 0);
  allocator.result = reinterpret_cast<void*>(0x70000010);
  expect_error(tk_launch(c.get(), nullptr, &allocator.allocator), TK_INVALID_ARGUMENT, {"256 bytes"});
  EXPECT_EQ(allocator.released, 1) << "what was given is given back";
}

TEST_F(LaunchTest, ScratchIsGivenBackWhenALaunchFails) {
  load_launches({Launch{.entry = "a", .args = {buffer(0)}}, Launch{.entry = "b"}},
                {{format::BufferKind::Scratch, 4096}});
  CountingAllocator allocator;
  Call c = call();
  fake().fail(Entry::cuLaunchKernelEx, 2);
  expect_error(tk_launch(c.get(), nullptr, &allocator.allocator), TK_DRIVER_ERROR,
               {"cuLaunchKernelEx", "CUDA_ERROR_FAKE"});
  EXPECT_EQ(allocator.released, 1);
}

TEST_F(LaunchTest, GlobalScratchIsPerBlock) {
  load_launches({Launch{.entry = "a",
                        .args = {global_scratch(), profile_scratch()},
                        .grid = {3, 2, 1},
                        .cluster = 2,
                        .global_scratch = 384,
                        .profile_scratch = 10},
                 Launch{.entry = "b", .args = {global_scratch(), profile_scratch()}}});
  CountingAllocator allocator;
  Call c = call();
  const auto launches = launched(c, nullptr, &allocator.allocator);
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].parameter<uint64_t>(0), 0x70000000u);
  EXPECT_EQ(launches[0].parameter<uint64_t>(1), 0x70000000u + 384 * 12);
  EXPECT_EQ(launches[1].parameter<uint64_t>(0), 0u) << "this one has none";
  EXPECT_EQ(launches[1].parameter<uint64_t>(1), 0u);
  EXPECT_EQ(allocator.bytes, std::vector<size_t>{384 * 12 + 10 * 12});
}

TEST_F(LaunchTest, TooMuchScratchIsRefused) {
  load_launches({Launch{.args = {buffer(0)}}}, {{format::BufferKind::Scratch, int_arg(0)}});
  for (const int64_t bytes : {int64_t{-1}, int64_t{1} << 47, std::numeric_limits<int64_t>::max()}) {
    Call c = call();
    c.ints[0] = bytes;
    expect_error(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"scratch memory"});
  }
}

TEST_F(LaunchTest, TooMuchGlobalScratchIsRefused) {
  load_launches({Launch{.args = {global_scratch()}, .grid = {INT32_MAX, 65535, 65535}, .global_scratch = UINT32_MAX}});
  Call c = call();
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"scratch memory"});
}

// An allocator may itself run an op of ours.
TEST_F(LaunchTest, AnAllocatorMayLaunch) {
  load_launches({Launch{.args = {pointer(0), buffer(0)}}}, {{format::BufferKind::Scratch, int_arg(0)}});
  struct Nested {
    Call inner = call();
    tk_allocator allocator{this,
                           [](void* self, size_t, size_t, int32_t, void*) {
                             Call& inner = static_cast<Nested*>(self)->inner;
                             EXPECT_EQ(tk_launch(inner.get(), nullptr, nullptr), TK_OK) << tk_last_error();
                             return reinterpret_cast<void*>(0x50000000);
                           },
                           [](void*, void*, int32_t, void*) {}};
  } nested;
  nested.inner.tensors[0].data = reinterpret_cast<void*>(0x990000);
  Call outer = call();
  outer.ints[0] = 64;
  for (int repeat = 0; repeat < 2; repeat++) {
    const auto launches = launched(outer, nullptr, &nested.allocator);
    ASSERT_EQ(launches.size(), 2u);
    EXPECT_EQ(launches[0].parameter<uint64_t>(0), 0x990000u);
    EXPECT_EQ(launches[1].parameter<uint64_t>(0), 0x10000u);
    EXPECT_EQ(launches[1].parameter<uint64_t>(1), 0x50000000u);
  }
}

// --- Tensor maps ---

Map map_of_rank(int rank) {
  Map map;
  for (int d = 0; d < rank; d++) {
    map.sizes.push_back(size(0, d));
    map.strides.push_back(stride(0, d));
    map.box.push_back(static_cast<uint32_t>(8 << d));
  }
  return map;
}

TEST_F(LaunchTest, TensorMapsOfEveryRank) {
  for (int rank = 1; rank <= 5; rank++) {
    SetUp();
    load_launches({Launch{.args = {tensor_map(map_of_rank(rank)), integer(size(0, 0)), integer(stride(0, 0), 8)}}});
    const std::vector<int64_t> sizes = {3, 5, 7, 2, 64};
    Call c = call({make_tensor({sizes.end() - rank, sizes.end()}), make_tensor({1}), absent_tensor()});
    const FakeLaunch got = launched(c).at(0);
    const FakeMap map = fake().map(got.parameter<cu::TensorMap>(0));
    EXPECT_EQ(map.address, 0x10000u);
    ASSERT_EQ(map.sizes.size(), static_cast<size_t>(rank));
    uint64_t bytes = 2;
    for (int d = 0; d < rank; d++) {  // innermost first
      EXPECT_EQ(map.sizes[static_cast<size_t>(d)], static_cast<uint64_t>(sizes[static_cast<size_t>(4 - d)]));
      EXPECT_EQ(map.box[static_cast<size_t>(d)], 8u << (rank - 1 - d));
      if (d > 0) {
        EXPECT_EQ(map.strides[static_cast<size_t>(d - 1)], bytes);
      }
      bytes *= map.sizes[static_cast<size_t>(d)];
    }
  }
}

// [N, H, W, C]; from one pixel above and two left of the image on, every second one along its width.
Map im2col_map() {
  Map map = map_of_rank(4);
  map.box = {512, 64};
  map.lower = {E(-1), E(-2)};
  map.upper = {E(3), size(0, 1) - E(5)};
  map.steps = {E(1), E(2)};
  return map;
}

TEST_F(LaunchTest, Im2colMapsSayWhatThePackSays) {
  load_launches({Launch{.args = {tensor_map(im2col_map())}}});
  Call c = call({make_tensor({3, 5, 7, 64}), make_tensor({1}), absent_tensor()});
  const FakeMap map = fake().map(launched(c).at(0).parameter<cu::TensorMap>(0));
  EXPECT_TRUE(map.is_im2col);
  EXPECT_EQ(map.sizes, (std::vector<uint64_t>{64, 7, 5, 3}));
  EXPECT_EQ(map.strides, (std::vector<uint64_t>{128, 896, 4480}));
  EXPECT_EQ(map.box, (std::vector<uint32_t>{512, 64})) << "pixels, channels";
  EXPECT_EQ(map.lower, (std::vector<int>{-2, -1})) << "innermost first";
  EXPECT_EQ(map.upper, (std::vector<int>{0, 3}));
  EXPECT_EQ(map.steps, (std::vector<uint32_t>{1, 2, 1, 1})) << "of channels, width, height, images";
}

TEST_F(LaunchTest, CornersOutOfReachAreRefused) {
  const auto refuse = [&](const char* what, const std::function<void(Map&)>& change) {
    Map map = im2col_map();
    change(map);
    load_launches({Launch{.args = {tensor_map(map)}}});
    Call c = call({make_tensor({3, 5, 7, 64}), make_tensor({1}), absent_tensor()});
    expect_error(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"tensor map can describe"});
    EXPECT_TRUE(fake().launches().empty()) << what;
    SetUp();
  };
  refuse("lower", [](Map& m) { m.lower[1] = E(-129); });
  refuse("upper", [](Map& m) { m.upper[0] = E(128); });
  refuse("no step", [](Map& m) { m.steps[0] = E(0); });
  refuse("a long step", [](Map& m) { m.steps[1] = E(9); });
}

TEST_F(LaunchTest, TensorMapsSayWhatThePackSays) {
  Map map = map_of_rank(2);
  map.tensor = 1;
  map.element_type = 11;
  map.element_size = 4;
  map.swizzle = 2;
  map.l2_promotion = 3;
  map.oob_fill = 1;
  map.offset = size(0, 0) * 16;
  load_launches({Launch{.args = {tensor_map(map)}}});
  Call c = call();
  const FakeMap got = fake().map(launched(c).at(0).parameter<cu::TensorMap>(0));
  EXPECT_EQ(got.element_type, 11);
  EXPECT_EQ(got.interleave, 0);
  EXPECT_EQ(got.swizzle, 2);
  EXPECT_EQ(got.l2_promotion, 3);
  EXPECT_EQ(got.oob_fill, 1);
  EXPECT_EQ(got.address, 0x20000u + 8 * 16);
  EXPECT_EQ(got.strides[0], 16u * 4) << "the stride of tensor 0's rows, in fp32 elements";
}

TEST_F(LaunchTest, TensorMapsAreEncodedOncePerAddress) {
  load_launches({Launch{.args = {tensor_map(map_of_rank(2))}}});
  const auto launch_at = [&](uintptr_t address) {
    Call c = call({make_tensor({8, 16}, 15, address), make_tensor({1}), absent_tensor()});
    const FakeMap map = fake().map(launched(c).at(0).parameter<cu::TensorMap>(0));
    EXPECT_EQ(map.address, address);
    return fake().calls(Entry::cuTensorMapEncodeTiled);
  };
  EXPECT_EQ(launch_at(0x10000), 1);
  EXPECT_EQ(launch_at(0x10000), 1);
  EXPECT_EQ(launch_at(0x20000), 2);
  EXPECT_EQ(launch_at(0x10000), 2) << "both are remembered";
  for (uintptr_t i = 3; i < 8; i++) launch_at(0x10000 * i);
  EXPECT_EQ(launch_at(0x70000), 7);
  EXPECT_EQ(launch_at(0x10000), 8) << "only the last few are";
}

TEST_F(LaunchTest, WhatNoTensorMapCanDescribeIsRefused) {
  load_launches({Launch{.args = {tensor_map(map_of_rank(2))}}});
  const auto refuse = [&](const char* what, const std::function<void(tk_tensor&)>& change) {
    Call c = call();
    change(c.tensors[0]);
    expect_error(tk_launch(c.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"tensor map can describe"});
    EXPECT_TRUE(fake().launches().empty()) << what;
  };
  refuse("misaligned", [](tk_tensor& t) { t.data = reinterpret_cast<void*>(0x10008); });
  refuse("inner stride", [](tk_tensor& t) { t.strides[1] = 2; });
  refuse("row stride", [](tk_tensor& t) { t.strides[0] = 17; });
  refuse("negative stride", [](tk_tensor& t) { t.strides[0] = -16; });
  refuse("huge stride", [](tk_tensor& t) { t.strides[0] = int64_t{1} << 39; });
  refuse("empty", [](tk_tensor& t) { t.sizes[0] = 0; });
  refuse("huge size", [](tk_tensor& t) { t.sizes[0] = (int64_t{1} << 32) + 1; });
  refuse("absent", [](tk_tensor& t) { t.ndim = -1; });
}

TEST_F(LaunchTest, AMapOfNoAddressIsRefused) {
  load_launches({Launch{.args = {tensor_map(map_of_rank(2))}}});
  Call c = call({make_tensor({8, 16}, 15, 0), make_tensor({1}), absent_tensor()});
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_INVALID_ARGUMENT, {"tensor 0", "no address"});
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_INVALID_ARGUMENT, {"tensor 0", "no address"});
}

// --- What is remembered ---

class RememberTest : public LaunchTest {
 protected:
  // Every number that expressions can read is a parameter.
  void SetUp() override {
    LaunchTest::SetUp();
    load_launches({Launch{.args = {integer(size(0, 0), 8), integer(stride(0, 1), 8), integer(dtype(0)),
                                   integer(ndim(1)), integer(alignment(0)), integer(int_arg(2), 8), integer(mode()),
                                   integer(device(DeviceField::SmCount)), pointer(0), floating(1, 8)}}});
  }
};

TEST_F(RememberTest, ACallThatDiffersInAnythingIsAnotherCall) {
  const auto check = [&](const char* what, size_t index, int64_t expected, const std::function<void(Call&)>& change) {
    Call c = call();
    launched(c);
    change(c);
    const FakeLaunch got = launched(c).at(0);
    const auto& bytes = got.parameters.at(index);
    int64_t value = 0;
    if (bytes.size() == 4) {
      value = got.parameter<int32_t>(index);
    } else {
      value = got.parameter<int64_t>(index);
    }
    EXPECT_EQ(value, expected) << what;
  };
  check("size", 0, 9, [](Call& c) { c.tensors[0].sizes[0] = 9; });
  check("stride", 1, 3, [](Call& c) { c.tensors[0].strides[1] = 3; });
  check("dtype", 2, 6, [](Call& c) { c.tensors[0].dtype = 6; });
  check("ndim", 3, 1, [](Call& c) { c.tensors[1].ndim = 1; });
  check("absent", 3, -1, [](Call& c) { c.tensors[1].ndim = -1; });
  check("alignment", 4, 4, [](Call& c) { c.tensors[0].data = reinterpret_cast<void*>(0x10004); });
  check("int", 5, 77, [](Call& c) { c.ints[2] = 77; });
  check("mode", 6, 8, [](Call& c) { c.call.mode = TK_MODE_STATIC_WEIGHTS; });
  check("address", 8, 0x30000, [](Call& c) { c.tensors[0].data = reinterpret_cast<void*>(0x30000); });
}

TEST_F(RememberTest, DevicesAreToldApart) {
  use({FakeGpu{}, FakeGpu{.sm_count = 78}});
  LaunchTest::load_launches({Launch{.args = {integer(device(DeviceField::SmCount))}}});
  Call c = call();
  EXPECT_EQ(launched(c).at(0).parameter<int32_t>(0), 132);
  c.call.device = 1;
  EXPECT_EQ(launched(c).at(0).parameter<int32_t>(0), 78);
  c.call.device = 0;
  EXPECT_EQ(launched(c).at(0).parameter<int32_t>(0), 132);
}

TEST_F(RememberTest, ARepeatedCallAsksTheDriverForNothingButTheLaunch) {
  Call c = call();
  FakeDriver::contexts().push_back(FakeDriver::primary(0));
  launched(c);
  std::vector<int> before;
  for (int i = 0; i < static_cast<int>(Entry::Count); i++) before.push_back(fake().calls(static_cast<Entry>(i)));
  launched(c);
  for (int i = 0; i < static_cast<int>(Entry::Count); i++) {
    const auto entry = static_cast<Entry>(i);
    const bool allowed = entry == Entry::cuLaunchKernelEx || entry == Entry::cuCtxGetCurrent;
    EXPECT_EQ(fake().calls(entry) - before[static_cast<size_t>(i)], allowed ? 1 : 0) << entry_name(entry);
  }
  FakeDriver::contexts().pop_back();
}

TEST_F(RememberTest, MoreCallsThanAreRememberedStillWork) {
  for (int round = 0; round < 2; round++) {
    for (int64_t rows = 1; rows <= 1500; rows++) {
      Call c = call();
      c.tensors[0].sizes[0] = rows;
      c.ints[2] = -rows;
      const FakeLaunch got = launched(c).at(0);
      ASSERT_EQ(got.parameter<int64_t>(0), rows);
      ASSERT_EQ(got.parameter<int64_t>(5), -rows);
    }
  }
}

// --- Outputs of generated ops ---

TEST_F(LaunchTest, OutputsAreWorkedOut) {
  Op op{.name = "sum", .n_tensors = 2, .n_ints = 1, .locals = {size(0, 0), size(0, 1)}};
  op.outputs = {{dtype(0), {local(0), 1}, {1, 1}}, {E(4), {}, {}}};
  load({op});
  Call c("sum", {make_tensor({6, 10}, 5), absent_tensor()}, {0});
  tk_tensor rows[2];
  uint32_t count = 0;
  ASSERT_EQ(tk_outputs(c.get(), rows, 2, &count), TK_OK) << tk_last_error();
  ASSERT_EQ(count, 2u);
  EXPECT_EQ(rows[0].ndim, 2);
  EXPECT_EQ(rows[0].dtype, 5);
  EXPECT_EQ(rows[0].sizes[0], 6);
  EXPECT_EQ(rows[0].sizes[1], 1);
  EXPECT_EQ(rows[0].strides[0], 1);
  EXPECT_EQ(rows[0].data, nullptr);
  EXPECT_EQ(rows[1].ndim, 0);
  EXPECT_EQ(rows[1].dtype, 4);
}

TEST_F(LaunchTest, OutputsThatNoTensorCanHaveAreRefused) {
  Op op{.name = "bad", .n_tensors = 2, .n_ints = 1};
  op.outputs = {{dtype(0), {size(0, 0) - int_arg(0)}, {1}}};
  load({op});
  Call c("bad", {make_tensor({6}), absent_tensor()}, {7});
  tk_tensor row;
  uint32_t count = 0;
  expect_error(tk_outputs(c.get(), &row, 1, &count), TK_INVALID_ARGUMENT, {"output 0"});
}

}  // namespace
}  // namespace tk::test
