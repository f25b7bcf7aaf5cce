#include <algorithm>
#include <bit>
#include <cmath>

#include "prepared.h"

namespace tk {
namespace {

using format::ArgKind;

// Each completes "this variant needs …".
constexpr char kWithin64Bits[] = "sizes whose products stay within 64 bits";
constexpr char kFittingArguments[] = "integer arguments that fit the types of its parameters";
constexpr char kFittingGrid[] = "a grid within CUDA's limits: x below 2**31, y and z below 65536";
constexpr char kFittingScratch[] = "less than 2**46 bytes of scratch memory";
constexpr char kMappable[] =
    "tensors that a tensor map can describe: present, on 16 bytes, the last stride 1, the other strides multiples of "
    "16 bytes below 2**40, sizes from 1 to 2**32";

constexpr uint64_t kMaxScratch = uint64_t{1} << 46;
constexpr int64_t kGridLimits[] = {INT32_MAX, 65535, 65535};

class Preparer {
 public:
  Preparer(Problem& problem, const format::Variant& variant, Prepared& out)
      : problem_(problem), pack_(problem.pack), variant_(variant), out_(out) {}

  const char* run() {
    out_ = Prepared{};
    out_.device = &problem_.device;
    out_.pack = &pack_;
    if (!problem_.evaluate_locals(variant_.locals, problem_.op.locals.count)) return kWithin64Bits;
    if (const char* why = buffers()) return why;
    for (const format::Launch& launch : pack_.rows<format::Launch>(variant_.launches))
      if (const char* why = add(launch)) return why;
    link();
    return nullptr;
  }

 private:
  bool value(format::Expr expr, int64_t& result) const { return evaluate(pack_.code(expr), problem_.scope(), result); }

  // --- Memory ---

  // Sets `offset` to where `bytes` lie in an area that grows by them.
  static const char* reserve(uint64_t& area, int64_t bytes, uint64_t alignment, uint64_t& offset) {
    if (bytes < 0 || static_cast<uint64_t>(bytes) > kMaxScratch) return kFittingScratch;
    offset = (area + alignment - 1) / alignment * alignment;
    area = offset + static_cast<uint64_t>(bytes);
    return area > kMaxScratch ? kFittingScratch : nullptr;
  }

  const char* buffers() {
    for (const format::Buffer& buffer : pack_.rows<format::Buffer>(variant_.buffers)) {
      const bool counters = buffer.kind == format::BufferKind::Counters;
      int64_t bytes = 0;
      Place place{counters ? Prepared::Base::Counters : Prepared::Base::Scratch, 0};
      if (!value(buffer.bytes, bytes)) return kWithin64Bits;
      uint64_t& area = counters ? out_.counter_bytes : out_.scratch_bytes;
      if (const char* why = reserve(area, bytes, buffer.alignment, place.offset)) return why;
      buffers_.push_back(place);
    }
    return nullptr;
  }

  // --- Launches ---

  const char* add(const format::Launch& launch) {
    int64_t when = 0, dependent = 0;
    if (!value(launch.when, when) || !value(launch.dependent, dependent)) return kWithin64Bits;
    if (!when) return nullptr;
    PreparedLaunch prepared{.recipe = &launch};
    bool empty = false;
    if (const char* why = set_grid(launch, prepared.config, empty)) return why;
    if (empty) return nullptr;
    prepared.config.block[0] = launch.threads;
    prepared.config.block[1] = prepared.config.block[2] = 1;
    prepared.config.shared = launch.shared;
    set_attributes(launch, dependent != 0, prepared);
    prepared.first_parameter = static_cast<uint32_t>(out_.parameters.size());
    reserve_parameters(launch.args.count);
    out_.launches.push_back(prepared);
    for (const format::Arg& arg : pack_.rows<format::Arg>(launch.args))
      if (const char* why = add(arg, launch)) return why;
    return nullptr;
  }

