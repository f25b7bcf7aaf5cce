// The one place where a pack is distrusted. What passes here is used without further checks of indices and ranges.
//
// Records may be shared (a list of arguments by many launches, a launch by many variants). So each is looked at once,
// on its own; what it reads of a problem is summed up in Needs, and held against the op it is used in.

#include <algorithm>
#include <bit>
#include <optional>
#include <set>

#include "interface.h"

namespace tk {
namespace {

using format::ArgKind;
using format::ParamKind;
using format::Range;
using format::Section;

constexpr size_t kRecordSizes[] = {1,
                                   sizeof(int64_t),
                                   sizeof(format::Op),
                                   sizeof(format::Expr),
                                   sizeof(format::Config),
                                   sizeof(format::Bucket),
                                   sizeof(uint32_t),
                                   sizeof(format::Variant),
                                   sizeof(format::Constraint),
                                   sizeof(format::Buffer),
                                   sizeof(format::Launch),
                                   sizeof(format::Arg),
                                   sizeof(format::TensorMap),
                                   sizeof(format::Image),
                                   sizeof(format::Output),
                                   sizeof(format::Pin),
                                   sizeof(format::Param),
                                   sizeof(format::Frame)};
static_assert(std::size(kRecordSizes) == static_cast<size_t>(Section::Count));

// What the driver guarantees of any allocation, and so the most that a recipe may ask for.
constexpr uint32_t kMaxAlignment = 256;
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxCluster = 16;
constexpr uint32_t kMaxShared = 1u << 20;
// Since CUDA 12.1; 4096 before, which the driver then checks when it loads the kernel.
constexpr uint32_t kMaxParameterBytes = 32764;

bool is_alignment(uint32_t x) { return std::has_single_bit(x) && x <= kMaxAlignment; }

bool is_width(ArgKind kind, uint32_t width) {
  switch (kind) {
    case ArgKind::Int:
      return width == 1 || width == 2 || width == 4 || width == 8;
    case ArgKind::Float:
      return width == 2 || width == 3 || width == 4 || width == 8;
    default:
      return true;
  }
}

}  // namespace

class Pack::Verifier {
 public:
  explicit Verifier(const Pack& pack) : pack_(pack) {}

  void run() {
    verify_sections();
    known_code_.resize(pack_.count<int64_t>(Section::Code));
    known_args_.resize(pack_.count<format::Arg>());
    known_constraints_.resize(pack_.count<format::Constraint>());
    known_launches_.resize(pack_.count<format::Launch>());
    budget_ = 4 * pack_.header().index_size + 65536;
    require_string(pack_.header().compiler);
    for (const auto& frame : pack_.all<format::Frame>()) verify_frame(frame);
    for (const auto& image : pack_.all<format::Image>()) verify_image(image);
    for (const auto& op : pack_.all<format::Op>()) verify_op(op);
  }

 private:
  // A record that was verified: the length of the list that begins with it, and what the list reads.
  struct Known {
    uint32_t count = 0;
    Needs needs;
  };

  template <class... Parts>
  void require(bool holds, const Parts&... parts) const {
    if (!holds) [[unlikely]]
      pack_.damaged("the index is damaged: ", parts...);
  }

  // Bounds the work that lists used over and over can make. A list's records take at least 4 bytes each, and packs that
  // are built use far fewer lists twice than this allows.
  void spend(uint64_t steps) {
    require(steps <= budget_, "its lists refer to each other without end");
    budget_ -= steps;
  }

  // --- The frame ---

  void verify_sections() const {
    const format::Header& header = pack_.header();
    require(header.n_sections == static_cast<uint32_t>(Section::Count), header.n_sections, " sections");
    require(header.flags == 0 || header.flags == format::kPtx || header.flags == format::kFamily, "unknown flags");
    for (uint32_t s = 0; s < header.n_sections; s++) {
      const auto& [offset, size] = header.sections[s];
      require(offset >= pack_.pages_offset_ && offset <= header.index_size && size <= header.index_size - offset &&
                  offset % alignof(uint64_t) == 0 && size % kRecordSizes[s] == 0 && size / kRecordSizes[s] < UINT32_MAX,
              "section ", s, " lies wrong");
    }
    pack_.need(pack_.pages_offset_, header.index_size - pack_.pages_offset_);
    const auto strings = pack_.rows<char>(Section::Strings, {0, pack_.count<char>(Section::Strings)});
    require(!strings.empty() && strings.front() == 0 && strings.back() == 0, "the strings do not end");
  }

