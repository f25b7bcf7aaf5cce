#include "conv_copies.h"

#include <algorithm>

#include "launch.h"
#include "runtime.h"

namespace tk::ops {
namespace {

constexpr int64_t kWorthCopies = int64_t{1} << 26;  // multiplications
constexpr int64_t kWorthLaunch = int64_t{1} << 28;
// Kernels for small groups wait for the weight's single elements, 0.8 us for each tap, and where channels of the result
// are apart for all elements, 2 us: against 6 us in which a weight of blocks was made by two launches.
constexpr int64_t kTapsWorthBlocks = 16;
constexpr int64_t kTapsWorthBlocksApart = 4;

bool has_tensor_cores(int32_t dtype, const Settings& s) { return dtype != kFloat32 || precision_of(s, dtype) != 0; }

// By which a choice is made: as for every one, in batch-invariant mode not by how many images there are.
int64_t images_of(const View& out, const Settings& s) {
  return (s.mode & TK_MODE_BATCH_INVARIANT) != 0 ? 8 : out.sizes[0];
}

// The seven dimensions of weights of merged groups.
Tensor blocks_of(const View& x, const std::array<int64_t, 7>& sizes, const std::array<int64_t, 7>& strides) {
  return view(x.handle, sizes, strides, x.offset);
}

}  // namespace

int64_t precision_of(const Settings& s, int32_t dtype) {
  if (dtype != kFloat32) return 0;
  return s.precision >= 0 ? s.precision : allows_tf32_in_convolutions();
}

Settings with_precision(const View& weight, Settings s) {
  // Tensor cores multiply at least 8 x 8 channels: of one they bring an eighth. And with sums this short the time is
  // that of memory.
  constexpr int64_t kShortSum = 16;
  const int64_t out = weight.sizes[1];
  const int64_t in = weight.sizes[View::kChannels];
  const int64_t taps = weight.sizes[3] * weight.sizes[4] * weight.sizes[5];
  if (weight.dtype == kFloat32 && (std::min(in, out) <= 1 || in * taps <= kShortSum)) s.precision = 0;
  return s;
}

bool has_wide_channels(const View& x) {
  const int64_t channels = x.sizes[View::kChannels];
  if (x.sizes[1] == 1) return channels % 8 == 0;
  return channels > 1 && channels * x.sizes[1] % 16 == 0;
}

bool wants_depthwise_copies(const View& grad, const View& weight) {
  const int64_t piece = 16 / item_size(weight.dtype);
  const bool is_depthwise = weight.sizes[1] == 1 && weight.sizes[View::kChannels] == 1 && weight.sizes[0] % piece == 0;
  const int64_t taps = weight.sizes[3] * weight.sizes[4] * weight.sizes[5];
  return is_depthwise && grad.count() * taps >= kWorthCopies;
}

void put_channels_together(View& view, bool is_weight, const Settings& s, Tensor& memory) {
  const bool needs =
      is_weight && view.sizes[0] > 1 ? view.strides[View::kChannels] != 1 : !view.is_channels_last(!is_weight);
  if (!needs) return;
  const View copy = channels_last_like(view, is_weight, memory);
  View from = as_images(view, is_weight);
  View to = as_images(copy, is_weight);
  for (View* image : {&from, &to})
    if (image->sizes[View::kChannels] == 1) {  // then groups are the channels
      std::swap(image->sizes[1], image->sizes[View::kChannels]);
      std::swap(image->strides[1], image->strides[View::kChannels]);
    }
  if (from.sizes[1] * from.sizes[2] % 16 == 0 && (!is_weight || view.sizes[0] == 1)) {
    static const tk_op op = tk_intern_op("conv_layout");
    const tk_tensor tensors[] = {to_core(from), to_core(to, true)};
    Settings plain = s;
    plain.config = -1;
    if (view.count() > 0) launch_op(op, tensors, {}, {}, plain, view.device);
  } else {
    ops::copy(as_tensor(to).get(), as_tensor(from).get());
  }
  view = copy;
}

bool wants_unfolding(const View& x, const View& weight, const View& out, const Settings& s) {
  const int64_t channels = x.sizes[View::kChannels];
  const bool can_be_read = channels % 16 == 0 || (x.is_channels_last() && channels * item_size(x.dtype) % 16 == 0);
  if (x.sizes[1] != 1 || can_be_read || weight.count() == 0 || s.config >= 0) return false;
  if (!has_tensor_cores(x.dtype, s)) return false;
  const int64_t of_image = out.count() / std::max<int64_t>(out.sizes[0], 1);
  return images_of(out, s) * of_image * (weight.count() / weight.sizes[1]) >= kWorthCopies;
}

Unfolding unfolding_of(const View& weight, int64_t stride) {
  constexpr int64_t kStep = 64;  // channels that a kernel multiplies at a time
  const auto padded = [](int64_t channels) { return (channels + 15) / 16 * 16; };
  const int64_t channels = weight.sizes[View::kChannels];
  const int64_t taps = weight.sizes[5];
  // All taps, where one step takes them or pixels are not copied more than twice.
  const bool all = padded(taps * channels) <= std::max(kStep, 2 * channels * stride);
  return {all ? taps : 1, padded(all ? taps * channels : channels)};
}

namespace {

// Of images, or of a weight's filters as images.
View unfolded(const View& from, bool is_weight, const Unfolding& unfolding, const std::array<int64_t, 4>& ints,
              int64_t pixels, const Settings& s, Tensor& memory) {
  View shape = from;
  shape.sizes[View::kChannels] = unfolding.channels;
  shape.sizes[5] = pixels;
  const View copy = channels_last_like(shape, is_weight, memory);
  static const tk_op op = tk_intern_op("conv_unfold");
  const tk_tensor tensors[] = {to_core(as_images(from, is_weight)), to_core(as_images(copy, is_weight), true)};
  if (copy.count() > 0) launch_op(op, tensors, ints, {}, s, from.device);
  return copy;
}

}  // namespace

View unfolded_image(const View& x, const Unfolding& unfolding, const Problem& p, const Settings& s, Tensor& memory) {
  if (unfolding.taps == 1) return unfolded(x, false, unfolding, {1, 1, 0, 1}, x.sizes[5], s, memory);
  const std::array<int64_t, 4> ints = {unfolding.taps, p.stride[2], p.padding[2], p.dilation[2]};
  return unfolded(x, false, unfolding, ints, p.out.sizes[5], s, memory);
}

void unfold_geometry(Problem& p, const Unfolding& unfolding) {
  if (unfolding.taps == 1) return;
  p.stride[2] = 1;
  p.padding[2] = 0;
  p.dilation[2] = 1;
}

void unfold(Problem& p, const Settings& s, Tensor& x_memory, Tensor& weight_memory) {
  const Unfolding unfolding = unfolding_of(p.weight, p.stride[2]);
  p.x = unfolded_image(p.x, unfolding, p, s, x_memory);
  const int64_t left = unfolding.taps == 1 ? p.weight.sizes[5] : 1;
  p.weight = unfolded(p.weight, true, unfolding, {unfolding.taps, 1, 0, 1}, left, s, weight_memory);
  unfold_geometry(p, unfolding);
}

// --- Groups ---

View with_merged_groups(View image, int64_t merge) {
  image.sizes[1] /= merge;
  image.sizes[View::kChannels] *= merge;
  image.strides[1] *= merge;
  return image;
}

Problem group_of(Problem p, int64_t g) {
  for (View* image : {&p.x, &p.bias, &p.out}) {
    image->offset += g * image->strides[1];
    image->sizes[1] = 1;
  }
  p.weight.offset += g * p.weight.strides[0];
  p.weight.sizes[0] = 1;
  return p;
}

bool has_gathering_kernels(const View& x) {
  int64_t arch = 0;
  if (item_size(x.dtype) != 2) return false;
  check_status(tk_device_arch(target(x.device), &arch));
  return arch == 90;
}

bool has_kernels_for_groups(const View& x, int64_t in, int64_t out) {
  return in % 64 == 0 && out % 64 == 0 && has_gathering_kernels(x);
}

int64_t groups_to_merge(const Problem& p, const Settings& s, bool waits_for_taps) {
  constexpr int64_t kChannels = 64;
  const int64_t groups = p.weight.sizes[0];
  const int64_t in = p.weight.sizes[View::kChannels];
  const int64_t out = p.weight.sizes[1];
  if (groups == 1 || in == 1 || out == 0 || p.weight.count() == 0 || s.config >= 0) return 0;
  if (!has_tensor_cores(p.x.dtype, s)) return 0;
  int64_t merge = std::max<int64_t>(std::min(kChannels / in, kChannels / out), 1);
  while (groups % merge != 0) merge--;
  if (merge * in % 16 != 0 || merge * out % 16 != 0) return 0;
  const int64_t pixels = p.out.count() / std::max<int64_t>(p.out.sizes[0] * groups * out, 1);
  const int64_t taps = p.weight.count() / (groups * in * out);
  const int64_t launches = has_kernels_for_groups(p.x, merge * in, merge * out) ? 1 : groups / merge;
  const int64_t least_taps = p.out.strides[View::kChannels] == 1 ? kTapsWorthBlocks : kTapsWorthBlocksApart;
  if (waits_for_taps && merge > 1 && launches == 1 && taps >= least_taps && has_gathering_kernels(p.x)) return merge;
  return images_of(p.out, s) * pixels * taps * merge * in * out * groups >= kWorthLaunch * launches ? merge : 0;
}

Tensor diagonal_of(const View& merged, const View& weight, int64_t merge) {
  const auto& m = merged.strides;
  const auto& w = weight.sizes;
  return blocks_of(merged, {merged.sizes[0], merge, w[1], w[2], w[3], w[4], w[5]},
                   {m[0], w[1] * m[1] + w[2] * m[2], m[1], m[2], m[3], m[4], m[5]});
}

Tensor groups_of(const View& weight, int64_t merge) {
  const auto& n = weight.sizes;
  const auto& w = weight.strides;
  return blocks_of(weight, {n[0] / merge, merge, n[1], n[2], n[3], n[4], n[5]},
                   {merge * w[0], w[0], w[1], w[2], w[3], w[4], w[5]});
}

View merged_weight_like(const View& weight, int64_t merge, Tensor& memory) {
  View merged = weight;
  merged.sizes[0] /= merge;
  merged.sizes[1] *= merge;
  merged.sizes[View::kChannels] *= merge;
  return channels_last_like(merged, true, memory);
}

View merged_weight(const View& weight, int64_t merge, const Settings& s, Tensor& memory) {
  const View merged = merged_weight_like(weight, merge, memory);
  static const tk_op op = tk_intern_op("conv_blocks");
  const tk_tensor tensors[] = {to_core(weight), to_core(merged, true)};
  launch_op(op, tensors, {}, {}, s, weight.device);
  return merged;
}

}  // namespace tk::ops