  const char* set_grid(const format::Launch& launch, cu::LaunchConfig& config, bool& empty) const {
    for (int d = 0; d < 3; d++) {
      int64_t blocks = 0;
      if (!value(launch.grid[d], blocks)) return kWithin64Bits;
      if (blocks < 0 || blocks > kGridLimits[d]) return kFittingGrid;
      if (d == 0) blocks *= launch.cluster;
      if (blocks > kGridLimits[d]) return kFittingGrid;
      config.grid[d] = static_cast<unsigned>(blocks);
      empty = empty || blocks == 0;
    }
    return nullptr;
  }

  static void set_attributes(const format::Launch& launch, bool dependent, PreparedLaunch& prepared) {
    const auto add = [&](cu::LaunchAttributeId id) -> cu::LaunchAttribute& {
      cu::LaunchAttribute& attribute = prepared.attributes[prepared.config.n_attributes++];
      attribute.id = id;
      return attribute;
    };
    if (dependent) add(cu::LaunchAttributeId::ProgrammaticStreamSerialization).value.flag = 1;
    if (launch.flags & format::kCooperative) add(cu::LaunchAttributeId::Cooperative).value.flag = 1;
    if (launch.cluster > 1) {
      unsigned* const cluster = add(cu::LaunchAttributeId::ClusterDimension).value.cluster;
      cluster[0] = launch.cluster;
      cluster[1] = cluster[2] = 1;
      add(cu::LaunchAttributeId::ClusterSchedulingPolicyPreference).value.flag = cu::kClusterPolicySpread;
    }
  }

  // --- Arguments ---

  // An address known when the call is: relative to scratch or counters.
  struct Place {
    Prepared::Base base;
    uint64_t offset;
  };

  void reserve_parameters(uint32_t count) {
    out_.slots.reserve(out_.slots.size() + count);
    out_.parameters.reserve(out_.parameters.size() + count);
    parameter_slots_.reserve(parameter_slots_.size() + count);
  }

  uint32_t add_slot(uint64_t bits = 0) {
    out_.slots.push_back(bits);
    out_.parameters.push_back(nullptr);  // linked at the end
    parameter_slots_.push_back(static_cast<uint32_t>(out_.slots.size() - 1));
    return parameter_slots_.back();
  }

  const char* add(const format::Arg& arg, const format::Launch& launch) {
    int64_t number = 0;
    if (!value(arg.value, number)) return kWithin64Bits;
    const auto offset = static_cast<uint64_t>(number);
    switch (arg.kind) {
      case ArgKind::Pointer:
        if (problem_.call.tensors[arg.index].ndim < 0) {
          add_slot();
        } else {
          out_.addresses.push_back({add_slot(), Prepared::Base::Tensor, arg.index, offset});
        }
        return nullptr;
      case ArgKind::Int:
        return add_int(number, arg.width);
      case ArgKind::Float:
        out_.floats.push_back({add_slot(), arg.index, arg.width});
        return nullptr;
      case ArgKind::TensorMap:
        return add_map(pack_.row<format::TensorMap>(arg.index));
      case ArgKind::Buffer:
        add_place({buffers_[arg.index].base, buffers_[arg.index].offset + offset});
        return nullptr;
      case ArgKind::GlobalScratch:
        return add_block_scratch(launch.global_scratch, launch.global_scratch_alignment);
      case ArgKind::ProfileScratch:
        return add_block_scratch(launch.profile_scratch, launch.profile_scratch_alignment);
      case ArgKind::Null:
        add_slot();
        return nullptr;
    }
    return nullptr;
  }

  void add_place(const Place& place) { out_.addresses.push_back({add_slot(), place.base, 0, place.offset}); }

  const char* add_int(int64_t number, uint32_t width) {
    const uint32_t unused = 64 - 8 * width;
    const auto bits = static_cast<uint64_t>(number);
    if (static_cast<int64_t>(bits << unused) >> unused != number) return kFittingArguments;
    add_slot(bits);
    return nullptr;
  }

