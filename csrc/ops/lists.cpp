#include "lists.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "arguments.h"
#include "canonical.h"
#include "launch.h"
#include "python_error.h"
#include "runtime.h"
#include "settings.h"

namespace tk::ops {
namespace {

struct List {
  const tk_param* param = nullptr;
  std::vector<Tensor> given;   // owned
  std::vector<Meta> tensors;   // what is launched on: those given, or copies
  std::vector<Tensor> copies;  // empty handles where none was needed
};

// What all places share: a tensor without dimensions.
struct Shared {
  const tk_param* param = nullptr;
  Tensor given;  // owned
  Meta tensor;
};

// One of the op's: a list with a tensor for each place, or one tensor.
struct Made {
  bool is_list = false;
  int32_t dtype = 0;
  std::vector<Tensor> tensors;  // owned
};

struct ListCall {
  explicit ListCall(const tk_generated_op& described) : op(described) {}
  size_t count() const { return lists.front().given.size(); }
  const List* first_with_sizes() const {
    const auto found = std::ranges::find_if(lists, [](const List& list) { return list.param->leading; });
    return found == lists.end() ? nullptr : &*found;
  }

  const tk_generated_op& op;
  std::vector<List> lists;
  std::vector<Shared> shared;
  std::vector<Made> results;
  std::vector<int64_t> ints;
  std::vector<double> floats;
  Settings settings;  // config and mode
};

// --- Reading ---

void read(StableIValue* stack, ListCall& c) {
  Arguments args(stack);
  for (uint32_t i = 0; i < c.op.n_params; i++) {
    const tk_param& param = c.op.params[i];
    switch (param.kind) {
      case TK_PARAM_FLOAT:
        c.floats.push_back(args.number());
        break;
      case TK_PARAM_INT:
        c.ints.push_back(args.integer());
        break;
      case TK_PARAM_BOOL:
        c.ints.push_back(args.boolean());
        break;
      case TK_PARAM_TENSOR:
        c.shared.emplace_back().param = &param;
        c.shared.back().given = args.tensor();
        break;
      default:
        c.lists.emplace_back().param = &param;
        c.lists.back().given = args.tensors();
    }
  }
  c.settings.config = args.integer();
  c.settings.mode = args.integer();
  for (List& list : c.lists) {
    for (const Tensor& tensor : list.given) list.tensors.push_back(meta(tensor));
    list.copies.resize(list.given.size());
  }
  for (Shared& one : c.shared) one.tensor = meta(one.given);
}

// --- Checks ---

[[noreturn]] void fail_call(const ListCall& c, const std::string& message) {
  fail_argument(text("tk.", c.op.name, ": ", message));
}

std::string place(const List& list, size_t i) { return text(list.param->name, "[", i, "]"); }

void check_lengths(const ListCall& c) {
  for (const List& list : c.lists)
    if (list.given.size() != c.count())
      fail_call(c, text("lists must have one length; ", c.lists.front().param->name, " has ", c.count(), " tensors, ",
                        list.param->name, " ", list.given.size()));
}

void check_tensor(const ListCall& c, const List& list, size_t i) {
  const Meta& x = list.tensors[i];
  const Meta& first = c.lists.front().tensors.front();
  if (x.device != first.device)
    fail_call(c, text(place(c.lists.front(), 0), " is on ", describe(first.device), ", ", place(list, i), " on ",
                      describe(x.device), "; all tensors must be on one device"));
  if (x.dtype != list.tensors.front().dtype)
    fail_call(c, text("the tensors of a list must have one dtype; ", place(list, 0), " is ",
                      dtype_name(list.tensors.front().dtype), ", ", place(list, i), " ", dtype_name(x.dtype)));
  if (!list.param->leading && x.dim() != 0)
    fail_call(c, text(place(list, i), " must have 0 dimensions, is ", describe_sizes(x.sizes)));
  const List* const like = c.first_with_sizes();
  if (list.param->leading && !std::ranges::equal(x.sizes, like->tensors[i].sizes))
    fail_call(c, text("the dimensions of ", place(*like, i), " and ", place(list, i), " must be the same, are ",
                      describe_sizes(like->tensors[i].sizes), " and ", describe_sizes(x.sizes)));
}

void check_shared(const ListCall& c, const Shared& one) {
  const Device device = c.lists.front().tensors.front().device;
  if (one.tensor.device != device)
    fail_call(c, text(place(c.lists.front(), 0), " is on ", describe(device), ", ", one.param->name, " on ",
                      describe(one.tensor.device), "; all tensors must be on one device"));
  if (one.tensor.dim() != 0)
    fail_call(c, text(one.param->name, " must have 0 dimensions, is ", describe_sizes(one.tensor.sizes)));
}

Layout layout_of(const Meta& x) { return {x.sizes, x.strides, static_cast<uint32_t>(x.sizes.size()), true}; }

const char* address(const Meta& x) { return static_cast<const char*>(read_pointer(x)); }

struct Extent {
  const char* first;
  const char* end;
  const List* list;  // null of what all places share
  size_t place;
  const Shared* shared;
  bool is_written() const { return list && list->param->mutated; }
  std::string name() const { return list ? ops::place(*list, place) : shared->param->name; }
};

// What is written shares memory with nothing else.
void check_memory(const ListCall& c) {
  std::vector<Extent> extents;
  for (const List& list : c.lists)
    for (size_t i = 0; i < c.count(); i++) {
      const Meta& x = list.tensors[i];
      if (x.count() == 0) continue;
      if (list.param->mutated && overlaps_itself(layout_of(x)))
        fail_call(c, text("elements of ", place(list, i),
                          ", which is written, share memory: give each a place of its own (.clone())"));
      extents.push_back({address(x), address(x) + reach(layout_of(x)) * item_size(x.dtype), &list, i, nullptr});
    }
  for (const Shared& one : c.shared)
    extents.push_back({address(one.tensor), address(one.tensor) + item_size(one.tensor.dtype), nullptr, 0, &one});
  std::ranges::sort(extents, {}, &Extent::first);
  const Extent* last = nullptr;          // of those so far the one that ends last,
  const Extent* last_written = nullptr;  // and of those that are written
  for (const Extent& extent : extents) {
    const bool is_written = extent.is_written();
    const Extent* const other = is_written ? last : last_written;
    if (other && other->end > extent.first) {
      const bool is_first = other->is_written();
      const Extent& written = is_first ? *other : extent;
      const Extent& shared = is_first ? extent : *other;
      fail_call(c,
                text(written.name(), ", which is written, overlaps ", shared.name(), " in memory; clone one of them"));
    }
    if (!last || extent.end > last->end) last = &extent;
    if (is_written && (!last_written || extent.end > last_written->end)) last_written = &extent;
  }
}

// --- One order of elements for the tensors of a place ---

bool is_row_major(const Meta& x) {
  int64_t step = 1;
  for (size_t d = x.sizes.size(); d-- > 0;) {
    if (x.sizes[d] != 1 && x.strides[d] != step) return false;
    step *= x.sizes[d];
  }
  return true;
}

bool same_strides(const Meta& x, const Meta& y) {
  for (size_t d = 0; d < x.sizes.size(); d++)
    if (x.sizes[d] != 1 && x.strides[d] != y.strides[d]) return false;
  return true;
}

// Whether element e of each lies at e in memory, in one order for all. Results are row-major.
bool run_alike(const ListCall& c, size_t i) {
  const Meta& first = c.first_with_sizes()->tensors[i];
  const Layout layout = layout_of(first);
  const bool is_dense =
      is_row_major(first) || (c.op.n_results == 0 && !overlaps_itself(layout) && reach(layout) == first.count());
  return is_dense && std::ranges::all_of(c.lists, [&](const List& list) {
           return !list.param->leading || same_strides(first, list.tensors[i]);
         });
}

void make_row_major(ListCall& c, size_t i) {
  for (List& list : c.lists) {
    Meta& x = list.tensors[i];
    if (!list.param->leading || is_row_major(x)) continue;
    list.copies[i] = copied(x, x.dtype);
    x = meta(list.copies[i]);
  }
}

void arrange(ListCall& c) {
  const List* const sized = c.first_with_sizes();
  if (!sized) return;
  for (size_t i = 0; i < c.count(); i++)
    if (sized->tensors[i].count() != 0 && !run_alike(c, i)) make_row_major(c, i);
}

void give_back(const ListCall& c) {
  for (const List& list : c.lists)
    for (size_t i = 0; i < c.count(); i++)
      if (list.copies[i] && list.param->mutated) copy(list.given[i].get(), list.copies[i].get());
}

// --- The table ---

int64_t word(const void* address) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)); }

