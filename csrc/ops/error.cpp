#include "error.h"

#include <new>
#include <stdexcept>
#include <string_view>

#include "runtime.h"

namespace tk::ops {

void fail_argument(const std::string& message) { throw std::invalid_argument(message); }

void fail_missing(std::string_view op, std::string_view name) {
  throw std::runtime_error(text("tk.", op, ": ", name, " must be a Tensor, is None"));
}

void fail_unsupported(const std::string& message) { throw std::runtime_error("[tk:Unsupported] " + message); }

void fail_shim(const char* what) {
  // Since torch 2.13; before it the reason is printed to stderr only.
  using GetWhat = const char*();
  static auto* const get_what = torch_symbol<GetWhat>("libtorch_cpu.so", "torch_exception_get_what_without_backtrace");
  const char* reason = get_what ? get_what() : nullptr;
  if (!reason) throw std::runtime_error(text("tk could not ", what, ": torch's reason is printed above"));
  const bool out_of_memory = std::string_view(reason).find("out of memory") != std::string_view::npos;
  throw std::runtime_error(text(out_of_memory ? "[tk:OutOfMemory] " : "", "tk could not ", what, ": ", reason));
}

void fail_status(tk_status status) {
  const char* message = tk_last_error();
  switch (status) {
    case TK_INVALID_ARGUMENT:
      throw std::invalid_argument(message);
    case TK_UNSUPPORTED:
      fail_unsupported(message);
    case TK_VARIANT_NOT_FOUND:
      throw std::runtime_error(text("[tk:VariantNotFound] ", message));
    case TK_PACK_ERROR:
      throw std::runtime_error(text("[tk:Pack] ", message));
    case TK_DRIVER_ERROR:
      throw std::runtime_error(text("[tk:Driver] ", message));
    case TK_OK:
      break;
  }
  throw std::logic_error(text("tk: unknown status ", static_cast<int>(status)));
}

}  // namespace tk::ops
