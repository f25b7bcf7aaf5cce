#include "pack.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "fake_driver.h"

namespace tk::test {
namespace {

// A pack that uses every section.
PackSpec rich_pack(size_t images_per_frame = 2) {
  Map map{.tensor = 0, .sizes = {size(0, 0), size(0, 1)}, .strides = {stride(0, 0), 1}, .box = {64, 32}};
  Launch first{.entry = "first",
               .args = {pointer(0, 16), integer(local(1), 8), floating(0), tensor_map(map), buffer(0), buffer(1, 8),
                        global_scratch(), profile_scratch()},
               .grid = {local(0), 1, 1},
               .dependent = local(0) >= 2,
               .shared = 65536,
               .cluster = 2,
               .flags = format::kCooperative,
               .global_scratch = 384};
  Launch second{.entry = "second", .args = {pointer(2), null_pointer()}, .when = int_arg(0)};
  Variant fast{.kernel = "fast",
               .config = 1,
               .constraints = {{size(0, 0) % 64 == 0, "M a multiple of 64"}},
               .locals = {local(0) * 2},
               .cost = local(1) * 1000,
               .buffers = {{format::BufferKind::Scratch, local(0) * 4}, {format::BufferKind::Counters, 128, 64}},
               .launches = {first, second}};
  Variant general{.kernel = "general", .flags = format::kGeneral, .cost = 1 << 30, .launches = {second}};
  Op op{.name = "rich",
        .n_tensors = 3,
        .n_ints = 1,
        .n_floats = 1,
        .locals = {size(0, 0)},
        .key = dtype(0) == 15,
        .dims = {0},
        .configs = {"general", "fast"},
        .variants = {fast, general, general},
        .outputs = {{dtype(0), {size(0, 0), 3}, {3, 1}}},
        .pins = {{1, {64}, 1}, {1, {128}, 0}},
        .schema = "rich(Tensor a, Tensor(a!) b, SymInt way, float alpha=1.5, int config=-1, int mode_bits=0) -> Tensor",
        .params = {{.name = "a", .flags = format::kLeading, .rank = 2},
                   {.name = "b", .flags = format::kMutated, .rank = 3},
                   {.name = "way", .kind = format::ParamKind::Int},
                   {.name = "alpha", .kind = format::ParamKind::Float, .default_value = "1.5"}},
        .checks = {{dtype(0) == dtype(1), "a and b of one dtype"}},
        .meta = "{}"};
  op.variants[0].bucket = op.variants[1].bucket = 1;
  return {.ops = {op, Op{.name = "plain"}}, .images_per_frame = images_per_frame};
}

TEST(Pack, HoldsWhatWasWritten) {
  const TempDir dir;
  const auto pack = Pack::open(dir.write("rich.tkpack", rich_pack()));
  EXPECT_EQ(pack->target().text(), "sm_90");
  EXPECT_STREQ(pack->compiler(), "test compiler 1.0");
  const format::Op* const op = pack->find_op("rich");
  ASSERT_NE(op, nullptr);
  EXPECT_EQ(pack->find_op("poor"), nullptr);
  EXPECT_STREQ(pack->string(op->schema),
               "rich(Tensor a, Tensor(a!) b, SymInt way, float alpha=1.5, int config=-1, int mode_bits=0) -> Tensor");
  EXPECT_STREQ(pack->string(op->meta), "{}");
  const auto params = pack->rows<format::Param>(op->params);
  ASSERT_EQ(params.size(), 4u);
  EXPECT_EQ(params[1].flags, format::kMutated);
  EXPECT_STREQ(pack->string(params[3].default_value), "1.5");
  const auto buckets = pack->rows<format::Bucket>(op->buckets);
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[1].key, 1);
  ASSERT_EQ(pack->candidates(buckets[1]).size(), 2u);
  const auto& fast = pack->all<format::Variant>()[pack->candidates(buckets[1])[0]];
  EXPECT_STREQ(pack->string(fast.kernel), "fast");
  const auto launches = pack->rows<format::Launch>(fast.launches);
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_STREQ(pack->string(launches[0].entry), "first");
  EXPECT_EQ(launches[0].args.count, 8u);
}

TEST(Pack, UnpacksImages) {
  const TempDir dir;
  for (const size_t per_frame : {1, 2, 9}) {
    const auto pack = Pack::open(dir.write("rich.tkpack", rich_pack(per_frame)));
    const auto n_images = pack->all<format::Image>().size();
    EXPECT_EQ(pack->all<format::Frame>().size(), (n_images + per_frame - 1) / per_frame);
    const char* const expected[] = {"FAKE first 8 8 4 128 8 8 8 8", "FAKE second 8 8"};
    for (int i = 0; i < 2; i++) {
      const std::vector<std::byte> image = pack->image(pack->all<format::Launch>()[i].image);
      EXPECT_STREQ(reinterpret_cast<const char*>(image.data()), expected[i]);
      EXPECT_EQ(image.back(), std::byte{0}) << "PTX must end in NUL";
    }
  }
}

// Many threads need a frame at once, as nobody has yet: the thread sanitizer watches.
TEST(Pack, UnpacksImagesInManyThreads) {
  const TempDir dir;
  const auto pack = Pack::open(dir.write("rich.tkpack", rich_pack()));
  const auto count = static_cast<uint32_t>(pack->all<format::Image>().size());
  std::vector<std::thread> threads;
  std::atomic<uint32_t> whole = 0;
  for (int t = 0; t < 8; t++)
    threads.emplace_back([&] {
      for (uint32_t i = 0; i < count; i++) whole += std::memcmp(pack->image(i).data(), "FAKE", 4) == 0;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(whole, 8 * count);
}

void expect_refused(const std::string& path, const std::string& part, std::string_view root = {}) {
  try {
    Pack::open(path, root);
    ADD_FAILURE() << "accepted; \"" << part << "\" was expected";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TK_PACK_ERROR);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << "the file is not named: " << error.what();
  }
}

TEST(Pack, RefusesWhatIsNoPack) {
  const TempDir dir;
  const auto path = (dir / "x.tkpack").string();
  expect_refused(path, "No such file");
  write_file(path, "");
  expect_refused(path, "no pack");
  write_file(path, std::string(4096, 'x'));
  expect_refused(path, "magic");
  expect_refused(dir.string(), "is a folder");
  const auto pipe = (dir / "pipe.tkpack").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_refused(pipe, "no regular file");  // at once, though nobody writes to it
}

TEST(Pack, RefusesAnotherVersion) {
  const TempDir dir;
  std::string bytes = pack_bytes(rich_pack());
  const uint32_t version = format::kVersion + 1;
  std::memcpy(bytes.data() + offsetof(format::Header, version), &version, sizeof version);
  rehash(bytes);
  write_file(dir / "new.tkpack", bytes);
  expect_refused((dir / "new.tkpack").string(), "version " + std::to_string(format::kVersion));
}

TEST(Pack, RefusesAnotherRoot) {
  const TempDir dir;
  const auto path = dir.write("rich.tkpack", rich_pack());
  const std::string hash = Pack::open(path)->index_hash();
  EXPECT_EQ(hash.size(), 64u);
  EXPECT_NE(Pack::open(path, hash), nullptr);
  expect_refused(path, "not the pack that was built with this library", std::string(64, '0'));
}

// The bytes of a pack whose one record of `section` has `value` in a field.
template <class T>
std::string with_field(std::string bytes, format::Section section, size_t field, T value) {
  const auto* const header = reinterpret_cast<const format::Header*>(bytes.data());
  std::memcpy(bytes.data() + header->sections[static_cast<size_t>(section)].offset + field, &value, sizeof value);
  rehash(bytes);
  return bytes;
}

// The pack opens, and its first image is refused for `part`.
void expect_damaged(const TempDir& dir, const std::string& bytes, const std::string& part) {
  write_file(dir / "damaged.tkpack", bytes);
  const auto pack = Pack::open((dir / "damaged.tkpack").string());
  for (int again = 0; again < 2; again++) {  // nothing half done is kept
    try {
      pack->image(0);
      ADD_FAILURE() << "unpacked; \"" << part << "\" was expected";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), TK_PACK_ERROR);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST(Pack, RefusesAnImageOfAnotherPlaceOrSize) {
  const TempDir dir;
  const std::string bytes = pack_bytes(rich_pack(1));
  const uint64_t size = Pack::open(dir.write("x", rich_pack(1)))->all<format::Image>()[0].size;
  const auto changed = [&](size_t field, uint64_t value) {
    return with_field(bytes, format::Section::Images, field, value);
  };
  for (const uint64_t smaller : {size - 1, uint64_t{1}})
    expect_damaged(dir, changed(offsetof(format::Image, size), smaller), "it does not have its hash");
  for (const uint64_t larger : {size + 1, format::kMaxFrameSize, ~uint64_t{0}}) {
    write_file(dir / "x.tkpack", changed(offsetof(format::Image, size), larger));
    expect_refused((dir / "x.tkpack").string(), "an image lies outside its frame");
  }
  for (const uint64_t begin : {uint64_t{1}, size + 1, ~uint64_t{0}}) {
    write_file(dir / "x.tkpack", changed(offsetof(format::Image, begin), begin));
    expect_refused((dir / "x.tkpack").string(), "an image lies outside its frame");
  }
  write_file(dir / "x.tkpack", with_field(bytes, format::Section::Images, offsetof(format::Image, frame), uint32_t{9}));
  expect_refused((dir / "x.tkpack").string(), "no frame 9");
}

TEST(Pack, RefusesAFrameThatIsNotWhole) {
  const TempDir dir;
  const std::string bytes = pack_bytes(rich_pack());
  const format::Frame frame = Pack::open(dir.write("x", rich_pack()))->all<format::Frame>()[0];
  for (const uint64_t other : {uint64_t{0}, frame.compressed_size - 1, frame.compressed_size + 1})
    expect_damaged(dir, with_field(bytes, format::Section::Frames, offsetof(format::Frame, compressed_size), other),
                   "no zstd frame");
  for (const uint64_t other : {frame.size + 1, format::kMaxFrameSize})
    expect_damaged(dir, with_field(bytes, format::Section::Frames, offsetof(format::Frame, size), other),
                   "no zstd frame of " + std::to_string(other) + " bytes");
}

// `rich_pack` with another frame in place of its first.
std::string with_frame(const TempDir& dir, const std::string& content, uint64_t unpacked) {
  std::string bytes = pack_bytes(rich_pack());
  const format::Frame record = Pack::open(dir.write("x", rich_pack()))->all<format::Frame>()[0];
  const std::string frame = compressed(content);
  const format::Frame moved{.offset = bytes.size(), .compressed_size = frame.size(), .size = unpacked};
  EXPECT_NE(record.offset, moved.offset);
  bytes += frame;
  const uint64_t size = bytes.size();
  std::memcpy(bytes.data() + offsetof(format::Header, file_size), &size, sizeof size);
  return with_field(bytes, format::Section::Frames, 0, moved);
}

TEST(Pack, RefusesAnotherFrame) {
  const TempDir dir;
  const uint64_t size = Pack::open(dir.write("x", rich_pack()))->all<format::Frame>()[0].size;
  expect_damaged(dir, with_frame(dir, std::string(size, 'x'), size), "it does not have its hash");
  expect_damaged(dir, with_frame(dir, std::string(8 << 20, 'x'), size), "frame 0 is damaged");
  write_file(dir / "empty.tkpack", with_frame(dir, "", 0));
  expect_refused((dir / "empty.tkpack").string(), "a frame of 0 bytes");
}

TEST(Pack, RefusesDamagedFrames) {
  const TempDir dir;
  const std::string bytes = pack_bytes(rich_pack());
  const auto path = dir.write("rich.tkpack", rich_pack());
  const auto intact = Pack::open(path);
  const format::Frame frame = intact->all<format::Frame>()[0];
  int refused = 0;
  for (uint64_t at = frame.offset; at < frame.offset + frame.compressed_size; at++) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ 1);
    write_file(path, flipped);
    const auto pack = Pack::open(path);
    try {
      // A flip may leave the same image: a frame has bits that mean nothing.
      EXPECT_EQ(pack->image(0), intact->image(0)) << "byte " << at;
    } catch (const Error& error) {
      refused++;
      EXPECT_EQ(error.status(), TK_PACK_ERROR);
      EXPECT_NE(std::string(error.what()).find("is damaged"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(refused, 10);
}

// --- Page by page: what came with the library ---

// Of so many ops that the index has dozens of pages.
PackSpec large_pack() {
  PackSpec spec = rich_pack();
  spec.ops.resize(1);
  for (int i = 0; i < 300; i++) {
    spec.ops.push_back(spec.ops[0]);
    Op& op = spec.ops.back();
    const std::string name = "rich" + std::to_string(i);
    op.schema.replace(0, 4, name);
    op.name = name;
    op.meta = std::string(2000, static_cast<char>('a' + i % 26));
    op.variants[0].cost = local(1) * (1000 + i);
  }
  return spec;
}

const format::Header& header_of(const std::string& bytes) {
  return *reinterpret_cast<const format::Header*>(bytes.data());
}

uint64_t pages_offset(const std::string& bytes) {
  return sizeof(format::Header) + header_of(bytes).n_pages * sizeof(format::PageHash);
}

// All that an op's call reads, in one number.
uint64_t read_op(const Pack& pack, const char* name) {
  const format::Op* const op = pack.find_op(name);
  if (!op) throw std::runtime_error(std::string("no ") + name);
  uint64_t sum = std::strlen(pack.string(op->schema)) + std::strlen(pack.string(op->meta));
  const auto add = [&](format::Expr expr) {
    for (const int64_t word : pack.code(expr)) sum = sum * 31 + static_cast<uint64_t>(word);
  };
  for (const format::Bucket& bucket : pack.rows<format::Bucket>(op->buckets))
    for (const uint32_t number : pack.candidates(bucket)) {
      const auto& variant = pack.row<format::Variant>(number);
      add(variant.cost);
      for (const format::Launch& launch : pack.rows<format::Launch>(variant.launches))
        for (const format::Arg& arg : pack.rows<format::Arg>(launch.args)) add(arg.value);
    }
  return sum;
}

TEST(PackPages, AreReadAsTheyAreNeeded) {
  const TempDir dir;
  const std::string bytes = pack_bytes(large_pack());
  ASSERT_GT(header_of(bytes).n_pages, 30u);
  const auto path = dir.write("large.tkpack", large_pack());
  const auto whole = Pack::open(path);
  const auto pack = Pack::open(path, whole->index_hash());
  EXPECT_FALSE(whole->is_rooted());
  EXPECT_TRUE(pack->is_rooted());
  EXPECT_EQ(read_op(*pack, "rich7"), read_op(*whole, "rich7"));
  std::filesystem::resize_file(path, pages_offset(bytes));  // what was read is kept, what was not is missed
  EXPECT_EQ(read_op(*pack, "rich7"), read_op(*whole, "rich7"));
  EXPECT_THROW(read_op(*pack, "rich250"), Error);
  EXPECT_NO_THROW(read_op(*whole, "rich250"));
}

TEST(PackPages, ReadTheSameAsAll) {
  const TempDir dir;
  const auto path = dir.write("large.tkpack", large_pack());
  const auto whole = Pack::open(path);
  const auto pack = Pack::open(path, whole->index_hash());
  for (int i = 299; i >= 0; i--) {
    const std::string name = "rich" + std::to_string(i);
    EXPECT_EQ(read_op(*pack, name.c_str()), read_op(*whole, name.c_str())) << name;
  }
  EXPECT_EQ(pack->all<format::Variant>().size(), whole->all<format::Variant>().size());
}

// Many threads need pages that nobody has yet: the thread sanitizer watches.
TEST(PackPages, AreReadInManyThreads) {
  const TempDir dir;
  const auto path = dir.write("large.tkpack", large_pack());
  const auto whole = Pack::open(path);
  const auto pack = Pack::open(path, whole->index_hash());
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 8; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < 300; i++) {
        const std::string name = "rich" + std::to_string(i);
        right += read_op(*pack, name.c_str()) == read_op(*whole, name.c_str());
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 8 * 300);
}

// With the right root a damaged page is refused by whoever needs it, each time, and no other.
TEST(PackPages, AreRefusedWhenTheyAreDamaged) {
  const TempDir dir;
  const std::string bytes = pack_bytes(large_pack());
  const auto path = dir.write("large.tkpack", large_pack());
  const auto whole = Pack::open(path);
  int refused = 0;
  for (uint64_t page = 0; page < header_of(bytes).n_pages; page++) {
    std::string flipped = bytes;
    const uint64_t at = pages_offset(bytes) + page * format::kPageSize + page % 7;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    write_file(path, flipped);
    for (int again = 0; again < 2; again++) {
      try {
        const auto pack = Pack::open(path, whole->index_hash());
        EXPECT_EQ(read_op(*pack, "rich3"), read_op(*whole, "rich3"));
      } catch (const Error& error) {
        refused++;
        EXPECT_EQ(error.status(), TK_PACK_ERROR);
        EXPECT_NE(std::string(error.what()).find("page " + std::to_string(page)), std::string::npos) << error.what();
      }
    }
    expect_refused(path, "page " + std::to_string(page));
  }
  EXPECT_GT(refused, 10);
  EXPECT_LT(refused, static_cast<int>(header_of(bytes).n_pages));
}

// The hash of a page that was changed together with its hash is not the one that the root stands for.
TEST(PackPages, AreThoseOfTheRoot) {
  const TempDir dir;
  std::string bytes = pack_bytes(large_pack());
  const auto path = dir.write("large.tkpack", large_pack());
  const std::string root = Pack::open(path)->index_hash();
  bytes[bytes.find("rich250") + 4] = '9';
  rehash(bytes);
  write_file(path, bytes);
  expect_refused(path, "not the pack that was built with this library", root);
}

// What was verified is what is used: nothing that happens to the file later can change it.
TEST(Pack, KeepsItsIndexWhenTheFileIsCut) {
  const TempDir dir;
  const auto path = dir.write("rich.tkpack", rich_pack());
  const auto pack = Pack::open(path);
  std::filesystem::resize_file(path, 10);
  EXPECT_NE(pack->find_op("rich"), nullptr);
  EXPECT_STREQ(pack->compiler(), "test compiler 1.0");
  EXPECT_THROW(pack->image(0), Error);
}

}  // namespace
}  // namespace tk::test
