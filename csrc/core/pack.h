// An open pack: its index, verified and in memory, and its images, unpacked on demand.
//
// The index is read into memory rather than mapped: what was verified is then what is used, whatever becomes of the
// file.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "error.h"
#include "expr.h"
#include "hash.h"
#include "pack_format.h"

struct ZSTD_DDict_s;

namespace tk {

// A record's section, so that a Range is read as what it is.
template <class T>
inline constexpr format::Section kSectionOf = format::Section::Count;
#define TK_SECTION(Type, Name) \
  template <>                  \
  inline constexpr format::Section kSectionOf<format::Type> = format::Section::Name;
TK_SECTION(Op, Ops)
TK_SECTION(Config, Configs)
TK_SECTION(Bucket, Buckets)
TK_SECTION(Variant, Variants)
TK_SECTION(Constraint, Constraints)
TK_SECTION(Buffer, Buffers)
TK_SECTION(Launch, Launches)
TK_SECTION(Arg, Args)
TK_SECTION(TensorMap, TensorMaps)
TK_SECTION(Image, Images)
TK_SECTION(Output, Outputs)
TK_SECTION(Pin, Pins)
TK_SECTION(Param, Params)
TK_SECTION(Dictionary, Dictionaries)
#undef TK_SECTION

// The order of pins: by key, then by size.
struct PinOrder {
  bool operator()(const format::Pin& a, const format::Pin& b) const {
    return std::tuple(a.key, std::to_array(a.dims)) < std::tuple(b.key, std::to_array(b.dims));
  }
};

class Pack {
 public:
  // Reads and verifies the index. root: the index's SHA-256 in hexadecimal, if it must be a certain one, whose records
  // are then known to be right.
  // Throws TK_PACK_ERROR, naming the file and what is wrong with it.
  static std::unique_ptr<const Pack> open(const std::string& path, std::string_view root = {});
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const { return path_; }
  uint32_t arch() const { return header().arch; }
  bool is_ptx() const { return header().flags & format::kPtx; }
  const char* compiler() const { return string(header().compiler); }
  uint64_t file_size() const { return header().file_size; }
  std::string index_hash() const { return hex(header().index_hash); }

  // All records of a section, or a range of them.
  template <class T>
  std::span<const T> all() const {
    return section<T>(kSectionOf<T>);
  }
  template <class T>
  std::span<const T> rows(format::Range range) const {
    return all<T>().subspan(range.first, range.count);
  }
  std::span<const format::Expr> locals(format::Range range) const {
    return section<format::Expr>(format::Section::Locals).subspan(range.first, range.count);
  }
  std::span<const uint32_t> candidates(const format::Bucket& bucket) const {
    return section<uint32_t>(format::Section::Candidates).subspan(bucket.candidates.first, bucket.candidates.count);
  }
  Code code(format::Expr expr) const { return section<int64_t>(format::Section::Code).subspan(expr.first, expr.count); }
  const char* string(uint32_t offset) const { return section<char>(format::Section::Strings).data() + offset; }

  const format::Op* find_op(std::string_view name) const;  // nullptr when it is not there

  // Reads, unpacks and checks an image. One NUL follows it, as the driver wants of PTX. Throws TK_PACK_ERROR.
  std::vector<std::byte> image(uint32_t index) const;

 private:
  Pack(std::string path, int file);
  void read_index();
  void verify(std::string_view root);  // pack_verify.cpp
  const format::Header& header() const { return *reinterpret_cast<const format::Header*>(index_.get()); }
  std::span<const std::byte> index() const { return {index_.get(), index_size_}; }
  template <class T>
  std::span<const T> section(format::Section s) const {
    const format::SectionEntry& entry = header().sections[static_cast<uint32_t>(s)];
    return {reinterpret_cast<const T*>(index_.get() + entry.offset), entry.size / sizeof(T)};
  }
  void read(void* to, uint64_t size, uint64_t offset) const;
  std::vector<std::byte> read_frame(uint64_t offset, uint64_t compressed_size, uint64_t size,
                                    const std::string& what) const;
  const ZSTD_DDict_s* dictionary(uint32_t index) const;
  template <class... Parts>
  [[noreturn]] void damaged(const Parts&... parts) const {
    fail(TK_PACK_ERROR, "pack ", path_, ": ", parts...);
  }

  class Verifier;
  struct DictionaryDeleter {
    void operator()(ZSTD_DDict_s* dictionary) const;
  };

  std::string path_;
  int file_;
  std::unique_ptr<std::byte[]> index_;  // no vector: that would fill it with zeros first, half of opening a pack
  size_t index_size_ = 0;
  std::unordered_map<std::string_view, const format::Op*> ops_;
  // By number, each digested when an image first needs it.
  mutable std::mutex dictionaries_mutex_;
  mutable std::unordered_map<uint32_t, std::unique_ptr<ZSTD_DDict_s, DictionaryDeleter>> dictionaries_;
};

}  // namespace tk
