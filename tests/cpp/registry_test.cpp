// Which pack serves which GPU.

#include "fake_driver.h"
#include "listing.h"

namespace tk::test {
namespace {

PackSpec pack_for(uint32_t arch, bool ptx = false, const std::string& op = "op", const std::string& kernel = "kernel") {
  Op row{.name = op};
  row.variants[0].kernel = kernel;
  return {.ops = {row}, .arch = arch, .ptx = ptx};
}

class RegistryTest : public CoreTest {
 protected:
  tk_status choose(const std::string& op, tk_choice& choice) {
    Call call(op);
    return tk_choose(call.get(), &choice);
  }
  // The pack that serves `op` on a GPU, as its architecture: "sm_80"; or the status.
  std::string serving(int major, int minor, const std::vector<PackSpec>& packs) {
    use({FakeGpu{.major = major, .minor = minor}});
    int n = 0;
    for (const PackSpec& spec : packs)
      EXPECT_EQ(tk_load_pack(dir_.write(std::to_string(n++) + ".tkpack", spec).c_str()), TK_OK) << tk_last_error();
    tk_choice choice{};
    const tk_status status = choose("op", choice);
    return status == TK_OK ? choice.kernel_name : "status " + std::to_string(status);
  }
  static const PackSpec sm80, sm86, sm90, sm100, ptx80, ptx90;
};
const PackSpec RegistryTest::sm80 = pack_for(80, false, "op", "sm_80");
const PackSpec RegistryTest::sm86 = pack_for(86, false, "op", "sm_86");
const PackSpec RegistryTest::sm90 = pack_for(90, false, "op", "sm_90");
const PackSpec RegistryTest::sm100 = pack_for(100, false, "op", "sm_100");
const PackSpec RegistryTest::ptx80 = pack_for(80, true, "op", "ptx80");
const PackSpec RegistryTest::ptx90 = pack_for(90, true, "op", "ptx90");

TEST_F(RegistryTest, AGpuGetsTheBestPackThatRunsThere) {
  const std::vector<PackSpec> all = {ptx80, sm80, sm90, ptx90, sm86};
  EXPECT_EQ(serving(8, 0, all), "sm_80");
  EXPECT_EQ(serving(8, 6, all), "sm_86");
  EXPECT_EQ(serving(8, 9, all), "sm_86");
  EXPECT_EQ(serving(8, 9, {ptx80, sm80}), "sm_80");
  EXPECT_EQ(serving(9, 0, all), "sm_90");
  EXPECT_EQ(serving(9, 0, {sm80, ptx80}), "ptx80") << "an sm_80 cubin does not run on 9.0";
  EXPECT_EQ(serving(10, 0, all), "ptx90") << "neither does an sm_90a cubin on 10.0";
  EXPECT_EQ(serving(10, 3, {sm100, ptx80}), "ptx80") << "nor an sm_100a cubin on 10.3";
  EXPECT_EQ(serving(10, 0, {sm100, ptx80}), "sm_100");
  EXPECT_EQ(serving(7, 5, all), "status 2");
  EXPECT_EQ(serving(8, 0, {sm86}), "status 2") << "a cubin does not run on older GPUs";
}

TEST_F(RegistryTest, SaysWhichArchitecturesThereAre) {
  EXPECT_EQ(serving(7, 5, {sm80, sm90, ptx80}), "status 2");
  for (const char* part : {"sm_75", "sm_80", "sm_90", "ptx80", "tk build"})
    EXPECT_NE(std::string(tk_last_error()).find(part), std::string::npos) << tk_last_error();
}

TEST_F(RegistryTest, AnOpThatNoPackHasIsNotFound) {
  load(pack_for(90, false, "other"));
  tk_choice choice;
  expect_error(choose("missing", choice), TK_VARIANT_NOT_FOUND, {"\"missing\"", "sm_90", "tk.load_pack", "tk build"});
}

TEST_F(RegistryTest, TwoPacksWithOneOpClash) {
  const auto first = dir_.write("first.tkpack", pack_for(90, false, "same", "one"));
  const auto second = dir_.write("second.tkpack", pack_for(90, false, "same", "two"));
  ASSERT_EQ(tk_load_pack(first.c_str()), TK_OK);
  expect_error(tk_load_pack(second.c_str()), TK_PACK_ERROR, {"\"same\"", first, second});
  tk_choice choice;
  ASSERT_EQ(choose("same", choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "one") << "the first one still serves";
}

TEST_F(RegistryTest, ThePackOfAnotherArchitectureDoesNotClash) {
  load(pack_for(90));
  load(pack_for(80));
  load(pack_for(90, true));
}

TEST_F(RegistryTest, LoadingTheSamePackAgainDoesNothing) {
  const auto path = dir_.write("p.tkpack", pack_for(90));
  const auto copy = dir_.write("copy.tkpack", pack_for(90));
  EXPECT_EQ(tk_load_pack(path.c_str()), TK_OK);
  EXPECT_EQ(tk_load_pack(path.c_str()), TK_OK);
  EXPECT_EQ(tk_load_pack(copy.c_str()), TK_OK);
  EXPECT_EQ(packs().size(), 1u);
}

TEST_F(RegistryTest, AMissingPackIsNamed) {
  const auto path = (dir_ / "nowhere.tkpack").string();
  expect_error(tk_load_pack(path.c_str()), TK_PACK_ERROR, {path, "No such file"});
  expect_error(tk_load_pack(nullptr), TK_INVALID_ARGUMENT, {"NULL"});
}

// --- The library's own packs ---

class BuiltinTest : public RegistryTest {
 protected:
  // Writes packs and a table of roots for them, as the build does.
  void install(const std::vector<std::pair<std::string, PackSpec>>& packs) {
    for (const auto& [name, spec] : packs) {
      names_.push_back(name);
      hashes_.push_back(Pack::open(dir_.write(name, spec))->index_hash());
    }
    for (size_t i = 0; i < names_.size(); i++) roots_.push_back({names_[i].c_str(), hashes_[i].c_str()});
    reset_runtime_for_tests(roots_);
    ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  }
  ~BuiltinTest() override { unsetenv("TK_UNROOTED_PACKS"); }

  std::vector<std::string> names_;
  std::vector<std::string> hashes_;
  std::vector<Root> roots_;
};

TEST_F(BuiltinTest, IsFoundByName) {
  install({{"sm90.tkpack", sm90}, {"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  tk_choice choice;
  ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "sm_90");
  EXPECT_EQ(choice.pack_path, (dir_ / "sm90.tkpack").string());
}

TEST_F(BuiltinTest, OneThatWasExchangedIsRefused) {
  install({{"sm90.tkpack", sm90}, {"ptx80.tkpack", ptx80}});
  dir_.write("sm90.tkpack", pack_for(90, false, "op", "evil"));
  tk_choice choice;
  expect_error(choose("op", choice), TK_PACK_ERROR, {"sm90.tkpack", "not the pack that was built with this library"});
}

TEST_F(BuiltinTest, OneThatIsMissingOrDamagedIsNotReplacedByAnother) {
  install({{"sm90.tkpack", sm90}, {"ptx80.tkpack", ptx80}});
  tk_choice choice;
  std::filesystem::resize_file(dir_ / "sm90.tkpack", 500);
  expect_error(choose("op", choice), TK_PACK_ERROR, {"sm90.tkpack", "cut short"});
  std::filesystem::remove(dir_ / "sm90.tkpack");
  expect_error(choose("op", choice), TK_PACK_ERROR, {"sm90.tkpack", "No such file"});
  dir_.write("sm90.tkpack", sm90);
  EXPECT_EQ(choose("op", choice), TK_OK) << "it is there again: " << tk_last_error();
}

TEST_F(BuiltinTest, OthersMayBeMissing) {
  install({{"sm90.tkpack", sm90}, {"sm80.tkpack", sm80}});
  std::filesystem::remove(dir_ / "sm80.tkpack");
  tk_choice choice;
  EXPECT_EQ(choose("op", choice), TK_OK) << tk_last_error();
}

TEST_F(BuiltinTest, AFileForAnotherArchitectureThanItsNameIsRefused) {
  install({{"sm90.tkpack", sm80}});
  tk_choice choice;
  expect_error(choose("op", choice), TK_PACK_ERROR, {"sm90.tkpack", "sm_80"});
}

TEST_F(BuiltinTest, FilesWithoutARootAreIgnored) {
  install({{"ptx80.tkpack", ptx80}});
  dir_.write("sm90.tkpack", sm90);
  setenv("TK_UNROOTED_PACKS", "1", 1);
  tk_choice choice;
  ASSERT_EQ(choose("op", choice), TK_OK);
  EXPECT_STREQ(choice.kernel_name, "ptx80") << "a library with roots takes nothing else, whatever the environment";
}

TEST_F(BuiltinTest, WithoutRootsThePacksMustBeAskedFor) {
  dir_.write("sm90.tkpack", sm90);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  tk_choice choice;
  expect_error(choose("op", choice), TK_VARIANT_NOT_FOUND, {"sm90.tkpack", "TK_UNROOTED_PACKS=1"});
  reset_runtime_for_tests();
  setenv("TK_UNROOTED_PACKS", "1", 1);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "sm_90");
}

TEST_F(BuiltinTest, ClashesWithAUsersPackInEitherOrder) {
  install({{"sm90.tkpack", sm90}});
  const auto user = dir_.write("user.tkpack", pack_for(90, false, "op", "mine"));
  expect_error(tk_load_pack(user.c_str()), TK_PACK_ERROR, {"\"op\"", "sm90.tkpack", "user.tkpack"});

  reset_runtime_for_tests(roots_);
  ASSERT_EQ(tk_load_pack(user.c_str()), TK_OK);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  tk_choice choice;
  expect_error(choose("op", choice), TK_PACK_ERROR, {"\"op\"", "sm90.tkpack", "user.tkpack"});
}

TEST_F(BuiltinTest, AUsersPackAddsOps) {
  install({{"sm90.tkpack", sm90}});
  load(pack_for(90, false, "mine", "mine"));
  tk_choice choice;
  ASSERT_EQ(choose("mine", choice), TK_OK) << tk_last_error();
  ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
}

TEST_F(BuiltinTest, AUsersCubinIsPreferredToOurPtx) {
  install({{"ptx80.tkpack", ptx80}});
  load(pack_for(90, false, "op", "mine"));
  tk_choice choice;
  ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "mine");
}

TEST_F(BuiltinTest, LoadingAPackOfTheLibraryByPathDoesNothing) {
  install({{"sm90.tkpack", sm90}});
  EXPECT_EQ(tk_load_pack((dir_ / "sm90.tkpack").c_str()), TK_OK) << tk_last_error();
  EXPECT_EQ(packs().size(), 1u);
}

// --- The definitions of the library's own generated ops ---

Op generated(const std::string& name, const std::string& meta = "{}") {
  return {.name = name,
          .n_tensors = 1,
          .schema = name + "(Tensor(a!) x, int config=-1, int mode_bits=0) -> ()",
          .params = {{.name = "x", .flags = format::kMutated}},
          .meta = meta};
}

Op defined(const std::string& name) {
  Op op = generated(name);
  op.variants.clear();
  return op;
}

class DefinitionsTest : public BuiltinTest {
 protected:
  // The ops that are there before any pack for a GPU is opened.
  static std::vector<std::string> names() {
    std::vector<std::string> out;
    for (uint32_t i = 0; const tk_generated_op* op = tk_generated_op_at(i); i++) out.push_back(op->name);
    return out;
  }
  const PackSpec ops_ = {.ops = {defined("softmax"), defined("gelu")}, .arch = 0};
  const PackSpec kernels_ = {.ops = {generated("softmax"), generated("gelu")}};
};

TEST_F(DefinitionsTest, AreThereAtOnce) {
  install({{"ops.tkpack", ops_}, {"sm90.tkpack", kernels_}});
  EXPECT_EQ(names(), (std::vector<std::string>{"softmax", "gelu"}));
  Call call("softmax", {make_tensor({})});
  EXPECT_EQ(launched(call).size(), 1u) << "the kernels come from the pack for the GPU";
  EXPECT_EQ(names().size(), 2u);
  EXPECT_EQ(packs().size(), 2u);
}

TEST_F(DefinitionsTest, AreNoKernels) {
  install({{"ops.tkpack", ops_}});
  Call call("softmax", {make_tensor({})});
  expect_error(tk_launch(call.get(), nullptr, nullptr), TK_VARIANT_NOT_FOUND, {"softmax", "tk build"});
}

TEST_F(DefinitionsTest, NoUsersOpTakesTheirNames) {
  install({{"ops.tkpack", ops_}});
  const auto other = dir_.write("user.tkpack", {.ops = {generated("gelu", "{\"other\": 1}")}, .arch = 80});
  expect_error(tk_load_pack(other.c_str()), TK_PACK_ERROR, {"\"gelu\"", "user.tkpack", "ops.tkpack"});
  const auto more = dir_.write("more.tkpack", {.ops = {generated("gelu")}, .arch = 100});
  EXPECT_EQ(tk_load_pack(more.c_str()), TK_OK) << "kernels of the same op for a GPU that we have none for";
}

TEST_F(DefinitionsTest, AreThoseThatWereBuiltWithTheLibrary) {
  install({{"ops.tkpack", ops_}, {"sm90.tkpack", kernels_}});
  dir_.write("ops.tkpack", {.ops = {defined("evil")}, .arch = 0});
  reset_runtime_for_tests(roots_);
  expect_error(tk_set_builtin_directory(dir_.string().c_str()), TK_PACK_ERROR, {"ops.tkpack", "not the pack"});
  EXPECT_TRUE(names().empty());
  Call call("softmax", {make_tensor({})});
  EXPECT_EQ(tk_launch(call.get(), nullptr, nullptr), TK_OK) << "the kernels are there: " << tk_last_error();
}

TEST_F(DefinitionsTest, MustBeForAnyGpu) {
  names_.push_back("ops.tkpack");
  hashes_.push_back(Pack::open(dir_.write("ops.tkpack", kernels_))->index_hash());
  roots_.push_back({names_[0].c_str(), hashes_[0].c_str()});
  reset_runtime_for_tests(roots_);
  expect_error(tk_set_builtin_directory(dir_.string().c_str()), TK_PACK_ERROR, {"ops.tkpack", "sm_90", "any GPU"});
}

TEST_F(DefinitionsTest, WithoutRootsTheyMustBeAskedFor) {
  dir_.write("ops.tkpack", ops_);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  EXPECT_TRUE(names().empty());
  reset_runtime_for_tests();
  setenv("TK_UNROOTED_PACKS", "1", 1);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  EXPECT_EQ(names().size(), 2u);
}

TEST_F(BuiltinTest, ThereIsOneDirectory) {
  install({});
  EXPECT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  expect_error(tk_set_builtin_directory("/elsewhere"), TK_PACK_ERROR, {dir_.string(), "/elsewhere"});
}

TEST_F(BuiltinTest, ADirectoryThatIsNotThereHasNoPacks) {
  ASSERT_EQ(tk_set_builtin_directory((dir_ / "none").c_str()), TK_OK);
  tk_choice choice;
  expect_error(choose("op", choice), TK_VARIANT_NOT_FOUND, {"\"op\""});
}

}  // namespace
}  // namespace tk::test
