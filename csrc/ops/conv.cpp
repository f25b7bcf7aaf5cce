// conv1d, conv2d and conv3d and their gradients: check, make views of the arguments, allocate, launch.
//
// The gradient of the input is a convolution of the result's gradient, with input and output channels exchanged and the
// taps walked backwards; with a stride, one for each remainder that a pixel's place leaves. So it needs no kernel of
// its own (docs/conv.md).

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "conv_reference.h"
#include "image.h"
#include "launch.h"
#include "matrix.h"
#include "names.h"
#include "product.h"
#include "registration.h"
#include "runtime.h"

namespace tk::ops {
namespace {

// What the caller says of a convolution, in as many numbers as the caller gave.
struct Lists {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  int64_t groups = 1;
};

struct Convolution {
  const char* op;   // "tk.conv2d", for messages
  int64_t spatial;  // dimensions
  Geometry geometry;
  Settings settings;
};

// --- Checks: in ATen's words where it has some ---

// One number for each dimension, the last ones of the three.
Spatial expand(const char* op, const char* what, std::span<const int64_t> list, int64_t spatial, int64_t missing) {
  const auto count = static_cast<int64_t>(list.size());
  if (count != 1 && count != spatial) [[unlikely]]
    fail_argument(text(op, ": expected ", what, " to be a single integer value or a list of ", spatial,
                       " values to match the convolution dimensions, but got ", what, "=", describe_sizes(list)));
  Spatial result = {missing, missing, missing};
  for (int64_t d = 0; d < spatial; d++)
    result[static_cast<size_t>(3 - spatial + d)] = list[count == 1 ? 0 : static_cast<size_t>(d)];
  return result;
}

void check_all(const char* op, const Spatial& values, int64_t least, const char* otherwise) {
  if (std::any_of(values.begin(), values.end(), [&](int64_t v) { return v < least; })) [[unlikely]]
    fail_argument(text(op, ": ", otherwise));
}

Geometry read_geometry(const char* op, const Lists& lists, int64_t spatial) {
  Geometry g;
  g.stride = expand(op, "stride", lists.stride, spatial, 1);
  g.dilation = expand(op, "dilation", lists.dilation, spatial, 1);
  // Twice as many numbers as dimensions: in front, then behind.
  const std::span<const int64_t> padding = lists.padding;
  const bool both = spatial > 0 && static_cast<int64_t>(padding.size()) == 2 * spatial;
  const size_t half = static_cast<size_t>(spatial);
  g.padding = expand(op, "padding", both ? padding.first(half) : padding, spatial, 0);
  g.padding_high = both ? expand(op, "padding", padding.last(half), spatial, 0) : g.padding;
  g.groups = lists.groups;
  check_all(op, g.stride, 1, "non-positive stride is not supported");
  check_all(op, g.padding, 0, "negative padding is not supported");
  check_all(op, g.padding_high, 0, "negative padding is not supported");
  check_all(op, g.dilation, 1, "dilation should be greater than zero");
  if (g.groups <= 0) fail_argument(text(op, ": non-positive groups is not supported"));
  return g;
}

void check_dtype(const char* op, const Meta& input) {
  const bool half = input.dtype == kBFloat16 || input.dtype == kFloat16;
  if (half || input.dtype == kFloat32 || (input.dtype == kFloat64 && !input.device.is_cuda())) return;
  fail_unsupported(text(op, ": input is ", dtype_name(input.dtype),
                        "; bfloat16, float16 and float32 are supported, and float64 on the CPU"));
}

void check_ranks(const Convolution& c, const Meta& input, const Meta& weight) {
  const int64_t n = c.spatial;
  if (weight.dim() != n + 2) [[unlikely]]
    fail_argument(
        text(c.op, ": expected ", n + 2, "-dimensional weight, but got weight of size ", describe_sizes(weight.sizes)));
  if (input.dim() != n + 1 && input.dim() != n + 2) [[unlikely]]
    fail_argument(text(c.op, ": Expected ", n + 1, "D (unbatched) or ", n + 2, "D (batched) input to conv", n,
                       "d, but got input of size: ", describe_sizes(input.sizes)));
}

void check_channels(const Convolution& c, const Meta& input, const Meta& weight) {
  const int64_t groups = c.geometry.groups;
  const std::string given = text(c.op, ": Given groups=", groups, ", ");
  const int64_t channels = input.sizes[static_cast<size_t>(input.dim() - c.spatial - 1)];
  if (weight.sizes[0] < groups && weight.sizes[0] != 0) [[unlikely]]
    fail_argument(text(given, "expected weight to be at least ", groups, " at dimension 0, but got weight of size ",
                       describe_sizes(weight.sizes), " instead"));
  if (weight.sizes[0] % groups != 0) [[unlikely]]
    fail_argument(text(given, "expected weight to be divisible by ", groups, " at dimension 0, but got weight of size ",
                       describe_sizes(weight.sizes), " instead"));
  if (channels != weight.sizes[1] * groups) [[unlikely]]
    fail_argument(text(given, "weight of size ", describe_sizes(weight.sizes), ", expected input",
                       describe_sizes(input.sizes), " to have ", weight.sizes[1] * groups, " channels, but got ",
                       channels, " channels instead"));
}

void check_bias(const Convolution& c, const Meta& input, const Meta& weight, const Meta& bias) {
  if (!bias) return;
  check_same(c.op, "input", input, "bias", bias);
  if (bias.dim() != 1 || bias.sizes[0] != weight.sizes[0]) [[unlikely]]
    fail_argument(text(c.op, ": Given weight of size ", describe_sizes(weight.sizes),
                       ", expected bias to be 1-dimensional with ", weight.sizes[0], " elements, but got bias of size ",
                       describe_sizes(bias.sizes), " instead"));
}

// "3 x 5", of the dimensions that there are.
std::string by(const Convolution& c, const Spatial& sizes) {
  std::string result;
  for (size_t d = static_cast<size_t>(3 - c.spatial); d < 3; d++)
    result += (result.empty() ? "" : " x ") + std::to_string(sizes[d]);
  return result;
}

Spatial spatial_sizes(const View& view) { return {view.sizes[3], view.sizes[4], view.sizes[5]}; }

// Of the result.
Spatial result_sizes(const Convolution& c, const View& x, const View& weight) {
  const Spatial in = spatial_sizes(x);
  const Spatial kernel = spatial_sizes(weight);
  const Geometry& g = c.geometry;
  Spatial padded;
  Spatial span;
  Spatial out;
  for (size_t d = 0; d < 3; d++) {
    padded[d] = in[d] + g.padding[d] + g.padding_high[d];
    span[d] = g.dilation[d] * (kernel[d] - 1) + 1;
    out[d] = (padded[d] - span[d]) / g.stride[d] + 1;
  }
  check_all(c.op, kernel, 1, text("kernel size should be greater than zero, but got (", by(c, kernel), ")").c_str());
  for (size_t d = 0; d < 3; d++)
    if (padded[d] < span[d]) [[unlikely]]
      fail_argument(text(c.op, ": Calculated padded input size per channel: (", by(c, padded), "). Kernel size: (",
                         by(c, span), "). Kernel size can't be greater than actual input size"));
  return out;
}

// The sizes of a tensor like `like`, with other channels and pixels.
std::vector<int64_t> sizes_like(const Convolution& c, const Meta& like, int64_t channels, const Spatial& pixels) {
  std::vector<int64_t> sizes;
  if (like.dim() == c.spatial + 2) sizes.push_back(like.sizes[0]);
  sizes.push_back(channels);
  sizes.insert(sizes.end(), pixels.end() - c.spatial, pixels.end());
  return sizes;
}

// --- Launch ---

// One convolution of the core. Padding and dilation may be negative.
struct Problem {
  View x;
  View weight;
  View bias;  // without a handle: absent
  View out;
  Spatial stride;
  Spatial padding;
  Spatial dilation;
};

int64_t precision_of(const Settings& s, int32_t dtype) {
  if (dtype != kFloat32) return 0;
  return s.precision >= 0 ? s.precision : allows_tf32_in_convolutions();
}

void launch_op(tk_op op, std::span<const tk_tensor> tensors, std::span<const int64_t> ints,
               std::span<const double> floats, const Settings& s, Device device) {
  tk_call call;
  call.op = op;
  call.mode = static_cast<uint32_t>(s.mode) | (wants_deterministic() ? TK_MODE_DETERMINISTIC : 0);
  call.config = static_cast<int32_t>(s.config);
  call.device = target(device);
  call.n_tensors = static_cast<uint32_t>(tensors.size());
  call.n_ints = static_cast<uint32_t>(ints.size());
  call.n_floats = static_cast<uint32_t>(floats.size());
  call.tensors = tensors.data();
  call.ints = ints.data();
  call.floats = floats.data();
  launch(call, device);
}

// Whether kernels that load 16 bytes of channels at a time could serve. Depthwise ones take any layout.
bool has_wide_channels(const View& x) {
  const int64_t channels = x.sizes[View::kChannels];
  if (x.sizes[1] == 1) return channels % 8 == 0;
  return channels > 1 && channels * x.sizes[1] % 16 == 0;
}

// Where channels are apart, a copy in which they are together costs less than reading them one by one, for every tap.
void put_channels_together(View& view, bool is_weight, const Settings& s, Tensor& memory) {
  const bool needs = is_weight && view.sizes[0] > 1 ? view.strides[View::kChannels] != 1 : !view.is_channels_last();
  if (!needs) return;
  const View copy = channels_last_like(view, is_weight, memory);
  View from = as_images(view, is_weight);
  View to = as_images(copy, is_weight);
  if (from.sizes[1] * from.sizes[2] % 16 == 0 && (!is_weight || view.sizes[0] == 1)) {
    static const tk_op op = tk_intern_op("conv_layout");
    const tk_tensor tensors[] = {to_core(from), to_core(to, true)};
    Settings plain = s;
    plain.config = -1;
    if (view.count() > 0) launch_op(op, tensors, {}, {}, plain, view.device);
  } else {
    check_shim(aoti_torch_copy_(as_tensor(to).get(), as_tensor(from).get(), 0), "put channels together");
  }
  view = copy;
}

// The pixels of an image as the rows of a matrix. False where they do not run together.
bool as_rows(const View& image, Matrix& out) {
  constexpr int kPixelDims[] = {0, 3, 4, 5};
  out = {1, image.sizes[View::kChannels], 0, image.strides[View::kChannels]};
  int64_t next = -1;  // the stride that the dimension further out must have
  for (size_t i = std::size(kPixelDims); i-- > 0;) {
    const auto d = static_cast<size_t>(kPixelDims[i]);
    out.rows *= image.sizes[d];
    if (image.sizes[d] == 1) continue;
    if (next >= 0 && image.strides[d] != next) return false;
    if (next < 0) out.row_stride = image.strides[d];
    next = image.strides[d] * image.sizes[d];
  }
  return true;
}

// A convolution of one tap that reads every pixel once is a product. Of channels-last images it is x weight^T; of a
// single contiguous one, weight x.
bool launch_product(const Problem& p, const Settings& s) {
  constexpr Spatial kOnes = {1, 1, 1};
  constexpr Spatial kZeros = {0, 0, 0};
  const bool one_by_one = p.x.sizes[1] == 1 && spatial_sizes(p.weight) == kOnes && p.stride == kOnes &&
                          p.padding == kZeros && spatial_sizes(p.x) == spatial_sizes(p.out) && s.config < 0;
  Matrix x;
  Matrix out;
  if (!one_by_one || p.x.sizes[View::kChannels] == 0 || !as_rows(p.x, x) || !as_rows(p.out, out)) return false;
  static const tk_op op = tk_intern_op("mm");
  const int32_t dtype = p.x.dtype;
  const void* const x_data = to_core(p.x).data;
  const void* const weight_data = to_core(p.weight).data;
  const Matrix weight = {p.weight.sizes[1], p.weight.sizes[2], p.weight.strides[1], p.weight.strides[2]};  // [O, C]
  const Matrix bias = {out.rows, out.cols, 0, p.bias.strides[View::kChannels]};
  const auto operand = [&](const Matrix& m, const void* data) { return to_core(normalized_operand(m), data, dtype); };
  const auto added = [&](const Matrix& m) {
    return p.bias.handle ? to_core(normalized_bias(m), to_core(p.bias).data, dtype) : absent();
  };
  const auto result = [&](const Matrix& m) { return to_core(normalized_output(m), to_core(p.out, true).data, dtype); };
  const bool upright = out.col_stride == 1 || out.cols == 1;
  const std::array<tk_tensor, 4> tensors =
      upright ? std::array{operand(x, x_data), operand(weight.transposed(), weight_data), added(bias), result(out)}
              : std::array{operand(weight, weight_data), operand(x.transposed(), x_data), added(bias.transposed()),
                           result(out.transposed())};
  const int64_t ints[] = {s.activation, precision_of(s, dtype)};
  const double floats[] = {1, 1};
  launch_op(op, tensors, ints, floats, s, p.x.device);
  return true;
}

std::vector<int64_t> geometry_ints(const Spatial& stride, const Spatial& padding, const Spatial& dilation) {
  std::vector<int64_t> ints;
  for (const Spatial* part : {&stride, &padding, &dilation}) ints.insert(ints.end(), part->begin(), part->end());
  return ints;
}

void launch_convolution(const Problem& p, const Settings& s) {
  if (p.out.count() == 0 || launch_product(p, s)) return;
  static const tk_op op = tk_intern_op("conv");
  tk_tensor bias = absent();
  if (p.bias.handle) {
    bias = to_core(p.bias);
    bias.ndim = 2;  // [G, O]
    std::copy_n(bias.sizes + 1, 2, bias.sizes);
    std::copy_n(bias.strides + 1, 2, bias.strides);
  }
  const tk_tensor tensors[] = {to_core(p.x), to_core(p.weight), bias, to_core(p.out, true)};
  std::vector<int64_t> ints = geometry_ints(p.stride, p.padding, p.dilation);
  ints.insert(ints.end(), {s.activation, precision_of(s, p.x.dtype)});
  launch_op(op, tensors, ints, {}, s, p.x.device);
}

// The places of the input at remainder `first` of a stride, and the taps that reach them: tap + n * tap_step reads
// result pixel place + shift - n * back.
struct Phase {
  int64_t first;
  int64_t tap;
  int64_t tap_step;
  int64_t taps;
  int64_t shift;
  int64_t back;
};

Phase phase_of(int64_t first, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation) {
  const int64_t common = std::gcd(stride, dilation);
  Phase phase = {first, 0, stride / common, 0, 0, dilation / common};
  while (phase.tap < phase.tap_step && (first + padding - phase.tap * dilation) % stride != 0) phase.tap++;
  if (phase.tap >= std::min(phase.tap_step, kernel)) {
    phase.tap = 0;
    return phase;  // no tap reaches them
  }
  phase.taps = (kernel - phase.tap + phase.tap_step - 1) / phase.tap_step;
  phase.shift = (first + padding - phase.tap * dilation) / stride;
  return phase;
}

// The part of the input's gradient that lies at these places, one phase for each dimension.
Problem problem_of(const Problem& whole, const std::array<Phase, 3>& phases, const Spatial& stride) {
  Problem p = whole;
  for (size_t d = 0; d < 3; d++) {
    const Phase& phase = phases[d];
    const size_t at = View::kSpatial + d;
    p.out.offset += phase.first * whole.out.strides[at];
    p.out.sizes[at] = (whole.out.sizes[at] - phase.first + stride[d] - 1) / stride[d];
    p.out.strides[at] *= stride[d];
    p.weight.offset += phase.tap * whole.weight.strides[at];
    p.weight.sizes[at] = phase.taps;
    p.weight.strides[at] *= phase.tap_step;
    p.padding[d] = -phase.shift;
    p.dilation[d] = -phase.back;
  }
  return p;
}

// whole: x is the gradient of the result, weight as the forward pass has it, out the gradient of the input.
void launch_input_gradient(Problem whole, const Geometry& g, const Settings& s) {
  Tensor x_memory;
  Tensor weight_memory;
  const Spatial kernel = spatial_sizes(whole.weight);
  whole.weight = exchanged(whole.weight);
  whole.stride = {1, 1, 1};
  std::array<Phase, 3> phases;
  const auto phase = [&](size_t d, int64_t first) {
    phases[d] = phase_of(first, kernel[d], g.stride[d], g.padding[d], g.dilation[d]);
  };
  for (size_t d = 0; d < 3; d++) phase(d, 0);
  if (g.stride == Spatial{1, 1, 1} && launch_product(problem_of(whole, phases, g.stride), s)) return;
  if (has_wide_channels(whole.x)) {
    put_channels_together(whole.x, false, s, x_memory);
    put_channels_together(whole.weight, true, s, weight_memory);
  }
  const Spatial sizes = spatial_sizes(whole.out);
  const auto count = [&](size_t d) { return std::min(g.stride[d], sizes[d]); };
  for (int64_t i = 0; i < count(0); i++)
    for (int64_t j = 0; j < count(1); j++)
      for (int64_t k = 0; k < count(2); k++) {
        phase(0, i);
        phase(1, j);
        phase(2, k);
        launch_convolution(problem_of(whole, phases, g.stride), s);
      }
}

void launch_weight_gradient(View grad, View x, const View& out, const Geometry& g, const Settings& s) {
  static const tk_op op = tk_intern_op("conv_weight_grad");
  Tensor grad_memory;
  Tensor x_memory;
  if (has_wide_channels(x)) put_channels_together(x, false, s, x_memory);
  if (has_wide_channels(grad)) put_channels_together(grad, false, s, grad_memory);
  const tk_tensor tensors[] = {to_core(grad), to_core(x), to_core(out, true)};
  std::vector<int64_t> ints = geometry_ints(g.stride, g.padding, g.dilation);
  ints.push_back(precision_of(s, x.dtype));
  launch_op(op, tensors, ints, {}, s, x.device);
}

// --- The ops ---

// Three-dimensional, with a batch, for ATen.
Tensor with_all_dimensions(const Meta& tensor, int64_t spatial, bool is_weight) {
  const View view = is_weight ? weight_view(tensor, spatial, 1) : image_view(tensor, spatial, 1);
  std::array<int64_t, 5> sizes = {view.sizes[is_weight ? 1 : 0], view.sizes[2], view.sizes[3], view.sizes[4],
                                  view.sizes[5]};
  std::array<int64_t, 5> strides = {view.strides[is_weight ? 1 : 0], view.strides[2], view.strides[3], view.strides[4],
                                    view.strides[5]};
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor.handle, 5, sizes.data(), strides.data(), 0, &handle),
             "view an image");
  return Tensor(handle);
}

