// What a call asks for besides its tensors: an epilogue, a config, a mode.
#pragma once

#include "arguments.h"
#include "tk/tk.h"

namespace tk::ops {

// At the end of every product's arguments.
#define TK_SETTINGS "int activation=0, ScalarType? out_dtype=None, int precision=-1, int config=-1, int mode=0"

struct Settings {          // in the order of TK_SETTINGS
  int64_t activation = 0;  // none, relu, gelu, gelu_tanh, silu
  std::optional<int32_t> out_dtype;
  int64_t precision = -1;  // of float32: 0 ieee, 1 tf32, -1 as torch's switch says
  int64_t config = -1;
  int64_t mode = 0;
};

template <>
struct Reading<Settings> {
  static constexpr std::string_view kTypes[] = {"int", "ScalarType?", "int", "int", "int"};
  // In braces, which are evaluated in their order.
  static Settings read(Arguments& args) {
    return Settings{args.integer(), args.optional_dtype(), args.integer(), args.integer(), args.integer()};
  }
};

// activation, precision, config and mode within their ranges. op: "tk.mm".
void check_settings(const char* op, const Settings& settings);
// The same of a generated op, "softmax", which has no others.
void check_settings(const char* op, int64_t config, int64_t mode);

// The CUDA device that a call on tensors of `device` is for. Tensors on the CPU stand for some on a device that is
// described (launch.h); without one they are refused.
int32_t target_device(const char* op, Device device);

}  // namespace tk::ops
