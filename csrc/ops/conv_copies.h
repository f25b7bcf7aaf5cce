// What a convolution copies so that fast kernels serve it: layouts, few channels, small groups.
#pragma once

#include "conv_launch.h"

namespace tk::ops {

// Of float32: 0 ieee, 1 tf32; else 0.
int64_t precision_of(const Settings& s, int32_t dtype);

// The settings of a convolution by `weight`, as its forward pass has it. Where tf32 could not be faster than float32,
// in the result and in both gradients, the precision is ieee.
Settings with_precision(const View& weight, Settings s);

// --- Layouts ---

// Whether kernels that load 16 bytes of channels at a time could serve. Depthwise ones take any layout.
bool has_wide_channels(const View& x);
// Whether the gradient of a weight of groups of one channel each is worth channels-last copies: the fast kernel for it
// has no other layout.
bool wants_depthwise_copies(const View& grad, const View& weight);
// Where channels are apart, a copy in which they are together costs less than reading them one by one, for every tap.
void put_channels_together(View& view, bool is_weight, const Settings& s, Tensor& memory);

// --- Few channels ---

// A convolution whose input has few channels, or a number of which no kernel loads 16 bytes at a time, reads single
// elements and multiplies with tensor cores that are mostly idle. Copies pay where there is enough to multiply: of the
// input and of the weight, padded with zeros to 16 channels or a multiple, and where they are few with the taps along w
// beside each other as channels of one pixel.
struct Unfolding {
  int64_t taps;      // along w
  int64_t channels;  // of the copies
};

bool wants_unfolding(const View& x, const View& weight, const View& out, const Settings& s);
Unfolding unfolding_of(const View& weight, int64_t stride);
// x, of which a pixel of the result then reads one along w where all taps are unfolded.
View unfolded_image(const View& x, const Unfolding& unfolding, const Problem& p, const Settings& s, Tensor& memory);
void unfold_geometry(Problem& p, const Unfolding& unfolding);
void unfold(Problem& p, const Settings& s, Tensor& x_memory, Tensor& weight_memory);

// --- Groups ---

// How many groups are best multiplied as one, by a weight that is zero but for blocks on its diagonal: those that make
// 64 channels, which is what the kernels for one group take at a time. 0: not so, the kernels for groups are better.
// waits_for_taps: those take a while for each tap, however little there is to multiply.
int64_t groups_to_merge(const Problem& p, const Settings& s, bool waits_for_taps);
// Whether images of this dtype on this device have kernels that gather pixels by TMA: Hopper's, of 16 bits.
bool has_gathering_kernels(const View& x);
// Whether one launch has all groups of so many channels in and out: Hopper's kernels do, of 64 channels or a multiple.
bool has_kernels_for_groups(const View& x, int64_t in, int64_t out);
// Groups of an image beside each other as one: a view.
View with_merged_groups(View image, int64_t merge);
// Group g of `p` alone.
Problem group_of(Problem p, int64_t g);
// Uninitialised memory for a weight of merged groups, [G / merge, merge * O, merge * C, taps].
View merged_weight_like(const View& weight, int64_t merge, Tensor& memory);
View merged_weight(const View& weight, int64_t merge, const Settings& s, Tensor& memory);
// The blocks on the diagonal of `merged`, and the groups of `weight`, as tensors [G / merge, merge, O, C, taps].
Tensor diagonal_of(const View& merged, const View& weight, int64_t merge);
Tensor groups_of(const View& weight, int64_t merge);

}  // namespace tk::ops
