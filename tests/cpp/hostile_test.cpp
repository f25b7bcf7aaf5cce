// Packs made to do harm. Each must be refused, or do none: the sanitizers watch.

#include <cstring>
#include <numeric>
#include <random>

#include "fake_driver.h"
#include "listing.h"

namespace tk::test {
namespace {

// Small, but with something in every section.
PackSpec small_pack() {
  Map map{.tensor = 0, .sizes = {size(0, 0), size(0, 1)}, .strides = {stride(0, 0), 1}, .box = {8, 8}};
  Launch launch{
      .args = {pointer(0), integer(local(0)), floating(0), tensor_map(map), buffer(0), buffer(1), global_scratch()},
      .grid = {local(0), 1, 1},
      .global_scratch = 128};
  Variant variant{.constraints = {{size(0, 1) == 16, "N = 16"}},
                  .locals = {local(0) + 1},
                  .cost = local(1),
                  .buffers = {{format::BufferKind::Scratch, 64}, {format::BufferKind::Counters, 64}},
                  .launches = {launch}};
  Op op{.name = "op",
        .n_tensors = 2,
        .n_ints = 1,
        .n_floats = 1,
        .locals = {size(0, 0)},
        .key = int_arg(0),
        .dims = {0},
        .variants = {variant},
        .outputs = {{dtype(0), {size(0, 0)}, {1}}},
        .pins = {{0, {5}, 0}},
        .schema = "op(Tensor(a!) x, bool way=True, float alpha=0.5, int config=-1, int mode_bits=0) -> Tensor",
        .params = {{.name = "x", .flags = format::kMutated, .rank = 2},
                   {.name = "way", .kind = format::ParamKind::Bool, .default_value = "True"},
                   {.name = "alpha", .kind = format::ParamKind::Float, .default_value = "0.5"}},
        .checks = {{size(0, 1) == 16, "x with 16 columns"}},
        .meta = "{}"};
  return {.ops = {op}, .images_per_frame = 2};
}

class Hostile : public CoreTest {
 protected:
  // Reads every text, so that the sanitizers see where it ends.
  static void list_everything() {
    std::string text;
    for (const tk_pack_info& pack : packs()) {
      for (const tk_op_info& op : ops(pack.pack)) {
        EXPECT_EQ(configs(pack.pack, op.name).size(), op.n_configs);
        EXPECT_EQ(variants(pack.pack, op.name).size(), op.n_variants);
        for (const tk_constraint_info& row : constraints(pack.pack, op.name)) text += row.message;
        for (const tk_launch_info& row : launches(pack.pack, op.name)) text = text + row.image + row.entry;
      }
      text = text + pack.path + pack.compiler;
    }
    EXPECT_FALSE(text.empty());
  }

  // Loads bytes in place of a pack and, if they are taken, uses them for everything.
  bool survives(const std::string& bytes) {
    reset_runtime_for_tests();
    write_file(path_, bytes);
    const tk_status status = tk_load_pack(path_.c_str());
    if (status != TK_OK) {
      EXPECT_EQ(status, TK_PACK_ERROR) << tk_last_error();
      return false;
    }
    for (const int64_t rows : {8, 5}) {
      Call call("op", {make_tensor({rows, 16}), absent_tensor()}, {0}, {1.5});
      tk_choice choice;
      tk_candidate candidates[4];
      tk_tensor outputs[4];
      uint32_t count = 0;
      tk_choose(call.get(), &choice);
      tk_candidates(call.get(), candidates, 4, &count);
      tk_outputs(call.get(), outputs, 4, &count);
      tk_launch(call.get(), nullptr, nullptr);
      tk_pin(call.get(), 0);
    }
    tk_preload(UINT32_MAX, 0, nullptr);
    register_ops();
    list_everything();
    return true;
  }

