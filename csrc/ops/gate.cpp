#include "gate.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>

#include "arguments.h"
#include "python_error.h"
#include "runtime.h"

namespace tk::ops {
namespace {

constexpr size_t kMaxWords = 2 * (TK_MAX_TENSORS + TK_MAX_INTS + TK_MAX_FLOATS);  // of a call

// Where the twin that a gate calls leaves what it throws. The twin takes it away, so that nobody else finds it there.
thread_local std::exception_ptr* carrier = nullptr;

class Carrying {
 public:
  Carrying() : previous_(std::exchange(carrier, &error_)) {}
  ~Carrying() { carrier = previous_; }
  Carrying(const Carrying&) = delete;
  Carrying& operator=(const Carrying&) = delete;
  const std::exception_ptr& error() const { return error_; }

 private:
  std::exception_ptr error_;
  std::exception_ptr* previous_;
};

void free_results(StableIValue* first, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) Tensor(torch::stable::detail::to<AtenTensorHandle>(first[i]));
}

// Throws what was carried past torch, else what torch says. `stack` has the results.
void finish(AOTITorchError status, const std::exception_ptr& error, StableIValue* stack, uint64_t n_results,
            const std::string& op) {
  if (status == 0 && !error) [[likely]]
    return;
  if (status == 0) free_results(stack, n_results);  // they stand for no result
  if (error) std::rethrow_exception(error);
  fail_shim(("call " + op).c_str());
}

struct Entry {
  Boxed* kernel = nullptr;
  std::function<void()> define_twins;
};

struct Gates {
  std::mutex lock;
  std::map<std::string, Entry> by_op;  // never shrinks: an entry stays where it is
};

Gates& gates() {
  static auto* const gates = new Gates;
  return *gates;
}

Entry* find_gate(const char* op) {
  const std::lock_guard lock(gates().lock);
  const auto found = gates().by_op.find(op);
  return found == gates().by_op.end() ? nullptr : &found->second;
}

}  // namespace

Gate::Gate(const char* name, const char* overload, const std::string& arguments, uint64_t n_inputs, uint64_t n_results,
           uint64_t n_plain, bool is_on_cpu)
    : name_(name),
      plain_(text("tk::_", name)),
      tracked_(text("tk::_", name, "_autograd")),
      overload_(overload),
      n_inputs_(n_inputs),
      n_results_(n_results),
      n_plain_(n_plain),
      is_on_cpu_(is_on_cpu) {
  size_t index = 0;
  for (std::string_view rest = arguments; !rest.empty();) {
    const std::string_view argument = next_argument(rest);
    if (argument == "*") continue;
    if (argument.find("[]") != argument.npos && argument.starts_with("Tensor"))
      throw std::logic_error(text("tk::", name, ": the gate knows no lists of tensors"));
    const bool is_written = argument.starts_with("Tensor(") && argument.find("!)") != argument.npos;
    if (argument.starts_with("Tensor"))
      tensors_.push_back({index, argument.starts_with("Tensor?"), is_written, std::string(name_of(argument))});
    writes_ = writes_ || is_written;
    index++;
  }
  if (index != n_inputs) throw std::logic_error(text("tk::", name, ": the gate does not know this form of schema"));
}

bool Gate::is_served(AtenTensorHandle tensor, const std::string& name) const {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  static const int32_t cuda = aoti_torch_device_type_cuda();
  const int32_t type = read_device_type(tensor, name_, name);
  return type == cuda || (type == cpu && is_on_cpu_);
}

bool Gate::is_gradient_at_stake(const StableIValue* stack) const {
  using torch::stable::detail::to;
  const TorchState& torch = TorchState::get();
  if (torch.is_transforming()) return true;
  const bool is_recording = aoti_torch_grad_mode_is_enabled();
  return std::any_of(tensors_.begin(), tensors_.end(), [&](const TensorArgument& argument) {
    const StableIValue* word = stack + argument.index;
    if (argument.is_optional) word = to<StableIValue*>(*word);
    if (!word) return false;  // not given
    const auto tensor = to<AtenTensorHandle>(*word);
    // A subclass first: it may answer for its device in Python.
    return torch.is_subclass(tensor) || !is_served(tensor, argument.name) ||
           (is_recording && torch.requires_grad(tensor));
  });
}

void Gate::count_writes(const StableIValue* stack) const {
  for (const TensorArgument& argument : tensors_)
    if (argument.is_written)
      TorchState::get().bump_version(torch::stable::detail::to<AtenTensorHandle>(stack[argument.index]));
}

void Gate::call(StableIValue* stack) const {
  if (writes_) count_writes(stack);
  is_gradient_at_stake(stack) ? call_tracked(stack) : call_plain(stack);
}

void Gate::call_plain(StableIValue* stack) const {
  const Carrying carrying;
  StableIValue wider[kMaxWords];  // the caller's stack has room for the op's own results
  StableIValue* words = stack;
  if (n_plain_ > n_results_) words = std::copy_n(stack, n_inputs_, wider) - n_inputs_;
  const AOTITorchError status = torch_call_dispatcher(plain_.c_str(), overload_.c_str(), words, TORCH_ABI_VERSION);
  finish(status, carrying.error(), words, n_plain_, plain_);
  if (words == stack) return;
  std::copy_n(words, n_results_, stack);
  free_results(words + n_results_, n_plain_ - n_results_);
}

void Gate::call_tracked(StableIValue* stack) const {
  const AOTITorchError status = torch_call_dispatcher(tracked_.c_str(), overload_.c_str(), stack, TORCH_ABI_VERSION);
  finish(status, take_python_error(), stack, n_results_, tracked_);
}

void add_gate(const std::string& op, Boxed* kernel, std::function<void()> define_twins) {
  const std::lock_guard lock(gates().lock);
  gates().by_op[op] = {kernel, std::move(define_twins)};
}

void call_carrying(Boxed* kernel, StableIValue* stack, uint64_t n_inputs, uint64_t n_outputs) {
  std::exception_ptr* const error = std::exchange(carrier, nullptr);
  if (!error) return kernel(stack, n_inputs, n_outputs);
  try {
    kernel(stack, n_inputs, n_outputs);
  } catch (...) {
    *error = std::current_exception();
    const int64_t none = 0;
    for (uint64_t i = 0; i < n_outputs; i++)
      stack[i] = torch::stable::detail::from(empty({&none, 1}, kUInt8, {aoti_torch_device_type_cpu(), 0}).release());
  }
}

}  // namespace tk::ops

int32_t tk_ops_gate(const char* op) {
  using torch::stable::detail::StableLibrary;
  tk::ops::Entry* const entry = tk::ops::find_gate(op);
  if (!entry) return 0;
  try {
    if (entry->define_twins) std::exchange(entry->define_twins, {})();
    if (!tk::ops::TorchState::get().is_known()) return 0;
    static auto* const library = new StableLibrary(StableLibrary::Kind::IMPL, "tk", "Autograd", __FILE__, __LINE__);
    library->impl(op, entry->kernel);
    return 1;
  } catch (const std::exception&) {
    return 0;  // torch would not have it there
  }
}
