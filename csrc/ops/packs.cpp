// Which packs are there when the library is loaded: the wheel's own beside it, and those of TK_PACK_PATH.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "error.h"
#include "generated.h"
#include "registration.h"

extern "C" TK_API uint32_t tk_ops_abi_version(void) { return TK_ABI_VERSION; }

namespace tk::ops {
namespace {

// A pack that cannot be used must not keep a program from starting; that it is missing must not go unseen either.
void warn(const std::string& message) { aoti_torch_warn("load", "tk", 0, message.c_str()); }

// ../packs from where this library lies. Without std::filesystem: libtorch_cpu exports parts of a copy of it, which the
// linker would take for libstdc++'s.
std::string builtin_directory() {
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&tk_ops_abi_version), &self) || !self.dli_fname) return {};
  const std::string library = self.dli_fname;
  const std::string packs = library.substr(0, library.rfind('/') + 1) + "../packs";
  const std::unique_ptr<char, decltype(&std::free)> absolute(realpath(packs.c_str(), nullptr), &std::free);
  return absolute ? absolute.get() : packs;
}

void find_builtin_packs() {
  const std::string packs = builtin_directory();
  if (!packs.empty() && tk_set_builtin_directory(packs.c_str()) != TK_OK) warn(tk_last_error());
  define_generated_ops();
}

void load_user_packs() {
  const char* value = std::getenv("TK_PACK_PATH");
  for (std::string_view paths = value ? value : ""; !paths.empty();) {
    const std::string path(paths.substr(0, paths.find(':')));
    paths.remove_prefix(std::min(paths.size(), path.size() + 1));
    if (path.empty()) continue;
    tk_status status;
    if (const char* const error = tk_ops_load_pack(path.c_str(), &status)) warn(text("TK_PACK_PATH: ", error));
  }
}

const bool packs_are_found = [] {
  reserve_names();
  find_builtin_packs();
  load_user_packs();
  return true;
}();

}  // namespace
}  // namespace tk::ops