  // --- Leaves ---

  void require_string(uint32_t offset) const {
    require(offset < pack_.count<char>(Section::Strings), "no string ", offset);
  }

  void require_range(Range range, size_t size, const char* what) {
    require(range.first <= size && range.count <= size - range.first, "no ", what, " ", range.first, " + ",
            range.count);
    spend(range.count);
  }

  template <class T>
  std::span<const T> rows(Range range, const char* what) {
    require_range(range, pack_.count<T>(), what);
    return pack_.rows<T>(range);
  }

  // Verifies a list once. `look` sums up what it reads.
  template <class Look>
  const Needs& once(std::vector<Known>& known, Range range, const char* what, const Look& look) {
    static constexpr Needs kNothing;
    if (range.count == 0) return kNothing;
    require(range.first < known.size(), "no ", what, " ", range.first);
    Known& entry = known[range.first];
    if (entry.count == range.count) return entry.needs;
    require_range(range, known.size(), what);
    entry.needs = look();  // throws before the entry counts as verified
    entry.count = range.count;
    return entry.needs;
  }

  const Needs& verify_code(format::Expr expr) {
    return once(known_code_, expr, "code", [&] {
      const auto needs = tk::verify(pack_.code(expr));
      require(needs.has_value(), "words ", expr.first, " + ", expr.count, " are no expression");
      return *needs;
    });
  }

  template <class Exprs>
  Needs verify_codes(const Exprs& exprs) {
    Needs needs;
    for (const format::Expr& expr : exprs) needs.merge(verify_code(expr));
    return needs;
  }

  // Each local may read those before it, `before` of them not of this list.
  void verify_locals(Range range, Needs available) {
    require_range(range, pack_.count<format::Expr>(Section::Locals), "locals");
    require(available.locals + range.count <= kMaxLocals, "more than ", kMaxLocals, " locals");
    for (const format::Expr& expr : pack_.locals(range)) {
      require(verify_code(expr).within(available), "a local reads what is not there");
      available.locals++;
    }
  }

  void verify_frame(const format::Frame& frame) const {
    const uint64_t file_size = pack_.file_size();
    require(frame.offset >= pack_.header().index_size && frame.offset <= file_size &&
                frame.compressed_size <= file_size - frame.offset,
            "a frame lies outside the file");
    require(frame.size > 0 && frame.size <= format::kMaxFrameSize, "a frame of ", frame.size, " bytes");
  }

  void verify_image(const format::Image& image) const {
    require_string(image.name);
    require((image.kind == format::ImageKind::Ptx) == pack_.target().is_ptx() && image.kind <= format::ImageKind::Ptx,
            "an image of another kind than the pack");
    require(image.frame < pack_.count<format::Frame>(), "no frame ", image.frame);
    const uint64_t frame_size = pack_.row<format::Frame>(image.frame).size;
    require(image.size > 0 && image.begin <= frame_size && image.size <= frame_size - image.begin,
            "an image lies outside its frame");
  }

  // --- Launches ---

  static constexpr uint32_t kMostPixels = 1024;  // of a column of an im2col map

