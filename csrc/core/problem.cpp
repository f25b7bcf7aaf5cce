#include "problem.h"

#include <algorithm>

#include "choose.h"

namespace tk {
namespace {

const char* dtype_name(int32_t dtype) {
  static constexpr std::pair<int32_t, const char*> kNames[] = {
      {0, "uint8"},   {1, "int8"},    {2, "int16"}, {3, "int32"},     {4, "int64"},        {5, "float16"},
      {6, "float32"}, {7, "float64"}, {11, "bool"}, {15, "bfloat16"}, {23, "float8_e5m2"}, {24, "float8_e4m3fn"},
  };
  const auto* const found = std::ranges::find(kNames, dtype, &std::pair<int32_t, const char*>::first);
  return found == std::end(kNames) ? "dtype?" : found->second;
}

const char* name_of(const tk_call& call) {
  const char* const name = op_names().name(call.op);
  if (!name) fail(TK_INVALID_ARGUMENT, "op ", call.op, " was never given out by tk_intern_op");
  return name;
}

void append_numbers(std::string& out, const int64_t* numbers, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) out += (i ? ", " : "") + std::to_string(numbers[i]);
}

bool is_contiguous(const tk_tensor& t) {
  int64_t expected = 1;
  for (int32_t d = t.ndim - 1; d >= 0; d--) {
    if (t.sizes[d] != 1 && t.strides[d] != expected) return false;
    if (__builtin_mul_overflow(expected, t.sizes[d], &expected)) return false;
  }
  return true;
}

std::string tensor_text(const tk_tensor& t) {
  if (t.ndim < 0) return "absent";
  std::string out = std::string(dtype_name(t.dtype)) + "[";
  append_numbers(out, t.sizes, static_cast<uint32_t>(t.ndim));
  out += "]";
  if (!is_contiguous(t)) {
    out += " with strides (";
    append_numbers(out, t.strides, static_cast<uint32_t>(t.ndim));
    out += ")";
  }
  if (const int64_t alignment = alignment_of(t); alignment < 16) out += " on " + std::to_string(alignment) + " bytes";
  return out;
}

// The op that serves a call; see Problem's first constructor.
OpInPack serving(const tk_call& call) {
  const Device& device = runtime().devices.get(call.device);
  const std::vector<OpInPack> found = runtime().registry.find(name_of(call), device.arch());
  if (found.size() == 1) return found.front();
  const OpInPack* accepting = nullptr;
  for (const OpInPack& op : found) {
    try {
      Problem problem(call, op);
      if (can_run(problem)) return op;
      if (!accepting) accepting = &op;
    } catch (const Error& error) {
      if (error.status() != TK_INVALID_ARGUMENT) throw;  // the arguments are wrong for this pack
    }
  }
  return accepting ? *accepting : found.front();
}

}  // namespace

void check_call(const tk_call* call) {
  if (!call) [[unlikely]]
    fail(TK_INVALID_ARGUMENT, "the call is NULL");
  if (call->n_tensors > TK_MAX_TENSORS || call->n_ints > TK_MAX_INTS || call->n_floats > TK_MAX_FLOATS) [[unlikely]]
    fail(TK_INVALID_ARGUMENT, "a call with ", call->n_tensors, " tensors, ", call->n_ints, " ints and ", call->n_floats,
         " floats; at most ", TK_MAX_TENSORS, ", ", TK_MAX_INTS, " and ", TK_MAX_FLOATS, " are possible");
  if ((call->n_tensors && !call->tensors) || (call->n_ints && !call->ints) || (call->n_floats && !call->floats))
      [[unlikely]]
    fail(TK_INVALID_ARGUMENT, "a call whose arguments are NULL");
  for (uint32_t i = 0; i < call->n_tensors; i++)
    if (call->tensors[i].ndim < -1 || call->tensors[i].ndim > TK_MAX_DIMS) [[unlikely]]
      fail(TK_INVALID_ARGUMENT, "tensor ", i, " has ", call->tensors[i].ndim, " dimensions; 0 to ", TK_MAX_DIMS,
           " are possible, and -1 where it is absent");
}

Problem::Problem(const tk_call& call) : Problem(call, serving(call)) {}

Problem::Problem(const tk_call& call, const OpInPack& found)
    : call(call), device(runtime().devices.get(call.device)), found(found), pack(*found.pack), op(*found.op) {
  check_arguments();
  evaluate_op();
  check_values();
  const auto buckets = pack.rows<format::Bucket>(op.buckets);
  const auto at = std::lower_bound(buckets.begin(), buckets.end(), key,
                                   [](const format::Bucket& b, int64_t wanted) { return b.key < wanted; });
  if (at != buckets.end() && at->key == key) bucket = &*at;
}

void Problem::check_arguments() const {
  if (call.n_tensors != op.n_tensors || call.n_ints != op.n_ints || call.n_floats != op.n_floats)
    fail(TK_INVALID_ARGUMENT, op_name(), " takes ", op.n_tensors, " tensors, ", op.n_ints, " ints and ", op.n_floats,
         " floats, not ", call.n_tensors, ", ", call.n_ints, " and ", call.n_floats, " (pack ", pack.path(), ")");
}

void Problem::evaluate_op() {
  const bool fits = evaluate_locals(op.locals, 0) && evaluate(pack.code(op.key), scope(), key);
  if (!fits) fail(TK_INVALID_ARGUMENT, text(), " is too large: its sizes leave 64 bits");
}

bool Problem::evaluate_locals(format::Range range, uint32_t first) {
  for (const format::Expr& expr : pack.locals(range))
    if (!evaluate(pack.code(expr), scope(), locals[first++])) return false;
  return true;
}

void Problem::check_values() const {
  for (const auto& check : pack.rows<format::Constraint>(op.checks)) {
    int64_t holds = 0;
    if (!evaluate(pack.code(check.holds), scope(), holds) || !holds)
      fail(TK_INVALID_ARGUMENT, "tk.", op_name(), ": ", pack.string(check.message));
  }
}

const char* Problem::config_name(uint32_t config) const {
  return pack.string(pack.rows<format::Config>(op.configs)[config].name);
}

std::string Problem::text() const {
  std::string out = std::string(op_name()) + "(";
  for (uint32_t i = 0; i < call.n_tensors; i++) out += (i ? ", " : "") + tensor_text(call.tensors[i]);
  if (call.n_ints) out += "; ";
  append_numbers(out, call.ints, call.n_ints);
  return out + ")";
}

PinKey Problem::pin_key() const {
  std::array<int64_t, 4> dims{};
  for (uint32_t i = 0; i < op.n_dims; i++) dims[i] = locals[op.dims[i]];
  return {&op, key, dims};
}

}  // namespace tk
