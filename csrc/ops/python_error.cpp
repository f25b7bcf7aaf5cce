#include "python_error.h"

#include <memory>
#include <stdexcept>
#include <utility>

// pybind11, through which Python calls ops, lets an exception of this base class set Python's error itself. Declared as
// there: C++ knows an exception's class by its name. Where the declarations should part, RuntimeError with the text is
// what is left, as of every exception from C++.
namespace pybind11 {
class builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace tk::ops {
namespace {

tk_ops_python python;
thread_local std::exception_ptr pending;

std::shared_ptr<void> own(void* object) {
  python.increment(object);
  return {object, [](void* owned) {
            const int state = python.lock();  // the last copy may die anywhere
            python.decrement(owned);
            python.unlock(state);
          }};
}

class PythonError : public pybind11::builtin_exception {
 public:
  PythonError(void* type, void* error, const char* text)
      : builtin_exception(text), type_(own(type)), error_(own(error)) {}
  void set_error() const override { python.set_error(type_.get(), error_.get()); }

 private:
  std::shared_ptr<void> type_;
  std::shared_ptr<void> error_;
};

class NotImplemented : public pybind11::builtin_exception {
 public:
  using builtin_exception::builtin_exception;
  void set_error() const override { python.set_text(*static_cast<void**>(python.not_implemented), what()); }
};

}  // namespace

void fail_not_implemented(const std::string& message) {
  if (python.set_text) throw NotImplemented(message);
  throw std::runtime_error(message);
}

std::exception_ptr take_python_error() { return std::exchange(pending, nullptr); }

}  // namespace tk::ops

void tk_ops_set_python(const tk_ops_python* functions) { tk::ops::python = *functions; }

void tk_ops_python_failed(void* type, void* error, const char* text) {
  tk::ops::pending = std::make_exception_ptr(tk::ops::PythonError(type, error, text));
}
