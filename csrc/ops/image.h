// Views of a convolution's tensors: batches of images and weights, three-dimensional and in groups, as the core takes
// them.
#pragma once

#include <array>

#include "tensor.h"
#include "tk/tk.h"

namespace tk::ops {

using Spatial = std::array<int64_t, 3>;  // of depth, height and width

// Some elements of a tensor, which must outlive it. An image's dimensions are [N, G, C, D, H, W], a weight's
// [G, O, C, KD, KH, KW]: in both, channels that a sum may run over come third.
struct View {
  static constexpr int kRank = 6;
  static constexpr int kChannels = 2;
  static constexpr int kSpatial = 3;

  AtenTensorHandle handle = nullptr;
  int64_t offset = 0;  // elements from the tensor's own first one
  std::array<int64_t, kRank> sizes = {};
  std::array<int64_t, kRank> strides = {};
  int32_t dtype = 0;
  Device device = {};

  int64_t count() const;
  // Has channels beside each other, and everything else on 16-byte boundaries. joins_groups: but for groups, if they
  // lie beside each other.
  bool is_channels_last(bool joins_groups = false) const;
};

inline Spatial spatial_sizes(const View& view) { return {view.sizes[3], view.sizes[4], view.sizes[5]}; }

// Of a tensor of `spatial` spatial dimensions, an image's batch dimension may be missing.
View image_view(const Meta& tensor, int64_t spatial, int64_t groups);
View weight_view(const Meta& tensor, int64_t spatial, int64_t groups);

// A weight for the way back: input and output channels have changed places.
View exchanged(View weight);

// Uninitialised memory for the same elements with channels innermost. `memory` keeps it.
View channels_last_like(const View& view, bool is_weight, Tensor& memory);

// A weight's filters as a batch of images; an image as it is.
View as_images(View view, bool is_weight);

// For the core. The stride of a dimension of size 1 says nothing: it becomes 0, of channels 1.
tk_tensor to_core(const View& view, bool is_written = false);

// A tensor of these elements through torch, for its own ops.
Tensor as_tensor(const View& view);

// What torch calls channels-last (channels_last_3d): of 4 and 5 dimensions, an ambiguous one is not.
bool suggests_channels_last(const Meta& tensor, int64_t spatial);

// An uninitialised tensor, row-major or channels-last.
Tensor empty_image(std::span<const int64_t> sizes, bool channels_last, int32_t dtype, Device device);

}  // namespace tk::ops
