#include "inspect.h"

#include "fake_driver.h"

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
  const auto packs = inspect::packs();
  ASSERT_EQ(packs.size(), 1u);
  EXPECT_EQ(packs[0].path, path);
  EXPECT_FALSE(packs[0].builtin);
  EXPECT_EQ(packs[0].problem, "");
  EXPECT_EQ(packs[0].arch, 90u);
  EXPECT_EQ(packs[0].compiler, "test compiler 1.0");
  EXPECT_EQ(packs[0].hash.size(), 64u);
  EXPECT_EQ(packs[0].file_size, std::filesystem::file_size(path));
  EXPECT_EQ(packs[0].n_images, 2u) << "equal images are one";
  ASSERT_EQ(packs[0].ops.size(), 2u);
  const inspect::Op& op = packs[0].ops[0];
  EXPECT_EQ(op.name, "op");
  EXPECT_EQ(op.schema, "op(Tensor x, int config=-1, int mode=0) -> ()");
  EXPECT_EQ(op.n_variants, 2u);
  EXPECT_EQ(op.n_buckets, 1u);
  ASSERT_EQ(op.configs.size(), 2u);
  EXPECT_EQ(op.configs[1].name, "fast");
  EXPECT_EQ(op.configs[1].params, "{\"number\": 1}");
}

TEST_F(InspectTest, ListsVariants) {
  const auto path = dir_.write("p.tkpack", {.ops = {Op{.name = "first"}, sample()}});
  ASSERT_EQ(tk_load_pack(path.c_str()), TK_OK);
  const auto variants = inspect::variants(path, "op");
  ASSERT_EQ(variants.size(), 2u);
  EXPECT_EQ(variants[0].number, 1u) << "counted through the pack";
  EXPECT_EQ(variants[0].kernel, "fast");
  EXPECT_EQ(variants[0].config_name, "fast");
  EXPECT_FALSE(variants[0].general);
  EXPECT_TRUE(variants[0].deterministic);
  EXPECT_EQ(variants[0].constraints, std::vector<std::string>{"nothing"});
  ASSERT_EQ(variants[0].launches.size(), 2u);
  EXPECT_EQ(variants[0].launches[0].entry, "entry");
  EXPECT_EQ(variants[0].launches[0].threads, 256u);
  EXPECT_EQ(variants[0].launches[0].shared, 4096u);
  EXPECT_EQ(variants[0].launches[0].cluster, 2u);
  EXPECT_EQ(variants[0].launches[0].size, std::string("FAKE entry 4").size());
  EXPECT_TRUE(variants[1].general);
  EXPECT_FALSE(variants[1].deterministic);
  EXPECT_THROW(inspect::variants(path, "missing"), std::out_of_range);
  EXPECT_THROW(inspect::variants("elsewhere", "op"), std::out_of_range);
}

TEST_F(InspectTest, ShowsABuiltinPackThatIsDamaged) {
  const auto path = dir_.write("sm90.tkpack", {});
  const std::string hash = Pack::open(path)->index_hash();
  const Root roots[] = {{"sm90.tkpack", hash.c_str()}};
  reset_runtime_for_tests(roots);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  EXPECT_EQ(inspect::packs().at(0).problem, "");
  reset_runtime_for_tests(roots);
  ASSERT_EQ(tk_set_builtin_directory(dir_.string().c_str()), TK_OK);
  std::filesystem::resize_file(path, 100);
  const auto packs = inspect::packs();
  ASSERT_EQ(packs.size(), 1u);
  EXPECT_TRUE(packs[0].builtin);
  EXPECT_NE(packs[0].problem.find("no pack"), std::string::npos) << packs[0].problem;
  EXPECT_TRUE(packs[0].ops.empty());
}

TEST_F(InspectTest, VerifiesImages) {
  const auto path = dir_.write("p.tkpack", {});
  EXPECT_EQ(inspect::verify(path), "");
  std::string bytes = pack_bytes({});
  bytes.back() = static_cast<char>(bytes.back() ^ 0x55);
  write_file(path, bytes);
  EXPECT_NE(inspect::verify(path).find("damaged"), std::string::npos) << inspect::verify(path);
  EXPECT_NE(inspect::verify("nowhere").find("No such file"), std::string::npos);
}

}  // namespace
}  // namespace tk::test
