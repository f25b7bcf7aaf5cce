#include "generated.h"

#include "interface.h"
#include "registry.h"
#include "runtime.h"

namespace tk {
namespace {

static_assert(TK_PARAM_TENSOR == static_cast<int>(format::ParamKind::Tensor) &&
              TK_PARAM_TENSORS == static_cast<int>(format::ParamKind::Tensors) &&
              TK_PARAM_FLOAT == static_cast<int>(format::ParamKind::Float) &&
              TK_PARAM_INT == static_cast<int>(format::ParamKind::Int) &&
              TK_PARAM_BOOL == static_cast<int>(format::ParamKind::Bool) &&
              TK_PARAM_OPTIONAL_TENSOR == static_cast<int>(format::ParamKind::OptionalTensor));

tk_code code_of(const Pack& pack, format::Expr expr) {
  const Code words = pack.code(expr);
  return {words.data(), words.size()};
}

tk_param param_of(const Pack& pack, const format::Param& param) {
  return {.name = pack.string(param.name),
          .kind = static_cast<tk_param_kind>(param.kind),
          .leading = param.flags & format::kLeading ? (param.flags & format::kInOrder ? 2 : 1) : 0,
          .mutated = (param.flags & format::kMutated) != 0,
          .rank = param.rank,
          .default_value = pack.string(param.default_value)};
}

tk_result result_of(const Pack& pack, const format::Output& output) {
  tk_result out{.dtype = code_of(pack, output.dtype),
                .leading = static_cast<int32_t>(output.leading) - 1,
                .ndim = output.ndim,
                .sizes = {},
                .strides = {}};
  for (uint32_t d = 0; d < output.ndim; d++) {
    out.sizes[d] = code_of(pack, output.sizes[d]);
    out.strides[d] = code_of(pack, output.strides[d]);
  }
  return out;
}

}  // namespace

bool is_generated(const Pack& pack, const format::Op& op) { return *pack.string(op.schema) != 0; }

const GeneratedOps::Entry* GeneratedOps::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

// False when it is known already. Throws when the name means something else.
bool GeneratedOps::is_new(const Pack& pack, const format::Op& op) const {
  const char* const name = pack.string(op.name);
  const Entry* const known = find(name);
  // Of one build: what they say of an op is the same, and need not be read for that.
  if (known && known->pack->is_rooted() && pack.is_rooted()) return false;
  if (!is_generated(pack, op)) {
    if (known)
      fail(TK_PACK_ERROR, "pack ", pack.path(), " has an op \"", name, "\" without a schema; pack ",
           known->pack->path(), " has a generated op of that name: rename one of them and build again");
    return false;
  }
  if (reserved_.contains(name))
    fail(TK_PACK_ERROR, "pack ", pack.path(), " has an op \"", name,
         "\", which is one of tk's own: rename it and build again");
  if (!known) return true;
  if (!same_interface(pack, op, *known->pack, *known->op))
    fail(TK_PACK_ERROR, "op \"", name, "\" of pack ", pack.path(), " is another one than that of ", known->pack->path(),
         ", which is loaded: ", pack.string(op.schema), " and ", known->row.schema,
         "; rename one of them, or build both packs from one definition");
  return false;
}

void GeneratedOps::add(const Pack& pack) {
  std::deque<Entry> added;
  for (const format::Op& op : pack.all<format::Op>())
    if (is_new(pack, op)) fill(added.emplace_back(&pack, &op));
  if (ops_.size() + added.size() > TK_MAX_GENERATED_OPS)
    fail(TK_PACK_ERROR, "pack ", pack.path(), " brings ", added.size(), " generated ops to the ", ops_.size(),
         " that are loaded; a process can have ", TK_MAX_GENERATED_OPS, ": leave packs out that it does not need");
  for (Entry& entry : added) {
    Entry& kept = ops_.emplace_back(std::move(entry));
    kept.row.twin_schema = kept.twin_schema.c_str();
    by_name_[kept.row.name] = &kept;
  }
}

void GeneratedOps::reserve(const std::string& name) {
  if (const Entry* const known = find(name))
    fail(TK_PACK_ERROR, "pack ", known->pack->path(), " has an op \"", name, "\" already");
  reserved_.insert(name);
}

void GeneratedOps::fill(Entry& entry) {
  const Pack& pack = *entry.pack;
  const format::Op& op = *entry.op;
  for (const auto& param : pack.rows<format::Param>(op.params)) entry.params.push_back(param_of(pack, param));
  for (const auto& local : pack.locals(op.locals)) entry.locals.push_back(code_of(pack, local));
  for (const auto& check : pack.rows<format::Constraint>(op.checks))
    entry.checks.push_back({code_of(pack, check.holds), pack.string(check.message)});
  for (const auto& output : pack.rows<format::Output>(op.outputs)) entry.results.push_back(result_of(pack, output));
  if (*pack.string(op.backward)) entry.twin_schema = twin_schema_of(pack, op);
  entry.row = {.op = op_names().intern(pack.string(op.name)),
               .name = pack.string(op.name),
               .schema = pack.string(op.schema),
               .meta = pack.string(op.meta),
               .backward = pack.string(op.backward),
               .twin_schema = nullptr,  // once the entry lies where it stays
               .pack_path = pack.path().c_str(),
               .n_params = static_cast<uint32_t>(entry.params.size()),
               .n_locals = static_cast<uint32_t>(entry.locals.size()),
               .n_checks = static_cast<uint32_t>(entry.checks.size()),
               .n_results = static_cast<uint32_t>(entry.results.size()),
               .n_saved = op.n_saved,
               .params = entry.params.data(),
               .locals = entry.locals.data(),
               .checks = entry.checks.data(),
               .results = entry.results.data()};
}

}  // namespace tk
