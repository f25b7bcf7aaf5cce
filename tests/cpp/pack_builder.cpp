#include "pack_builder.h"

#include <stdlib.h>
#include <unistd.h>
#include <zstd.h>

#include <cstring>
#include <fstream>
#include <stdexcept>

#include "hash.h"

namespace tk::test {
namespace {

using format::Range;
using format::Section;

constexpr size_t kSections = static_cast<size_t>(Section::Count);

class Writer {
 public:
  explicit Writer(const PackSpec& spec) : spec_(spec) { string(""); }

  std::string run() {
    for (const Op& op : spec_.ops) ops_.push_back(add(op));
    for (const format::Op& op : ops_) append(Section::Ops, op);
    return assemble();
  }

 private:
  std::string& section(Section s) { return sections_[static_cast<size_t>(s)]; }

  template <class T>
  uint32_t append(Section s, const T& record) {
    std::string& bytes = section(s);
    bytes.append(reinterpret_cast<const char*>(&record), sizeof record);
    return static_cast<uint32_t>(bytes.size() / sizeof record - 1);
  }

  template <class T>
  Range append_all(Section s, const std::vector<T>& records) {
    const Range range{static_cast<uint32_t>(section(s).size() / sizeof(T)), static_cast<uint32_t>(records.size())};
    for (const T& record : records) append(s, record);
    return range;
  }

  uint32_t string(const std::string& text) {
    const auto [at, is_new] = strings_.emplace(text, section(Section::Strings).size());
    if (is_new) section(Section::Strings).append(text.c_str(), text.size() + 1);
    return at->second;
  }

  format::Expr code(const E& e) {
    const format::Expr range{static_cast<uint32_t>(section(Section::Code).size() / 8),
                             static_cast<uint32_t>(e.words.size())};
    for (const int64_t word : e.words) append(Section::Code, word);
    return range;
  }

  Range locals(const std::vector<E>& es) {
    std::vector<format::Expr> ranges;
    for (const E& e : es) ranges.push_back(code(e));
    return append_all(Section::Locals, ranges);
  }

  uint32_t image(const std::string& content) {
    const auto [at, is_new] = images_.emplace(content, image_records_.size());
    if (!is_new) return at->second;
    format::Image record{};
    record.kind = spec_.ptx ? format::ImageKind::Ptx : format::ImageKind::Cubin;
    record.name = string("image " + std::to_string(image_records_.size()));
    record.size = content.size();
    const Digest digest = sha256({std::as_bytes(std::span(content))});
    std::memcpy(record.hash, digest.data(), digest.size());
    if (image_records_.size() % spec_.images_per_frame == 0) frame_contents_.emplace_back();
    record.frame = static_cast<uint32_t>(frame_contents_.size() - 1);
    record.begin = frame_contents_.back().size();
    frame_contents_.back() += content;
    image_records_.push_back(record);
    return at->second;
  }

  uint32_t add(const Map& map) {
    format::TensorMap out{};
    out.tensor = static_cast<uint32_t>(map.tensor);
    out.rank = static_cast<uint32_t>(map.sizes.size());
    out.element_type = map.element_type;
    out.element_size = map.element_size;
    out.swizzle = map.swizzle;
    out.l2_promotion = map.l2_promotion;
    out.oob_fill = map.oob_fill;
    out.offset = code(map.offset);
    out.is_im2col = !map.lower.empty();
    std::copy(map.box.begin(), map.box.end(), out.box);
    for (size_t d = 0; d < map.lower.size(); d++) {
      out.lower[d] = code(map.lower[d]);
      out.upper[d] = code(map.upper[d]);
      out.steps[d] = code(map.steps[d]);
    }
    for (size_t d = 0; d < map.sizes.size(); d++) {
      out.sizes[d] = code(map.sizes[d]);
      out.strides[d] = code(map.strides[d]);
    }
    return append(Section::TensorMaps, out);
  }

  format::Arg add(const Arg& arg) {
    const uint32_t index = arg.kind == format::ArgKind::TensorMap ? add(arg.map) : arg.index;
    return {.kind = arg.kind, .width = arg.width, .index = index, .reserved = 0, .value = code(arg.value)};
  }

