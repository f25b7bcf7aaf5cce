#include "registry.h"

namespace tk {

// roots.inc is written by the pack build (CMake: TK_ROOTS_INC). Without it the library knows no packs of its own.
std::span<const Root> compiled_roots() {
#ifdef TK_ROOTS_INC
  static constexpr Root kRoots[] = {
#include TK_ROOTS_INC
      {nullptr, nullptr}};
  return std::span(kRoots).first(std::size(kRoots) - 1);
#else
  return {};
#endif
}

}  // namespace tk
