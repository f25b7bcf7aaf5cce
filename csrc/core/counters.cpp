#include "counters.h"

#include <algorithm>
#include <memory>

namespace tk {

uint64_t stream_id(const Driver& driver, cu::Stream stream) {
  if (driver.cuStreamGetId) {
    unsigned long long id = 0;
    check(driver, driver.cuStreamGetId(stream, &id), "cuStreamGetId");
    return id;
  }
  // Before CUDA 12 the handle has to do. That of the per-thread default stream (2) stands for a stream in each thread.
  static thread_local char this_thread;
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  return handle == 2 ? reinterpret_cast<uintptr_t>(&this_thread) : handle;
}

// The lock is never held across a call of the driver: end_lease comes from one of the driver's own threads.
cu::DevicePtr CounterPool::get(uint64_t stream_id, const Capture& capture, uint64_t bytes) {
  const Key key{stream_id, capture.id};
  Buffer found;
  const uint64_t old_size = in_use(key, bytes, found);
  if (found.address) return found.address;
  const Buffer made = make(std::max(bytes, 2 * old_size));
  if (capture.id) lease(key, made, capture.graph);
  std::lock_guard lock(mutex_);
  Buffer& entry = in_use_[key];
  // Another thread on the same stream may have been faster. A buffer that is too small stays where queued work uses it.
  if (entry.size < bytes) {
    entry = made;
  } else if (!capture.id) {
    spare_.push_back(made);
  }
  return entry.address;
}

// Sets `found` if what the key has is large enough. Returns the size of what it has.
uint64_t CounterPool::in_use(const Key& key, uint64_t bytes, Buffer& found) {
  std::lock_guard lock(mutex_);
  const auto entry = in_use_.find(key);
  if (entry == in_use_.end()) return 0;
  if (entry->second.size >= bytes) found = entry->second;
  return entry->second.size;
}

CounterPool::Buffer CounterPool::make(uint64_t bytes) {
  const RelaxedCapture relaxed(driver_);
  Buffer buffer = take_spare(bytes);
  if (!buffer.address) {
    buffer.size = bytes;
    check(driver_, driver_.cuMemAlloc(&buffer.address, bytes), "cuMemAlloc");
  }
  try {
    clear(buffer);
  } catch (...) {
    give_back(buffer);
    throw;
  }
  return buffer;
}

CounterPool::Buffer CounterPool::take_spare(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(spare_.begin(), spare_.end(), [=](const Buffer& b) { return b.size >= bytes; });
  if (found == spare_.end()) return {};
  const Buffer buffer = *found;
  spare_.erase(found);
  return buffer;
}

void CounterPool::give_back(const Buffer& buffer) {
  std::lock_guard lock(mutex_);
  spare_.push_back(buffer);
}

void CounterPool::clear(const Buffer& buffer) {
  const cu::Stream stream = private_stream();
  check(driver_, driver_.cuMemsetD8Async(buffer.address, 0, buffer.size, stream), "cuMemsetD8Async");
  check(driver_, driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

cu::Stream CounterPool::private_stream() {
  static std::mutex creating;
  std::lock_guard lock(creating);
  if (!stream_) check(driver_, driver_.cuStreamCreate(&stream_, cu::kStreamNonBlocking), "cuStreamCreate");
  return stream_;
}

// --- Graphs ---

struct CounterPool::Lease {
  CounterPool* pool;
  Key key;
  Buffer buffer;
};

// From here on the graph, and everything instantiated from it, owns the buffer.
void CounterPool::lease(const Key& key, const Buffer& buffer, cu::Graph graph) {
  auto lease = std::make_unique<Lease>(Lease{this, key, buffer});
  cu::UserObject object = nullptr;
  const cu::Result created =
      driver_.cuUserObjectCreate(&object, lease.get(), end_lease, 1, cu::kUserObjectNoDestructorSync);
  if (created != cu::kSuccess) {
    give_back(buffer);
    check(driver_, created, "cuUserObjectCreate");
  }
  lease.release();
  const cu::Result retained = driver_.cuGraphRetainUserObject(graph, object, 1, 0);
  // Ours goes; when the graph could not take one this was the last, and end_lease runs.
  const cu::Result released = driver_.cuUserObjectRelease(object, 1);
  check(driver_, retained, "cuGraphRetainUserObject");
  check(driver_, released, "cuUserObjectRelease");
}

// May not call the driver. The buffer is cleared when it is used again.
void CounterPool::end_lease(void* data) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(data));
  CounterPool& pool = *lease->pool;
  std::lock_guard lock(pool.mutex_);
  const auto entry = pool.in_use_.find(lease->key);
  if (entry != pool.in_use_.end() && entry->second.address == lease->buffer.address) pool.in_use_.erase(entry);
  pool.spare_.push_back(lease->buffer);
}

}  // namespace tk