bool result_is_channels_last(const Convolution& c, const Meta& input, const Meta& weight) {
  const bool has_batch = input.dim() == c.spatial + 2;
  return has_batch && (suggests_channels_last(input, c.spatial) || suggests_channels_last(weight, c.spatial));
}

Tensor forward(const Convolution& c, const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Meta x = meta(input);
  const Meta w = meta(weight);
  const Meta b = meta(bias);
  check_same(c.op, "input", x, "weight", w);
  check_dtype(c.op, x);
  check_settings(c.op, c.settings);
  check_ranks(c, x, w);
  check_channels(c, x, w);
  check_bias(c, x, w, b);
  const Geometry& g = c.geometry;
  Problem p = {.x = image_view(x, c.spatial, g.groups),
               .weight = weight_view(w, c.spatial, g.groups),
               .bias = {},
               .out = {},
               .stride = g.stride,
               .padding = g.padding,
               .dilation = g.dilation};
  const Spatial pixels = result_sizes(c, p.x, p.weight);
  Tensor out = empty_image(sizes_like(c, x, w.sizes[0], pixels), result_is_channels_last(c, x, w), x.dtype, x.device);
  const Meta y = meta(out);
  p.out = image_view(y, c.spatial, g.groups);
  if (p.out.count() == 0) return out;
  if (target(x.device) < 0) {
    reference_conv(with_all_dimensions(x, c.spatial, false), with_all_dimensions(w, c.spatial, true), bias, g,
                   c.settings.activation, with_all_dimensions(y, c.spatial, false));
    return out;
  }
  if (b) {
    p.bias.handle = b.handle;
    p.bias.dtype = b.dtype;
    p.bias.sizes = {1, g.groups, w.sizes[0] / g.groups, 1, 1, 1};
    p.bias.strides = {0, w.sizes[0] / g.groups * b.strides[0], b.strides[0], 0, 0, 0};
  }
  if (launch_product(p, c.settings)) return out;  // which takes more layouts
  Tensor x_memory;
  Tensor weight_memory;
  if (has_wide_channels(p.x)) {
    put_channels_together(p.x, false, c.settings, x_memory);
    put_channels_together(p.weight, true, c.settings, weight_memory);
  }
  launch_convolution(p, c.settings);
  return out;
}

