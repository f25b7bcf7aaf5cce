#include "runtime.h"

namespace tk {
namespace {

std::unique_ptr<Runtime>& holder() {
  static auto* const holder = new std::unique_ptr<Runtime>(new Runtime);
  return *holder;
}

}  // namespace

OpNames& op_names() {
  static auto* const names = new OpNames;
  return *names;
}

Runtime& runtime() { return *holder(); }

void reset_runtime_for_tests(std::span<const Root> roots) {
  holder().reset(new Runtime{Registry(roots), {}});
  Registry::next_generation();
}

}  // namespace tk