  // Reads all that a library registers ops by.
  static void register_ops() {
    size_t read = 0;
    const auto code = [&](const tk_code& c) { read += std::accumulate(c.words, c.words + c.count, size_t{0}); };
    for (uint32_t i = 0; const tk_generated_op* const op = tk_generated_op_at(i); i++) {
      for (const char* text : {op->name, op->schema, op->meta, op->backward, op->twin_schema, op->pack_path})
        read += std::strlen(text);
      for (uint32_t p = 0; p < op->n_params; p++)
        read += std::strlen(op->params[p].name) + std::strlen(op->params[p].default_value);
      for (uint32_t l = 0; l < op->n_locals; l++) code(op->locals[l]);
      for (uint32_t c = 0; c < op->n_checks; c++) {
        code(op->checks[c].holds);
        read += std::strlen(op->checks[c].message);
      }
      for (uint32_t r = 0; r < op->n_results; r++) {
        code(op->results[r].dtype);
        ASSERT_LE(op->results[r].ndim, 8u);
        for (uint32_t d = 0; d < op->results[r].ndim; d++) {
          code(op->results[r].sizes[d]);
          code(op->results[r].strides[d]);
        }
      }
    }
    ASSERT_NE(read, 1u);  // that it was read at all is what the sanitizers need
  }

  const std::filesystem::path path_ = dir_ / "hostile.tkpack";
};

uint64_t index_size(const std::string& bytes) {
  return reinterpret_cast<const format::Header*>(bytes.data())->index_size;
}

TEST_F(Hostile, TheUnchangedPackWorks) {
  ASSERT_TRUE(survives(pack_bytes(small_pack())));
  EXPECT_FALSE(fake().launches().empty()) << "the rest of these tests would prove little";
}

TEST_F(Hostile, EveryFlippedByteOfTheIndexIsRefused) {
  const std::string bytes = pack_bytes(small_pack());
  for (size_t at = 0; at < index_size(bytes); at++) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << at % 8));
    EXPECT_FALSE(survives(flipped)) << "byte " << at;
  }
}

