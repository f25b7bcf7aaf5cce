#include "interface.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <span>

namespace tk {
namespace {

using format::ParamKind;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The whole of it, and in digits: a schema has no word for inf.
template <class Number>
bool is_number(std::string_view text) {
  const size_t first = text.starts_with('-');
  if (text.size() == first || !is_digit(text[first])) return false;
  Number value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string type_of(const format::Param& param, uint32_t& mutated) {
  switch (param.kind) {
    case ParamKind::Float:
      return "float";
    case ParamKind::Int:
      return "SymInt";  // so that a graph traced with one value serves others
    case ParamKind::Bool:
      return "bool";
    case ParamKind::OptionalTensor:
      return "Tensor?";
    default:
      std::string out = "Tensor";
      if (param.flags & format::kMutated) out += std::string("(") + static_cast<char>('a' + mutated++) + "!)";
      return param.kind == ParamKind::Tensors ? out + "[]" : out;
  }
}

// Of an op of lists a result that follows a list is one.
std::string results(std::span<const format::Output> outputs, bool takes_lists) {
  std::string out;
  for (const format::Output& output : outputs)
    out += std::string(out.empty() ? "" : ", ") + (takes_lists && output.leading != 0 ? "Tensor[]" : "Tensor");
  return outputs.size() == 1 ? out : "(" + out + ")";
}

std::string schema(const Pack& pack, const format::Op& op, const char* prefix, uint32_t n_results) {
  std::string out = std::string(prefix) + pack.string(op.name) + "(";
  uint32_t mutated = 0;
  bool takes_lists = false;
  for (const format::Param& param : pack.rows<format::Param>(op.params)) {
    takes_lists |= param.kind == ParamKind::Tensors;
    out += type_of(param, mutated) + " " + pack.string(param.name);
    if (*pack.string(param.default_value)) out += std::string("=") + pack.string(param.default_value);
    out += ", ";
  }
  // torch passes the arguments of an op that writes by name, among others to a function with a `mode` of its own.
  return out + "int config=-1, int mode" + (mutated ? "_bits" : "") + "=0) -> " +
         results(pack.rows<format::Output>(op.outputs).first(n_results), takes_lists);
}

}  // namespace

std::string schema_of(const Pack& pack, const format::Op& op) {
  return schema(pack, op, "", op.outputs.count - op.n_saved);
}

std::string twin_schema_of(const Pack& pack, const format::Op& op) { return schema(pack, op, "_", op.outputs.count); }

bool is_identifier(std::string_view name) {
  return !name.empty() && is_letter(name[0]) &&
         std::ranges::all_of(name, [](char c) { return is_letter(c) || is_digit(c); });
}

bool is_reserved_argument(std::string_view name) { return name == "config" || name == "mode" || name == "mode_bits"; }

bool is_default(ParamKind kind, std::string_view text) {
  if (text.empty()) return true;
  switch (kind) {
    case ParamKind::Float:
      return is_number<double>(text);
    case ParamKind::Int:
      return is_number<int64_t>(text);
    case ParamKind::Bool:
      return text == "True" || text == "False";
    case ParamKind::OptionalTensor:
      return text == "None";
    default:
      return false;
  }
}

bool same_interface(const Pack& a, const format::Op& x, const Pack& b, const format::Op& y) {
  const auto params = [](const format::Param& p) { return std::pair(p.flags, p.rank); };
  const auto outputs = [](const format::Output& o) { return std::pair(o.ndim, o.leading); };
  return std::strcmp(a.string(x.schema), b.string(y.schema)) == 0 &&
         std::strcmp(a.string(x.meta), b.string(y.meta)) == 0 &&
         std::strcmp(a.string(x.backward), b.string(y.backward)) == 0 && x.n_saved == y.n_saved &&
         std::ranges::equal(a.rows<format::Param>(x.params), b.rows<format::Param>(y.params), {}, params, params) &&
         std::ranges::equal(a.rows<format::Output>(x.outputs), b.rows<format::Output>(y.outputs), {}, outputs, outputs);
}

}  // namespace tk
