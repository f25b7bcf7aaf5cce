#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace tk {

using Digest = std::array<uint8_t, 32>;

// SHA-256 of some bytes that follow each other.
Digest sha256(std::initializer_list<std::span<const std::byte>> parts);

std::string hex(std::span<const uint8_t> bytes);

}  // namespace tk
