// tk.h: the core behind functions that never throw.

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>

#include "choose.h"
#include "inspect.h"
#include "launch.h"
#include "outputs.h"

namespace tk {
namespace {

std::string& last_error() {
  static thread_local std::string error;
  return error;
}

tk_status set_error(tk_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    last_error().clear();  // not even memory for the message; the status says enough
  }
  return status;
}

template <class Body>
tk_status guarded(const Body& body) noexcept {
  try {
    body();
    return TK_OK;
  } catch (const Error& error) {
    return set_error(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return set_error(TK_UNSUPPORTED, "this machine is out of memory");
  } catch (const std::exception& error) {
    return set_error(TK_UNSUPPORTED, error.what());
  }
}

template <class Body>
tk_status guarded_problem(const tk_call* call, const Body& body) noexcept {
  return guarded([&] {
    check_not_forked();
    check_call(call);
    Problem problem(*call);
    body(problem);
  });
}

void require_argument(const void* pointer, const char* name) {
  if (!pointer) fail(TK_INVALID_ARGUMENT, name, " is NULL");
}

template <class Body>
tk_status guarded_text(const char* text, const char* name, const Body& body) noexcept {
  return guarded([&] {
    require_argument(text, name);
    body(text);
  });
}

// As much of what `find` finds as the caller has room for, each as `describe` makes a row of it.
template <class Row, class Find, class Describe = std::identity>
void list(Row* rows, uint32_t capacity, uint32_t* count, const Find& find, const Describe& describe = {}) {
  require_argument(count, "count");
  if (capacity) require_argument(rows, "rows");
  const auto& found = find();
  *count = static_cast<uint32_t>(found.size());
  std::transform(found.begin(), found.begin() + std::min(capacity, *count), rows, describe);
}

uint32_t preload(tk_op op, int32_t ordinal) {
  Device& device = runtime().devices.get(ordinal);
  std::vector<OpInPack> ops;
  if (op == UINT32_MAX) {
    ops = runtime().registry.all(device.arch());
  } else {
    const char* const name = op_names().name(op);
    if (!name) fail(TK_INVALID_ARGUMENT, "op ", op, " was never given out by tk_intern_op");
    ops = runtime().registry.find(name, device.arch());
  }
  const ContextGuard context(device.driver(), device.context());
  // By pack, frame and number: ops share images, and images frames.
  std::map<std::tuple<const Pack*, uint32_t, uint32_t>, std::vector<const format::Launch*>> images;
  for (const auto& [pack, row] : ops) {
    for (const auto& variant : pack->rows<format::Variant>(row->variants)) {
      for (const auto& launch : pack->rows<format::Launch>(variant.launches)) {
        if (launch.shared > device.field(DeviceField::SharedOptin)) continue;  // it is never chosen here
        images[{pack, pack->row<format::Image>(launch.image).frame, launch.image}].push_back(&launch);
      }
    }
  }
  for (const auto& [image, launches] : images)
    for (const format::Launch* const launch : launches) device.function(*std::get<0>(image), *launch, false);
  return static_cast<uint32_t>(images.size());
}

}  // namespace
}  // namespace tk

using namespace tk;

const char* tk_last_error(void) { return last_error().c_str(); }

uint32_t tk_abi_version(void) { return TK_ABI_VERSION; }

tk_status tk_set_builtin_directory(const char* path) {
  return guarded_text(path, "path", [](const char* given) { runtime().registry.set_builtin_directory(given); });
}

tk_status tk_add_pack_directory(const char* path) {
  return guarded_text(path, "path", [](const char* given) { runtime().registry.add_directory(given); });
}

tk_status tk_load_pack(const char* path) {
  return guarded_text(path, "path", [](const char* given) { runtime().registry.load(given); });
}

const tk_generated_op* tk_generated_op_at(uint32_t index) { return runtime().registry.generated_op(index); }

tk_status tk_reserve_op(const char* name) {
  return guarded_text(name, "name", [](const char* given) { runtime().registry.reserve(given); });
}

tk_op tk_intern_op(const char* name) { return op_names().intern(name ? name : ""); }

const char* tk_op_name(tk_op op) {
  const char* const name = op_names().name(op);
  return name ? name : "";
}