struct Table {
  std::vector<int64_t> words;
  int64_t chunks = 0;
};

Table table_of(const ListCall& c) {
  const size_t n = c.count();
  const auto n_made = static_cast<size_t>(std::ranges::count_if(c.results, &Made::is_list));
  const auto needed = static_cast<int64_t>((2 + c.lists.size() + n_made) * n);
  const int64_t padded = (needed + kStoredWords - 1) / kStoredWords * kStoredWords;
  Table table{std::vector<int64_t>(static_cast<size_t>(padded))};
  const List* const sized = c.first_with_sizes();
  for (size_t i = 0; i < n; i++) {
    const int64_t size = sized ? sized->tensors[i].count() : 0;
    table.words[i] = table.chunks;
    table.words[n + i] = size;
    table.chunks += (size + kListChunk - 1) / kListChunk;
    for (size_t k = 0; k < c.lists.size(); k++) table.words[(2 + k) * n + i] = word(address(c.lists[k].tensors[i]));
    size_t column = 2 + c.lists.size();
    for (const Made& made : c.results)
      if (made.is_list) table.words[column++ * n + i] = word(write_pointer(meta(made.tensors[i])));
  }
  return table;
}

void store(const Table& table, void* memory, Settings settings, Device device) {
  static const tk_op op = tk_intern_op("store_table");
  settings.config = -1;  // of the op's own
  double words[kStoredWords];
  for (size_t first = 0; first < table.words.size(); first += kStoredWords) {
    // A float of a call is passed on as it is, and no part of what a choice is remembered by.
    std::transform(table.words.begin() + static_cast<ptrdiff_t>(first),
                   table.words.begin() + static_cast<ptrdiff_t>(first + kStoredWords), words,
                   [](int64_t word) { return std::bit_cast<double>(word); });
    const tk_tensor part = {.data = static_cast<int64_t*>(memory) + first,
                            .sizes = {kStoredWords},
                            .strides = {1},
                            .dtype = kInt64,
                            .ndim = 1};
    launch_op(op, {&part, 1}, {}, words, settings, device);
  }
}

