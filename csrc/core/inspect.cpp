#include "inspect.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <unordered_set>

#include "runtime.h"

namespace tk::inspect {
namespace {

// A copy for as long as the process lives, one of each text: of what the registry hands out by value.
const char* lasting(const std::string& value) {
  static auto* const mutex = new std::mutex;
  static auto* const values = new std::unordered_set<std::string>;
  const std::lock_guard lock(*mutex);
  return values->insert(value).first->c_str();
}

tk_pack_info describe(const Registry::Listed& row) {
  tk_pack_info out{};
  out.path = lasting(row.path);
  out.builtin = row.builtin;
  if (!row.pack) {
    out.problem = lasting(row.problem);
    return out;
  }
  out.pack = reinterpret_cast<const tk_pack*>(row.pack);
  out.arch = row.pack->target().arch;
  out.ptx = row.pack->target().is_ptx();
  out.family = row.pack->target().is_family();
  out.n_images = row.pack->count<format::Image>();
  out.file_size = row.pack->file_size();
  out.compiler = row.pack->compiler();
  out.hash = lasting(row.pack->index_hash());
  return out;
}

// A pointer from outside is compared, never followed.
const Pack& known(const tk_pack* pack) {
  for (const Registry::Listed& row : runtime().registry.list())
    if (row.pack && reinterpret_cast<const tk_pack*>(row.pack) == pack) return *row.pack;
  fail(TK_INVALID_ARGUMENT, "pack is ", static_cast<const void*>(pack), ", which tk_list_packs did not give out");
}

OpInPack find(const tk_pack* handle, const char* name) {
  if (!name) fail(TK_INVALID_ARGUMENT, "op is NULL");
  const Pack& pack = known(handle);
  const format::Op* const op = pack.find_op(name);
  if (!op) fail(TK_INVALID_ARGUMENT, "pack ", pack.path(), " has no op \"", name, "\"");
  return {&pack, op};
}

// visit(number of the variant in the pack, variant) for each of an op.
template <class Visit>
void for_each_variant(const OpInPack& op, const Visit& visit) {
  uint32_t number = op.op->variants.first;
  for (const auto& variant : op.pack->rows<format::Variant>(op.op->variants)) visit(number++, variant);
}

}  // namespace

std::vector<tk_pack_info> packs() {
  std::vector<tk_pack_info> out;
  for (const Registry::Listed& row : runtime().registry.list()) out.push_back(describe(row));
  return out;
}

std::vector<tk_op_info> ops(const tk_pack* handle) {
  const Pack& pack = known(handle);
  std::vector<tk_op_info> out;
  for (const format::Op& op : pack.all<format::Op>()) {
    const Pack* const first = runtime().registry.before(pack, pack.string(op.name));
    out.push_back({.name = pack.string(op.name),
                   .schema = pack.string(op.schema),
                   .n_tensors = op.n_tensors,
                   .n_ints = op.n_ints,
                   .n_floats = op.n_floats,
                   .n_outputs = op.outputs.count,
                   .n_buckets = op.buckets.count,
                   .n_configs = op.configs.count,
                   .n_variants = op.variants.count,
                   .n_pins = op.pins.count,
                   .served_by = first ? first->path().c_str() : nullptr});
  }
  return out;
}

std::vector<tk_config_info> configs(const tk_pack* handle, const char* name) {
  const auto [pack, op] = find(handle, name);
  std::vector<tk_config_info> out;
  for (const auto& config : pack->rows<format::Config>(op->configs))
    out.push_back({.number = config.number, .name = pack->string(config.name), .params = pack->string(config.params)});
  return out;
}

std::vector<tk_variant_info> variants(const tk_pack* handle, const char* name) {
  const OpInPack op = find(handle, name);
  const auto configs = op.pack->rows<format::Config>(op.op->configs);
  std::vector<tk_variant_info> out;
  for_each_variant(op, [&](uint32_t number, const format::Variant& variant) {
    out.push_back({.number = number,
                   .config = variant.config,
                   .config_name = op.pack->string(configs[variant.config].name),
                   .kernel = op.pack->string(variant.kernel),
                   .general = (variant.flags & format::kGeneral) != 0,
                   .deterministic = (variant.flags & format::kNonDeterministic) == 0});
  });
  return out;
}

std::vector<tk_constraint_info> constraints(const tk_pack* handle, const char* name) {
  const OpInPack op = find(handle, name);
  std::vector<tk_constraint_info> out;
  for_each_variant(op, [&](uint32_t number, const format::Variant& variant) {
    for (const auto& constraint : op.pack->rows<format::Constraint>(variant.constraints))
      out.push_back({.variant = number, .message = op.pack->string(constraint.message)});
  });
  return out;
}

std::vector<tk_launch_info> launches(const tk_pack* handle, const char* name) {
  const OpInPack op = find(handle, name);
  std::vector<tk_launch_info> out;
  for_each_variant(op, [&](uint32_t number, const format::Variant& variant) {
    for (const auto& launch : op.pack->rows<format::Launch>(variant.launches))
      out.push_back(describe(*op.pack, number, launch));
  });
  return out;
}

tk_launch_info describe(const Pack& pack, uint32_t variant, const format::Launch& launch) {
  const format::Image& image = pack.row<format::Image>(launch.image);
  const format::Frame& frame = pack.row<format::Frame>(image.frame);
  return {.variant = variant,
          .threads = launch.threads,
          .shared = launch.shared,
          .cluster = launch.cluster,
          .size = image.size,
          .compressed_size = image.size * frame.compressed_size / frame.size,
          .image = pack.string(image.name),
          .entry = pack.string(launch.entry)};
}

uint32_t verify(const std::string& path) {
  const auto pack = Pack::open(path);
  const auto images = pack->all<format::Image>();
  std::vector<uint32_t> by_frame(images.size());
  std::iota(by_frame.begin(), by_frame.end(), 0);
  std::ranges::stable_sort(by_frame, {}, [&](uint32_t i) { return images[i].frame; });
  for (const uint32_t i : by_frame) pack->image(i);
  return static_cast<uint32_t>(images.size());
}

}  // namespace tk::inspect