tk_status tk_choose(const tk_call* call, tk_choice* choice) {
  return guarded_problem(call, [&](Problem& problem) {
    require_argument(choice, "choice");
    const Choice chosen = choose(problem);
    const format::Variant& variant = problem.pack.row<format::Variant>(chosen.variant);
    *choice = {.config = static_cast<int32_t>(variant.config),
               .variant = chosen.variant,
               .cost = chosen.cost,
               .pinned = static_cast<int32_t>(chosen.how),
               .n_launches = static_cast<uint32_t>(chosen.prepared.launches.size()),
               .config_name = problem.config_name(variant.config),
               .kernel_name = problem.pack.string(variant.kernel),
               .pack_path = problem.pack.path().c_str()};
  });
}

tk_status tk_candidates(const tk_call* call, tk_candidate* rows, uint32_t capacity, uint32_t* count) {
  return guarded_problem(call, [&](Problem& problem) {
    const auto describe = [&](const Candidate& candidate) -> tk_candidate {
      const format::Variant& variant = problem.pack.row<format::Variant>(candidate.variant);
      return {.variant = candidate.variant,
              .config = static_cast<int32_t>(variant.config),
              .cost = candidate.cost,
              .config_name = problem.config_name(variant.config),
              .kernel_name = problem.pack.string(variant.kernel),
              .failed_constraint = candidate.failed};
    };
    list(rows, capacity, count, [&] { return candidates(problem); }, describe);
  });
}

tk_status tk_outputs(const tk_call* call, tk_tensor* rows, uint32_t capacity, uint32_t* count) {
  return guarded([&] {
    check_not_forked();
    check_call(call);
    list(rows, capacity, count, [&] { return outputs(*call); });
  });
}

tk_status tk_launch(const tk_call* call, void* stream, const tk_allocator* allocator) {
  return guarded([&] { launch(call, static_cast<cu::Stream>(stream), allocator); });
}

tk_status tk_preload(tk_op op, int32_t device, uint32_t* modules) {
  return guarded([&] {
    check_not_forked();
    const uint32_t count = preload(op, device);
    if (modules) *modules = count;
  });
}

tk_status tk_capture_id(void* stream, uint64_t* id) {
  return guarded([&] {
    require_argument(id, "id");
    *id = capture_of(driver(), static_cast<cu::Stream>(stream)).id;
  });
}

tk_status tk_pin(const tk_call* call, int32_t config) {
  return guarded_problem(call, [&](Problem& problem) { pin(problem, config); });
}

tk_status tk_describe_device(int64_t sm_count, int64_t arch, int64_t shared_optin, int64_t l2_bytes, int32_t* device) {
  return guarded([&] {
    require_argument(device, "device");
    *device = runtime().devices.describe({sm_count, arch, shared_optin, l2_bytes});
  });
}

tk_status tk_device_arch(int32_t device, int64_t* arch) {
  return guarded([&] {
    require_argument(arch, "arch");
    *arch = runtime().devices.get(device).arch();
  });
}

tk_status tk_list_packs(tk_pack_info* rows, uint32_t capacity, uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [] { return inspect::packs(); }); });
}

tk_status tk_list_ops(const tk_pack* pack, tk_op_info* rows, uint32_t capacity, uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [&] { return inspect::ops(pack); }); });
}

tk_status tk_list_configs(const tk_pack* pack, const char* op, tk_config_info* rows, uint32_t capacity,
                          uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [&] { return inspect::configs(pack, op); }); });
}

tk_status tk_list_variants(const tk_pack* pack, const char* op, tk_variant_info* rows, uint32_t capacity,
                           uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [&] { return inspect::variants(pack, op); }); });
}

tk_status tk_list_constraints(const tk_pack* pack, const char* op, tk_constraint_info* rows, uint32_t capacity,
                              uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [&] { return inspect::constraints(pack, op); }); });
}

tk_status tk_list_launches(const tk_pack* pack, const char* op, tk_launch_info* rows, uint32_t capacity,
                           uint32_t* count) {
  return guarded([&] { list(rows, capacity, count, [&] { return inspect::launches(pack, op); }); });
}

tk_status tk_launches(const tk_call* call, tk_launch_info* rows, uint32_t capacity, uint32_t* count) {
  return guarded_problem(call, [&](Problem& problem) {
    const Choice chosen = choose(problem);
    list(
        rows, capacity, count, [&] { return std::span(chosen.prepared.launches); },
        [&](const PreparedLaunch& launch) { return inspect::describe(problem.pack, chosen.variant, *launch.recipe); });
  });
}

tk_status tk_verify_pack(const char* path, uint32_t* images) {
  return guarded_text(path, "path", [&](const char* given) {
    const uint32_t count = inspect::verify(given);
    if (images) *images = count;
  });
}