  format::Launch add(const Launch& launch) {
    format::Launch out{};
    out.image = image(launch.image.empty() ? fake_image(launch) : launch.image);
    out.entry = string(launch.entry);
    out.threads = launch.threads;
    out.shared = launch.shared;
    out.cluster = launch.cluster;
    out.flags = launch.flags;
    out.global_scratch = launch.global_scratch;
    out.global_scratch_alignment = launch.global_scratch_alignment;
    out.profile_scratch = launch.profile_scratch;
    out.profile_scratch_alignment = 128;
    out.when = code(launch.when);
    out.dependent = code(launch.dependent);
    for (int d = 0; d < 3; d++) out.grid[d] = code(launch.grid[d]);
    std::vector<format::Arg> args;
    for (const Arg& arg : launch.args) args.push_back(add(arg));
    out.args = append_all(Section::Args, args);
    return out;
  }

  Range add(const std::vector<Constraint>& constraints) {
    std::vector<format::Constraint> records;
    for (const auto& c : constraints) records.push_back({code(c.holds), string(c.message)});
    return append_all(Section::Constraints, records);
  }

  format::Variant add(const Variant& variant) {
    format::Variant out{};
    out.kernel = string(variant.kernel);
    out.config = variant.config;
    out.flags = variant.flags;
    out.constraints = add(variant.constraints);
    out.locals = locals(variant.locals);
    out.cost = code(variant.cost);
    std::vector<format::Buffer> buffers;
    for (const auto& b : variant.buffers) buffers.push_back({b.kind, b.alignment, code(b.bytes)});
    out.buffers = append_all(Section::Buffers, buffers);
    std::vector<format::Launch> launches;
    for (const auto& l : variant.launches) launches.push_back(add(l));
    out.launches = append_all(Section::Launches, launches);
    return out;
  }

  Range add_buckets(const Op& op, uint32_t first_variant) {
    std::map<int64_t, std::vector<uint32_t>> grouped;
    for (size_t i = 0; i < op.variants.size(); i++)
      grouped[op.variants[i].bucket].push_back(first_variant + static_cast<uint32_t>(i));
    std::vector<format::Bucket> buckets;
    for (const auto& [key, numbers] : grouped) buckets.push_back({key, append_all(Section::Candidates, numbers)});
    return append_all(Section::Buckets, buckets);
  }

  format::Op add(const Op& op) {
    format::Op out{};
    out.name = string(op.name);
    out.schema = string(op.schema);
    out.n_tensors = op.n_tensors;
    out.n_ints = op.n_ints;
    out.n_floats = op.n_floats;
    out.n_dims = static_cast<uint32_t>(op.dims.size());
    out.locals = locals(op.locals);
    out.key = code(op.key);
    for (size_t i = 0; i < op.dims.size(); i++) out.dims[i] = op.dims[i];
    std::vector<format::Config> configs;
    for (uint32_t i = 0; i < op.configs.size(); i++)
      configs.push_back({i, string(op.configs[i]), string("{\"number\": " + std::to_string(i) + "}")});
    out.configs = append_all(Section::Configs, configs);
    std::vector<format::Variant> variants;
    for (const Variant& v : op.variants) variants.push_back(add(v));
    out.variants = append_all(Section::Variants, variants);
    out.buckets = add_buckets(op, out.variants.first);
    out.outputs = add_outputs(op);
    std::vector<format::Pin> pins;
    for (const Pin& p : op.pins) {
      format::Pin pin{.key = p.key, .dims = {}, .config = p.config, .reserved = 0};
      std::copy(p.dims.begin(), p.dims.end(), pin.dims);
      pins.push_back(pin);
    }
    out.pins = append_all(Section::Pins, pins);
    std::vector<format::Param> params;
    for (const Param& p : op.params)
      params.push_back({string(p.name), p.kind, p.flags, p.rank, string(p.default_value)});
    out.params = append_all(Section::Params, params);
    out.checks = add(op.checks);
    out.meta = string(op.meta);
    out.backward = string(op.backward);
    out.n_saved = op.n_saved;
    return out;
  }

  Range add_outputs(const Op& op) {
    std::vector<format::Output> outputs;
    for (const Output& o : op.outputs) {
      format::Output out{};
      out.dtype = code(o.dtype);
      out.ndim = static_cast<uint32_t>(o.sizes.size());
      out.leading = o.leading;
      for (size_t d = 0; d < o.sizes.size(); d++) {
        out.sizes[d] = code(o.sizes[d]);
        out.strides[d] = code(o.strides[d]);
      }
      outputs.push_back(out);
    }
    return append_all(Section::Outputs, outputs);
  }

