// conv1d, conv2d and conv3d and their gradients: check, make views of the arguments, allocate, launch.
//
// The gradient of the input is a convolution of the result's gradient, with input and output channels exchanged and the
// taps walked backwards; with a stride, one for each remainder that a pixel's place leaves. So it needs no kernel of
// its own (docs/conv.md).

#include <algorithm>
#include <vector>

#include "conv_launch.h"
#include "launch.h"
#include "ops.h"

namespace tk::ops {

// What the caller says of a convolution, in as many numbers as the caller gave.
struct ConvolutionLists {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;  // for each dimension, or twice as many: in front, then behind
  std::vector<int64_t> dilation;
  int64_t groups = 1;
};
template <>
struct Reading<ConvolutionLists> {
  static constexpr std::string_view kTypes[] = {"int[]", "int[]", "int[]", "int"};
  static ConvolutionLists read(Arguments& args) {
    return ConvolutionLists{args.integers(), args.integers(), args.integers(), args.integer()};
  }
};

// Those of a product but for the result's dtype, which is the operands'.
struct ConvolutionSettings : Settings {};
template <>
struct Reading<ConvolutionSettings> {
  static constexpr std::string_view kTypes[] = {"int", "int", "int", "int"};
  static ConvolutionSettings read(Arguments& args) {
    return ConvolutionSettings{{args.integer(), {}, args.integer(), args.integer(), args.integer()}};
  }
};

namespace {

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

bool any_below(const Spatial& values, int64_t least) {
  return std::any_of(values.begin(), values.end(), [&](int64_t v) { return v < least; });
}

void check_all(const char* op, const Spatial& values, int64_t least, const char* otherwise) {
  if (any_below(values, least)) [[unlikely]]
    fail_argument(text(op, ": ", otherwise));
}

Geometry read_geometry(const char* op, const ConvolutionLists& lists, int64_t spatial) {
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
  const auto given = [&] { return text(c.op, ": Given groups=", groups, ", "); };
  const int64_t channels = input.sizes[static_cast<size_t>(input.dim() - c.spatial - 1)];
  if (weight.sizes[0] < groups && weight.sizes[0] != 0) [[unlikely]]
    fail_argument(text(given(), "expected weight to be at least ", groups, " at dimension 0, but got weight of size ",
                       describe_sizes(weight.sizes), " instead"));
  if (weight.sizes[0] % groups != 0) [[unlikely]]
    fail_argument(text(given(), "expected weight to be divisible by ", groups,
                       " at dimension 0, but got weight of size ", describe_sizes(weight.sizes), " instead"));
  if (channels != weight.sizes[1] * groups) [[unlikely]]
    fail_argument(text(given(), "weight of size ", describe_sizes(weight.sizes), ", expected input",
                       describe_sizes(input.sizes), " to have ", weight.sizes[1] * groups, " channels, but got ",
                       channels, " channels instead"));
}

void check_operands(const Convolution& c, const Meta& input, const Meta& weight) {
  check_same(c.op, "input", input, "weight", weight);
  check_dtype(c.op, "input", input);
  check_settings(c.op, c.settings);
  check_ranks(c, input, weight);
  check_channels(c, input, weight);
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
  if (any_below(kernel, 1)) [[unlikely]]
    fail_argument(text(c.op, ": kernel size should be greater than zero, but got (", by(c, kernel), ")"));
  for (size_t d = 0; d < 3; d++)
    if (padded[d] < span[d]) [[unlikely]]
      fail_argument(text(c.op, ": Calculated padded input size per channel: (", by(c, padded), "). Kernel size: (",
                         by(c, span), "). Kernel size can't be greater than actual input size"));
  return out;
}

// Of the result. Of an input without channels it has none either, which is ATen's answer, whatever the weight has.
int64_t result_channels(const View& x, const Meta& weight) {
  return x.sizes[View::kChannels] == 0 ? 0 : weight.sizes[0];
}

// The sizes of a tensor like `like`, with other channels and pixels.
std::vector<int64_t> sizes_like(const Convolution& c, const Meta& like, int64_t channels, const Spatial& pixels) {
  std::vector<int64_t> sizes;
  if (like.dim() == c.spatial + 2) sizes.push_back(like.sizes[0]);
  sizes.push_back(channels);
  sizes.insert(sizes.end(), pixels.end() - c.spatial, pixels.end());
  return sizes;
}

// --- The ops ---

// Three-dimensional, with a batch, for ATen.
Tensor with_all_dimensions(const Meta& tensor, int64_t spatial, bool is_weight) {
  View x = is_weight ? weight_view(tensor, spatial, 1) : image_view(tensor, spatial, 1);
  if (!is_weight) {  // groups first, as a weight has them
    std::swap(x.sizes[0], x.sizes[1]);
    std::swap(x.strides[0], x.strides[1]);
  }
  return view(tensor.handle, std::span(x.sizes).subspan(1), std::span(x.strides).subspan(1), 0);
}

bool result_is_channels_last(const Convolution& c, const Meta& input, const Meta& weight) {
  const bool has_batch = input.dim() == c.spatial + 2;
  return has_batch && (suggests_channels_last(input, c.spatial) || suggests_channels_last(weight, c.spatial));
}

Tensor forward(const Convolution& c, const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const Meta x = meta(input);
  const Meta w = meta(weight);
  const Meta b = meta(bias);
  check_operands(c, x, w);
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
  Tensor out = empty_image(sizes_like(c, x, result_channels(p.x, w), pixels), result_is_channels_last(c, x, w), x.dtype,
                           x.device);
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
  launch_forward(p, c.settings);
  return out;
}

// The gradient of the input or of the weight; `input` and `weight` say what it looks like.
Tensor gradient(const Convolution& c, const Tensor& grad, const Tensor& input, const Tensor& weight, bool of_input) {
  const Meta dy = meta(grad);
  const Meta x = meta(input);
  const Meta w = meta(weight);
  check_same(c.op, "input", x, "grad", dy);
  check_operands(c, x, w);
  const Geometry& g = c.geometry;
  const View x_view = image_view(x, c.spatial, g.groups);
  const View weight_of_x = weight_view(w, c.spatial, g.groups);
  const std::vector<int64_t> expected =
      sizes_like(c, x, result_channels(x_view, w), result_sizes(c, x_view, weight_of_x));
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

// --- The ops ---

constexpr const char* kNames[] = {"", "tk.conv1d", "tk.conv2d", "tk.conv3d"};

template <int kSpatial>
Tensor conv(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, const ConvolutionLists& lists,
            const ConvolutionSettings& settings) {
  const Convolution c = {.op = kNames[kSpatial],
                         .spatial = kSpatial,
                         .geometry = read_geometry(kNames[kSpatial], lists, kSpatial),
                         .settings = settings};
  return forward(c, input, weight, bias);
}

template <bool kOfInput>
Tensor conv_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight, const ConvolutionLists& lists,
                     int64_t precision, int64_t mode) {
  Convolution c = {.op = kOfInput ? "tk.conv_input_grad" : "tk.conv_weight_grad",
                   .spatial = meta(weight).dim() - 2,
                   .geometry = {},
                   .settings = {}};
  c.settings.precision = precision;
  c.settings.mode = mode;
  if (c.spatial < 1 || c.spatial > 3) [[unlikely]]
    fail_argument(text(c.op, ": weight must have 3 to 5 dimensions, is ", describe_sizes(meta(weight).sizes)));
  c.geometry = read_geometry(c.op, lists, c.spatial);
  return gradient(c, grad, input, weight, kOfInput);
}

#define TK_CONV(n)                                                                                       \
  "Tensor input, Tensor weight, Tensor? bias=None, int[" #n "] stride=1, int[" #n "] padding=0, int[" #n \
  "] dilation=1, int groups=1, int activation=0, int precision=-1, int config=-1, int mode=0"
#define TK_CONV_GRADIENT                                                                                  \
  "Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups=1, " \
  "int precision=-1, int mode=0"

constexpr Op kOps[] = {
    op<conv<1>>("conv1d", TK_CONV(1)),
    op<conv<2>>("conv2d", TK_CONV(2)),
    op<conv<3>>("conv3d", TK_CONV(3)),
    op<conv_gradient<true>>("conv_input_grad", TK_CONV_GRADIENT),
    op<conv_gradient<false>>("conv_weight_grad", TK_CONV_GRADIENT),
};

}  // namespace

constinit const OpTable kConvolutionOps = op_table<kOps>();

}  // namespace tk::ops