// The gradient of the input or of the weight; `input` and `weight` say what it looks like.
Tensor gradient(const Convolution& c, const Tensor& grad, const Tensor& input, const Tensor& weight, bool of_input) {
  const Meta dy = meta(grad);
  const Meta x = meta(input);
  const Meta w = meta(weight);
  check_same(c.op, "input", x, "grad", dy);
  check_same(c.op, "input", x, "weight", w);
  check_dtype(c.op, x);
  check_settings(c.op, c.settings);
  check_ranks(c, x, w);
  check_channels(c, x, w);
  const Geometry& g = c.geometry;
  const View x_view = image_view(x, c.spatial, g.groups);
  const View weight_of_x = weight_view(w, c.spatial, g.groups);
  const std::vector<int64_t> expected = sizes_like(c, x, w.sizes[0], result_sizes(c, x_view, weight_of_x));
  if (!std::equal(expected.begin(), expected.end(), dy.sizes.begin(), dy.sizes.end())) [[unlikely]]
    fail_argument(text(c.op, ": grad is ", describe_sizes(dy.sizes), ", must be ", describe_sizes(expected)));
  const Meta& like = of_input ? x : w;
  const bool last = of_input ? result_is_channels_last(c, x, w) : suggests_channels_last(w, c.spatial);
  Tensor out = empty_image(like.sizes, last, x.dtype, x.device);
  const Meta result = meta(out);
  const View of_result = of_input ? image_view(result, c.spatial, g.groups) : weight_view(result, c.spatial, g.groups);
  const View dy_view = image_view(dy, c.spatial, g.groups);
  if (of_result.count() == 0) return out;
  if (dy_view.count() == 0) {
    check_shim(aoti_torch_zero_(out.get()), "fill a gradient with zeros");
  } else if (target(x.device) < 0) {
    reference_conv_gradient(with_all_dimensions(dy, c.spatial, false), with_all_dimensions(x, c.spatial, false),
                            with_all_dimensions(w, c.spatial, true), g, of_input,
                            with_all_dimensions(result, c.spatial, !of_input));
  } else if (of_input) {
    launch_input_gradient({.x = dy_view,
                           .weight = weight_of_x,
                           .bias = {},
                           .out = of_result,
                           .stride = {},
                           .padding = {},
                           .dilation = {}},
                          g, c.settings);
  } else {
    launch_weight_gradient(dy_view, x_view, of_result, g, c.settings);
  }
  return out;
}