// --- Autograd ---
//
// The gate knows no lists: to pass hundreds of tensors on would cost more than the call. What torch.func transforms
// does not come here: Python has refused it (tk.generated.register).

void check_gradients(const ListCall& c) {
  const TorchState& torch = TorchState::get();
  if (!torch.is_known()) return;
  const bool is_recording = aoti_torch_grad_mode_is_enabled();
  const bool is_forward = torch.is_forward_mode();
  if (!is_recording && !is_forward) return;
  const auto check = [&](const Tensor& tensor) {
    if ((is_recording && torch.requires_grad(tensor.get())) || (is_forward && torch.has_tangent(tensor.get())))
      fail_not_implemented(text("tk.", c.op.name,
                                " has no gradient: it is for inference. Call it under torch.no_grad() or "
                                "torch.inference_mode(), or detach its arguments."));
  };
  for (const List& list : c.lists) std::ranges::for_each(list.given, check);
  for (const Shared& one : c.shared) check(one.given);
}

void count_writes(const ListCall& c) {
  for (const List& list : c.lists)
    for (const Tensor& tensor : list.given)
      if (list.param->mutated) TorchState::get().bump_version(tensor.get());
}

// --- Launching ---

bool is_aligned(const List& list) {
  return std::ranges::all_of(list.tensors,
                             [](const Meta& x) { return reinterpret_cast<uintptr_t>(address(x)) % 16 == 0; });
}

int64_t chunks_of(const ListCall& c) {
  const List* const sized = c.first_with_sizes();
  int64_t found = 0;
  for (size_t i = 0; sized && i < c.count(); i++) found += (sized->tensors[i].count() + kListChunk - 1) / kListChunk;
  return found;
}

tk_tensor describe_list(const ListCall& c, void* table, int64_t chunks, bool aligned, int32_t dtype) {
  return {.data = table,
          .sizes = {static_cast<int64_t>(c.count()), chunks},
          .strides = {aligned ? 16 : 1, 1},
          .dtype = dtype,
          .ndim = 2};
}

// A tensor without dimensions.
tk_tensor describe_shared(const void* data, int32_t dtype) {
  return {.data = const_cast<void*>(data), .sizes = {}, .strides = {}, .dtype = dtype, .ndim = 0};
}

// The arguments as the core sees them.
std::vector<tk_tensor> describe_arguments(const ListCall& c, void* table, int64_t chunks) {
  std::vector<tk_tensor> found;
  size_t next_list = 0, next_shared = 0;
  for (uint32_t i = 0; i < c.op.n_params; i++) {
    if (c.op.params[i].kind == TK_PARAM_TENSORS) {
      const List& list = c.lists[next_list++];
      found.push_back(describe_list(c, table, chunks, is_aligned(list), list.tensors.front().dtype));
    } else if (c.op.params[i].kind == TK_PARAM_TENSOR) {
      const Meta& x = c.shared[next_shared++].tensor;
      found.push_back(describe_shared(read_pointer(x), x.dtype));
    }
  }
  return found;
}

