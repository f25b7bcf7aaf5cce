// An open pack: its index, verified and in memory, and its images, unpacked on demand.
//
// The index is read into memory rather than mapped: what was verified is then what is used, whatever becomes of the
// file. A pack of the library's own, whose records are known to be right, is read page by page as records are asked
// for: the index of a wheel's pack is many times what one op needs.
#pragma once

#include <array>
#include <atomic>
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
TK_SECTION(Frame, Frames)
#undef TK_SECTION

// The order of pins: by key, then by size.
struct PinOrder {
  bool operator()(const format::Pin& a, const format::Pin& b) const {
    return std::tuple(a.key, std::to_array(a.dims)) < std::tuple(b.key, std::to_array(b.dims));
  }
};

// What images are for. arch: 90 for 9.0. flags: as in a pack's header.
struct Target {
  uint32_t arch = 0;
  uint32_t flags = 0;

  bool is_ptx() const { return flags & format::kPtx; }
  bool is_family() const { return flags & format::kFamily; }
  std::string text() const;  // sm_90, sm_100f, ptx80
  bool operator==(const Target&) const = default;
};

class Pack {
 public:
  // root: the index_hash in hexadecimal, if it must be a certain one; the records are then known to be right, and pages
  // of them are read when they are needed. Without it all is read and verified here.
  // is_own: whether it is the library's, and no user's.
  // Throws TK_PACK_ERROR, naming the file and what is wrong with it; so does whatever needs a page that is damaged.
  static std::unique_ptr<const Pack> open(const std::string& path, std::string_view root = {}, bool is_own = false);
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& path() const { return path_; }
  Target target() const { return {header().arch, header().flags}; }
  const char* compiler() const { return string(header().compiler); }
  uint64_t file_size() const { return header().file_size; }
  std::string index_hash() const { return hex(header().index_hash); }
  bool is_rooted() const { return is_rooted_; }
  bool is_own() const { return is_own_; }

  // The records of a section: how many there are, all, a range, one.
  template <class T>
  uint32_t count() const {
    return count<T>(kSectionOf<T>);
  }
  template <class T>
  std::span<const T> all() const {
    return rows<T>({0, count<T>()});
  }
  template <class T>
  std::span<const T> rows(format::Range range) const {
    return rows<T>(kSectionOf<T>, range);
  }
  template <class T>
  const T& row(uint32_t number) const {
    return rows<T>({number, 1}).front();
  }
  std::span<const format::Expr> locals(format::Range range) const {
    return rows<format::Expr>(format::Section::Locals, range);
  }
  std::span<const uint32_t> candidates(const format::Bucket& bucket) const {
    return rows<uint32_t>(format::Section::Candidates, bucket.candidates);
  }
  Code code(format::Expr expr) const { return rows<int64_t>(format::Section::Code, expr); }
  const char* string(uint32_t offset) const;

  const format::Op* find_op(std::string_view name) const;  // nullptr when it is not there

  // Reads, unpacks and checks an image. One NUL follows it, as the driver wants of PTX. Throws TK_PACK_ERROR.
  std::vector<std::byte> image(uint32_t index) const;

 private:
  using Bytes = std::vector<std::byte>;

  Pack(std::string path, int file);
  void read_header();
  void check_root(std::string_view root);
  void verify();  // pack_verify.cpp
  const format::Header& header() const { return *reinterpret_cast<const format::Header*>(index_.get()); }
  const format::SectionEntry& section(format::Section s) const { return header().sections[static_cast<uint32_t>(s)]; }
  template <class T>
  uint32_t count(format::Section s) const {
    return static_cast<uint32_t>(section(s).size / sizeof(T));
  }
  template <class T>
  std::span<const T> rows(format::Section s, format::Range range) const {
    return {reinterpret_cast<const T*>(need(section(s).offset + range.first * sizeof(T), range.count * sizeof(T))),
            range.count};
  }

  // These bytes of the index, from the file if they are not here yet.
  const std::byte* need(uint64_t offset, uint64_t size) const {
    if (size == 0) return nullptr;
    const uint64_t first = page_of(offset), last = page_of(offset + size - 1);
    if (last - first > 1 || !has_page(first) || !has_page(last)) [[unlikely]]
      fetch(first, last);
    return index_.get() + offset;
  }
  bool has_page(uint64_t page) const { return has_page_[page].load(std::memory_order_acquire); }
  uint64_t page_of(uint64_t offset) const { return (offset - pages_offset_) / format::kPageSize; }
  uint64_t end_of(uint64_t page) const;
  void fetch(uint64_t first, uint64_t last) const;
  void read(void* to, uint64_t size, uint64_t offset) const;
  Bytes unpacked(uint32_t frame) const;
  std::shared_ptr<const Bytes> frame(uint32_t index) const;  // unpacked, by whoever needs it
  template <class... Parts>
  [[noreturn]] void damaged(const Parts&... parts) const {
    fail(TK_PACK_ERROR, "pack ", path_, ": ", parts...);
  }

  class Verifier;
  struct KeptFrame {
    uint32_t index = 0;
    std::shared_ptr<const Bytes> content;
  };

  std::string path_;
  int file_;
  bool is_rooted_ = false;
  bool is_own_ = false;
  std::unique_ptr<std::byte[]> index_;  // header and page hashes are here, of the rest what has_page_ says
  uint64_t pages_offset_ = 0;           // where the first page begins
  mutable std::unique_ptr<std::atomic<bool>[]> has_page_;
  mutable std::mutex pages_mutex_;
  std::unordered_map<std::string_view, const format::Op*> ops_;
  mutable std::mutex frames_mutex_;
  mutable std::array<KeptFrame, 4> frames_;  // those that were unpacked last
  mutable size_t next_frame_ = 0;
};

}  // namespace tk
