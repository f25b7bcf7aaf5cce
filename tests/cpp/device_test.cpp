// Modules: loaded once, when needed, with what the launch will need of them.

#include "fake_driver.h"

namespace tk::test {
namespace {

class DeviceTest : public CoreTest {
 protected:
  static Op two_launches(const std::string& name = "op") {
    Op op{.name = name};
    op.variants[0].launches = {Launch{.entry = name + "_a"}, Launch{.entry = name + "_b"}};
    return op;
  }
};

TEST_F(DeviceTest, ModulesAreLoadedOnFirstUseAndOnce) {
  load({two_launches()});
  Call c("op");
  EXPECT_EQ(fake().modules_loaded(), 0);
  launched(c);
  EXPECT_EQ(fake().modules_loaded(), 2);
  launched(c);
  EXPECT_EQ(fake().calls(Entry::cuModuleLoadDataEx), 2);
}

TEST_F(DeviceTest, EachDeviceHasItsOwn) {
  use({FakeGpu{}, FakeGpu{}});
  load({two_launches()});
  Call c("op");
  launched(c);
  c.call.device = 1;
  launched(c);
  EXPECT_EQ(fake().modules_loaded(), 4);
}

TEST_F(DeviceTest, LaunchesOfOneImageShareAModule) {
  Op op;
  op.variants[0].launches = {Launch{.grid = {1, 1, 1}}, Launch{.grid = {2, 1, 1}}};
  load({op});
  Call c("op");
  EXPECT_EQ(launched(c).size(), 2u);
  EXPECT_EQ(fake().modules_loaded(), 1);
}

TEST_F(DeviceTest, PreloadLoadsEverythingOfAnOp) {
  load({two_launches("one"), two_launches("two")});
  uint32_t modules = 0;
  ASSERT_EQ(tk_preload(tk_intern_op("one"), 0, &modules), TK_OK) << tk_last_error();
  EXPECT_EQ(modules, 2u);
  EXPECT_EQ(fake().modules_loaded(), 2);
  ASSERT_EQ(tk_preload(UINT32_MAX, 0, &modules), TK_OK) << tk_last_error();
  EXPECT_EQ(modules, 4u);
  EXPECT_EQ(fake().modules_loaded(), 4);
  Call c("two");
  launched(c);
  EXPECT_EQ(fake().calls(Entry::cuModuleLoadDataEx), 4) << "nothing is left to load";
  EXPECT_TRUE(FakeDriver::contexts().empty());
}

TEST_F(DeviceTest, PreloadCountsAnImageOfTwoOpsOnce) {
  load({Op{.name = "one"}, Op{.name = "two"}});
  uint32_t modules = 0;
  ASSERT_EQ(tk_preload(UINT32_MAX, 0, &modules), TK_OK) << tk_last_error();
  EXPECT_EQ(modules, 1u);
  EXPECT_EQ(fake().modules_loaded(), 1);
}

TEST_F(DeviceTest, PreloadOfWhatIsNotThere) {
  expect_error(tk_preload(tk_intern_op("missing"), 0, nullptr), TK_VARIANT_NOT_FOUND, {"\"missing\""});
  expect_error(tk_preload(1u << 30, 0, nullptr), TK_INVALID_ARGUMENT, {"tk_intern_op"});
  expect_error(tk_preload(UINT32_MAX, 7, nullptr), TK_INVALID_ARGUMENT, {"device 7"});
}

TEST_F(DeviceTest, SharedMemoryUpToTheLimitOfTheGpu) {
  Op op;
  op.variants[0].launches = {Launch{.shared = 227 << 10}};
  load({op});
  Call c("op");
  EXPECT_EQ(launched(c).at(0).config.shared, 227u << 10) << "exactly at the limit is allowed";
}

TEST_F(DeviceTest, KernelsAreReadyBeforeTheirFirstLaunch) {
  load({two_launches()});
  ASSERT_EQ(tk_preload(UINT32_MAX, 0, nullptr), TK_OK);
  EXPECT_EQ(fake().calls(Entry::cuFuncLoad), 2) << "lazy loading would load at the launch";
}

TEST_F(DeviceTest, ARecipeMustHaveTheKernelsParameters) {
  const auto refuse = [&](const std::string& image, const char* part) {
    SetUp();
    Op op;
    op.variants[0].launches = {Launch{.args = {integer(1, 4), null_pointer()}, .image = image}};
    load({op});
    Call c("op");
    expect_error(tk_launch(c.get(), nullptr, nullptr), TK_PACK_ERROR, {part, "image 0"});
    EXPECT_TRUE(fake().launches().empty());
  };
  refuse("FAKE kernel 8 8", "parameter 0 has 8 bytes in the kernel and 4 in the recipe");
  refuse("FAKE kernel 4", "parameter 1 has 0 bytes");
  refuse("FAKE kernel 4 8 8", "more than the 2 parameters");
}

TEST_F(DeviceTest, AKernelThatIsNotInItsImage) {
  Op op;
  op.variants[0].launches = {Launch{.entry = "wanted", .image = "FAKE other"}};
  load({op});
  Call c("op");
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_DRIVER_ERROR, {"cuModuleGetFunction"});
}

TEST_F(DeviceTest, PtxThatDoesNotCompileShowsTheCompilersLog) {
  Op op;
  op.variants[0].launches = {Launch{.image = "not PTX"}};
  load(PackSpec{.ops = {op}, .arch = 80, .ptx = true});
  Call c("op");
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_DRIVER_ERROR,
               {"cuModuleLoadDataEx", "image 0", "pack0", "ptxas: no FAKE"});
}

TEST_F(DeviceTest, AnImageThatWasDamagedOnDiskIsRefused) {
  const auto path = dir_.write("later", PackSpec{});
  ASSERT_EQ(tk_load_pack(path.c_str()), TK_OK);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 3);
  Call c("op");
  expect_error(tk_launch(c.get(), nullptr, nullptr), TK_PACK_ERROR, {path});
}

}  // namespace
}  // namespace tk::test