void allocate_results(ListCall& c, Device device) {
  if (c.op.n_results == 0) return;
  std::vector<tk_tensor> tensors = describe_arguments(c, nullptr, chunks_of(c));
  const auto n_inputs = tensors.size();
  for (uint32_t i = 0; i < c.op.n_results; i++)
    tensors.push_back({.data = nullptr, .sizes = {}, .strides = {}, .dtype = 0, .ndim = -1});
  const tk_call call = {.op = c.op.op,
                        .mode = static_cast<uint32_t>(c.settings.mode),
                        .config = static_cast<int32_t>(c.settings.config),
                        .device = target_device(c.op.name, device),
                        .n_tensors = static_cast<uint32_t>(n_inputs + c.op.n_results),
                        .n_ints = static_cast<uint32_t>(c.ints.size()),
                        .n_floats = static_cast<uint32_t>(c.floats.size()),
                        .tensors = tensors.data(),
                        .ints = c.ints.data(),
                        .floats = c.floats.data()};
  tk_tensor found[TK_MAX_TENSORS];
  uint32_t count = 0;
  check_status(tk_outputs(&call, found, c.op.n_results, &count));
  for (uint32_t i = 0; i < c.op.n_results; i++) {
    Made& made = c.results[i];
    made.dtype = found[i].dtype;
    const bool has_sizes = made.is_list && c.op.results[i].ndim == 0 && c.first_with_sizes();
    for (size_t at = 0; at < (made.is_list ? c.count() : 1); at++) {
      const std::span<const int64_t> sizes =
          has_sizes ? std::span<const int64_t>(c.first_with_sizes()->tensors[at].sizes) : std::span<const int64_t>();
      made.tensors.push_back(empty(sizes, made.dtype, device));
    }
  }
}

void launch_lists(const ListCall& c, Device device) {
  const Table table = table_of(c);
  const auto size = static_cast<int64_t>(table.words.size());
  const Tensor memory = empty({&size, 1}, kInt64, device);
  void* const data = write_pointer(meta(memory));
  store(table, data, c.settings, device);
  std::vector<tk_tensor> tensors = describe_arguments(c, data, table.chunks);
  for (const Made& made : c.results)
    tensors.push_back(made.is_list ? describe_list(c, data, table.chunks, true, made.dtype)
                                   : describe_shared(write_pointer(meta(made.tensors.front())), made.dtype));
  launch_op(c.op.op, tensors, c.ints, c.floats, c.settings, device);
}

void give_back_results(ListCall& c, StableIValue* stack) {
  for (Made& made : c.results) {
    if (!made.is_list) {
      *stack++ = torch::stable::detail::from(made.tensors.front().release());
      continue;
    }
    StableListHandle list = nullptr;
    check_shim(torch_new_list_reserve_size(made.tensors.size(), &list), "make a list of tensors");
    for (Tensor& tensor : made.tensors)
      check_shim(torch_list_push_back(list, torch::stable::detail::from(tensor.release())), "fill a list of tensors");
    *stack++ = torch::stable::detail::from(list);
  }
}

// Of lists without a tensor results are lists without one.
void run(ListCall& c) {
  if (c.count() == 0) {
    if (std::ranges::any_of(c.results, [](const Made& made) { return !made.is_list; }))
      fail_call(c, text(c.lists.front().param->name, " is an empty list, of which nothing can be reduced"));
    return;
  }
  for (const List& list : c.lists)
    for (size_t i = 0; i < c.count(); i++) check_tensor(c, list, i);
  for (const Shared& one : c.shared) check_shared(c, one);
  check_memory(c);
  const Device device = c.lists.front().tensors.front().device;
  target_device(c.op.name, device);  // refuses those that no kernel is for
  count_writes(c);
  arrange(c);
  allocate_results(c, device);
  launch_lists(c, device);
  give_back(c);
}

}  // namespace

void call_lists(const tk_generated_op& op, StableIValue* stack) {
  ListCall c(op);
  read(stack, c);
  check_gradients(c);
  check_settings(op.name, c.settings.config, c.settings.mode);
  check_lengths(c);
  for (uint32_t i = 0; i < op.n_results; i++) c.results.emplace_back().is_list = op.results[i].leading >= 0;
  run(c);
  give_back_results(c, stack);
}

}  // namespace tk::ops
