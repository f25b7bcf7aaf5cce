// Counters: small device memory that is zero whenever no launch is using it. A kernel that splits its work counts the
// parts that are done there, and leaves zeros behind, so that no launch has to clear anything.
//
// Launches of one stream follow each other and share a buffer. A captured graph may run beside the stream it came from,
// so each capture has its own, which comes back when the graph and all that was made of it are destroyed. The buffers
// of streams live as long as the process: nobody tells us when a stream is gone.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "driver.h"

namespace tk {

// A number that no other stream of the process has or will have.
uint64_t stream_id(const Driver& driver, cu::Stream stream);

class CounterPool {
 public:
  explicit CounterPool(const Driver& driver) : driver_(driver) {}

  // At least `bytes` zeroed bytes on the device of the current context. Throws TK_DRIVER_ERROR.
  cu::DevicePtr get(uint64_t stream_id, const Capture& capture, uint64_t bytes);

 private:
  struct Buffer {
    cu::DevicePtr address = 0;
    uint64_t size = 0;
  };
  struct Key {
    uint64_t stream;
    uint64_t capture;
    auto operator<=>(const Key&) const = default;
  };
  struct Lease;  // of a captured graph on a buffer

  uint64_t in_use(const Key& key, uint64_t bytes, Buffer& found);
  Buffer make(uint64_t bytes);
  Buffer take_spare(uint64_t bytes);
  void give_back(const Buffer& buffer);
  void clear(const Buffer& buffer);
  cu::Stream private_stream();
  void lease(const Key& key, const Buffer& buffer, cu::Graph graph);
  static void end_lease(void* lease);

  const Driver& driver_;
  std::mutex mutex_;
  cu::Stream stream_ = nullptr;  // for clearing, apart from everyone's work
  std::map<Key, Buffer> in_use_;
  std::vector<Buffer> spare_;
};

}  // namespace tk