// --- Boxed ---

Lists read_lists(Arguments& args) {
  Lists lists;
  lists.stride = args.integers();
  lists.padding = args.integers();
  lists.dilation = args.integers();
  lists.groups = args.integer();
  return lists;
}

constexpr const char* kNames[] = {"", "tk.conv1d", "tk.conv2d", "tk.conv3d"};

template <int kSpatial>
void boxed_conv(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor input = args.tensor();
  const Tensor weight = args.tensor();
  const Tensor bias = args.optional_tensor();
  const Lists lists = read_lists(args);
  Convolution c = {.op = kNames[kSpatial], .spatial = kSpatial, .geometry = {}, .settings = {}};
  c.settings.activation = args.integer();
  c.settings.precision = args.integer();
  c.settings.config = args.integer();
  c.settings.mode = args.integer();
  c.geometry = read_geometry(c.op, lists, kSpatial);
  args.give_back(forward(c, input, weight, bias));
}

template <bool kOfInput>
void boxed_gradient(StableIValue* stack, uint64_t, uint64_t) {
  Arguments args(stack);
  const Tensor grad = args.tensor();
  const Tensor input = args.tensor();
  const Tensor weight = args.tensor();
  const Lists lists = read_lists(args);
  Convolution c = {.op = kOfInput ? "tk.conv_input_grad" : "tk.conv_weight_grad",
                   .spatial = meta(weight).dim() - 2,
                   .geometry = {},
                   .settings = {}};
  c.settings.precision = args.integer();
  c.settings.mode = args.integer();
  if (c.spatial < 1 || c.spatial > 3) [[unlikely]]
    fail_argument(text(c.op, ": weight must have 3 to 5 dimensions, is ", describe_sizes(meta(weight).sizes)));
  c.geometry = read_geometry(c.op, lists, c.spatial);
  args.give_back(gradient(c, grad, input, weight, kOfInput));
}

