#include "fake_driver.h"
#include "listing.h"

namespace tk::test {
namespace {

class InspectTest : public CoreTest {
 protected:
  static Op sample() {
    Launch launch{.entry = "entry", .args = {integer(1)}, .threads = 256, .shared = 4096, .cluster = 2};
    Variant fast{.kernel = "fast", .config = 1, .constraints = {{1, "nothing"}}, .launches = {launch, Launch{}}};
    Variant any{.kernel = "any", .flags = format::kGeneral | format::kNonDeterministic};
    return {.name = "op",
            .n_tensors = 1,
            .configs = {"any", "fast"},
            .variants = {fast, any},
            .schema = "op(Tensor x, int config=-1, int mode=0) -> ()",
            .params = {{.name = "x"}}};
  }
};

TEST_F(InspectTest, ListsPacks) {
  const auto path = dir_.write("p.tkpack", {.ops = {sample(), Op{.name = "second"}}});
  ASSERT_EQ(tk_load_pack(path.c_str()), TK_OK);
  const auto rows = packs();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NE(rows[0].pack, nullptr);
  EXPECT_EQ(rows[0].path, path);
  EXPECT_EQ(rows[0].problem, nullptr);
  EXPECT_EQ(rows[0].builtin, 0);
  EXPECT_EQ(rows[0].arch, 90u);
  EXPECT_EQ(rows[0].ptx, 0);
  EXPECT_STREQ(rows[0].compiler, "test compiler 1.0");
  EXPECT_EQ(rows[0].hash, Pack::open(path)->index_hash());
  EXPECT_EQ(rows[0].file_size, std::filesystem::file_size(path));
  EXPECT_EQ(rows[0].n_images, 2u) << "equal images are one";
}

TEST_F(InspectTest, ListsPtx) {
  load(PackSpec{.arch = 80, .ptx = true});
  EXPECT_EQ(packs().at(0).arch, 80u);
  EXPECT_EQ(packs().at(0).ptx, 1);
}

TEST_F(InspectTest, ListsOpsAndConfigs) {
  load({sample(), Op{.name = "second", .n_tensors = 1, .outputs = {{dtype(0), {1}, {1}}}}});
  const tk_pack* const pack = packs().at(0).pack;
  const auto rows = ops(pack);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_STREQ(rows[0].name, "op");
  EXPECT_STREQ(rows[0].schema, "op(Tensor x, int config=-1, int mode=0) -> ()");
  EXPECT_EQ(rows[0].n_variants, 2u);
  EXPECT_EQ(rows[0].n_buckets, 1u);
  EXPECT_EQ(rows[0].n_configs, 2u);
  EXPECT_EQ(rows[0].n_pins, 0u);
  EXPECT_STREQ(rows[1].name, "second");
  EXPECT_EQ(rows[1].n_tensors, 1u);
  EXPECT_EQ(rows[1].n_outputs, 1u);
  const auto names = configs(pack, "op");
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(names[1].number, 1u);
  EXPECT_STREQ(names[1].name, "fast");
  EXPECT_STREQ(names[1].params, "{\"number\": 1}");
}

TEST_F(InspectTest, ListsVariants) {
  load({Op{.name = "first"}, sample()});
  const tk_pack* const pack = packs().at(0).pack;
  const auto rows = variants(pack, "op");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].number, 1u) << "counted through the pack";
  EXPECT_EQ(rows[0].config, 1u);
  EXPECT_STREQ(rows[0].kernel, "fast");
  EXPECT_STREQ(rows[0].config_name, "fast");
  EXPECT_EQ(rows[0].general, 0);
  EXPECT_EQ(rows[0].deterministic, 1);
  EXPECT_EQ(rows[1].general, 1);
  EXPECT_EQ(rows[1].deterministic, 0);
  const auto needs = constraints(pack, "op");
  ASSERT_EQ(needs.size(), 1u);
  EXPECT_EQ(needs[0].variant, 1u);
  EXPECT_STREQ(needs[0].message, "nothing");
}

TEST_F(InspectTest, ListsLaunches) {
  load({Op{.name = "first"}, sample()});
  const auto rows = launches(packs().at(0).pack, "op");
  ASSERT_EQ(rows.size(), 3u) << "two of the first variant, one of the second";
  EXPECT_EQ(rows[0].variant, 1u);
  EXPECT_EQ(rows[1].variant, 1u);
  EXPECT_EQ(rows[2].variant, 2u);
  EXPECT_STREQ(rows[0].entry, "entry");
  EXPECT_EQ(rows[0].threads, 256u);
  EXPECT_EQ(rows[0].shared, 4096u);
  EXPECT_EQ(rows[0].cluster, 2u);
  EXPECT_EQ(rows[0].size, std::string("FAKE entry 4").size());
  EXPECT_GT(rows[0].compressed_size, 0u);
  EXPECT_STRNE(rows[0].image, "");
}