  // Memory of each block of a launch.
  const char* add_block_scratch(uint32_t bytes, uint32_t alignment) {
    if (bytes == 0) {
      add_slot();
      return nullptr;
    }
    uint64_t total = bytes;
    for (const unsigned blocks : out_.launches.back().config.grid)
      if (__builtin_mul_overflow(total, uint64_t{blocks}, &total)) return kFittingScratch;
    if (total > kMaxScratch) return kFittingScratch;
    Place place{Prepared::Base::Scratch, 0};
    if (const char* why = reserve(out_.scratch_bytes, static_cast<int64_t>(total), alignment, place.offset)) return why;
    add_place(place);
    return nullptr;
  }

  const char* add_map(const format::TensorMap& map) {
    const tk_tensor& tensor = problem_.call.tensors[map.tensor];
    int64_t offset = 0;
    if (!value(map.offset, offset)) return kWithin64Bits;
    if (tensor.ndim < 0 || alignment_of(tensor) < 16 || offset % 16 != 0) return kMappable;
    TensorMapCache::Shape shape{.tensor = map.tensor,
                                .offset = static_cast<uint64_t>(offset),
                                .element_type = static_cast<int>(map.element_type),
                                .rank = map.rank,
                                .sizes = {},
                                .strides = {},
                                .box = {},
                                .swizzle = static_cast<int>(map.swizzle),
                                .l2_promotion = static_cast<int>(map.l2_promotion),
                                .oob_fill = static_cast<int>(map.oob_fill),
                                .is_im2col = map.is_im2col != 0,
                                .lower = {},
                                .upper = {},
                                .steps = {1, 1, 1, 1, 1}};
    for (uint32_t d = 0; d < map.rank; d++)
      if (const char* why = set_dimension(map, map.rank - 1 - d, d, shape)) return why;
    for (uint32_t d = 0; shape.is_im2col && d < map.rank - 2; d++)
      if (const char* why = set_corners(map, map.rank - 3 - d, d, shape)) return why;
    out_.maps.push_back({static_cast<uint32_t>(out_.parameters.size()), TensorMapCache(shape)});
    out_.parameters.push_back(nullptr);
    parameter_slots_.push_back(kNoSlot);
    return nullptr;
  }

  // Dimension `from` of the recipe is `to` of the driver.
  const char* set_dimension(const format::TensorMap& map, uint32_t from, uint32_t to,
                            TensorMapCache::Shape& shape) const {
    int64_t size = 0;
    int64_t stride = 0;
    if (!value(map.sizes[from], size) || !value(map.strides[from], stride)) return kWithin64Bits;
    if (size < 1 || size > int64_t{1} << 32) return kMappable;
    shape.sizes[to] = static_cast<uint64_t>(size);
    shape.box[to] = map.box[map.is_im2col ? to : from];
    if (to == 0) return stride == 1 ? nullptr : kMappable;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(stride, int64_t{map.element_size}, &bytes)) return kWithin64Bits;
    if (bytes < 0 || bytes >= int64_t{1} << 40 || bytes % 16 != 0) return kMappable;
    shape.strides[to - 1] = static_cast<uint64_t>(bytes);
    return nullptr;
  }

  // Of spatial dimension `from` of the recipe, which is `to` of the driver. The more dimensions, the nearer the
  // corners.
  const char* set_corners(const format::TensorMap& map, uint32_t from, uint32_t to,
                          TensorMapCache::Shape& shape) const {
    int64_t lower = 0;
    int64_t upper = 0;
    int64_t step = 0;
    if (!value(map.lower[from], lower) || !value(map.upper[from], upper) || !value(map.steps[from], step))
      return kWithin64Bits;
    const int64_t reach = int64_t{1} << (map.rank == 3 ? 15 : map.rank == 4 ? 7 : 4);
    const bool in_reach = std::min(lower, upper) >= -reach && std::max(lower, upper) < reach;
    if (!in_reach || step < 1 || step > 8) return kMappable;
    shape.lower[to] = static_cast<int>(lower);
    shape.upper[to] = static_cast<int>(upper);
    shape.steps[to + 1] = static_cast<uint32_t>(step);
    return nullptr;
  }

