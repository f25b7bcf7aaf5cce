// Which packs are there when the library is loaded: the wheel's own beside it, and those of TK_PACK_PATH.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "error.h"

extern "C" TK_API uint32_t tk_ops_abi_version(void) { return TK_ABI_VERSION; }

namespace tk::ops {
namespace {

// A pack that cannot be used must not keep a program from starting; that it is missing must not go unseen either.
void warn(const std::string& message) { aoti_torch_warn("load", "tk", 0, message.c_str()); }

void find_builtin_packs() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&tk_ops_abi_version), &self) || !self.dli_fname) return;
  std::error_code error;
  const auto library = std::filesystem::absolute(self.dli_fname, error);
  const auto packs = (library.parent_path().parent_path() / "packs").lexically_normal();
  if (tk_set_builtin_directory(packs.c_str()) != TK_OK) warn(tk_last_error());
}

void load_user_packs() {
  const char* value = std::getenv("TK_PACK_PATH");
  for (std::string_view paths = value ? value : ""; !paths.empty();) {
    const std::string path(paths.substr(0, paths.find(':')));
    paths.remove_prefix(std::min(paths.size(), path.size() + 1));
    if (path.empty()) continue;
    if (tk_load_pack(path.c_str()) != TK_OK) warn(text("TK_PACK_PATH: ", tk_last_error()));
  }
}

const bool packs_are_found = [] {
  find_builtin_packs();
  load_user_packs();
  return true;
}();

}  // namespace
}  // namespace tk::ops