TEST_F(InspectTest, GivesAsManyRowsAsThereIsRoomFor) {
  load({sample()});
  const tk_pack* const pack = packs().at(0).pack;
  tk_variant_info rows[2] = {{}, {.number = 77}};
  uint32_t count = 0;
  ASSERT_EQ(tk_list_variants(pack, "op", rows, 1, &count), TK_OK);
  EXPECT_EQ(count, 2u);
  EXPECT_STREQ(rows[0].kernel, "fast");
  EXPECT_EQ(rows[1].number, 77u) << "beyond the capacity";
  ASSERT_EQ(tk_list_variants(pack, "op", nullptr, 0, &count), TK_OK);
  EXPECT_EQ(count, 2u);
}

TEST_F(InspectTest, RefusesWhatItDidNotGiveOut) {
  load({sample()});
  const tk_pack* const pack = packs().at(0).pack;
  tk_op_info op_row;
  tk_pack_info pack_row;
  uint32_t count = 77;
  expect_error(tk_list_packs(nullptr, 1, &count), TK_INVALID_ARGUMENT, {"rows is NULL"});
  expect_error(tk_list_packs(&pack_row, 1, nullptr), TK_INVALID_ARGUMENT, {"count is NULL"});
  // NULL, the address of something else, and one where nothing is.
  for (const void* wrong : {static_cast<const void*>(nullptr), static_cast<const void*>(&op_row),
                            static_cast<const void*>(reinterpret_cast<const char*>(pack) + 1),
                            reinterpret_cast<const void*>(uintptr_t{16})}) {
    const auto* const handle = static_cast<const tk_pack*>(wrong);
    expect_error(tk_list_ops(handle, &op_row, 1, &count), TK_INVALID_ARGUMENT, {"tk_list_packs did not give out"});
    expect_error(tk_list_configs(handle, "op", nullptr, 0, &count), TK_INVALID_ARGUMENT, {"did not give out"});
    expect_error(tk_list_variants(handle, "op", nullptr, 0, &count), TK_INVALID_ARGUMENT, {"did not give out"});
    expect_error(tk_list_constraints(handle, "op", nullptr, 0, &count), TK_INVALID_ARGUMENT, {"did not give out"});
    expect_error(tk_list_launches(handle, "op", nullptr, 0, &count), TK_INVALID_ARGUMENT, {"did not give out"});
  }
  for (const char* wrong : {"missing", "", "op ", "o"}) {
    expect_error(tk_list_configs(pack, wrong, nullptr, 0, &count), TK_INVALID_ARGUMENT, {"has no op", wrong});
    expect_error(tk_list_variants(pack, wrong, nullptr, 0, &count), TK_INVALID_ARGUMENT, {"has no op", wrong});
    expect_error(tk_list_constraints(pack, wrong, nullptr, 0, &count), TK_INVALID_ARGUMENT, {"has no op", wrong});
    expect_error(tk_list_launches(pack, wrong, nullptr, 0, &count), TK_INVALID_ARGUMENT, {"has no op", wrong});
  }
  expect_error(tk_list_launches(pack, nullptr, nullptr, 0, &count), TK_INVALID_ARGUMENT, {"op is NULL"});
  expect_error(tk_describe_device(132, 90, 232448, 50 << 20, nullptr), TK_INVALID_ARGUMENT, {"device is NULL"});
  EXPECT_EQ(count, 77u) << "a failure writes nothing";
}

TEST_F(InspectTest, ShowsABuiltinPackThatIsDamaged) {
  const auto path = dir_.write("sm90.tkpack", {});
  const std::string hash = Pack::open(path)->index_hash();
  const Root roots[] = {{"sm90.tkpack", hash.c_str()}};
  reset_runtime_for_tests(roots);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  EXPECT_EQ(packs().at(0).problem, nullptr);
  EXPECT_EQ(packs().at(0).builtin, 1);
  reset_runtime_for_tests(roots);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  std::filesystem::resize_file(path, 100);
  const auto rows = packs();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].builtin, 1);
  EXPECT_EQ(rows[0].path, path);
  EXPECT_NE(std::string(rows[0].problem).find("no pack"), std::string::npos) << rows[0].problem;
  EXPECT_EQ(rows[0].pack, nullptr);
  EXPECT_EQ(rows[0].compiler, nullptr);
  EXPECT_EQ(packs().at(0).problem, rows[0].problem) << "one copy of a text, however often it is asked for";
}

TEST_F(InspectTest, VerifiesImages) {
  const auto path = dir_.write("p.tkpack", {.ops = {sample()}});
  uint32_t images = 0;
  EXPECT_EQ(tk_verify_pack(path.c_str(), &images), TK_OK) << tk_last_error();
  EXPECT_EQ(images, 2u);
  EXPECT_EQ(tk_verify_pack(path.c_str(), nullptr), TK_OK);
  EXPECT_TRUE(packs().empty()) << "verifying loads nothing";
  std::string bytes = pack_bytes({.ops = {sample()}});
  bytes.back() = static_cast<char>(bytes.back() ^ 0x55);
  write_file(path, bytes);
  expect_error(tk_verify_pack(path.c_str(), &images), TK_PACK_ERROR, {path, "damaged"});
  expect_error(tk_verify_pack("nowhere", &images), TK_PACK_ERROR, {"nowhere", "No such file"});
  expect_error(tk_verify_pack(nullptr, &images), TK_INVALID_ARGUMENT, {"path is NULL"});
}

}  // namespace
}  // namespace tk::test
