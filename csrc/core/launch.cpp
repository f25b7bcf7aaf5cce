#include "launch.h"

#include <memory>

#include "call_cache.h"
#include "choose.h"

namespace tk {
namespace {

// Scratch memory of one call, given back in stream order.
class Scratch {
 public:
  Scratch(Device& device, cu::Stream stream, const tk_allocator* allocator, uint64_t bytes)
      : device_(device), stream_(stream), allocator_(allocator) {
    if (bytes) address_ = allocator ? allocate_outside(bytes) : allocate_from_driver(bytes);
  }
  ~Scratch() {
    if (address_) give_back();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  cu::DevicePtr address() const { return address_; }

  void release() {
    if (!address_) return;
    const cu::Result result = give_back();
    address_ = 0;
    check(device_.driver(), result, "cuMemFreeAsync");
  }

 private:
  static constexpr size_t kAlignment = 256;  // what recipes may count on

  cu::DevicePtr allocate_from_driver(uint64_t bytes) {
    const Driver& d = device_.driver();
    cu::DevicePtr address = 0;
    check(d, d.cuMemAllocAsync(&address, bytes, stream_), "cuMemAllocAsync");
    return address;
  }

  cu::DevicePtr allocate_outside(uint64_t bytes) {
    void* const memory =
        allocator_->allocate(allocator_->context, bytes, kAlignment, device_.ordinal(), static_cast<void*>(stream_));
    const auto address = reinterpret_cast<uintptr_t>(memory);
    if (!address) fail(TK_DRIVER_ERROR, "the caller's allocator has no ", bytes, " bytes of scratch memory");
    if (address % kAlignment) {
      allocator_->release(allocator_->context, memory, device_.ordinal(), static_cast<void*>(stream_));
      fail(TK_INVALID_ARGUMENT, "the caller's allocator gave memory that does not lie on ", kAlignment, " bytes");
    }
    return address;
  }

  cu::Result give_back() {
    if (!allocator_) return device_.driver().cuMemFreeAsync(address_, stream_);
    allocator_->release(allocator_->context, reinterpret_cast<void*>(address_), device_.ordinal(),
                        static_cast<void*>(stream_));
    return cu::kSuccess;
  }

  Device& device_;
  const cu::Stream stream_;
  const tk_allocator* const allocator_;
  cu::DevicePtr address_ = 0;
};

cu::DevicePtr counters(Prepared& prepared, cu::Stream stream) {
  const Driver& d = prepared.device->driver();
  const Capture capture = capture_of(d, stream);
  // The driver names no stream that is being captured; its handle does within the capture.
  const uint64_t id = capture.id ? reinterpret_cast<uintptr_t>(stream) : stream_id(d, stream);
  Prepared::CounterMemo& memo = prepared.counter_memo;
  // A stream's buffer stays where it is; a graph's goes with the graph.
  if (!capture.id && memo.address && memo.stream_id == id) return memo.address;
  const cu::DevicePtr address = prepared.device->counters().get(id, capture, prepared.counter_bytes);
  if (!capture.id) memo = {id, address};
  return address;
}

void patch(Prepared& prepared, const tk_call& call, cu::DevicePtr scratch, cu::DevicePtr counter_memory) {
  for (const Prepared::AddressPatch& p : prepared.addresses) {
    uint64_t base = 0;
    switch (p.base) {
      case Prepared::Base::Tensor:
        base = reinterpret_cast<uintptr_t>(call.tensors[p.tensor].data);
        break;
      case Prepared::Base::Scratch:
        base = scratch;
        break;
      case Prepared::Base::Counters:
        base = counter_memory;
        break;
    }
    prepared.slots[p.slot] = base + p.offset;
  }
  for (const Prepared::FloatPatch& p : prepared.floats)
    prepared.slots[p.slot] = float_bits(call.floats[p.index], p.width);
  for (Prepared::MapPatch& p : prepared.maps)
    prepared.parameters[p.parameter] = p.cache.get(prepared.device->driver(), call);
}

void run(Prepared& prepared, const tk_call& call, cu::Stream stream, const tk_allocator* allocator) {
  if (prepared.launches.empty()) return;
  Device& device = *prepared.device;
  const Driver& d = device.driver();
  const ContextGuard context(d, device.context());
  const cu::DevicePtr counter_memory = prepared.counter_bytes ? counters(prepared, stream) : 0;
  Scratch scratch(device, stream, allocator, prepared.scratch_bytes);
  patch(prepared, call, scratch.address(), counter_memory);
  for (PreparedLaunch& launch : prepared.launches) {
    launch.config.stream = stream;
    check(d,
          d.cuLaunchKernelEx(&launch.config, launch.function, prepared.parameters.data() + launch.first_parameter,
                             nullptr),
          "cuLaunchKernelEx");
  }
  scratch.release();
}

// Chooses, and loads what was chosen.
Prepared prepare_call(const tk_call& call, cu::Stream stream) {
  Problem problem(call);
  Prepared prepared = choose(problem).prepared;
  if (prepared.launches.empty()) return prepared;
  const Driver& d = problem.device.driver();
  const ContextGuard context(d, problem.device.context());
  resolve(prepared, capture_of(d, stream).id != 0);
  return prepared;
}

struct BusyScope {
  explicit BusyScope(bool& busy) : flag(busy) { flag = true; }
  ~BusyScope() { flag = false; }
  bool& flag;
};

}  // namespace

void launch(const tk_call* call, cu::Stream stream, const tk_allocator* allocator) {
  check_not_forked();
  check_call(call);
  auto& cache = thread_cache<CallCache<Prepared>>();
  if (cache.busy) {  // called by an allocator
    Prepared prepared = prepare_call(*call, stream);
    return run(prepared, *call, stream, allocator);
  }
  const CallKey key(*call);
  const uint64_t generation = Registry::generation();
  Prepared* prepared = cache.find(key, generation);
  if (!prepared) [[unlikely]]
    prepared = cache.insert(key, generation, prepare_call(*call, stream));
  const BusyScope busy(cache.busy);
  run(*prepared, *call, stream, allocator);
}

}  // namespace tk