// --- Registration ---

// padding: a number for each dimension, or twice as many: in front, then behind.
#define TK_CONV(n)                                                                                       \
  "Tensor input, Tensor weight, Tensor? bias=None, int[" #n "] stride=1, int[" #n "] padding=0, int[" #n \
  "] dilation=1, int groups=1, int activation=0, int precision=-1, int config=-1, int mode=0"
#define TK_CONV_GRADIENT                                                                                  \
  "Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups=1, " \
  "int precision=-1, int mode=0"

constexpr Op kOps[] = {
    {"conv1d", TK_CONV(1), boxed_conv<1>, nullptr},
    {"conv2d", TK_CONV(2), boxed_conv<2>, nullptr},
    {"conv3d", TK_CONV(3), boxed_conv<3>, nullptr},
    {"conv_input_grad", TK_CONV_GRADIENT, boxed_gradient<true>, nullptr},
    {"conv_weight_grad", TK_CONV_GRADIENT, boxed_gradient<false>, nullptr},
};

STABLE_TORCH_LIBRARY_FRAGMENT(tk, library) { define<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CPU, library) { implement<kOps>(library); }
STABLE_TORCH_LIBRARY_IMPL(tk, CUDA, library) { implement<kOps>(library); }

}  // namespace

void reserve_conv_names() {
  for (const Op& op : kOps) check_status(tk_reserve_op(op.name));
  for (const char* name : {"conv", "conv_layout"}) check_status(tk_reserve_op(name));
}

}  // namespace tk::ops
