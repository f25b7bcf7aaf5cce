#include "pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <new>

namespace tk {

static_assert(std::endian::native == std::endian::little, "packs are read as they are: little-endian");

namespace {

uint64_t size_of(int file) {
  struct stat status;
  return fstat(file, &status) == 0 && S_ISREG(status.st_mode) ? static_cast<uint64_t>(status.st_size) : 0;
}

}  // namespace

std::unique_ptr<const Pack> Pack::open(const std::string& path, std::string_view root) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(TK_PACK_ERROR, "pack ", path, " cannot be opened: ", std::strerror(errno));
  std::unique_ptr<Pack> pack(new Pack(path, file));
  pack->read_index();
  pack->verify(root);
  for (const format::Op& op : pack->all<format::Op>()) pack->ops_[pack->string(op.name)] = &op;
  return pack;
}

Pack::Pack(std::string path, int file) : path_(std::move(path)), file_(file) {}

Pack::~Pack() { ::close(file_); }

// Nothing in the header is believed before it was held against the size of the file.
void Pack::read_index() {
  const uint64_t size = size_of(file_);
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
  if (header.index_size < sizeof header || header.index_size > size)
    damaged("its index cannot have ", header.index_size, " bytes");
  index_size_ = header.index_size;
  index_ = std::make_unique_for_overwrite<std::byte[]>(index_size_);
  read(index_.get(), index_size_, 0);
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

void Pack::DictionaryDeleter::operator()(ZSTD_DDict* dictionary) const { ZSTD_freeDDict(dictionary); }

// A compressed frame as it is in the file, when it is whole and promises `size` bytes: what is allocated for its
// content is what the index says, and never more is written.
std::vector<std::byte> Pack::read_frame(uint64_t offset, uint64_t compressed_size, uint64_t size,
                                        const std::string& what) const {
  std::vector<std::byte> frame(compressed_size);
  read(frame.data(), frame.size(), offset);
  if (ZSTD_findFrameCompressedSize(frame.data(), frame.size()) != frame.size() ||
      ZSTD_getFrameContentSize(frame.data(), frame.size()) != size)
    damaged(what, " is damaged: it is no zstd frame of ", size, " bytes");
  return frame;
}

// Digested once, by whoever needs it first. No reference to it outlives the pack.
const ZSTD_DDict* Pack::dictionary(uint32_t index) const {
  const std::lock_guard lock(dictionaries_mutex_);
  auto& digested = dictionaries_[index];
  if (digested) return digested.get();
  const format::Dictionary& record = all<format::Dictionary>()[index];
  const std::string what = "dictionary " + std::to_string(index);
  const auto frame = read_frame(record.offset, record.compressed_size, record.size, what);
  const auto content = std::make_unique_for_overwrite<std::byte[]>(record.size);
  const size_t size = ZSTD_decompress(content.get(), record.size, frame.data(), frame.size());
  if (size != record.size)
    damaged(what, " is damaged: ", ZSTD_isError(size) ? ZSTD_getErrorName(size) : "it ends early");
  digested.reset(ZSTD_createDDict(content.get(), record.size));
  // Bytes that are no dictionary pass as one without a number.
  if (!digested || ZSTD_getDictID_fromDDict(digested.get()) == 0) {
    digested.reset();
    damaged(what, " is damaged: it is no zstd dictionary");
  }
  return digested.get();
}

std::vector<std::byte> Pack::image(uint32_t index) const {
  const format::Image& image = all<format::Image>()[index];
  const std::string what = std::string("the image of ") + string(image.name);
  const auto frame = read_frame(image.offset, image.compressed_size, image.size, what);
  const ZSTD_DDict* const with = image.dictionary ? dictionary(image.dictionary - 1) : nullptr;
  const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(), ZSTD_freeDCtx);
  if (!context) throw std::bad_alloc();
  std::vector<std::byte> out(image.size + 1);  // the last stays 0
  const size_t size =
      ZSTD_decompress_usingDDict(context.get(), out.data(), image.size, frame.data(), frame.size(), with);
  if (ZSTD_isError(size)) damaged(what, " is damaged: ", ZSTD_getErrorName(size));
  if (size != image.size || sha256({std::span(out).first(image.size)}) != std::bit_cast<Digest>(image.hash))
    damaged(what, " is damaged: it does not have its hash");
  return out;
}

}  // namespace tk
