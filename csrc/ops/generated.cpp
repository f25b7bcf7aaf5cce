// Generated ops. An op `f` of a pack becomes tk::f on CUDA tensors. What f does on the CPU, and its gradients, are
// registered from Python; for them an op that has a gradient gets a twin tk::_f, which returns what is saved too. The
// kernel for CUDA takes tensors on the CPU only to have a launch described (tk_ops_capture).
//
// A call: read the arguments, check them, ask the core for the outputs, allocate, put the tensors as the core wants
// them (canonical.h), launch. Nothing is allocated on the way but the outputs, and nothing is looked up by name.

#include "generated.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>

#include "arguments.h"
#include "canonical.h"
#include "gate.h"
#include "launch.h"
#include "lists.h"
#include "matrix.h"
#include "runtime.h"
#include "settings.h"

namespace tk::ops {
namespace {

// A call on its way. Arrays are filled as far as they are used.
struct Frame {
  explicit Frame(const tk_generated_op& described) : op(described) {}
  ~Frame() {
    for (uint32_t i = 0; i < n_tensors; i++)
      if (handles[i]) aoti_torch_delete_tensor_object(handles[i]);
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  std::span<const Layout> all_layouts() const { return {layouts, n_tensors}; }

  const tk_generated_op& op;
  uint32_t n_inputs = 0;
  uint32_t n_tensors = 0;  // inputs, then outputs as they come
  uint32_t n_ints = 0;
  uint32_t n_floats = 0;
  int64_t config = -1;
  int64_t mode = 0;
  Device device{};
  AtenTensorHandle handles[TK_MAX_TENSORS];  // owned; null of a tensor that is absent
  const tk_param* params[TK_MAX_TENSORS];    // of the inputs
  union {                                    // no constructors
    Layout layouts[TK_MAX_TENSORS];
  };
  int32_t dtypes[TK_MAX_TENSORS];
  int64_t ints[TK_MAX_INTS];
  double floats[TK_MAX_FLOATS];
  tk_tensor tensors[TK_MAX_TENSORS];  // as the core sees them
};

// --- Reading ---

void read(StableIValue* stack, Frame& f) {
  Arguments args(stack);
  for (uint32_t i = 0; i < f.op.n_params; i++) {
    const tk_param& param = f.op.params[i];
    switch (param.kind) {
      case TK_PARAM_FLOAT:
        f.floats[f.n_floats++] = args.number();
        break;
      case TK_PARAM_INT:
        f.ints[f.n_ints++] = args.integer();
        break;
      case TK_PARAM_BOOL:
        f.ints[f.n_ints++] = args.boolean();
        break;
      case TK_PARAM_OPTIONAL_TENSOR:
        f.params[f.n_tensors] = &param;
        f.handles[f.n_tensors++] = args.optional_tensor().release();
        break;
      default:
        f.params[f.n_tensors] = &param;
        f.handles[f.n_tensors++] = args.tensor().release();
    }
  }
  f.n_inputs = f.n_tensors;
  f.config = args.integer();
  f.mode = args.integer();
}

Layout layout_of(AtenTensorHandle handle, uint32_t rank, bool has_leading, bool in_order) {
  int64_t ndim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_shim(aoti_torch_get_dim(handle, &ndim), "read a tensor's rank");
  check_shim(aoti_torch_get_sizes(handle, &sizes), "read a tensor's sizes");
  check_shim(aoti_torch_get_strides(handle, &strides), "read a tensor's strides");
  const auto n = static_cast<size_t>(ndim);
  return {{sizes, n}, {strides, n}, static_cast<uint32_t>(n) - rank, has_leading, in_order};
}

// Of an input, which only now shows to be None.
Device device_of(const Frame& f, uint32_t i) {
  Device device{};
  device.type = read_device_type(f.handles[i], f.op.name, f.params[i]->name);
  check_shim(aoti_torch_get_device_index(f.handles[i], &device.index), "read a tensor's device");
  return device;
}

// --- Checks ---

// "x is bfloat16[2, 8], bias is bfloat16[7]"
std::string given(const Frame& f) {
  std::string out;
  for (uint32_t i = 0; i < f.n_inputs; i++)
    out += text(i ? ", " : "", f.params[i]->name, " is ", f.handles[i] ? dtype_name(f.dtypes[i]) : "None",
                f.handles[i] ? describe_sizes(f.layouts[i].sizes) : "");
  return out;
}

[[noreturn]] void fail_call(const Frame& f, const std::string& message) {
  fail_argument(text("tk.", f.op.name, ": ", message));
}

void check_rank(const Frame& f, uint32_t i) {
  const tk_param& param = *f.params[i];
  const size_t ndim = f.layouts[i].sizes.size();
  if (param.leading ? ndim >= param.rank : ndim == param.rank) [[likely]]
    return;
  fail_call(f, text(param.name, " must have ", param.rank, param.leading ? " or more" : "",
                    param.rank == 1 ? " dimension" : " dimensions", ", is ", describe_sizes(f.layouts[i].sizes)));
}

std::span<const int64_t> leading_sizes(const Layout& layout) { return layout.sizes.first(layout.n_leading); }

void check_leading(const Frame& f, uint32_t first, uint32_t i) {
  if (!std::ranges::equal(leading_sizes(f.layouts[first]), leading_sizes(f.layouts[i]))) [[unlikely]]
    fail_call(f, text("the leading dimensions of ", f.params[first]->name, " and ", f.params[i]->name,
                      " must be the same, are ", describe_sizes(leading_sizes(f.layouts[first])), " and ",
                      describe_sizes(leading_sizes(f.layouts[i]))));
}

// Fills what is known of the inputs, and checks all that the op's own checks take for granted.
void look_at_inputs(Frame& f) {
  constexpr uint32_t kNone = UINT32_MAX;
  uint32_t first_leading = kNone;
  uint32_t first = kNone;
  for (uint32_t i = 0; i < f.n_inputs; i++) {
    const tk_param& param = *f.params[i];
    if (!f.handles[i]) {
      f.layouts[i] = {};
      f.dtypes[i] = -1;
      continue;
    }
    const Device device = device_of(f, i);
    f.layouts[i] = layout_of(f.handles[i], param.rank, param.leading, param.leading == 2);
    check_shim(aoti_torch_get_dtype(f.handles[i], &f.dtypes[i]), "read a tensor's dtype");
    check_rank(f, i);
    if (first == kNone) {
      first = i;
      f.device = device;
    }
    if (device != f.device) [[unlikely]]
      fail_call(f, text(f.params[first]->name, " is on ", ops::describe(f.device), ", ", param.name, " on ",
                        ops::describe(device), "; all tensors must be on one device"));
    if (!param.leading) continue;
    if (first_leading == kNone) first_leading = i;
    check_leading(f, first_leading, i);
  }
}

// Bytes from the first to past the last.
std::pair<const char*, const char*> extent(const Frame& f, uint32_t i) {
  const int64_t count = f.handles[i] ? reach(f.layouts[i]) : 0;
  if (count == 0) return {};
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(f.handles[i], &data), "read a tensor's address");
  const auto* const first = static_cast<const char*>(data);
  return {first, first + count * item_size(f.dtypes[i])};
}

// A tensor that is written shares memory with no other, not even as the same view: the op was traced with different
// tensors, so what it would do to one that is two of its arguments is not what the function does.
void check_memory(const Frame& f, uint32_t written) {
  if (overlaps_itself(f.layouts[written]))
    fail_call(f, text("elements of ", f.params[written]->name,
                      ", which is written, share memory: give each a place of its own (.clone())"));
  const auto mine = extent(f, written);
  for (uint32_t i = 0; i < f.n_inputs; i++) {
    if (i == written) continue;
    const auto other = extent(f, i);
    if (other.second <= mine.first || mine.second <= other.first) continue;
    fail_call(f, text(f.params[written]->name, ", which is written, overlaps ", f.params[i]->name,
                      " in memory; clone one of them"));
  }
}

void check_written(const Frame& f) {
  for (uint32_t i = 0; i < f.n_inputs; i++)
    if (f.params[i]->mutated) check_memory(f, i);
}

// --- Outputs ---

tk_call call_of(const Frame& f, int32_t device, uint32_t n_tensors) {
  return {.op = f.op.op,
          .mode = static_cast<uint32_t>(f.mode),
          .config = static_cast<int32_t>(f.config),
          .device = device,
          .n_tensors = n_tensors,
          .n_ints = f.n_ints,
          .n_floats = f.n_floats,
          .tensors = f.tensors,
          .ints = f.ints,
          .floats = f.floats};
}

void allocate(const tk_tensor& declared, const tk_result& result, Frame& f) {
  const auto ndim = static_cast<uint32_t>(declared.ndim);
  const bool has_leading = result.leading >= 0;
  int64_t sizes[kMaxLeading + TK_MAX_DIMS];
  int64_t strides[kMaxLeading + TK_MAX_DIMS];
  uint32_t n_leading = 0;
  if (has_leading) {
    const Layout& like = f.layouts[result.leading];
    n_leading = like.n_leading;
    std::ranges::copy(leading_sizes(like), sizes);
    dense_strides(like, {declared.sizes, ndim}, {declared.strides, ndim}, strides);
  } else {
    std::copy_n(declared.strides, ndim, strides);
  }
  std::copy_n(declared.sizes, ndim, sizes + n_leading);
  const size_t rank = n_leading + ndim;
  Tensor memory = empty_strided({sizes, rank}, {strides, rank}, declared.dtype, f.device);
  // No kernel writes what is only described: who looks something up by it finds the first place, not what memory had.
  if (is_described()) [[unlikely]]
    check_shim(aoti_torch_zero_(memory.get()), "fill a result with zeros");
  const uint32_t i = f.n_tensors++;
  f.handles[i] = memory.release();
  f.dtypes[i] = declared.dtype;
  f.layouts[i] = layout_of(f.handles[i], ndim, has_leading, false);
}

void allocate_outputs(Frame& f, int32_t device) {
  const uint32_t n_results = f.op.n_results;
  for (uint32_t i = 0; i < f.n_inputs; i++) {
    describe_declared(f.layouts[i], f.tensors[i]);
    f.tensors[i].dtype = f.dtypes[i];
    if (!f.handles[i]) f.tensors[i].ndim = -1;
  }
  for (uint32_t i = 0; i < n_results; i++) f.tensors[f.n_inputs + i].ndim = -1;
  const tk_call call = call_of(f, device, f.n_inputs + n_results);
  tk_tensor found[TK_MAX_TENSORS];
  uint32_t count = 0;
  const tk_status status = tk_outputs(&call, found, n_results, &count);
  if (status == TK_INVALID_ARGUMENT) [[unlikely]]
    fail_argument(text(tk_last_error(), "; ", given(f)));
  check_status(status);
  for (uint32_t i = 0; i < n_results; i++) allocate(found[i], f.op.results[i], f);
}

// --- Launching ---

bool is_empty(const Layout& layout) { return std::ranges::find(layout.sizes, 0) != layout.sizes.end(); }

bool is_written(const Frame& f, uint32_t i) { return i >= f.n_inputs || f.params[i]->mutated; }

bool has_nothing_to_do(const Frame& f) {
  for (uint32_t i = 0; i < f.n_tensors; i++)
    if (is_written(f, i) && !is_empty(f.layouts[i])) return false;
  return true;
}

void launch_frame(Frame& f, const Leading& leading, const AtenTensorHandle* handles, int32_t device) {
  for (uint32_t i = 0; i < f.n_tensors; i++) {
    tk_tensor& t = f.tensors[i];
    if (!handles[i]) {
      t = absent();
      continue;
    }
    describe(f.layouts[i], leading, t);
    t.dtype = f.dtypes[i];
    if (is_written(f, i)) {
      check_shim(torch_get_mutable_data_ptr(handles[i], &t.data), "read a tensor's address");
    } else {
      const void* data = nullptr;
      check_shim(torch_get_const_data_ptr(handles[i], &data), "read a tensor's address");
      t.data = const_cast<void*>(data);
    }
  }
  if (wants_deterministic()) f.mode |= TK_MODE_DETERMINISTIC;
  const tk_call call = call_of(f, device, f.n_tensors);
  launch(call, {f.device.type, device});
}

// A dense tensor of the same elements, whose leading dimensions run together in the order of all.
Tensor empty_joined(const Frame& f, uint32_t i) {
  const Layout& like = f.layouts[i];
  int64_t strides[kMaxLeading + TK_MAX_DIMS];
  joined_strides(like, f.all_layouts(), strides);
  return empty_strided(like.sizes, {strides, like.sizes.size()}, f.dtypes[i], f.device);
}

// Leading dimensions that do not join into three: tensors that stand in the way are copied into dense ones and, where
// they are written, back.
void launch_copied(Frame& f, int32_t device) {
  std::array<Tensor, TK_MAX_TENSORS> copies;
  AtenTensorHandle handles[TK_MAX_TENSORS];
  for (uint32_t i = 0; i < f.n_tensors; i++) {
    handles[i] = f.handles[i];
    if (runs_together(f.layouts[i], f.all_layouts())) continue;
    copies[i] = empty_joined(f, i);
    handles[i] = copies[i].get();
    if (i < f.n_inputs) copy(handles[i], f.handles[i]);
  }
  for (uint32_t i = 0; i < f.n_tensors; i++) {
    const Layout& t = f.layouts[i];
    const auto rank = static_cast<uint32_t>(t.sizes.size()) - t.n_leading;
    if (copies[i]) f.layouts[i] = layout_of(handles[i], rank, t.has_leading, t.in_order);
  }
  Leading leading;
  join_leading(f.all_layouts(), leading);
  launch_frame(f, leading, handles, device);
  for (uint32_t i = 0; i < f.n_tensors; i++)
    if (copies[i] && is_written(f, i)) copy(f.handles[i], handles[i]);
}

void run(Frame& f) {
  check_settings(f.op.name, f.config, f.mode);
  look_at_inputs(f);
  const int32_t device = target_device(f.op.name, f.device);
  allocate_outputs(f, device);
  check_written(f);
  if (has_nothing_to_do(f)) return;
  Leading leading;
  join_leading(f.all_layouts(), leading);
  if (leading.fits()) [[likely]]
    launch_frame(f, leading, f.handles, device);
  else
    launch_copied(f, device);
}

// n_results: of the op, which leaves out what is saved, or of its twin. Not inline: it is called by 512 functions.
[[gnu::noinline]] void call_generated(const tk_generated_op& op, StableIValue* stack, uint32_t n_results) {
  Frame f(op);
  read(stack, f);
  run(f);
  Results results(stack);
  for (uint32_t i = 0; i < n_results; i++)
    results.give_back(std::exchange(f.handles[f.n_inputs + i], nullptr));  // the caller's now
}

// --- The pool ---

// A boxed function is told nothing but its arguments, so there is one of each kind for every op that can be.
const tk_generated_op* defined[TK_MAX_GENERATED_OPS];

template <size_t kIndex>
void boxed(StableIValue* stack, uint64_t, uint64_t n_results) {
  call_generated(*defined[kIndex], stack, static_cast<uint32_t>(n_results));
}

template <size_t kIndex>
void boxed_lists(StableIValue* stack, uint64_t, uint64_t) {
  call_lists(*defined[kIndex], stack);
}

template <size_t kIndex>
void boxed_twin(StableIValue* stack, uint64_t n_inputs, uint64_t n_results) {
  call_carrying(boxed<kIndex>, stack, n_inputs, n_results);
}

// "Tensor x, float alpha, int config=-1, int mode=0" of a schema.
std::string arguments_of(const tk_generated_op& op) {
  const std::string_view schema = op.schema;
  const size_t first = schema.find('(') + 1;
  return std::string(schema.substr(first, schema.find(") -> ", first) - first));
}

std::unique_ptr<const Gate> gate_of[TK_MAX_GENERATED_OPS];  // of ops that were asked for, and have a gradient

template <size_t kIndex>
void boxed_gate(StableIValue* stack, uint64_t, uint64_t) {
  gate_of[kIndex]->call(stack);
}

struct Functions {
  Boxed* op;
  Boxed* lists;
  Boxed* twin;
  Boxed* gate;
};

template <size_t... kIndices>
constexpr std::array<Functions, sizeof...(kIndices)> make_pool(std::index_sequence<kIndices...>) {
  return {Functions{boxed<kIndices>, boxed_lists<kIndices>, boxed_twin<kIndices>, boxed_gate<kIndices>}...};
}

constexpr auto kPool = make_pool(std::make_index_sequence<TK_MAX_GENERATED_OPS>());

// --- Registration ---

using torch::stable::detail::StableLibrary;

// What is registered stays for as long as the process.
struct Libraries {
  StableLibrary schemas{StableLibrary::Kind::FRAGMENT, "tk", nullptr, __FILE__, __LINE__};
  StableLibrary cuda{StableLibrary::Kind::IMPL, "tk", "CUDA", __FILE__, __LINE__};
};

// Those that an op with a gradient needs (gate.h); of few ops is one ever asked for. The core has the twin's schema
// where it returns more than the op.
void define_twins(Libraries& libraries, uint32_t index, Boxed* twin) {
  const tk_generated_op& op = *defined[index];
  gate_of[index] = std::make_unique<Gate>(op.name, "", arguments_of(op), op.n_params + 2, op.n_results - op.n_saved,
                                          op.n_results, false);
  const std::string signature(std::string_view(op.schema).substr(std::string_view(op.name).size()));
  libraries.schemas.def((*op.twin_schema ? op.twin_schema : text("_", op.name, signature)).c_str());
  libraries.schemas.def(text("_", op.name, "_autograd", signature).c_str());
  libraries.cuda.impl(text("_", op.name).c_str(), twin);
}

bool takes_lists(const tk_generated_op& op) {
  return std::any_of(op.params, op.params + op.n_params,
                     [](const tk_param& param) { return param.kind == TK_PARAM_TENSORS; });
}

void define(Libraries& libraries, uint32_t index, const Functions& functions) {
  const tk_generated_op& op = *defined[index];
  libraries.schemas.def(op.schema);
  libraries.cuda.impl(op.name, takes_lists(op) ? functions.lists : functions.op);
  add_gate(op.name, functions.gate, [&, index] { define_twins(libraries, index, functions.twin); });
}

std::mutex definition;
uint32_t n_defined = 0;

}  // namespace

void define_generated_ops() {
  const std::lock_guard lock(definition);
  if (!tk_generated_op_at(n_defined)) return;
  static auto& libraries = *new Libraries;
  while (const tk_generated_op* const op = tk_generated_op_at(n_defined)) {
    const uint32_t i = n_defined++;  // if torch refuses it, it is not tried again
    defined[i] = op;
    define(libraries, i, kPool[i]);
  }
}

const tk_generated_op* find_generated(const char* name) {
  const std::lock_guard lock(definition);
  for (uint32_t i = 0; i < n_defined; i++)
    if (std::string_view(defined[i]->name) == name) return defined[i];
  return nullptr;
}

Tensor call_generated(const tk_generated_op& op, StableIValue* stack) {
  call_generated(op, stack, 1);
  return Tensor(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

}  // namespace tk::ops

const char* tk_ops_load_pack(const char* path, tk_status* status) {
  static thread_local std::string error;
  *status = tk_load_pack(path);
  if (*status != TK_OK) {
    error = tk_last_error();
    return error.c_str();
  }
  try {
    tk::ops::define_generated_ops();
    return nullptr;
  } catch (const std::exception& refused) {
    *status = TK_PACK_ERROR;
    error = tk::ops::text("pack ", path, " is loaded, but torch does not take all of its ops: ", refused.what());
    return error.c_str();
  }
}
