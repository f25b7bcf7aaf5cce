#include "pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <bit>
#include <cerrno>
#include <cstring>

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

std::vector<std::byte> Pack::image(uint32_t index) const {
  const format::Image& image = all<format::Image>()[index];
  std::vector<std::byte> compressed(image.compressed_size);
  read(compressed.data(), compressed.size(), image.offset);
  std::vector<std::byte> out(image.size + 1);  // the last stays 0
  uLongf size = image.size;
  const int result = uncompress(reinterpret_cast<Bytef*>(out.data()), &size,
                                reinterpret_cast<const Bytef*>(compressed.data()), compressed.size());
  const Digest expected = std::bit_cast<Digest>(image.hash);
  if (result != Z_OK || size != image.size || sha256({std::span(out).first(image.size)}) != expected)
    damaged("the image of ", string(image.name), " is damaged");
  return out;
}

}  // namespace tk
