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
  static PackSpec family(uint32_t arch) {
    PackSpec made = pack_for(arch, false, "op", "sm_" + std::to_string(arch) + "f");
    made.family = true;
    return made;
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

TEST_F(RegistryTest, TheCubinsOfAFamilyServeItsNewerGpus) {
  const std::vector<PackSpec> all = {ptx80, family(100), family(103), family(120), sm100};
  EXPECT_EQ(serving(10, 0, all), "sm_100") << "what is made for it alone goes before";
  EXPECT_EQ(serving(10, 0, {ptx80, family(100), family(103)}), "sm_100f");
  EXPECT_EQ(serving(10, 3, {ptx80, family(100), sm100}), "sm_100f");
  EXPECT_EQ(serving(10, 3, all), "sm_103f");
  EXPECT_EQ(serving(12, 0, all), "sm_120f");
  EXPECT_EQ(serving(12, 1, all), "sm_120f");
  EXPECT_EQ(serving(11, 0, all), "ptx80") << "of another family";
  EXPECT_EQ(serving(9, 0, {family(100)}), "status 2");
  EXPECT_EQ(serving(10, 0, {family(103), family(120)}), "status 2") << "nor on older GPUs of its own";
  for (const char* part : {"sm_103f", "sm_120f", "sm_100"})
    EXPECT_NE(std::string(tk_last_error()).find(part), std::string::npos) << tk_last_error();
}

TEST_F(RegistryTest, AFamilyIsListed) {
  load(family(100));
  EXPECT_EQ(packs().at(0).arch, 100u);
  EXPECT_EQ(packs().at(0).family, 1);
  EXPECT_EQ(packs().at(0).ptx, 0);
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

// --- The same op in several packs ---

// An op of one tensor that any number of packs may have: what it takes and returns is the same in all of them. Its only
// kernel is for a dtype and for columns of a certain size.
Op shared_op(const std::string& kernel, int64_t columns, int32_t dtype_number = 15, const std::string& meta = "{}") {
  Op op{.name = "flex_0123456789abcdef",
        .n_tensors = 2,
        .variants = {Variant{.kernel = kernel,
                             .constraints = {{size(0, 1) == columns, "its number of columns"}},
                             .launches = {Launch{.args = {pointer(0), pointer(1)}}}}},
        .outputs = {{dtype(0), {size(0, 0)}, {1}}},
        .params = {{.name = "x", .rank = 2}},
        .checks = {{dtype(0) == dtype_number, "x must be of its dtype"}},
        .meta = meta};
  op.schema = op.name + "(Tensor x, int config=-1, int mode=0) -> Tensor";
  return op;
}

class SharedOpTest : public RegistryTest {
 protected:
  static constexpr char kName[] = "flex_0123456789abcdef";
  static Call call(int64_t columns, int32_t dtype_number = 15) {
    return Call(kName, {make_tensor({4, columns}, dtype_number), make_tensor({4}, dtype_number)});
  }
  std::string kernel(int64_t columns, int32_t dtype_number = 15) {
    tk_choice choice{};
    Call made = call(columns, dtype_number);
    return tk_choose(made.get(), &choice) == TK_OK ? choice.kernel_name : tk_last_error();
  }
  std::string add(const std::string& file, const Op& op, uint32_t arch = 90) {
    const std::string path = dir_.write(file, {.ops = {op}, .arch = arch});
    EXPECT_EQ(tk_load_pack(path.c_str()), TK_OK) << tk_last_error();
    return path;
  }
};

TEST_F(SharedOpTest, TheFirstServesAndTheSecondAddsWhatItLacks) {
  add("first.tkpack", shared_op("first_64", 64));
  Op more = shared_op("second_64", 64);
  more.variants.push_back(shared_op("second_96", 96).variants[0]);
  add("second.tkpack", more);
  EXPECT_EQ(kernel(64), "first_64");
  EXPECT_EQ(kernel(96), "second_96");
  Call launch = call(96);
  EXPECT_EQ(launched(launch).size(), 1u);
  EXPECT_NE(kernel(100).find("first_64"), std::string::npos) << "what the first needs is said";
  uint32_t modules = 0;
  ASSERT_EQ(tk_preload(tk_intern_op(kName), 0, &modules), TK_OK) << tk_last_error();
  EXPECT_EQ(modules, 2u) << "of both packs";
}

TEST_F(SharedOpTest, AnotherDtypeComesFromAnotherPack) {
  add("bf16.tkpack", shared_op("bf16", 64, 15));
  add("fp32.tkpack", shared_op("fp32", 64, 6));
  EXPECT_EQ(kernel(64, 15), "bf16");
  EXPECT_EQ(kernel(64, 6), "fp32");
  EXPECT_NE(kernel(64, 5).find("x must be of its dtype"), std::string::npos);
  Call made(kName, {make_tensor({4, 64}, 6), absent_tensor()});
  tk_tensor out{};
  uint32_t count = 0;
  ASSERT_EQ(tk_outputs(made.get(), &out, 1, &count), TK_OK) << tk_last_error();
  EXPECT_EQ(out.dtype, 6) << "the outputs are those of the pack whose checks hold";
}

TEST_F(SharedOpTest, AConfigIsOneOfThePackThatServes) {
  add("first.tkpack", shared_op("first", 64));
  Op other = shared_op("other", 96);
  other.configs = {"slow", "fast"};
  other.variants[0].config = 1;
  add("second.tkpack", other);
  tk_choice choice{};
  Call made = call(96);
  made.call.config = 1;
  ASSERT_EQ(tk_choose(made.get(), &choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.config_name, "fast");
  EXPECT_EQ(choice.pack_path, (dir_ / "second.tkpack").string());
}

TEST_F(SharedOpTest, AMeasuredConfigIsKeptForThePackThatServes) {
  add("first.tkpack", shared_op("first", 64));
  Op other = shared_op("slow", 96);
  other.configs = {"one", "two"};
  other.variants.push_back(shared_op("two", 96).variants[0]);
  other.variants[1].config = 1;
  other.variants[1].cost = 5;
  add("second.tkpack", other);
  EXPECT_EQ(kernel(96), "slow");
  Call made = call(96);
  ASSERT_EQ(tk_pin(made.get(), 1), TK_OK) << tk_last_error();
  EXPECT_EQ(kernel(96), "two");
  EXPECT_EQ(kernel(64), "first");
}

TEST_F(SharedOpTest, AnotherDefinitionIsRefusedAndBothPacksAreNamed) {
  const auto first = add("first.tkpack", shared_op("first", 64));
  const auto second = dir_.write("second.tkpack", {.ops = {shared_op("second", 64, 15, "{\"other\": 1}")}});
  expect_error(tk_load_pack(second.c_str()), TK_PACK_ERROR, {first, second, "another one"});
  EXPECT_EQ(kernel(64), "first");
}

TEST_F(SharedOpTest, TheListsSayWhoServes) {
  const auto first = add("first.tkpack", shared_op("first", 64));
  add("second.tkpack", shared_op("second", 64));
  add("other.tkpack", shared_op("other", 64), 80);
  const auto loaded = packs();
  ASSERT_EQ(loaded.size(), 3u);
  EXPECT_EQ(ops(loaded[0].pack).at(0).served_by, nullptr);
  EXPECT_EQ(ops(loaded[1].pack).at(0).served_by, first);
  EXPECT_EQ(ops(loaded[2].pack).at(0).served_by, nullptr) << "it is for other GPUs";
}

TEST_F(SharedOpTest, AnOlderArchitectureServesWhatTheOwnLacks) {
  use({FakeGpu{.major = 8, .minor = 6}});
  add("sm80.tkpack", shared_op("sm_80", 96), 80);
  add("sm86.tkpack", shared_op("sm_86", 64), 86);
  EXPECT_EQ(kernel(64), "sm_86");
  EXPECT_EQ(kernel(96), "sm_80");
}

// --- A pack of several files ---

TEST_F(RegistryTest, ANameStandsForTheFilesOfAllArchitectures) {
  const std::vector<std::tuple<int, int, std::string>> wanted = {{8, 0, "sm_80"}, {8, 6, "sm_80"},  {8, 9, "sm_80"},
                                                                 {9, 0, "sm_90"}, {10, 0, "ptx80"}, {12, 0, "ptx80"}};
  for (const auto& [major, minor, expected] : wanted) {
    use({FakeGpu{.major = major, .minor = minor}});
    dir_.write("my.sm80.tkpack", sm80);
    dir_.write("my.sm90.tkpack", sm90);
    dir_.write("my.ptx80.tkpack", ptx80);
    dir_.write("my.other.tkpack", pack_for(90, false, "other"));
    dir_.write("not_my.sm90.tkpack", pack_for(90, false, "other"));
    ASSERT_EQ(tk_load_pack((dir_ / "my.tkpack").c_str()), TK_OK) << tk_last_error();
    EXPECT_EQ(packs().size(), 3u);
    tk_choice choice{};
    ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
    EXPECT_EQ(choice.kernel_name, expected);
  }
}

TEST_F(RegistryTest, AFileOfThatNameStandsForItselfAlone) {
  dir_.write("my.tkpack", pack_for(90, false, "mine"));
  dir_.write("my.sm90.tkpack", sm90);
  ASSERT_EQ(tk_load_pack((dir_ / "my.tkpack").c_str()), TK_OK) << tk_last_error();
  EXPECT_EQ(packs().size(), 1u);
}

TEST_F(RegistryTest, APackOfSeveralFilesIsFoundInTheCurrentFolder) {
  const auto before = std::filesystem::current_path();
  dir_.write("my.sm90.tkpack", sm90);
  std::filesystem::current_path(dir_.string());
  EXPECT_EQ(tk_load_pack("my.tkpack"), TK_OK) << tk_last_error();
  std::filesystem::current_path(before);
}

TEST_F(RegistryTest, AdviceNamesAnArchitectureThatCanBeBuilt) {
  const std::vector<std::tuple<int, int, std::string>> wanted = {
      {8, 0, "--arch 80"},     {8, 6, "--arch 80"},     {8, 9, "--arch 80"},       {9, 0, "--arch 90"},
      {10, 0, "--arch ptx80"}, {12, 1, "--arch ptx80"}, {7, 5, "older than sm_80"}};
  for (const auto& [major, minor, expected] : wanted) {
    use({FakeGpu{.major = major, .minor = minor}});
    tk_choice choice{};
    expect_error(choose("missing", choice), TK_VARIANT_NOT_FOUND, {expected});
  }
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

  static void expect_no(const std::string& part) {
    EXPECT_EQ(std::string(tk_last_error()).find(part), std::string::npos) << tk_last_error();
  }

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

// --- What a message advises does what it says ---

TEST_F(BuiltinTest, AnOwnOpWithoutAKernelIsNotForAUsersFileToDeclare) {
  PackSpec of_another_key = sm90;
  of_another_key.ops[0].variants[0].bucket = 7;
  install({{"sm90.tkpack", of_another_key}, {"sm80.tkpack", pack_for(80, false, "of_sm80")}});
  tk_choice choice;
  expect_error(choose("op", choice), TK_VARIANT_NOT_FOUND,
               {"no kernel was compiled", "python -m tk list --op op lists"});
  expect_no(" build ");
  expect_error(choose("of_sm80", choice), TK_VARIANT_NOT_FOUND,
               {"it is there for sm_80", "python -m tk list --op of_sm80 lists"});
  expect_no(" build ");
  expect_no("load_pack");
}

TEST_F(BuiltinTest, AnOpThatNoneHasIsNotSaidToBeThere) {
  install({{"sm90.tkpack", sm90}, {"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  tk_choice choice;
  expect_error(choose("missing", choice), TK_VARIANT_NOT_FOUND,
               {"tk.load_pack", "python -m tk build FILE.py -o my.tkpack --arch 90"});
  expect_no("it is there for");
  expect_no("tk list");
}

TEST_F(BuiltinTest, OwnKernelsForAnotherGpuAreCompiledAndLoaded) {
  use({FakeGpu{.major = 8, .minor = 6}});
  install({{"sm90.tkpack", sm90}});
  tk_choice choice;
  expect_error(choose("op", choice), TK_UNSUPPORTED,
               {"there are kernels for sm_90", "python -m tk build --all -o FOLDER --arch 80",
                "tk.load_pack('FOLDER/sm80.tkpack')"});
  ASSERT_EQ(tk_load_pack(dir_.write("made.tkpack", sm80).c_str()), TK_OK) << tk_last_error();
  ASSERT_EQ(choose("op", choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "sm_80");
}

TEST_F(BuiltinTest, AUsersOpIsDeclaredInItsFile) {
  install({{"sm90.tkpack", sm90}, {"sm80.tkpack", sm80}});
  ASSERT_EQ(tk_load_pack(dir_.write("users.tkpack", pack_for(80, false, "users")).c_str()), TK_OK);
  tk_choice choice;
  expect_error(choose("users", choice), TK_VARIANT_NOT_FOUND,
               {"it is there for sm_80;", "python -m tk build FILE.py -o my.tkpack --arch 90"});
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

// --- Packs of add-on packages ---

class AddedTest : public BuiltinTest {
 protected:
  // The pack that serves a GPU where the library has some of its own and a folder is added, before or after these.
  std::string serving_with(int major, int minor, bool added_first) {
    use({FakeGpu{.major = major, .minor = minor}});
    reset_runtime_for_tests(roots_);
    const auto add = [&] { EXPECT_EQ(tk_add_pack_directory(added_.string().c_str()), TK_OK) << tk_last_error(); };
    if (added_first) add();
    EXPECT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK) << tk_last_error();
    if (!added_first) add();
    tk_choice choice{};
    return choose("op", choice) == TK_OK ? choice.kernel_name : tk_last_error();
  }
  TempDir added_;
};

TEST_F(AddedTest, ServesTheGpusThatItIsFor) {
  install({{"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  added_.write("sm100.tkpack", sm100);
  for (const bool added_first : {false, true}) {
    EXPECT_EQ(serving_with(8, 0, added_first), "sm_80");
    EXPECT_EQ(serving_with(8, 9, added_first), "sm_80");
    EXPECT_EQ(serving_with(9, 0, added_first), "ptx80");
    EXPECT_EQ(serving_with(10, 0, added_first), "sm_100");
    EXPECT_EQ(serving_with(10, 3, added_first), "ptx80");
    EXPECT_EQ(serving_with(12, 0, added_first), "ptx80");
  }
}

TEST_F(AddedTest, ServesTheFamilyThatItIsFor) {
  install({{"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  added_.write("sm100f.tkpack", family(100));
  added_.write("sm120f.tkpack", family(120));
  added_.write("sm120ff.tkpack", family(120));
  added_.write("ptx100f.tkpack", family(100));
  EXPECT_EQ(serving_with(8, 0, false), "sm_80");
  EXPECT_EQ(serving_with(9, 0, false), "ptx80");
  EXPECT_EQ(serving_with(10, 0, false), "sm_100f");
  EXPECT_EQ(serving_with(10, 3, false), "sm_100f");
  EXPECT_EQ(serving_with(12, 1, false), "sm_120f");
}

TEST_F(AddedTest, WhereNothingFitsTheMessageNamesItToo) {
  install({{"sm80.tkpack", sm80}});
  added_.write("sm100.tkpack", sm100);
  const std::string said = serving_with(12, 0, false);
  for (const char* part : {"sm_120", "sm_80", "sm_100"}) EXPECT_NE(said.find(part), std::string::npos) << said;
}

TEST_F(AddedTest, ADamagedPackFailsWhereItIsNeededAlone) {
  install({{"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  added_.write("sm100.tkpack", family(100));
  EXPECT_EQ(serving_with(8, 0, false), "sm_80");
  const std::string said = serving_with(10, 0, false);
  EXPECT_NE(said.find("sm100.tkpack is for sm_100f, not what its name says"), std::string::npos) << said;
}

TEST_F(AddedTest, AFolderMustHavePacksForWhatTheLibraryHasNone) {
  install({{"sm80.tkpack", sm80}, {"ptx80.tkpack", ptx80}});
  expect_error(tk_add_pack_directory(added_.string().c_str()), TK_PACK_ERROR, {added_.string(), "no packs"});
  expect_error(tk_add_pack_directory("/no/such"), TK_PACK_ERROR, {"/no/such", "no packs"});
  expect_error(tk_add_pack_directory(nullptr), TK_INVALID_ARGUMENT, {"path"});
  added_.write("sm100.tkpack", sm100);
  added_.write("sm80.tkpack", sm80);
  const std::string own = (dir_ / "sm80.tkpack").string();
  expect_error(tk_add_pack_directory(added_.string().c_str()), TK_PACK_ERROR,
               {(added_ / "sm80.tkpack").string(), own, "leave one of them out"});
}

TEST_F(AddedTest, IsAddedOnce) {
  install({{"sm80.tkpack", sm80}});
  added_.write("sm100.tkpack", sm100);
  for (int i = 0; i < 2; i++) ASSERT_EQ(tk_add_pack_directory(added_.string().c_str()), TK_OK) << tk_last_error();
  uint32_t count = 0;
  ASSERT_EQ(tk_list_packs(nullptr, 0, &count), TK_OK);
  EXPECT_EQ(count, 2u);
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

TEST_F(BuiltinTest, ServesBeforeAUsersPackWithTheSameOp) {
  const auto shared = [](const std::string& kernel) {
    Op op{.name = "gelu",
          .n_tensors = 1,
          .schema = "gelu(Tensor(a!) x, int config=-1, int mode_bits=0) -> ()",
          .params = {{.name = "x", .flags = format::kMutated}}};
    op.variants[0].kernel = kernel;
    return op;
  };
  install({{"sm90.tkpack", {.ops = {shared("ours")}}}});
  load(PackSpec{.ops = {shared("theirs")}});
  tk_choice choice;
  Call call("gelu", {make_tensor({})});
  ASSERT_EQ(tk_choose(call.get(), &choice), TK_OK) << tk_last_error();
  EXPECT_STREQ(choice.kernel_name, "ours");
  EXPECT_EQ(ops(packs().at(1).pack).at(0).served_by, (dir_ / "sm90.tkpack").string());
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