  // Pointers into vectors that no longer grow.
  void link() {
    for (size_t i = 0; i < parameter_slots_.size(); i++)
      if (parameter_slots_[i] != kNoSlot) out_.parameters[i] = &out_.slots[parameter_slots_[i]];
    for (PreparedLaunch& launch : out_.launches) launch.config.attributes = launch.attributes.data();
  }

  static constexpr uint32_t kNoSlot = UINT32_MAX;

  Problem& problem_;
  const Pack& pack_;
  const format::Variant& variant_;
  Prepared& out_;
  std::vector<Place> buffers_;
  std::vector<uint32_t> parameter_slots_;
};

}  // namespace

const char* prepare(Problem& problem, const format::Variant& variant, Prepared& prepared) {
  return Preparer(problem, variant, prepared).run();
}

void resolve(Prepared& prepared, bool capturing) {
  for (PreparedLaunch& launch : prepared.launches)
    launch.function = prepared.device->function(*prepared.pack, *launch.recipe, capturing);
}

// --- Tensor maps ---

cu::TensorMap* TensorMapCache::encode(const Driver& driver, uint64_t address) {
  if (!driver.cuTensorMapEncodeTiled || !driver.cuTensorMapEncodeIm2col)
    fail(TK_UNSUPPORTED, "this kernel uses tensor maps, for which the NVIDIA driver must be for CUDA 12.0 or newer");
  if (!address) fail(TK_INVALID_ARGUMENT, "tensor ", shape_.tensor, " has elements but no address");
  const uint32_t way = next_;
  constexpr int kNoInterleave = 0;
  void* const data = reinterpret_cast<void*>(address);
  addresses_[way] = kFree;  // if the driver refuses, nothing is there
  if (shape_.is_im2col)
    check(driver,
          driver.cuTensorMapEncodeIm2col(&maps_[way], shape_.element_type, shape_.rank, data, shape_.sizes,
                                         shape_.strides, shape_.lower, shape_.upper, shape_.box[1], shape_.box[0],
                                         shape_.steps, kNoInterleave, shape_.swizzle, shape_.l2_promotion,
                                         shape_.oob_fill),
          "cuTensorMapEncodeIm2col");
  else
    check(driver,
          driver.cuTensorMapEncodeTiled(&maps_[way], shape_.element_type, shape_.rank, data, shape_.sizes,
                                        shape_.strides, shape_.box, shape_.steps, kNoInterleave, shape_.swizzle,
                                        shape_.l2_promotion, shape_.oob_fill),
          "cuTensorMapEncodeTiled");
  addresses_[way] = address;
  next_ = (way + 1) % kWays;
  return &maps_[way];
}

// --- Floats ---

namespace {

// IEEE formats narrower than double, without going through float: rounding twice is not rounding once.
uint64_t narrow(double value, int exponent_bits, int mantissa_bits) {
  const uint64_t sign = std::signbit(value) ? uint64_t{1} << (exponent_bits + mantissa_bits) : 0;
  const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) return sign | infinity | uint64_t{1} << (mantissa_bits - 1);
  if (std::isinf(value)) return sign | infinity;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = value == 0 ? 1 - bias : std::max(std::ilogb(value), 1 - bias);
  // In units of the last place; nearbyint rounds half to even. A carry moves into the exponent by itself.
  const double units = std::nearbyint(std::scalbn(std::fabs(value), mantissa_bits - exponent));
  const uint64_t bits = static_cast<uint64_t>(exponent + bias - 1) << mantissa_bits;
  return sign | std::min(bits + static_cast<uint64_t>(units), infinity);
}

}  // namespace

uint64_t float_bits(double value, uint32_t width) {
  switch (width) {
    case 2:
      return narrow(value, 5, 10);
    case 3:
      return narrow(value, 8, 7);
    case 4:
      return std::bit_cast<uint32_t>(static_cast<float>(value));
    default:
      return std::bit_cast<uint64_t>(value);
  }
}

}  // namespace tk
