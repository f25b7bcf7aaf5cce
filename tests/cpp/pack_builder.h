// Packs for tests: described as nested structs, written as bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "expr.h"
#include "pack_format.h"

namespace tk::test {

// --- Expressions ---

struct E {
  std::vector<int64_t> words;

  E(int64_t constant = 0) : E(Opcode::Const, constant) {}  // NOLINT: a number is an expression
  E(Opcode op, int64_t operand) : words{static_cast<int64_t>(op) | operand * 256} {}
  E(Opcode op, std::initializer_list<E> operands);
};

inline E size(int t, int d) { return {Opcode::Size, t | d << 8}; }
inline E stride(int t, int d) { return {Opcode::Stride, t | d << 8}; }
inline E dtype(int t) { return {Opcode::Dtype, t}; }
inline E ndim(int t) { return {Opcode::Ndim, t}; }
inline E alignment(int t) { return {Opcode::Alignment, t}; }
inline E int_arg(int i) { return {Opcode::Int, i}; }
inline E mode() { return {Opcode::Mode, 0}; }
inline E device(DeviceField f) { return {Opcode::Device, static_cast<int64_t>(f)}; }
inline E local(int i) { return {Opcode::Local, i}; }
inline E operator+(const E& a, const E& b) { return {Opcode::Add, {a, b}}; }
inline E operator-(const E& a, const E& b) { return {Opcode::Sub, {a, b}}; }
inline E operator*(const E& a, const E& b) { return {Opcode::Mul, {a, b}}; }
inline E operator%(const E& a, const E& b) { return {Opcode::Mod, {a, b}}; }
inline E operator==(const E& a, const E& b) { return {Opcode::Eq, {a, b}}; }
inline E operator>=(const E& a, const E& b) { return {Opcode::Ge, {a, b}}; }
inline E operator<=(const E& a, const E& b) { return {Opcode::Le, {a, b}}; }
inline E ceil_div(const E& a, const E& b) { return {Opcode::CeilDiv, {a, b}}; }

// --- What a pack holds ---

struct Map {
  int tensor = 0;
  std::vector<E> sizes;  // outermost first
  std::vector<E> strides;
  std::vector<uint32_t> box;
  uint32_t element_type = 9;
  uint32_t element_size = 2;
  uint32_t swizzle = 3;
  uint32_t l2_promotion = 2;
  uint32_t oob_fill = 0;
  E offset = 0;
  std::vector<E> lower = {};  // of im2col; then box is pixels, channels
  std::vector<E> upper = {};
  std::vector<E> steps = {};
};

struct Arg {
  format::ArgKind kind;
  uint32_t width = 8;
  uint32_t index = 0;
  E value = 0;
  Map map = {};
};
inline Arg pointer(int tensor, E offset = 0) {
  return {.kind = format::ArgKind::Pointer, .index = static_cast<uint32_t>(tensor), .value = offset};
}
inline Arg integer(E value, uint32_t width = 4) {
  return {.kind = format::ArgKind::Int, .width = width, .value = value};
}
inline Arg floating(uint32_t index, uint32_t width = 4) {
  return {.kind = format::ArgKind::Float, .width = width, .index = index};
}
inline Arg tensor_map(Map map) { return {.kind = format::ArgKind::TensorMap, .map = std::move(map)}; }
inline Arg buffer(uint32_t index, E offset = 0) {
  return {.kind = format::ArgKind::Buffer, .index = index, .value = offset};
}
inline Arg global_scratch() { return {.kind = format::ArgKind::GlobalScratch}; }
inline Arg profile_scratch() { return {.kind = format::ArgKind::ProfileScratch}; }
inline Arg null_pointer() { return {.kind = format::ArgKind::Null}; }

struct Launch {
  std::string entry = "kernel";
  std::vector<Arg> args = {};
  std::vector<E> grid = {1, 1, 1};
  E when = 1;
  E dependent = 0;
  uint32_t threads = 128;
  uint32_t shared = 0;
  uint32_t cluster = 1;
  uint32_t flags = 0;
  uint32_t global_scratch = 0;
  uint32_t global_scratch_alignment = 128;
  uint32_t profile_scratch = 0;
  std::string image = {};  // "": what the fake driver takes for a kernel with these arguments
};

struct Constraint {
  E holds;
  std::string message;
};

struct Buffer {
  format::BufferKind kind;
  E bytes;
  uint32_t alignment = 256;
};

struct Variant {
  std::string kernel = "kernel";
  uint32_t config = 0;
  uint32_t flags = 0;
  std::vector<Constraint> constraints = {};
  std::vector<E> locals = {};
  E cost = 0;
  std::vector<Buffer> buffers = {};
  std::vector<Launch> launches = {Launch{}};
  int64_t bucket = 0;
};

struct Output {
  E dtype;
  std::vector<E> sizes;
  std::vector<E> strides;
  uint32_t leading = 0;  // 1 + a tensor
};

struct Param {
  std::string name;
  format::ParamKind kind = format::ParamKind::Tensor;
  uint32_t flags = 0;
  uint32_t rank = 0;
  std::string default_value = {};
};

struct Pin {
  int64_t key;
  std::vector<int64_t> dims;
  uint32_t config;
};

struct Op {
  std::string name = "op";
  uint32_t n_tensors = 0;
  uint32_t n_ints = 0;
  uint32_t n_floats = 0;
  std::vector<E> locals = {};
  E key = 0;
  std::vector<uint32_t> dims = {};
  std::vector<std::string> configs = {"config0"};
  std::vector<Variant> variants = {Variant{}};
  std::vector<Output> outputs = {};
  std::vector<Pin> pins = {};  // in order
  std::string schema = {};
  std::vector<Param> params = {};
  std::vector<Constraint> checks = {};
  std::string meta = {};
  std::string backward = {};
  uint32_t n_saved = 0;
};

struct PackSpec {
  std::vector<Op> ops = {Op{}};
  uint32_t arch = 90;
  bool ptx = false;
  bool family = false;
  std::string compiler = "test compiler 1.0";
  size_t images_per_frame = 1;
};

// The image that the fake driver loads: one kernel, by its parameters' sizes in bytes.
std::string fake_image(const Launch& launch);

std::string pack_bytes(const PackSpec& spec);

// A zstd frame.
std::string compressed(const std::string& content);

// Puts the right hash over whatever the index holds now.
void rehash(std::string& bytes);

// --- Files ---

void write_file(const std::filesystem::path& path, const std::string& bytes);

// A folder that goes with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string write(const std::string& name, const PackSpec& spec) const;  // returns the path
  std::string string() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace tk::test
