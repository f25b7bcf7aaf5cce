#include "conv_launch.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "conv_copies.h"
#include "launch.h"
#include "matrix.h"

namespace tk::ops {

namespace {

// --- Products ---

// The pixels of images as the rows of a matrix, or of one for each image: a batch. False where they do not run
// together.
bool as_rows(const View& image, bool is_batch, Matrix& out) {
  constexpr int kPixelDims[] = {0, 3, 4, 5};
  out = {1, image.sizes[View::kChannels], 0, image.strides[View::kChannels]};
  out.is_batch = is_batch;
  if (is_batch) {
    out.batch = image.sizes[0];
    out.batch_stride = image.strides[0];
  }
  int64_t next = -1;  // the stride that the dimension further out must have
  for (size_t i = std::size(kPixelDims); i-- > (is_batch ? 1U : 0U);) {
    const auto d = static_cast<size_t>(kPixelDims[i]);
    out.rows *= image.sizes[d];
    if (image.sizes[d] == 1) continue;
    if (next >= 0 && image.strides[d] != next) return false;
    if (next < 0) out.row_stride = image.strides[d];
    next = image.strides[d] * image.sizes[d];
  }
  return true;
}

// A product's tensors, as the core takes them: a, b, bias and the result.
using ProductTensors = std::array<tk_tensor, 4>;

// Whether kernels that read and write 16 bytes at a time serve a batch: Hopper's do for 16-bit elements, others want 16
// elements. What is left reads single ones, and a channels-last copy is faster.
bool has_wide_matrices(const ProductTensors& tensors) {
  const int64_t wide = tensors[0].dtype == kFloat32 ? 16 : 8;
  for (const size_t i : {size_t{0}, size_t{1}, size_t{3}}) {
    const tk_tensor& t = tensors[i];
    const int64_t pitch = std::max(t.strides[1], t.strides[2]);
    const bool is_wide = std::min(t.strides[1], t.strides[2]) == 1 && pitch % wide == 0 && t.strides[0] % wide == 0;
    if (!is_wide || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  return tensors[3].sizes[2] % wide == 0;
}

tk_tensor operand_of(const Matrix& m, const View& view) {
  return to_core(normalized_operand(m), to_core(view).data, view.dtype);
}

tk_tensor result_of(const Matrix& m, const View& view) {
  return to_core(normalized_output(m), to_core(view, true).data, view.dtype);
}

// The rows of x times the weight's transpose; or, where the result has its rows side by side, all of it transposed.
// Then the weight is `a`.
ProductTensors product_tensors(const Problem& p, const Matrix& x, const Matrix& out, bool upright) {
  Matrix weight = {p.weight.sizes[1], p.weight.sizes[2], p.weight.strides[1], p.weight.strides[2]};  // [O, C]
  weight.is_batch = x.is_batch;
  weight.batch = x.batch;  // one for all of them
  const Matrix bias = {out.rows, out.cols, 0, p.bias.strides[View::kChannels], x.is_batch, x.batch, 0};
  const auto added = [&](const Matrix& m) {
    return p.bias.handle ? to_core(normalized_bias(m), to_core(p.bias).data, p.bias.dtype) : absent();
  };
  if (upright)
    return {operand_of(x, p.x), operand_of(weight.transposed(), p.weight), added(bias), result_of(out, p.out)};
  return {operand_of(weight, p.weight), operand_of(x.transposed(), p.x), added(bias.transposed()),
          result_of(out.transposed(), p.out)};
}

// reads_weight: what a product may read early, its `b`, is a weight.
void launch_mm(tk_op op, const ProductTensors& tensors, int64_t activation, bool reads_weight, Settings s,
               Device device) {
  const int64_t ints[] = {activation, precision_of(s, tensors[0].dtype)};
  const double floats[] = {1, 1};
  if (!reads_weight) s.mode &= ~static_cast<int64_t>(TK_MODE_STATIC_WEIGHTS);
  launch_op(op, tensors, ints, floats, s, device);
}

// Whether a convolution has one group and one tap, and reads every pixel once. geometry: a Problem or a Geometry.
template <class G>
bool is_product(const View& x, const View& weight, const View& out, const G& geometry) {
  constexpr Spatial kOnes = {1, 1, 1};
  return x.sizes[1] == 1 && spatial_sizes(weight) == kOnes && geometry.stride == kOnes &&
         geometry.padding == Spatial{0, 0, 0} && spatial_sizes(x) == spatial_sizes(out);
}

// A convolution of one tap that reads every pixel once is a product. Of channels-last images it is x weight^T; of
// contiguous ones, weight x of each.
bool launch_product(const Problem& p, const Settings& s) {
  if (!is_product(p.x, p.weight, p.out, p) || s.config >= 0 || p.x.sizes[View::kChannels] == 0) return false;
  static const tk_op mm = tk_intern_op("mm");
  static const tk_op bmm = tk_intern_op("bmm");
  for (const bool is_batch : {false, true}) {
    Matrix x;
    Matrix out;
    if (!as_rows(p.x, is_batch, x) || !as_rows(p.out, is_batch, out)) continue;
    const bool upright = out.col_stride == 1 || out.cols == 1;
    const ProductTensors tensors = product_tensors(p, x, out, upright);
    if (is_batch && !has_wide_matrices(tensors)) return false;
    launch_mm(is_batch ? bmm : mm, tensors, s.activation, upright, s, p.x.device);
    return true;
  }
  return false;
}

// geometry: a Problem or a Geometry. more: what follows.
template <class G>
std::vector<int64_t> geometry_ints(const G& geometry, std::initializer_list<int64_t> more) {
  std::vector<int64_t> ints;
  for (const Spatial* part : {&geometry.stride, &geometry.padding, &geometry.dilation})
    ints.insert(ints.end(), part->begin(), part->end());
  ints.insert(ints.end(), more);
  return ints;
}

// more: ints of the op behind those that all of them have.
void launch_conv_op(tk_op op, const Problem& p, const Settings& s, std::initializer_list<int64_t> more = {}) {
  tk_tensor bias = absent();
  if (p.bias.handle) {
    bias = to_core(p.bias);
    bias.ndim = 2;  // [G, O]
    std::copy_n(bias.sizes + 1, 2, bias.sizes);
    std::copy_n(bias.strides + 1, 2, bias.strides);
  }
  const tk_tensor tensors[] = {to_core(p.x), to_core(p.weight), bias, to_core(p.out, true)};
  std::vector<int64_t> ints = geometry_ints(p, {s.activation, precision_of(s, p.x.dtype)});
  ints.insert(ints.end(), more);
  launch_op(op, tensors, ints, {}, s, p.x.device);
}

void launch_convolution(const Problem& p, const Settings& s) {
  static const tk_op op = tk_intern_op("conv");
  if (p.out.count() > 0 && !launch_product(p, s)) launch_conv_op(op, p, s);
}

// Of several groups: each alone, or all at once where there are kernels for that. `separate`: the same before groups
// were merged. Where they were, 0 * NaN made NaN of results that do not depend on it: those are worked out again.
void launch_groups(const Problem& p, const Problem& separate, const Settings& s) {
  static const tk_op contained = tk_intern_op("conv_contained");
  if (has_kernels_for_groups(p.x, p.weight.sizes[View::kChannels], p.weight.sizes[1])) {
    launch_convolution(p, s);
  } else {
    for (int64_t g = 0; g < p.weight.sizes[0]; g++) launch_convolution(group_of(p, g), s);
  }
  const int64_t merge = separate.weight.sizes[0] / p.weight.sizes[0];
  if (merge > 1 && p.out.count() > 0) launch_conv_op(contained, separate, s, {merge});
}

// Makes `p` one for `launch_groups`, or for `launch_convolution` where that is better: false.
bool prepare_groups(Problem& p, const Settings& s, Tensor& weight_memory) {
  const int64_t merge = groups_to_merge(p, s, true);
  if (merge == 0) return false;
  if (merge == 1) {
    put_channels_together(p.weight, true, s, weight_memory);
    return true;
  }
  p.weight = merged_weight(p.weight, merge, s, weight_memory);
  for (View* image : {&p.x, &p.bias, &p.out}) *image = with_merged_groups(*image, merge);
  return true;
}

// --- Gradients ---

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

// The gradient of the weight of a convolution of one tap that reads every pixel once, where channels are enough for
// tiles on half of a large GPU's multiprocessors: else its pixels must be split, which mm does for few rows alone.
bool launch_weight_product(const View& grad, const View& x, const View& out, const Geometry& g, const Settings& s) {
  constexpr int64_t kTile = 128;
  constexpr int64_t kEnoughTiles = 64;
  const auto tiles = [](int64_t channels) { return (channels + kTile - 1) / kTile; };
  if (!is_product(x, out, grad, g)) return false;
  if (tiles(out.sizes[1]) * tiles(out.sizes[View::kChannels]) < kEnoughTiles) return false;
  Matrix of_grad;
  Matrix of_x;
  if (!as_rows(grad, false, of_grad) || !as_rows(x, false, of_x)) return false;
  static const tk_op op = tk_intern_op("mm");
  const Matrix result = {out.sizes[1], out.sizes[View::kChannels], out.strides[1], out.strides[View::kChannels]};
  launch_mm(op, {operand_of(of_grad.transposed(), grad), operand_of(of_x, x), absent(), result_of(result, out)}, 0,
            false, s, x.device);
  return true;
}

bool launch_input_product(Problem p, const Geometry& g, const Settings& s) {
  p.weight = exchanged(p.weight);
  p.stride = g.stride;
  p.dilation = {-g.dilation[0], -g.dilation[1], -g.dilation[2]};
  p.padding = {-g.padding[0], -g.padding[1], -g.padding[2]};
  return launch_product(p, s);
}

// Whether one launch has all places of the input's gradient: Hopper's kernels do, of one group and 16 bits. No
// dimension may have both a stride and a dilation, nor reach further than an im2col map can say
// (kernels/conv/input_grad/tma_plans.py).
bool has_kernels_for_input_gradient(const Problem& whole, const Geometry& g) {
  const View& weight = whole.weight;
  if (g.groups != 1 || weight.count() == 0) return false;
  if (weight.sizes[1] % 8 != 0 || weight.sizes[View::kChannels] % 8 != 0) return false;
  const bool is_flat =
      whole.out.sizes[3] == 1 && whole.x.sizes[3] == 1 && weight.sizes[3] == 1 && g.padding[0] == 0 && g.stride[0] == 1;
  const int64_t reach = is_flat ? 128 : 16;
  for (size_t d = is_flat ? 1 : 0; d < 3; d++) {
    const size_t at = View::kSpatial + d;
    if (g.stride[d] > 8 || (g.stride[d] != 1 && g.dilation[d] != 1)) return false;
    const auto parts = [&](int64_t pixels) { return (pixels + g.stride[d] - 1) / g.stride[d]; };
    const int64_t span = parts((weight.sizes[at] - 1) * g.dilation[d]);
    const int64_t lower = g.padding[d] / g.stride[d] - span;
    const int64_t upper = lower + parts(whole.out.sizes[at]) - whole.x.sizes[at];
    if (span + 1 >= 2 * reach || std::min(lower, upper) < -reach || std::max(lower, upper) >= reach) return false;
  }
  constexpr int64_t kMostPixels = int64_t{1} << 28;  // that 32 bits number them and their tiles
  return whole.out.count() / weight.sizes[View::kChannels] <= kMostPixels && has_gathering_kernels(whole.x);
}

// geometry: a Problem or a Geometry.
template <class G>
void launch_gradient_op(tk_op op, const View& a, const View& b, const View& out, const G& geometry, const Settings& s) {
  const tk_tensor tensors[] = {to_core(a), to_core(b), to_core(out, true)};
  launch_op(op, tensors, geometry_ints(geometry, {precision_of(s, a.dtype)}), {}, s, a.device);
}

// Of the weight as the forward pass has it.
bool launch_all_phases(Problem whole, const Geometry& g, const Settings& s) {
  if (!has_kernels_for_input_gradient(whole, g)) return false;
  Tensor x_memory;
  Tensor weight_memory;
  put_channels_together(whole.x, false, s, x_memory);
  put_channels_together(whole.weight, true, s, weight_memory);
  static const tk_op op = tk_intern_op("conv_input_grad");
  launch_gradient_op(op, whole.x, whole.weight, whole.out, g, s);
  return true;
}

void launch_weight_sum(const View& grad, const View& x, const View& out, const Problem& p, const Settings& s) {
  static const tk_op op = tk_intern_op("conv_weight_grad");
  launch_gradient_op(op, grad, x, out, p, s);
}

// Of an unfolded input: the gradient has a place for each of its channels, of which those of taps are kept.
void launch_unfolded_weight_gradient(Problem p, const View& grad, const Settings& s) {
  Tensor x_memory;
  Tensor sum_memory;
  const Unfolding unfolding = unfolding_of(p.weight, p.stride[2]);
  const View x = unfolded_image(p.x, unfolding, p, s, x_memory);
  View sum = p.weight;
  sum.sizes[View::kChannels] = unfolding.channels;
  if (unfolding.taps > 1) sum.sizes[5] = 1;
  sum = channels_last_like(sum, true, sum_memory);
  unfold_geometry(p, unfolding);
  launch_weight_sum(grad, x, sum, p, s);
  sum.sizes = p.weight.sizes;
  if (unfolding.taps > 1) sum.strides[5] = p.weight.sizes[View::kChannels];
  copy(as_tensor(p.weight).get(), as_tensor(sum).get());
}

// Of each group alone, or of several as one: of that gradient the blocks on the diagonal are kept.
void launch_merged_weight_gradient(Problem p, const View& grad, const View& x, int64_t merge, const Settings& s) {
  const View weight = p.weight;
  Tensor memory;
  p.out = with_merged_groups(grad, merge);
  p.x = with_merged_groups(x, merge);
  if (merge > 1) p.weight = merged_weight_like(weight, merge, memory);
  for (int64_t g = 0; g < p.weight.sizes[0]; g++) {
    const Problem one = group_of(p, g);
    launch_weight_sum(one.out, one.x, one.weight, one, s);
  }
  if (merge > 1) copy(groups_of(weight, merge).get(), diagonal_of(p.weight, weight, merge).get());
}

}  // namespace

void launch_forward(Problem p, const Settings& given) {
  const Settings s = with_precision(p.weight, given);
  if (launch_product(p, s)) return;  // which takes more layouts
  Tensor x_memory;
  Tensor weight_memory;
  if (wants_unfolding(p.x, p.weight, p.out, s)) {
    unfold(p, s, x_memory, weight_memory);
  } else if (has_wide_channels(p.x)) {
    put_channels_together(p.x, false, s, x_memory);
    const Problem separate = p;
    if (prepare_groups(p, s, weight_memory)) return launch_groups(p, separate, s);
    put_channels_together(p.weight, true, s, weight_memory);
  }
  launch_convolution(p, s);
}

void launch_input_gradient(Problem whole, const Geometry& g, const Settings& given) {
  const Settings s = with_precision(whole.weight, given);
  if (launch_input_product(whole, g, s) || launch_all_phases(whole, g, s)) return;
  Tensor x_memory;
  Tensor weight_memory;
  const Spatial kernel = spatial_sizes(whole.weight);
  const Spatial sizes = spatial_sizes(whole.out);
  whole.weight = exchanged(whole.weight);
  whole.stride = {1, 1, 1};
  std::array<std::vector<Phase>, 3> reached;  // by taps
  bool is_covered = true;
  for (size_t d = 0; d < 3; d++)
    for (int64_t first = 0; first < std::min(g.stride[d], sizes[d]); first++) {
      const Phase phase = phase_of(first, kernel[d], g.stride[d], g.padding[d], g.dilation[d]);
      if (phase.taps > 0) reached[d].push_back(phase);
      is_covered = is_covered && phase.taps > 0;
    }
  // All other places at once: nothing writes faster.
  if (!is_covered) check_shim(aoti_torch_zero_(whole.out.handle), "fill a gradient with zeros");
  if (std::any_of(reached.begin(), reached.end(), [](const auto& phases) { return phases.empty(); })) return;
  bool by_group = false;
  if (has_wide_channels(whole.x)) put_channels_together(whole.x, false, s, x_memory);
  const Problem separate = whole;
  if (has_wide_channels(whole.x)) {
    by_group = prepare_groups(whole, s, weight_memory);
    if (!by_group) put_channels_together(whole.weight, true, s, weight_memory);
  }
  for (const Phase& d : reached[0])
    for (const Phase& h : reached[1])
      for (const Phase& w : reached[2]) {
        const Problem part = problem_of(whole, {d, h, w}, g.stride);
        by_group ? launch_groups(part, problem_of(separate, {d, h, w}, g.stride), s) : launch_convolution(part, s);
      }
}

void launch_weight_gradient(View grad, View x, const View& out, const Geometry& g, const Settings& given) {
  const Settings s = with_precision(out, given);
  if (launch_weight_product(grad, x, out, g, s)) return;
  Tensor grad_memory;
  Tensor x_memory;
  const Problem p = {
      .x = x, .weight = out, .bias = {}, .out = grad, .stride = g.stride, .padding = g.padding, .dilation = g.dilation};
  const bool unfolds = wants_unfolding(x, out, grad, s);
  const bool depthwise = wants_depthwise_copies(grad, out);
  if (!unfolds && (depthwise || has_wide_channels(x))) put_channels_together(x, false, s, x_memory);
  if (depthwise || has_wide_channels(grad)) put_channels_together(grad, false, s, grad_memory);
  if (unfolds) {
    launch_unfolded_weight_gradient(p, grad, s);
  } else if (const int64_t merge = groups_to_merge(p, s, false); merge > 0 && has_wide_channels(x)) {
    launch_merged_weight_gradient(p, grad, x, merge, s);
  } else {
    launch_weight_sum(grad, x, out, p, s);
  }
}

}  // namespace tk::ops
