#include "hash.h"

// The plain functions instead of EVP: they alone come out of the static archive, in 37 KB instead of megabytes.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

namespace tk {

Digest sha256(std::initializer_list<std::span<const std::byte>> parts) {
  SHA256_CTX context;
  SHA256_Init(&context);
  for (const auto part : parts) SHA256_Update(&context, part.data(), part.size());
  Digest digest;
  SHA256_Final(digest.data(), &context);
  return digest;
}

std::string hex(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint8_t byte : bytes) {
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

}  // namespace tk
