// How an op fails. The type of an exception survives the way to Python for std::invalid_argument (ValueError) alone;
// the rest arrive as RuntimeError, so their text starts with "[tk:<Name>] ", from which tk.errors makes the typed
// error.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <sstream>
#include <string>
#include <string_view>

#include "tk/tk.h"

namespace tk::ops {

[[noreturn]] void fail_argument(const std::string& message);                 // ValueError
[[noreturn]] void fail_missing(std::string_view op, std::string_view name);  // a tensor must be given
[[noreturn]] void fail_unsupported(const std::string& message);              // tk.UnsupportedError
[[noreturn]] void fail_shim(const char* what);    // RuntimeError, with torch's own words where it has some
[[noreturn]] void fail_status(tk_status status);  // by status, with tk_last_error()

// A call of torch's C API. `what` says what was being done: "allocate the output".
inline void check_shim(AOTITorchError error, const char* what) {
  if (error != 0) [[unlikely]]
    fail_shim(what);
}

inline void check_status(tk_status status) {
  if (status != TK_OK) [[unlikely]]
    fail_status(status);
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace tk::ops
