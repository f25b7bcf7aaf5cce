#include "image.h"

#include <algorithm>
#include <numeric>

namespace tk::ops {
namespace {

constexpr int64_t kWide = 16;  // bytes that a thread or TMA takes at once

// The spatial dimensions are the tensor's last; those that it lacks have size 1.
void set_spatial(const Meta& tensor, int64_t spatial, View& view) {
  const size_t first = tensor.sizes.size() - static_cast<size_t>(spatial);
  const size_t missing = 3 - static_cast<size_t>(spatial);
  for (size_t d = 0; d < 3; d++) {
    const bool is_there = d >= missing;
    view.sizes[View::kSpatial + d] = is_there ? tensor.sizes[first + d - missing] : 1;
    view.strides[View::kSpatial + d] = is_there ? tensor.strides[first + d - missing] : 0;
  }
}

View view_of(const Meta& tensor) {
  View view;
  view.handle = tensor.handle;
  view.dtype = tensor.dtype;
  view.device = tensor.device;
  return view;
}

// Dense strides; the dimensions from the outermost in.
std::array<int64_t, View::kRank> dense_strides(const View& view, const std::array<int, View::kRank>& order) {
  std::array<int64_t, View::kRank> strides = {};
  int64_t stride = 1;
  for (size_t i = View::kRank; i-- > 0;) {
    const size_t d = static_cast<size_t>(order[i]);
    strides[d] = stride;
    stride *= std::max<int64_t>(view.sizes[d], 1);
  }
  return strides;
}

constexpr std::array<int, View::kRank> kImageOrder = {0, 3, 4, 5, 1, 2};   // N D H W G C
constexpr std::array<int, View::kRank> kWeightOrder = {0, 1, 3, 4, 5, 2};  // G O KD KH KW C

}  // namespace

int64_t View::count() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

bool View::is_channels_last(bool joins_groups) const {
  if (sizes[kChannels] != 1 && strides[kChannels] != 1) return false;
  const int64_t wide = kWide / item_size(dtype);
  const bool are_joined = joins_groups && strides[1] == sizes[kChannels];
  for (int d = 0; d < kRank; d++)
    if (d != kChannels && !(d == 1 && are_joined) && sizes[d] != 1 && strides[d] % wide != 0) return false;
  return reinterpret_cast<uintptr_t>(to_core(*this).data) % kWide == 0;
}

View image_view(const Meta& tensor, int64_t spatial, int64_t groups) {
  View view = view_of(tensor);
  const bool has_batch = tensor.dim() == spatial + 2;
  const size_t channels = has_batch ? 1 : 0;
  const int64_t of_group = tensor.sizes[channels] / groups;
  view.sizes = {has_batch ? tensor.sizes[0] : 1, groups, of_group};
  view.strides = {has_batch ? tensor.strides[0] : 0, of_group * tensor.strides[channels], tensor.strides[channels]};
  set_spatial(tensor, spatial, view);
  return view;
}

View weight_view(const Meta& tensor, int64_t spatial, int64_t groups) {
  View view = view_of(tensor);
  const int64_t of_group = tensor.sizes[0] / groups;
  view.sizes = {groups, of_group, tensor.sizes[1]};
  view.strides = {of_group * tensor.strides[0], tensor.strides[0], tensor.strides[1]};
  set_spatial(tensor, spatial, view);
  return view;
}

View exchanged(View weight) {
  std::swap(weight.sizes[1], weight.sizes[2]);
  std::swap(weight.strides[1], weight.strides[2]);
  return weight;
}

View channels_last_like(const View& view, bool is_weight, Tensor& memory) {
  View copy = view;
  const int64_t count = view.count();
  memory = empty({&count, 1}, view.dtype, view.device);
  copy.handle = memory.get();
  copy.offset = 0;
  copy.strides = dense_strides(view, is_weight ? kWeightOrder : kImageOrder);
  return copy;
}

View as_images(View view, bool is_weight) {
  if (!is_weight || view.sizes[0] != 1) return view;
  view.sizes[0] = view.sizes[1];
  view.strides[0] = view.strides[1];
  view.sizes[1] = 1;
  view.strides[1] = 0;
  return view;
}

tk_tensor to_core(const View& view, bool is_written) {
  Meta tensor;
  tensor.handle = view.handle;
  tk_tensor t;
  const auto* const data = static_cast<const char*>(is_written ? write_pointer(tensor) : read_pointer(tensor));
  t.data = const_cast<char*>(data + view.offset * item_size(view.dtype));
  t.dtype = view.dtype;
  t.ndim = View::kRank;
  for (int d = 0; d < View::kRank; d++) {
    t.sizes[d] = view.sizes[d];
    t.strides[d] = view.sizes[d] != 1 ? view.strides[d] : d == View::kChannels ? 1 : 0;
  }
  return t;
}

Tensor as_tensor(const View& x) { return view(x.handle, x.sizes, x.strides, x.offset); }

bool suggests_channels_last(const Meta& tensor, int64_t spatial) {
  if (spatial < 2 || tensor.dim() != spatial + 2 || tensor.strides[1] == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) {
    // Channels, then the spatial dimensions from the last on, then the batch.
    const int64_t d = i == 0 ? 1 : i == tensor.dim() - 1 ? 0 : tensor.dim() - i;
    if (tensor.sizes[d] == 0 || tensor.strides[d] < least) return false;
    if (d == 0 && least == tensor.strides[1]) return false;
    least = tensor.strides[d] * std::max<int64_t>(tensor.sizes[d], 1);
  }
  return true;
}

Tensor empty_image(std::span<const int64_t> sizes, bool channels_last, int32_t dtype, Device device) {
  if (!channels_last) return empty(sizes, dtype, device);
  std::array<int64_t, 5> strides = {};
  int64_t stride = 1;
  const size_t rank = sizes.size();
  for (size_t i = 0; i < rank; i++) {
    const size_t d = i == 0 ? 1 : i == rank - 1 ? 0 : rank - i;
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return empty_strided(sizes, std::span(strides).first(rank), dtype, device);
}

}  // namespace tk::ops