  Needs verify_map(const format::TensorMap& map) {
    require(map.tensor < TK_MAX_TENSORS && map.rank >= 1 && map.rank <= 5, "a tensor map of tensor ", map.tensor,
            ", rank ", map.rank);
    require(map.element_type <= 15 && map.element_size <= 8 && std::has_single_bit(map.element_size) &&
                map.swizzle <= 6 && map.l2_promotion <= 3 && map.oob_fill <= 1,
            "a tensor map with unknown fields");
    require(map.is_im2col <= 1 && map.reserved == 0 && (!map.is_im2col || map.rank >= 3),
            "a tensor map with unknown fields");
    Needs needs = verify_code(map.offset);
    needs.tensors = std::max(needs.tensors, map.tensor + 1);
    for (uint32_t d = 0; d < map.rank; d++) {
      needs.merge(verify_code(map.sizes[d]));
      needs.merge(verify_code(map.strides[d]));
    }
    for (uint32_t d = 0; d < (map.is_im2col ? 2 : map.rank); d++) {
      const uint32_t most = map.is_im2col && d == 0 ? kMostPixels : 256;
      require(map.box[d] >= 1 && map.box[d] <= most, "a tensor map with a box of ", map.box[d]);
    }
    for (uint32_t d = 0; map.is_im2col && d < map.rank - 2; d++)
      for (const format::Expr& code : {map.lower[d], map.upper[d], map.steps[d]}) needs.merge(verify_code(code));
    return needs;
  }

  // What an argument's index counts.
  Needs verify_index(const format::Arg& arg) {
    Needs needs;
    const uint32_t count = arg.index + 1;
    switch (arg.kind) {
      case ArgKind::Pointer:
        needs.tensors = count;
        break;
      case ArgKind::Float:
        needs.floats = count;
        break;
      case ArgKind::Buffer:
        needs.buffers = count;
        break;
      case ArgKind::TensorMap:
        require(arg.index < pack_.count<format::TensorMap>(), "no tensor map ", arg.index);
        spend(20);
        return verify_map(pack_.row<format::TensorMap>(arg.index));
      default:
        break;
    }
    require(arg.index < UINT32_MAX, "an argument of nothing");
    return needs;
  }

  Needs verify_args(Range range) {
    return once(known_args_, range, "arguments", [&] {
      Needs needs;
      uint32_t bytes = 0;
      for (const format::Arg& arg : pack_.rows<format::Arg>(range)) {
        require(arg.kind <= ArgKind::Null && is_width(arg.kind, arg.width), "an unknown kind of argument");
        needs.merge(verify_index(arg));
        needs.merge(verify_code(arg.value));
        bytes += arg.kind == ArgKind::TensorMap ? sizeof(uint64_t[16]) : 1;
        require(bytes <= kMaxParameterBytes, "more arguments than a kernel can have");
      }
      return needs;
    });
  }

  Needs verify_launch(uint32_t index) {
    return once(known_launches_, {index, 1}, "launch", [&] {
      const format::Launch& launch = pack_.row<format::Launch>(index);
      require(launch.image < pack_.count<format::Image>(), "no image ", launch.image);
      require_string(launch.entry);
      require(launch.threads >= 1 && launch.threads <= kMaxThreads && launch.shared <= kMaxShared &&
                  launch.cluster >= 1 && launch.cluster <= kMaxCluster && (launch.flags & ~format::kCooperative) == 0,
              "a launch that no GPU can do");
      require(launch.global_scratch == 0 || is_alignment(launch.global_scratch_alignment), "a scratch alignment");
      require(launch.profile_scratch == 0 || is_alignment(launch.profile_scratch_alignment), "a scratch alignment");
      Needs needs = verify_codes(launch.grid);
      needs.merge(verify_code(launch.when));
      needs.merge(verify_code(launch.dependent));
      needs.merge(verify_args(launch.args));
      return needs;
    });
  }

  // --- Variants and ops ---

  Needs verify_constraints(Range range) {
    return once(known_constraints_, range, "constraints", [&] {
      Needs needs;
      for (const format::Constraint& constraint : pack_.rows<format::Constraint>(range)) {
        require_string(constraint.message);
        needs.merge(verify_code(constraint.holds));
      }
      return needs;
    });
  }

  void verify_variant(const format::Variant& variant, const format::Op& op, Needs available) {
    require_string(variant.kernel);
    require(variant.config < op.configs.count, "a variant with config ", variant.config, " of ", op.configs.count);
    require((variant.flags & ~(format::kGeneral | format::kNonDeterministic)) == 0, "a variant with unknown flags");
    require(verify_constraints(variant.constraints).within(available), "a constraint reads what is not there");
    verify_locals(variant.locals, available);
    available.locals += variant.locals.count;
    Needs needs = verify_code(variant.cost);
    for (const format::Buffer& buffer : rows<format::Buffer>(variant.buffers, "buffers")) {
      require(buffer.kind <= format::BufferKind::Counters && is_alignment(buffer.alignment), "an unknown buffer");
      needs.merge(verify_code(buffer.bytes));
    }
    rows<format::Launch>(variant.launches, "launches");
    for (uint32_t i = 0; i < variant.launches.count; i++) needs.merge(verify_launch(variant.launches.first + i));
    available.buffers = variant.buffers.count;
    require(needs.within(available), "a variant reads what its op does not have");
  }

