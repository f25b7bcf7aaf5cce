#include "beneath.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "gate.h"
#include "generated.h"
#include "launch.h"
#include "ops.h"
#include "runtime.h"

namespace tk::ops {
namespace {

namespace stable = torch::stable::detail;

// --- Deciding ---

std::atomic<tk_ops_decide*> decide_in_python{nullptr};
std::atomic<uint64_t> generation{0};  // of what is remembered

// The words that a class of calls is known by (tk_ops_decide), and the place of the op in front.
class Class {
 public:
  explicit Class(int32_t op) { add(op); }

  void add(int64_t word) {
    if (count_ == std::size(words_)) [[unlikely]] {
      fits_ = false;
      return;
    }
    words_[count_++] = word;
    hash_ = std::rotl((hash_ ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15, 23);
  }
  void add(const Meta& tensor) {
    add(tensor.dtype);
    add(tensor.dim());
    for (const int64_t size : tensor.sizes) add(size);
    for (const int64_t stride : tensor.strides) add(stride);
  }

  bool fits() const { return fits_; }
  int32_t op() const { return static_cast<int32_t>(words_[0]); }
  std::span<const int64_t> words() const { return {words_, count_}; }
  size_t hash() const { return hash_ ^ hash_ >> 32; }

 private:
  int64_t words_[64];
  size_t count_ = 0;
  uint64_t hash_ = 0;
  bool fits_ = true;
};

using Words = std::vector<int64_t>;

struct Hash {
  using is_transparent = void;
  size_t operator()(const Class& call) const { return call.hash(); }
  size_t operator()(const Words& words) const {
    Class call(static_cast<int32_t>(words[0]));
    for (size_t i = 1; i < words.size(); i++) call.add(words[i]);
    return call.hash();
  }
};

struct Equal {
  using is_transparent = void;
  static std::span<const int64_t> view(const Class& call) { return call.words(); }
  static std::span<const int64_t> view(const Words& words) { return words; }
  bool operator()(const auto& x, const auto& y) const { return std::ranges::equal(view(x), view(y)); }
};

// Of one thread, so that nothing is locked: not by a thread that waits for the GIL, and not in a forked process.
struct Remembered {
  uint64_t generation = 0;
  std::unordered_map<Words, bool, Hash, Equal> answers;
};
thread_local Remembered remembered;

constexpr size_t kMostRemembered = 4096;  // a program whose sizes never repeat asks again

Remembered& current() {
  const uint64_t now = generation.load(std::memory_order_acquire);
  if (remembered.generation != now || remembered.answers.size() >= kMostRemembered) [[unlikely]] {
    remembered.answers.clear();
    remembered.generation = now;
  }
  return remembered;
}

void remember(const Class& call, bool answer) {
  const auto words = call.words();
  current().answers.insert_or_assign(Words(words.begin(), words.end()), answer);
}

bool is_decided(const Class& call) {
  const auto& answers = current().answers;
  if (const auto found = answers.find(call); found != answers.end()) [[likely]]
    return found->second;
  tk_ops_decide* const decide = decide_in_python.load(std::memory_order_acquire);
  if (!decide) return false;
  const auto words = call.words().subspan(1);
  const bool answer = decide(call.op(), words.data(), static_cast<int32_t>(words.size())) != 0;
  remember(call, answer);
  return answer;
}

// --- What may be served at all ---

// Set while a kernel of tk runs: what it computes by ATen's ops is ATen's.
thread_local bool is_inside = false;

class Inside {
 public:
  Inside() { is_inside = true; }
  ~Inside() { is_inside = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

bool has_names(AtenTensorHandle tensor) {
  using HasNames = bool(const void* impl);
  static auto* const function = torch_symbol<HasNames>("libtorch_cpu.so", "_ZN2at4impl9has_namesEPKN3c1010TensorImplE");
  return function && function(*reinterpret_cast<const void* const*>(tensor));
}

bool is_plain(AtenTensorHandle tensor) {
  const TorchState& torch = TorchState::get();
  return is_defined(tensor) && torch.is_known() && !torch.is_subclass(tensor) && !has_names(tensor);
}

// Plain tensors of one floating-point dtype on one device, with elements. Writes them to `call`.
bool describe(std::initializer_list<const Tensor*> tensors, std::initializer_list<int64_t> numbers, Class& call) {
  bool is_first = true;
  int32_t dtype = 0;
  Device device = {};
  for (const Tensor* const tensor : tensors) {
    if (!is_plain(tensor->get())) return false;
    const Meta m = meta(*tensor);
    if (std::exchange(is_first, false)) {
      dtype = m.dtype;
      device = m.device;
      if (dtype != kBFloat16 && dtype != kFloat16 && dtype != kFloat32) return false;
      call.add(dtype == kFloat32 && allows_tf32());
      call.add(device.index);
      call.add(static_cast<int64_t>(tensors.size()));
    }
    if (m.dtype != dtype || m.device != device || m.count() == 0) return false;
    call.add(m);
  }
  for (const int64_t number : numbers) call.add(number);
  return call.fits();
}

// --- Serving and leaving ---

struct Calls {
  void* aten = nullptr;                        // at::cuda::f, where calls are left
  const tk_generated_op* generated = nullptr;  // what serves them, if that is a generated op
  std::atomic<int64_t> served{0};
  std::atomic<int64_t> left{0};
};
Calls calls[32];

// A function of ATen that returns an at::Tensor gets the address of its result in front. A handle's own is as good as
// any: it holds a tensor that is not defined, to which no reference is counted.
template <class... Parameters>
Tensor leave(int32_t op, Parameters... arguments) {
  if (!is_inside) calls[op].left.fetch_add(1, std::memory_order_relaxed);
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch_new_uninitialized_tensor(&handle), "make a tensor");
  Tensor result(handle);
  reinterpret_cast<void* (*)(void*, Parameters...)>(calls[op].aten)(handle, arguments...);
  return result;
}

// Nothing where tk refuses: no kernel in the packs, no memory. It does so before it launches anything.
template <class Serve>
Tensor attempt(const Class& call, const Serve& serve) {
  try {
    const Inside inside;
    Tensor result = serve();
    calls[call.op()].served.fetch_add(1, std::memory_order_relaxed);
    return result;
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    if (what.find("[tk:OutOfMemory]") == what.npos) remember(call, false);
    return {};
  }
}

// The same of a function that writes to its last argument, `out`.
Tensor leave_out(int32_t op, const Tensor& a, const Tensor& b, const Tensor& out) {
  if (!is_inside) calls[op].left.fetch_add(1, std::memory_order_relaxed);
  using Function = void*(const void*, const void*, void*);
  reinterpret_cast<Function*>(calls[op].aten)(a.get(), b.get(), out.get());
  return alias(out.get());
}

// Whether tk is to serve a call of these tensors and other arguments, by which it is decided. Not where torch is to be
// deterministic, for which ATen has conditions and errors of its own; and not what cannot be looked at.
bool is_served(std::initializer_list<const Tensor*> tensors, std::initializer_list<int64_t> numbers, Class& call) {
  if (is_inside || is_described() || wants_deterministic()) return false;
  try {
    return describe(tensors, numbers, call) && is_decided(call);
  } catch (const std::exception&) {
    return false;
  }
}

// A call: served by `serve`, or left to ATen with `arguments`, as its function takes them.
template <class Serve, class... Parameters>
Tensor run(int32_t op, std::initializer_list<const Tensor*> tensors, std::initializer_list<int64_t> numbers,
           const Serve& serve, Parameters... arguments) {
  Class call(op);
  if (is_served(tensors, numbers, call))
    if (Tensor result = attempt(call, serve)) return result;
  return leave(op, arguments...);
}

// By the op's generated op, of these tensors and other arguments.
Tensor generate(int32_t op, std::initializer_list<const Tensor*> tensors, std::initializer_list<StableIValue> others) {
  const tk_generated_op& by = *calls[op].generated;
  StableIValue stack[8];
  StableIValue* next = stack;
  for (const Tensor* const tensor : tensors) *next++ = stable::from(alias(tensor->get()).release());
  next = std::ranges::copy(others, next).out;
  *next++ = stable::from(int64_t{-1});  // config
  *next++ = stable::from(int64_t{0});   // mode
  if (meta(**tensors.begin()).device.is_cuda()) return call_generated(by, stack);
  check_shim(torch_call_dispatcher(text("tk::", by.name).c_str(), "", stack, TORCH_ABI_VERSION), by.name);
  return Tensor(stable::to<AtenTensorHandle>(stack[0]));
}

// --- The ops ---

// Their places in the table.
enum Place : int32_t {
  kMm,
  kMmOut,
  kBmm,
  kBmmOut,
  kGelu,
  kGeluBackward,
  kSilu,
  kSiluBackward,
  kSoftmax,
  kSoftmaxBackward,
  kLogSoftmax,
  kLogSoftmaxBackward,
  kCount
};

template <Place kPlace, auto kMultiply>
void multiply(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  args.give_back(run(kPlace, {&a, &b}, {}, [&] { return kMultiply(a, b, {}, {}, {}); }, a.get(), b.get()));
}

template <Place kPlace, auto kMultiply>
void multiply_out(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor a = args.tensor();
  const Tensor b = args.tensor();
  const Tensor out = args.tensor();
  Class call(kPlace);
  Tensor result;
  if (is_served({&a, &b, &out}, {}, call))
    result = attempt(call, [&] { return kMultiply(a, b, {}, {}, alias(out.get())); });
  args.give_back(result ? std::move(result) : leave_out(kPlace, a, b, out));
}

// "none", "tanh", or what ATen will refuse.
int64_t form_of(const std::string& approximate) { return approximate == "none" ? 0 : approximate == "tanh" ? 1 : 2; }

void gelu(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor x = args.tensor();
  const std::string approximate = args.text();
  const int64_t form = form_of(approximate);
  const auto serve = [&] { return generate(kGelu, {&x}, {stable::from(form == 1)}); };
  args.give_back(run(kGelu, {&x}, {form}, serve, x.get(), std::string_view(approximate)));
}

void gelu_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor grad = args.tensor();
  const Tensor x = args.tensor();
  const std::string approximate = args.text();
  const int64_t form = form_of(approximate);
  const auto serve = [&] { return generate(kGeluBackward, {&grad, &x}, {stable::from(form == 1)}); };
  args.give_back(run(kGeluBackward, {&grad, &x}, {form}, serve, grad.get(), x.get(), std::string_view(approximate)));
}

void silu(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor x = args.tensor();
  args.give_back(run(kSilu, {&x}, {}, [&] { return generate(kSilu, {&x}, {}); }, x.get()));
}

void silu_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor grad = args.tensor();
  const Tensor x = args.tensor();
  const auto serve = [&] { return generate(kSiluBackward, {&grad, &x}, {}); };
  args.give_back(run(kSiluBackward, {&grad, &x}, {}, serve, grad.get(), x.get()));
}

// _softmax and _log_softmax. to_float: from 16 bits.
template <Place kPlace>
void softmax(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor x = args.tensor();
  const int64_t dim = args.integer();
  const bool to_float = args.boolean();
  args.give_back(
      run(kPlace, {&x}, {dim, to_float}, [&] { return generate(kPlace, {&x}, {}); }, x.get(), dim, to_float));
}

// _softmax_backward_data and _log_softmax_backward_data, of the result y.
template <Place kPlace>
void softmax_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor grad = args.tensor();
  const Tensor y = args.tensor();
  const int64_t dim = args.integer();
  const auto dtype = static_cast<int8_t>(args.dtype());
  const auto serve = [&] { return generate(kPlace, {&grad, &y}, {}); };
  args.give_back(run(kPlace, {&grad, &y}, {dim, dtype}, serve, grad.get(), y.get(), dim, dtype));
}

// aten: the end of the mangled name of at::cuda::f, behind the namespace. generated: what serves it, if that is one.
struct BeneathOp {
  const char* name;
  const char* aten;
  Boxed* kernel;
  const char* generated = nullptr;
};

constexpr BeneathOp kOps[kCount] = {
    {"mm", "2mmERKNS_6TensorES3_", multiply<kMm, mm>},
    {"mm.out", "7mm_outfERKNS_6TensorES3_RS1_", multiply_out<kMmOut, mm>},
    {"bmm", "3bmmERKNS_6TensorES3_", multiply<kBmm, bmm>},
    {"bmm.out", "8bmm_outfERKNS_6TensorES3_RS1_", multiply_out<kBmmOut, bmm>},
    {"gelu", "4geluERKNS_6TensorESt17basic_string_viewIcSt11char_traitsIcEE", gelu, "gelu"},
    {"gelu_backward", "13gelu_backwardERKNS_6TensorES3_St17basic_string_viewIcSt11char_traitsIcEE", gelu_backward,
     "gelu_backward"},
    {"silu", "4siluERKNS_6TensorE", silu, "silu"},
    {"silu_backward", "13silu_backwardERKNS_6TensorES3_", silu_backward, "silu_backward"},
    {"_softmax", "8_softmaxERKNS_6TensorElb", softmax<kSoftmax>, "softmax"},
    {"_softmax_backward_data", "22_softmax_backward_dataERKNS_6TensorES3_lN3c1010ScalarTypeE",
     softmax_backward<kSoftmaxBackward>, "softmax_backward"},
    {"_log_softmax", "12_log_softmaxERKNS_6TensorElb", softmax<kLogSoftmax>, "log_softmax"},
    {"_log_softmax_backward_data", "26_log_softmax_backward_dataERKNS_6TensorES3_lN3c1010ScalarTypeE",
     softmax_backward<kLogSoftmaxBackward>, "log_softmax_backward"},
};

void* find_aten(const BeneathOp& op, bool is_cuda) {
  const std::string name = text(is_cuda ? "_ZN2at4cuda" : "_ZN2at3cpu", op.aten);
  return find_torch_symbol(is_cuda ? "libtorch_cuda.so" : "libtorch_cpu.so", name.c_str());
}

using stable::StableLibrary;
StableLibrary* installed = nullptr;  // stays at exit, when torch may be gone

}  // namespace
}  // namespace tk::ops