  std::string assemble() {
    format::Header header{};
    std::memcpy(header.magic, format::kMagic, sizeof header.magic);
    header.version = format::kVersion;
    header.arch = spec_.arch;
    header.flags = (spec_.ptx ? format::kPtx : 0) | (spec_.family ? format::kFamily : 0);
    header.n_sections = kSections;
    header.compiler = string(spec_.compiler);
    for (const format::Image& image : image_records_) append(Section::Images, image);
    section(Section::Frames).assign(frame_contents_.size() * sizeof(format::Frame), '\0');
    uint64_t size = 0;
    for (size_t s = 0; s < kSections; s++) {
      size = (size + 7) / 8 * 8;
      header.sections[s] = {size, sections_[s].size()};
      size += sections_[s].size();
    }
    header.n_pages = static_cast<uint32_t>((size + format::kPageSize - 1) / format::kPageSize);
    const uint64_t pages_offset = sizeof header + header.n_pages * sizeof(format::PageHash);
    for (format::SectionEntry& entry : header.sections) entry.offset += pages_offset;
    uint64_t at = header.index_size = pages_offset + size;
    section(Section::Frames).clear();
    std::string frames;
    for (const std::string& content : frame_contents_) {
      const std::string frame = compressed(content);
      append(Section::Frames, format::Frame{at, frame.size(), content.size()});
      frames += frame;
      at += frame.size();
    }
    header.file_size = at;

    std::string bytes(header.index_size, '\0');
    std::memcpy(bytes.data(), &header, sizeof header);
    for (size_t s = 0; s < kSections; s++)
      std::memcpy(bytes.data() + header.sections[s].offset, sections_[s].data(), sections_[s].size());
    rehash(bytes);
    return bytes + frames;
  }

  const PackSpec& spec_;
  std::string sections_[kSections];
  std::map<std::string, uint32_t> strings_;
  std::map<std::string, uint32_t> images_;
  std::vector<format::Image> image_records_;
  std::vector<std::string> frame_contents_;
  std::vector<format::Op> ops_;
};

}  // namespace

E::E(Opcode op, std::initializer_list<E> operands) {
  for (const E& e : operands) words.insert(words.end(), e.words.begin(), e.words.end());
  words.push_back(static_cast<int64_t>(op));
}

std::string fake_image(const Launch& launch) {
  std::string text = "FAKE " + launch.entry;
  for (const Arg& arg : launch.args) {
    uint32_t bytes = 8;
    if (arg.kind == format::ArgKind::Int) bytes = arg.width;
    if (arg.kind == format::ArgKind::Float) bytes = arg.width == 3 ? 2 : arg.width;
    if (arg.kind == format::ArgKind::TensorMap) bytes = 128;
    text += " " + std::to_string(bytes);
  }
  return text;
}

std::string compressed(const std::string& content) {
  std::string frame(ZSTD_compressBound(content.size()), '\0');
  const size_t size = ZSTD_compress(frame.data(), frame.size(), content.data(), content.size(), 19);
  if (ZSTD_isError(size)) throw std::runtime_error(ZSTD_getErrorName(size));
  frame.resize(size);
  return frame;
}

std::string pack_bytes(const PackSpec& spec) { return Writer(spec).run(); }

void rehash(std::string& bytes) {
  format::Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  const size_t index_size = std::min<size_t>(header.index_size, bytes.size());
  const size_t pages_offset = std::min(sizeof header + header.n_pages * sizeof(format::PageHash), index_size);
  const auto hash = [&](size_t at, size_t end) {
    return sha256({std::as_bytes(std::span(bytes).subspan(at, end - at))});
  };
  for (size_t page = 0, at = pages_offset; at < index_size; page++, at += format::kPageSize) {
    const Digest digest = hash(at, std::min<size_t>(at + format::kPageSize, index_size));
    const size_t to = sizeof header + page * sizeof digest;
    if (to + sizeof digest <= pages_offset) std::memcpy(bytes.data() + to, digest.data(), sizeof digest);
  }
  constexpr size_t kAt = offsetof(format::Header, index_hash);
  std::memset(bytes.data() + kAt, 0, sizeof header.index_hash);
  const Digest digest = hash(0, pages_offset);
  std::memcpy(bytes.data() + kAt, digest.data(), digest.size());
}

// --- Files ---

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

TempDir::TempDir() {
  // In memory where that is possible: the hostile packs alone are thousands of files.
  const std::filesystem::path memory = "/dev/shm";
  const bool usable = access(memory.c_str(), W_OK) == 0;
  std::string name = ((usable ? memory : std::filesystem::temp_directory_path()) / "tk_tests.XXXXXX").string();
  if (!mkdtemp(name.data())) throw std::runtime_error("cannot make " + name);
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::write(const std::string& name, const PackSpec& spec) const {
  write_file(path_ / name, pack_bytes(spec));
  return (path_ / name).string();
}

}  // namespace tk::test