  void verify_configs(const format::Op& op) {
    uint32_t number = 0;
    for (const format::Config& config : rows<format::Config>(op.configs, "configs")) {
      require(config.number == number++, "the configs are not numbered from 0");
      require_string(config.name);
      require_string(config.params);
    }
  }

  void verify_buckets(const format::Op& op) {
    const format::Bucket* previous = nullptr;
    for (const format::Bucket& bucket : rows<format::Bucket>(op.buckets, "buckets")) {
      require(!previous || previous->key < bucket.key, "the buckets are not sorted");
      previous = &bucket;
      require_range(bucket.candidates, pack_.count<uint32_t>(Section::Candidates), "candidates");
      for (const uint32_t variant : pack_.candidates(bucket))
        require(variant >= op.variants.first && variant - op.variants.first < op.variants.count,
                "a candidate of another op");
    }
  }

  void verify_pins(const format::Op& op) {
    const format::Pin* previous = nullptr;
    for (const format::Pin& pin : rows<format::Pin>(op.pins, "pins")) {
      require(!previous || PinOrder{}(*previous, pin), "the pins are not sorted");
      require(pin.config < op.configs.count, "a pin to no config");
      previous = &pin;
    }
  }

  void verify_outputs(const format::Op& op, const Needs& available) {
    for (const format::Output& output : rows<format::Output>(op.outputs, "outputs")) {
      require(output.ndim <= TK_MAX_DIMS, "an output of ", output.ndim, " dimensions");
      Needs needs = verify_code(output.dtype);
      needs.merge(verify_codes(output.sizes));
      needs.merge(verify_codes(output.strides));
      require(needs.within(available), "an output reads what is not there");
    }
    require(op.outputs.count <= op.n_tensors, "more outputs than tensors");
  }

  // --- The interface of a generated op: what the ops library takes a call's arguments by ---

  void verify_param(const format::Param& param) {
    require_string(param.name);
    require_string(param.default_value);
    const char* const name = pack_.string(param.name);
    require(is_identifier(name) && !is_reserved_argument(name), "\"", name, "\" is no name of an argument");
    require(is_default(param.kind, pack_.string(param.default_value)), "argument ", name, " has no such default");
    require(param.kind <= ParamKind::OptionalTensor, "argument ", name, " is of a kind that this tk does not know");
    const bool is_tensor = is_tensor_kind(param.kind);
    const bool has_flags = is_tensor && param.kind != ParamKind::OptionalTensor;
    require((param.flags & ~(has_flags ? format::kLeading | format::kMutated | format::kInOrder : 0u)) == 0,
            "argument ", name, " with unknown flags");
    require(!(param.flags & format::kInOrder) || (param.flags & format::kLeading), "argument ", name,
            " with an order of dimensions that it lacks");
    require(param.rank <= (is_tensor ? max_rank(param.flags & format::kLeading) : 0u), "argument ", name, " with ",
            param.rank, " dimensions");
    require(param.kind != ParamKind::Tensors || param.rank == 0, "list ", name, " of tensors with declared dimensions");
  }

  static bool is_tensor_kind(ParamKind kind) {
    return kind == ParamKind::Tensor || kind == ParamKind::Tensors || kind == ParamKind::OptionalTensor;
  }

  static uint32_t max_rank(bool leading) { return leading ? TK_MAX_DIMS - format::kLeadingDims : TK_MAX_DIMS; }

