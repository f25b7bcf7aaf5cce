// A launch recipe worked out for a problem: all that does not depend on addresses, floats and the stream.
#pragma once

#include <vector>

#include "problem.h"

namespace tk {

// A tensor map of one launch, encoded for the last few addresses it was used with.
class TensorMapCache {
 public:
  // Dimensions innermost first, as the driver has them. strides: bytes, of all dimensions but the innermost.
  struct Shape {
    uint32_t tensor;
    uint64_t offset;  // bytes, from the tensor's address
    int element_type;
    uint32_t rank;
    uint64_t sizes[5];
    uint64_t strides[4];
    uint32_t box[5];
    int swizzle;
    int l2_promotion;
    int oob_fill;
    bool is_im2col;
    int lower[3];
    int upper[3];
    uint32_t steps[5];
  };

  explicit TensorMapCache(const Shape& shape) : shape_(shape) {}

  cu::TensorMap* get(const Driver& driver, const tk_call& call) {
    const uint64_t address = reinterpret_cast<uintptr_t>(call.tensors[shape_.tensor].data) + shape_.offset;
    for (uint32_t way = 0; way < kWays; way++)
      if (addresses_[way] == address) [[likely]]
        return &maps_[way];
    return encode(driver, address);
  }

 private:
  // Buffers alternate (double buffering, a few layers); more ways than that are as slow to search as to encode.
  static constexpr uint32_t kWays = 4;

  cu::TensorMap* encode(const Driver& driver, uint64_t address);

  Shape shape_;
  static constexpr uint64_t kFree = 1;  // no address that a map can have

  uint64_t addresses_[kWays] = {kFree, kFree, kFree, kFree};
  uint32_t next_ = 0;
  cu::TensorMap maps_[kWays];
};

struct PreparedLaunch {
  const format::Launch* recipe;
  cu::Function function = nullptr;
  cu::LaunchConfig config{};
  std::array<cu::LaunchAttribute, 4> attributes{};
  uint32_t first_parameter = 0;
};

// Not to be used by two threads at once: the parameters are written in place.
struct Prepared {
  enum class Base : uint32_t { Tensor, Scratch, Counters };
  struct AddressPatch {
    uint32_t slot;
    Base base;
    uint32_t tensor;
    uint64_t offset;
  };
  struct FloatPatch {
    uint32_t slot;
    uint32_t index;
    uint32_t width;
  };
  struct MapPatch {
    uint32_t parameter;
    TensorMapCache cache;
  };
  struct CounterMemo {  // of the last stream
    uint64_t stream_id = 0;
    cu::DevicePtr address = 0;
  };

  Prepared() = default;
  Prepared(Prepared&&) = default;  // a copy's parameters would point into the original
  Prepared& operator=(Prepared&&) = default;

  Device* device = nullptr;
  const Pack* pack = nullptr;
  std::vector<PreparedLaunch> launches;  // those that have something to do
  std::vector<uint64_t> slots;           // the values of parameters
  std::vector<void*> parameters;         // of all launches, as the driver wants them
  std::vector<AddressPatch> addresses;
  std::vector<FloatPatch> floats;
  std::vector<MapPatch> maps;
  uint64_t scratch_bytes = 0;
  uint64_t counter_bytes = 0;
  CounterMemo counter_memo;
};

// Works out a variant whose constraints hold. Returns nullptr, or what it would need: "this variant needs …".
// Writes the variant's locals into the problem.
const char* prepare(Problem& problem, const format::Variant& variant, Prepared& prepared);

// Finds the kernels of what was prepared; our context must be current. Throws as Device::function.
void resolve(Prepared& prepared, bool capturing);

// The bits of a floating-point parameter, rounded to nearest even. width: 2 fp16, 3 bf16, 4 fp32, 8 fp64.
uint64_t float_bits(double value, uint32_t width);

}  // namespace tk