using namespace tk::ops;

const char* tk_ops_beneath_name(int32_t op) { return op < kCount ? kOps[op].name : nullptr; }

int32_t tk_ops_beneath_is_known(int32_t op, int32_t is_cuda) {
  const char* const generated = kOps[op].generated;
  return TorchState::get().is_known() && find_aten(kOps[op], is_cuda) && (!generated || find_generated(generated));
}

int32_t tk_ops_beneath_install(const int32_t* ops, int32_t count, int32_t is_cuda) {
  for (int32_t i = 0; i < count; i++) {
    Calls& of = calls[ops[i]];
    of.aten = find_aten(kOps[ops[i]], is_cuda);
    if (const char* const generated = kOps[ops[i]].generated) of.generated = find_generated(generated);
    if (!of.aten) return 0;
    of.served = of.left = 0;
  }
  generation.fetch_add(1, std::memory_order_release);
  try {
    auto library =
        std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", is_cuda ? "CUDA" : "CPU", "tk.enable", 0);
    for (int32_t i = 0; i < count; i++) library->impl(kOps[ops[i]].name, kOps[ops[i]].kernel);
    installed = library.release();
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

void tk_ops_beneath_remove() { delete std::exchange(installed, nullptr); }

void tk_ops_beneath_ask(tk_ops_decide* decide) {
  decide_in_python.store(decide, std::memory_order_release);
  generation.fetch_add(1, std::memory_order_release);
}

void tk_ops_beneath_count(int32_t op, int64_t* served, int64_t* left) {
  *served = calls[op].served.load(std::memory_order_relaxed);
  *left = calls[op].left.load(std::memory_order_relaxed);
}