  void verify_interface(const format::Op& op) {
    if (*pack_.string(op.schema) == 0) return require(op.params.count == 0, "arguments without a schema");
    require(is_identifier(pack_.string(op.name)) && *pack_.string(op.name) != '_',
            "an op's name that no schema can have");
    std::vector<const format::Param*> tensors;
    std::set<std::string_view> names;
    uint32_t n_ints = 0, n_floats = 0, n_mutated = 0, n_lists = 0, n_optional = 0;
    for (const format::Param& param : rows<format::Param>(op.params, "params")) {
      verify_param(param);
      require(names.insert(pack_.string(param.name)).second, "two arguments of one name");
      if (is_tensor_kind(param.kind)) tensors.push_back(&param);
      n_optional += param.kind == ParamKind::OptionalTensor;
      n_lists += param.kind == ParamKind::Tensors;
      n_ints += param.kind == ParamKind::Int || param.kind == ParamKind::Bool;
      n_floats += param.kind == ParamKind::Float;
      n_mutated += (param.flags & format::kMutated) != 0;
    }
    require(tensors.size() > n_optional, "a generated op without a tensor that is always there");
    require(n_lists == 0 || n_optional == 0, "lists of tensors beside a tensor that may be absent");
    const auto is_shared = [](const format::Param* tensor) {
      return tensor->kind == ParamKind::Tensors || (tensor->flags == 0 && tensor->rank == 0);
    };
    require(n_lists == 0 || (std::ranges::all_of(tensors, is_shared) && !*pack_.string(op.backward)),
            "lists of tensors beside tensors with dimensions");
    require(op.n_saved <= op.outputs.count && (op.n_saved == 0 || *pack_.string(op.backward)),
            "outputs that are saved for nothing");
    require(n_mutated <= kMaxMutated, "more than ", kMaxMutated, " arguments written in place");
    require(tensors.size() + op.outputs.count == op.n_tensors && n_ints == op.n_ints && n_floats == op.n_floats,
            "its arguments are not those of its schema");
    for (const format::Output& output : pack_.rows<format::Output>(op.outputs)) {
      require(output.ndim <= max_rank(output.leading), "an output of ", output.ndim, " dimensions");
      require(output.leading <= tensors.size(), "an output that follows no tensor");
      require(output.leading == 0 || (n_lists != 0 ? tensors[output.leading - 1]->kind == ParamKind::Tensors
                                                   : (tensors[output.leading - 1]->flags & format::kLeading) != 0),
              "an output that follows a tensor without leading dimensions");
      require(n_lists == 0 || output.ndim <= (output.leading != 0), "an output of lists with dimensions of its own");
    }
    require(schema_of(pack_, op) == pack_.string(op.schema), "a schema that is not that of its arguments");
  }

  void verify_op(const format::Op& op) {
    require_string(op.name);
    require_string(op.schema);
    require(*pack_.string(op.name) != 0 && names_.insert(pack_.string(op.name)).second, "two ops of one name");
    require(op.n_tensors <= TK_MAX_TENSORS && op.n_ints <= TK_MAX_INTS && op.n_floats <= TK_MAX_FLOATS &&
                op.n_dims <= std::size(op.dims),
            "an op with too many arguments");
    Needs available{.tensors = op.n_tensors, .ints = op.n_ints, .floats = op.n_floats};
    verify_locals(op.locals, available);
    available.locals = op.locals.count;
    for (uint32_t i = 0; i < op.n_dims; i++) require(op.dims[i] < op.locals.count, "a size that is no local");
    require(verify_code(op.key).within(available), "a key that reads what is not there");
    require(verify_constraints(op.checks).within(available), "a check reads what is not there");
    require_string(op.meta);
    require_string(op.backward);
    verify_configs(op);
    verify_outputs(op, available);
    verify_interface(op);
    for (const auto& variant : rows<format::Variant>(op.variants, "variants")) verify_variant(variant, op, available);
    verify_buckets(op);
    verify_pins(op);
  }

  const Pack& pack_;
  uint64_t budget_ = 0;
  std::vector<Known> known_code_;
  std::vector<Known> known_args_;
  std::vector<Known> known_constraints_;
  std::vector<Known> known_launches_;
  std::set<std::string_view> names_;
};

void Pack::verify() { Verifier(*this).run(); }

}  // namespace tk
