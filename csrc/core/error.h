// Failures of the core: thrown where they are found, turned into a status and a message at the C API.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "tk/tk.h"

namespace tk {

class Error : public std::runtime_error {
 public:
  Error(tk_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  tk_status status() const { return status_; }

 private:
  tk_status status_;
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(tk_status status, const Parts&... parts) {
  throw Error(status, text(parts...));
}

}  // namespace tk
