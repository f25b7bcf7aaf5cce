#include "inspect.h"

#include "runtime.h"

namespace tk::inspect {
namespace {

Op describe(const tk::Pack& pack, const format::Op& op) {
  Op out{.name = pack.string(op.name),
         .schema = pack.string(op.schema),
         .n_tensors = op.n_tensors,
         .n_ints = op.n_ints,
         .n_floats = op.n_floats,
         .n_outputs = op.outputs.count,
         .n_buckets = op.buckets.count,
         .n_variants = op.variants.count,
         .n_pins = op.pins.count,
         .configs = {}};
  for (const auto& config : pack.rows<format::Config>(op.configs))
    out.configs.push_back({config.number, pack.string(config.name), pack.string(config.params)});
  return out;
}

Launch describe(const tk::Pack& pack, const format::Launch& launch) {
  const format::Image& image = pack.all<format::Image>()[launch.image];
  return {.image = pack.string(image.name),
          .entry = pack.string(launch.entry),
          .threads = launch.threads,
          .shared = launch.shared,
          .cluster = launch.cluster,
          .size = image.size,
          .compressed_size = image.compressed_size};
}

Variant describe(const tk::Pack& pack, const format::Op& op, uint32_t number) {
  const format::Variant& variant = pack.all<format::Variant>()[number];
  Variant out{.number = number,
              .kernel = pack.string(variant.kernel),
              .config = variant.config,
              .config_name = pack.string(pack.rows<format::Config>(op.configs)[variant.config].name),
              .general = (variant.flags & format::kGeneral) != 0,
              .deterministic = (variant.flags & format::kNonDeterministic) == 0,
              .constraints = {},
              .launches = {}};
  for (const auto& constraint : pack.rows<format::Constraint>(variant.constraints))
    out.constraints.push_back(pack.string(constraint.message));
  for (const auto& launch : pack.rows<format::Launch>(variant.launches)) out.launches.push_back(describe(pack, launch));
  return out;
}

Pack describe(const Registry::Listed& row) {
  Pack out{};
  out.path = row.path;
  out.builtin = row.builtin;
  out.problem = row.problem;
  if (!row.pack) return out;
  out.arch = row.pack->arch();
  out.ptx = row.pack->is_ptx();
  out.compiler = row.pack->compiler();
  out.hash = row.pack->index_hash();
  out.file_size = row.pack->file_size();
  out.n_images = static_cast<uint32_t>(row.pack->all<format::Image>().size());
  for (const format::Op& op : row.pack->all<format::Op>()) out.ops.push_back(describe(*row.pack, op));
  return out;
}

}  // namespace

std::vector<Pack> packs() {
  std::vector<Pack> out;
  for (const Registry::Listed& row : runtime().registry.list()) out.push_back(describe(row));
  return out;
}

std::vector<Variant> variants(const std::string& path, const std::string& name) {
  for (const Registry::Listed& row : runtime().registry.list()) {
    if (row.path != path || !row.pack) continue;
    const format::Op* const op = row.pack->find_op(name);
    if (!op) break;
    std::vector<Variant> out;
    for (uint32_t i = 0; i < op->variants.count; i++) out.push_back(describe(*row.pack, *op, op->variants.first + i));
    return out;
  }
  throw std::out_of_range("no loaded pack " + path + " has an op \"" + name + "\"");
}

std::string verify(const std::string& path) {
  try {
    const auto pack = tk::Pack::open(path);
    for (uint32_t i = 0; i < pack->all<format::Image>().size(); i++) pack->image(i);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

int32_t describe_device(int64_t sm_count, int64_t arch, int64_t shared_optin, int64_t l2_bytes) {
  return runtime().devices.describe({sm_count, arch, shared_optin, l2_bytes});
}

}  // namespace tk::inspect
