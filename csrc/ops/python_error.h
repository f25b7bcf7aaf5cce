// Python exceptions on their way through torch's C API, which keeps their text at most. A formula that the gate calls
// leaves its exception here and returns; the gate throws it again as the very object that Python raised, since those
// who catch it (torch.utils.checkpoint, which stops a recomputation with one) go by its type.
#pragma once

#include <exception>
#include <string>

#include "tk/tk.h"

// The functions of CPython that this takes, from the Python that is there: the library is built for none.
extern "C" struct tk_ops_python {
  void (*set_error)(void* type, void* error);  // PyErr_SetObject
  void (*increment)(void* object);             // Py_IncRef
  void (*decrement)(void* object);             // Py_DecRef
  int (*lock)(void);                           // PyGILState_Ensure
  void (*unlock)(int state);                   // PyGILState_Release
  void (*set_text)(void* type, const char*);   // PyErr_SetString
  void* not_implemented;                       // the address of PyExc_NotImplementedError
};

extern "C" TK_API void tk_ops_set_python(const tk_ops_python* functions);
// Python's exception, for the gate that called. Called under the GIL; text: for those who catch it in C++.
extern "C" TK_API void tk_ops_python_failed(void* type, void* error, const char* text);

namespace tk::ops {

// What tk_ops_python_failed left in this thread, or null.
std::exception_ptr take_python_error();

// Throws what Python sees as a NotImplementedError; a RuntimeError where there is no Python.
[[noreturn]] void fail_not_implemented(const std::string& message);

}  // namespace tk::ops