// The same by someone who can compute a hash.
TEST_F(Hostile, EveryFlippedByteWithTheRightHashIsHarmless) {
  const std::string bytes = pack_bytes(small_pack());
  int refused = 0;
  int taken = 0;
  for (size_t at = 0; at < index_size(bytes); at++) {
    for (const int mask : {0xff, 1 << at % 8}) {
      std::string flipped = bytes;
      flipped[at] = static_cast<char>(flipped[at] ^ mask);
      rehash(flipped);
      (survives(flipped) ? taken : refused)++;
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(taken, 100) << "flips of constants and names are legal packs";
}

TEST_F(Hostile, RandomWordsWithTheRightHashAreHarmless) {
  const std::string bytes = pack_bytes(small_pack());
  std::mt19937 random(99);
  const uint32_t words[] = {0, 1, 2, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffe, 64, 1u << 20};
  for (int i = 0; i < 3000; i++) {
    std::string changed = bytes;
    for (int n = 1 + static_cast<int>(random() % 2); n > 0; n--) {
      const size_t at = sizeof(format::Header) + random() % ((index_size(bytes) - sizeof(format::Header)) / 4) * 4;
      const uint32_t word = words[random() % std::size(words)];
      std::memcpy(changed.data() + at, &word, std::min<size_t>(4, changed.size() - at));
    }
    rehash(changed);
    survives(changed);
  }
}

TEST_F(Hostile, EveryTruncationIsRefused) {
  const std::string bytes = pack_bytes(small_pack());
  const auto* const header = reinterpret_cast<const format::Header*>(bytes.data());
  std::vector<uint64_t> cuts = {
      0, 1, 8, sizeof(format::Header) - 1, sizeof(format::Header), header->index_size, bytes.size() - 1};
  for (const auto& [offset, size] : header->sections) {
    for (const uint64_t cut : {offset, offset + 1, offset + size, offset + size - (size > 0)}) cuts.push_back(cut);
  }
  for (const uint64_t cut : cuts) EXPECT_FALSE(survives(bytes.substr(0, cut))) << cut << " of " << bytes.size();
}

TEST_F(Hostile, TruncationsThatAdmitTheirSizeAreRefused) {
  const std::string bytes = pack_bytes(small_pack());
  for (uint64_t cut = sizeof(format::Header); cut < bytes.size(); cut += 5) {
    std::string shorter = bytes.substr(0, cut);
    std::memcpy(shorter.data() + offsetof(format::Header, file_size), &cut, sizeof cut);
    if (cut < index_size(bytes)) std::memcpy(shorter.data() + offsetof(format::Header, index_size), &cut, sizeof cut);
    rehash(shorter);
    EXPECT_FALSE(survives(shorter)) << cut;
  }
}

// Promises are held against the file before anything is allocated for them.
TEST_F(Hostile, HugePromisesAreRefused) {
  const std::string bytes = pack_bytes(small_pack());
  const uint64_t huge = uint64_t{1} << 60;
  std::vector<size_t> fields = {offsetof(format::Header, file_size), offsetof(format::Header, index_size)};
  for (size_t s = 0; s < static_cast<size_t>(format::Section::Count); s++) {
    fields.push_back(offsetof(format::Header, sections) + s * sizeof(format::SectionEntry));
    fields.push_back(fields.back() + sizeof(uint64_t));
  }
  const auto* const header = reinterpret_cast<const format::Header*>(bytes.data());
  const uint64_t images = header->sections[static_cast<size_t>(format::Section::Images)].offset;
  for (const size_t field : {offsetof(format::Image, begin), offsetof(format::Image, size)})
    fields.push_back(images + field);
  const uint64_t frames = header->sections[static_cast<size_t>(format::Section::Frames)].offset;
  for (const size_t field :
       {offsetof(format::Frame, offset), offsetof(format::Frame, compressed_size), offsetof(format::Frame, size)})
    fields.push_back(frames + field);
  for (const size_t field : fields) {
    for (const uint64_t value : {huge, ~uint64_t{0}, ~uint64_t{7}}) {
      std::string changed = bytes;
      std::memcpy(changed.data() + field, &value, sizeof value);
      rehash(changed);
      EXPECT_FALSE(survives(changed)) << "field at " << field;
    }
  }
}

// Lists that share everything with each other must not make verification quadratic.
TEST_F(Hostile, ListsThatReferToEachOtherWithoutEndAreRefused) {
  PackSpec spec = small_pack();
  Op& op = spec.ops[0];
  op.variants.resize(5000, op.variants[0]);
  std::string bytes = pack_bytes(spec);
  auto* const header = reinterpret_cast<format::Header*>(bytes.data());
  const auto& section = header->sections[static_cast<size_t>(format::Section::Variants)];
  const uint32_t launches = static_cast<uint32_t>(
      header->sections[static_cast<size_t>(format::Section::Launches)].size / sizeof(format::Launch));
  for (uint64_t i = 0; i < section.size / sizeof(format::Variant); i++) {
    const format::Range all{0, launches};
    std::memcpy(bytes.data() + section.offset + i * sizeof(format::Variant) + offsetof(format::Variant, launches), &all,
                sizeof all);
  }
  rehash(bytes);
  EXPECT_FALSE(survives(bytes));
  EXPECT_NE(std::string(tk_last_error()).find("without end"), std::string::npos) << tk_last_error();
}

// --- What the format forbids, one by one ---

class Forbidden : public Hostile {
 protected:
  void refuse(const std::function<void(PackSpec&)>& change, const std::string& part) {
    PackSpec spec = small_pack();
    change(spec);
    EXPECT_FALSE(survives(pack_bytes(spec))) << part;
    EXPECT_NE(std::string(tk_last_error()).find(part), std::string::npos) << tk_last_error();
  }
  static Variant& variant(PackSpec& spec) { return spec.ops[0].variants[0]; }
  static Launch& launch(PackSpec& spec) { return variant(spec).launches[0]; }
};

TEST_F(Forbidden, ReadingWhatIsNotThere) {
  refuse([](PackSpec& s) { s.ptx = s.family = true; }, "unknown flags");
  refuse([](PackSpec& s) { s.ops[0].key = size(2, 0); }, "key");
  refuse([](PackSpec& s) { s.ops[0].key = int_arg(1); }, "key");
  refuse([](PackSpec& s) { s.ops[0].key = local(1); }, "key");
  refuse([](PackSpec& s) { s.ops[0].locals = {local(0)}; }, "local");
  refuse([](PackSpec& s) { s.ops[0].dims = {1}; }, "no local");
  refuse([](PackSpec& s) { variant(s).constraints[0].holds = local(1); }, "constraint");
  refuse([](PackSpec& s) { variant(s).locals = {local(1)}; }, "local");
  refuse([](PackSpec& s) { variant(s).cost = local(2); }, "variant reads");
  refuse([](PackSpec& s) { launch(s).grid[1] = local(2); }, "variant reads");
  refuse([](PackSpec& s) { launch(s).when = int_arg(1); }, "variant reads");
  refuse([](PackSpec& s) { launch(s).dependent = int_arg(1); }, "variant reads");
  refuse([](PackSpec& s) { launch(s).args[0].index = 2; }, "variant reads");
  refuse([](PackSpec& s) { launch(s).args[0].index = UINT32_MAX; }, "argument");
  refuse([](PackSpec& s) { launch(s).args[2].index = 1; }, "variant reads");
  refuse([](PackSpec& s) { launch(s).args[3].map.tensor = 2; }, "variant reads");
  refuse([](PackSpec& s) { s.ops[0].checks[0].holds = local(1); }, "check");
  refuse([](PackSpec& s) { launch(s).args[4].index = 2; }, "variant reads");
  refuse([](PackSpec& s) { s.ops[0].outputs[0].sizes[0] = local(1); }, "output");
  refuse([](PackSpec& s) { variant(s).config = 1; }, "config");
  refuse([](PackSpec& s) { s.ops[0].pins[0].config = 1; }, "pin");
}

TEST_F(Forbidden, WhatNoGpuCanDo) {
  refuse([](PackSpec& s) { launch(s).threads = 0; }, "launch");
  refuse([](PackSpec& s) { launch(s).threads = 1025; }, "launch");
  refuse([](PackSpec& s) { launch(s).cluster = 0; }, "launch");
  refuse([](PackSpec& s) { launch(s).cluster = 17; }, "launch");
  refuse([](PackSpec& s) { launch(s).shared = 2 << 20; }, "launch");
  refuse([](PackSpec& s) { launch(s).global_scratch_alignment = 3; }, "alignment");
  refuse([](PackSpec& s) { launch(s).global_scratch_alignment = 512; }, "alignment");
  refuse([](PackSpec& s) { variant(s).buffers[0].alignment = 0; }, "buffer");
  refuse([](PackSpec& s) { launch(s).args[3].map.box = {8, 257}; }, "box");
  refuse([](PackSpec& s) { launch(s).args[3].map.element_size = 3; }, "tensor map");
  refuse([](PackSpec& s) { launch(s).args[3].map.swizzle = 7; }, "tensor map");
  refuse([](PackSpec& s) { launch(s).args.resize(40000, integer(0)); }, "more arguments");
}

TEST_F(Forbidden, WhatIsUnknown) {
  refuse([](PackSpec& s) { variant(s).flags = 4; }, "flags");
  refuse([](PackSpec& s) { launch(s).flags = 2; }, "launch");
  refuse([](PackSpec& s) { launch(s).args[1].width = 3; }, "argument");
  refuse([](PackSpec& s) { launch(s).args[2].width = 1; }, "argument");
  refuse([](PackSpec& s) { launch(s).args[0].kind = static_cast<format::ArgKind>(8); }, "argument");
  refuse([](PackSpec& s) { variant(s).buffers[0].kind = static_cast<format::BufferKind>(2); }, "buffer");
}

TEST_F(Forbidden, Disorder) {
  refuse([](PackSpec& s) { s.ops[0].pins = {{0, {6}, 0}, {0, {5}, 0}}; }, "pins are not sorted");
  refuse([](PackSpec& s) { s.ops[0].pins = {{0, {5}, 0}, {0, {5}, 0}}; }, "pins are not sorted");
  refuse([](PackSpec& s) { s.ops.push_back(s.ops[0]); }, "two ops of one name");
  refuse([](PackSpec& s) { s.ops[0].name = ""; }, "two ops of one name");
  refuse([](PackSpec& s) { s.ops[0].n_tensors = TK_MAX_TENSORS + 1; }, "too many");
}

// What a library registers an op by says the same as the op's records, or it is not registered.
TEST_F(Forbidden, InterfacesThatContradictThemselves) {
  const auto param = [](PackSpec& s, size_t i) -> Param& { return s.ops[0].params[i]; };
  const auto rename = [](PackSpec& s, const std::string& from, const std::string& to) {
    s.ops[0].schema.replace(s.ops[0].schema.find(from), from.size(), to);
  };
  refuse([](PackSpec& s) { s.ops[0].schema += " "; }, "schema");
  refuse([](PackSpec& s) { s.ops[0].schema = ""; }, "without a schema");
  refuse([](PackSpec& s) { s.ops[0].params.clear(); }, "without a tensor");
  refuse([](PackSpec& s) { s.ops[0].params.pop_back(); }, "not those of its schema");
  refuse([](PackSpec& s) { s.ops[0].n_ints = 2; }, "not those of its schema");
  refuse([](PackSpec& s) { s.ops[0].n_saved = 1; }, "saved for nothing");
  refuse([](PackSpec& s) { s.ops[0].n_saved = 2, s.ops[0].backward = "b"; }, "saved for nothing");
  refuse([](PackSpec& s) { s.ops[0].n_tensors = 3; }, "not those of its schema");
  refuse([](PackSpec& s) { s.ops[0].name = "two words"; }, "op's name");
  refuse([](PackSpec& s) { s.ops[0].name = "_op"; }, "op's name");
  refuse([&](PackSpec& s) { param(s, 0).name = "1x"; }, "no name of an argument");
  refuse([&](PackSpec& s) { param(s, 1).name = "mode"; }, "no name of an argument");
  refuse([&](PackSpec& s) { param(s, 1).name = "x"; }, "two arguments");
  refuse([&](PackSpec& s) { param(s, 0).kind = format::ParamKind::Tensors, param(s, 0).rank = 1; },
         "list x of tensors with declared dimensions");
  refuse([&](PackSpec& s) { param(s, 0).kind = format::ParamKind::Tensors, param(s, 0).rank = 0; },
         "an output of lists with dimensions of its own");
  refuse([&](PackSpec& s) { param(s, 0).kind = static_cast<format::ParamKind>(6); }, "kind");
  refuse([&](PackSpec& s) { param(s, 0).flags = 8; }, "flags");
  refuse([&](PackSpec& s) { param(s, 0).flags = format::kInOrder; }, "order of dimensions that it lacks");
  refuse([&](PackSpec& s) { param(s, 1).flags = format::kMutated; }, "flags");
  refuse([&](PackSpec& s) { param(s, 0).rank = 9; }, "dimensions");
  refuse([&](PackSpec& s) { param(s, 2).rank = 1; }, "dimensions");
  refuse([&](PackSpec& s) { param(s, 0).flags = format::kLeading, param(s, 0).rank = 6; }, "dimensions");
  for (const char* wrong : {"x", "1.5.5", "0x10", "inf", "nan", "1e", "True"})
    refuse([&](PackSpec& s) { param(s, 2).default_value = wrong, rename(s, "0.5", wrong); }, "default");
  for (const char* wrong : {"1", "true", "Tensor"})
    refuse([&](PackSpec& s) { param(s, 1).default_value = wrong, rename(s, "True", wrong); }, "default");
  refuse([&](PackSpec& s) { param(s, 0).default_value = "1"; }, "default");
  refuse([](PackSpec& s) { s.ops[0].outputs[0].leading = 1; }, "without leading");
  refuse([](PackSpec& s) { s.ops[0].outputs[0].leading = 2; }, "follows no tensor");
  refuse(
      [&](PackSpec& s) {
        param(s, 0).flags = format::kLeading;
        s.ops[0].outputs[0] = {dtype(0), {1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1}, 1};
      },
      "output of 6");
}

}  // namespace
}  // namespace tk::test
