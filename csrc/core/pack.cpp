#include "pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace tk {

static_assert(std::endian::native == std::endian::little, "packs are read as they are: little-endian");

namespace {

uint64_t size_of(int file, const std::string& path) {
  struct stat status;
  if (fstat(file, &status) != 0) fail(TK_PACK_ERROR, "pack ", path, " cannot be read: ", std::strerror(errno));
  if (!S_ISREG(status.st_mode))
    fail(TK_PACK_ERROR, "pack ", path, S_ISDIR(status.st_mode) ? " is a folder" : " is no regular file",
         "; name a pack, such as 'my.tkpack'");
  return static_cast<uint64_t>(status.st_size);
}

}  // namespace

std::unique_ptr<const Pack> Pack::open(const std::string& path, std::string_view root, bool is_own) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a pipe it would wait
  if (file < 0) fail(TK_PACK_ERROR, "pack ", path, " cannot be opened: ", std::strerror(errno));
  std::unique_ptr<Pack> pack(new Pack(path, file));
  pack->is_own_ = is_own;
  pack->read_header();
  if (root.empty()) {
    pack->verify();
  } else {
    pack->check_root(root);  // byte for byte what came with this library, and `tk verify` looks at all of that
  }
  for (const format::Op& op : pack->all<format::Op>()) pack->ops_[pack->string(op.name)] = &op;
  return pack;
}

Pack::Pack(std::string path, int file) : path_(std::move(path)), file_(file) {}

Pack::~Pack() { ::close(file_); }

// Nothing in the header is believed before it was held against the size of the file.
void Pack::read_header() {
  const uint64_t size = size_of(file_, path_);
  format::Header header;
  if (size < sizeof header)
    damaged("it is no pack: a header alone takes ", sizeof header, " bytes, the file has ", size);
  read(&header, sizeof header, 0);
  if (std::memcmp(header.magic, format::kMagic, sizeof header.magic) != 0)
    damaged("it is no pack: the magic is missing");
  if (header.version != format::kVersion)
    damaged("it is of version ", header.version, ", this library reads version ", format::kVersion,
            "; build it again with the tk that is installed");
  if (header.file_size != size)
    damaged("it should have ", header.file_size, " bytes and has ", size, ": it is cut short");
  pages_offset_ = sizeof header + header.n_pages * sizeof(format::PageHash);
  if (header.index_size < pages_offset_ || header.index_size > size)
    damaged("its index cannot have ", header.index_size, " bytes");
  if (header.n_pages != (header.index_size - pages_offset_ + format::kPageSize - 1) / format::kPageSize)
    damaged("its index cannot have ", header.n_pages, " pages");
  index_ = std::make_unique_for_overwrite<std::byte[]>(header.index_size);
  has_page_ = std::make_unique<std::atomic<bool>[]>(header.n_pages);
  std::memcpy(index_.get(), &header, sizeof header);  // not read again: a file may change meanwhile
  read(index_.get() + sizeof header, pages_offset_ - sizeof header, sizeof header);
  constexpr size_t kHashAt = offsetof(format::Header, index_hash);
  const std::span front(index_.get(), pages_offset_);
  const std::byte zeros[sizeof header.index_hash] = {};
  const Digest found = sha256({front.first(kHashAt), zeros, front.subspan(kHashAt + sizeof zeros)});
  if (found != std::bit_cast<Digest>(header.index_hash))
    damaged("the index is damaged: its SHA-256 is not the one it names");
}

void Pack::check_root(std::string_view root) {
  if (index_hash() != root) damaged("it is not the pack that was built with this library; install tk again");
  is_rooted_ = true;
}

uint64_t Pack::end_of(uint64_t page) const {
  return std::min(pages_offset_ + (page + 1) * format::kPageSize, header().index_size);
}

void Pack::fetch(uint64_t first, uint64_t last) const {
  const auto* const hashes = reinterpret_cast<const format::PageHash*>(index_.get() + sizeof(format::Header));
  for (uint64_t page = first; page <= last; page++) {
    if (has_page(page)) continue;
    const std::lock_guard lock(pages_mutex_);
    if (has_page(page)) continue;  // by now
    const uint64_t offset = pages_offset_ + page * format::kPageSize;
    const std::span bytes(index_.get() + offset, end_of(page) - offset);
    read(bytes.data(), bytes.size(), offset);
    if (sha256({bytes}) != std::bit_cast<Digest>(hashes[page].sha256))
      damaged("the index is damaged: page ", page, " does not have its hash");
    has_page_[page].store(true, std::memory_order_release);
  }
}

const char* Pack::string(uint32_t offset) const {
  const uint64_t begin = section(format::Section::Strings).offset + offset;
  for (uint64_t at = begin;;) {
    const std::byte* const bytes = need(at, 1);
    const uint64_t end = end_of(page_of(at));
    if (std::memchr(bytes, 0, end - at)) return reinterpret_cast<const char*>(index_.get() + begin);
    at = end;
  }
}

void Pack::read(void* to, uint64_t size, uint64_t offset) const {
  for (auto* at = static_cast<char*>(to); size > 0;) {
    const ssize_t got = pread(file_, at, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) damaged("it cannot be read: ", got < 0 ? std::strerror(errno) : "the file ends early");
    at += got;
    size -= static_cast<uint64_t>(got);
    offset += static_cast<uint64_t>(got);
  }
}

const format::Op* Pack::find_op(std::string_view name) const {
  const auto found = ops_.find(name);
  return found == ops_.end() ? nullptr : found->second;
}

// What is allocated for its content is what the index says, and never more is written.
Pack::Bytes Pack::unpacked(uint32_t index) const {
  const format::Frame& record = row<format::Frame>(index);
  const std::string what = "frame " + std::to_string(index);
  Bytes frame(record.compressed_size);
  read(frame.data(), frame.size(), record.offset);
  if (ZSTD_findFrameCompressedSize(frame.data(), frame.size()) != frame.size() ||
      ZSTD_getFrameContentSize(frame.data(), frame.size()) != record.size)
    damaged(what, " is damaged: it is no zstd frame of ", record.size, " bytes");
  Bytes content(record.size);
  const size_t size = ZSTD_decompress(content.data(), content.size(), frame.data(), frame.size());
  if (size != content.size())
    damaged(what, " is damaged: ", ZSTD_isError(size) ? ZSTD_getErrorName(size) : "it ends early");
  return content;
}

// A few are kept, for what is needed next is likely to lie in one of them.
std::shared_ptr<const Pack::Bytes> Pack::frame(uint32_t index) const {
  {
    const std::lock_guard lock(frames_mutex_);
    for (const KeptFrame& kept : frames_)
      if (kept.content && kept.index == index) return kept.content;
  }
  auto content = std::make_shared<const Bytes>(unpacked(index));
  const std::lock_guard lock(frames_mutex_);
  frames_[next_frame_] = {index, content};
  next_frame_ = (next_frame_ + 1) % frames_.size();
  return content;
}

std::vector<std::byte> Pack::image(uint32_t index) const {
  const format::Image& image = row<format::Image>(index);
  const auto content = frame(image.frame);
  const std::span<const std::byte> bytes = std::span(*content).subspan(image.begin, image.size);
  if (sha256({bytes}) != std::bit_cast<Digest>(image.hash))
    damaged("the image of ", string(image.name), " is damaged: it does not have its hash");
  std::vector<std::byte> out(image.size + 1);  // the last stays 0
  std::ranges::copy(bytes, out.begin());
  return out;
}

}  // namespace tk
