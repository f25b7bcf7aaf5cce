// Leading dimensions as three: the core sees the same elements, in any layout.

#include "ops/canonical.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace tk::ops {
namespace {

using Dims = std::vector<int64_t>;

struct View {
  Dims sizes;
  Dims strides;
  uint32_t rank = 0;
  bool leading = true;
  bool in_order = false;

  Layout layout() const { return {sizes, strides, static_cast<uint32_t>(sizes.size()) - rank, leading, in_order}; }
};

std::vector<Layout> layouts(const std::vector<View>& views) {
  std::vector<Layout> out;
  for (const View& v : views) out.push_back(v.layout());
  return out;
}

Dims row_major(const Dims& sizes) {
  Dims strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<tk_tensor> described(const std::vector<View>& views, Leading& leading) {
  const auto all = layouts(views);
  join_leading(all, leading);
  std::vector<tk_tensor> out(views.size());
  if (!leading.fits()) return out;
  for (size_t i = 0; i < views.size(); i++) describe(all[i], leading, out[i]);
  return out;
}

// The offsets of all elements, as a sorted list of tuples: an element of the same index in each tensor.
using Offsets = std::vector<Dims>;

void walk(const Dims& sizes, const std::vector<Dims>& strides, size_t d, Dims at, Offsets& out) {
  if (d == sizes.size()) return out.push_back(at);
  for (int64_t i = 0; i < sizes[d]; i++) {
    Dims next = at;
    for (size_t t = 0; t < strides.size(); t++) next[t] += i * strides[t][d];
    walk(sizes, strides, d + 1, next, out);
  }
}

Offsets offsets(const Dims& sizes, const std::vector<Dims>& strides) {
  Offsets out;
  walk(sizes, strides, 0, Dims(strides.size()), out);
  std::ranges::sort(out);
  return out;
}

Dims first(const int64_t* from, size_t n) { return {from, from + n}; }

TEST(Canonical, DimensionsThatAreCountedKeepTheirOrder) {
  Leading leading;
  described({{.sizes = {3, 5, 7}, .strides = {1, 3, 15}, .rank = 1, .in_order = true}}, leading);
  ASSERT_EQ(leading.count, 2u);
  EXPECT_EQ(leading.sizes[0], 3);
  EXPECT_EQ(leading.sizes[1], 5);
  described({{.sizes = {3, 5, 7}, .strides = {1, 3, 15}, .rank = 1}}, leading);
  ASSERT_EQ(leading.count, 1u);
}

TEST(Canonical, AContiguousTensorHasOneLeadingDimension) {
  Leading leading;
  const View x{{2, 3, 4, 8}, row_major({2, 3, 4, 8}), 1};
  const auto got = described({x, x}, leading);
  EXPECT_EQ(got[0].ndim, 4);
  EXPECT_EQ(first(got[0].sizes, 4), (Dims{1, 1, 24, 8}));
  EXPECT_EQ(first(got[0].strides, 4), (Dims{0, 0, 8, 1}));
}

TEST(Canonical, ChannelsLastIsFlatToo) {
  Leading leading;
  const View x{{2, 3, 4, 5}, {60, 1, 15, 3}};
  const auto got = described({x, x}, leading);
  EXPECT_EQ(first(got[0].sizes, 3), (Dims{1, 1, 120}));
  EXPECT_EQ(first(got[0].strides, 3), (Dims{0, 0, 1}));
}

TEST(Canonical, WhatDoesNotRunTogetherInAllStaysApart) {
  Leading leading;
  const View x{{6, 4}, {4, 1}};
  const auto padded = described({x, {{6, 4}, {8, 1}}}, leading);
  EXPECT_EQ(first(padded[0].sizes, 3), (Dims{1, 6, 4}));
  EXPECT_EQ(first(padded[1].strides, 3), (Dims{0, 8, 1}));
  const auto expanded = described({{{6, 4}, {0, 1}}, x}, leading);
  EXPECT_EQ(first(expanded[0].strides, 3), (Dims{0, 0, 1}));
  EXPECT_EQ(first(expanded[1].strides, 3), (Dims{0, 4, 1}));
}

// The order is that of the first tensor that does not repeat elements.
TEST(Canonical, AnExpandedTensorDoesNotDecideTheOrder) {
  Leading leading;
  const View expanded{{4, 6}, {1, 0}};
  const View transposed{{4, 6}, {1, 4}};
  const auto got = described({expanded, transposed}, leading);
  EXPECT_EQ(first(got[1].sizes, 3), (Dims{1, 6, 4}));
  EXPECT_EQ(first(got[1].strides, 3), (Dims{0, 4, 1}));
  EXPECT_EQ(first(got[0].strides, 3), (Dims{0, 0, 1}));
}

TEST(Canonical, SizeOneHasStrideZero) {
  Leading leading;
  const View x{{1, 5, 1, 7}, {99, 7, 98, 1}, 2};
  const View y{{1, 7}, {13, 1}, 2, false};
  const auto got = described({x, y}, leading);
  EXPECT_EQ(first(got[0].sizes, 5), (Dims{1, 1, 5, 1, 7}));
  EXPECT_EQ(first(got[0].strides, 5), (Dims{0, 0, 7, 0, 1}));
  EXPECT_EQ(got[1].ndim, 2) << "a tensor without leading dimensions is as it lies";
  EXPECT_EQ(first(got[1].strides, 2), (Dims{0, 1}));
}

TEST(Canonical, NoLeadingDimensionsAndNoElements) {
  Leading leading;
  const auto scalar = described({View{{}, {}}}, leading);
  EXPECT_EQ(first(scalar[0].sizes, 3), (Dims{1, 1, 1}));
  const auto empty = described({View{{2, 0, 3}, {9, 5, 1}}}, leading);
  EXPECT_EQ(first(empty[0].sizes, 3), (Dims{1, 1, 0}));
  EXPECT_EQ(first(empty[0].strides, 3), (Dims{0, 0, 0}));
}

TEST(Canonical, DeclaredDimensionsAloneForChecks) {
  tk_tensor t;
  const View x{{2, 3, 8, 1}, {99, 50, 2, 1}, 2};
  describe_declared(x.layout(), t);
  EXPECT_EQ(t.ndim, 5);
  EXPECT_EQ(first(t.sizes, 5), (Dims{1, 1, 6, 8, 1}));
  EXPECT_EQ(first(t.strides, 5), (Dims{0, 0, 0, 2, 0}));
  EXPECT_EQ(t.data, nullptr);
}

TEST(Canonical, OutputsFollowTheOrderInMemory) {
  const auto strides = [](const View& like, Dims declared) {
    Dims out(like.layout().n_leading + declared.size());
    const Dims inner = row_major(declared);
    dense_strides(like.layout(), declared, inner, out.data());
    return out;
  };
  EXPECT_EQ(strides({{2, 3, 4}, row_major({2, 3, 4}), 1}, {5}), (Dims{15, 5, 1}));
  EXPECT_EQ(strides({{2, 3, 4, 5}, {60, 1, 15, 3}}, {}), (Dims{60, 1, 15, 3})) << "channels-last";
  EXPECT_EQ(strides({{1, 3, 4, 5}, {7, 1, 15, 3}}, {}), (Dims{60, 1, 15, 3})) << "of one image";
  EXPECT_EQ(strides({{4, 6}, {1, 8}}, {}), (Dims{1, 4})) << "dense, though the input is not";
  EXPECT_EQ(strides({{4, 6}, {0, 1}}, {}), (Dims{6, 1})) << "an expanded tensor has no order";
  EXPECT_EQ(strides({{2, 0, 3}, {0, 3, 1}}, {}), (Dims{3, 3, 1})) << "as torch.empty";
}

TEST(Canonical, OverlapIsSeen) {
  EXPECT_FALSE(overlaps_itself(View{{4, 6}, {1, 4}}.layout()));
  EXPECT_FALSE(overlaps_itself(View{{4, 6}, {7, 1}}.layout()));
  EXPECT_FALSE(overlaps_itself(View{{1, 6}, {0, 1}}.layout()));
  EXPECT_FALSE(overlaps_itself(View{{4, 0}, {0, 0}}.layout()));
  EXPECT_TRUE(overlaps_itself(View{{4, 6}, {0, 1}}.layout()));
  EXPECT_TRUE(overlaps_itself(View{{4, 6}, {5, 1}}.layout()));
}

// Random views: permuted, sliced, expanded, with sizes of 1. What the core sees are the same elements at the same
// places, and where it cannot be three dimensions, dense copies of what is in the way can.
class RandomViews : public ::testing::Test {
 protected:
  int64_t pick(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  View view(const Dims& leading, uint32_t rank) {
    View v{leading, {}, rank};
    for (uint32_t d = 0; d < rank; d++) v.sizes.push_back(1 + pick(3));
    std::vector<size_t> order(v.sizes.size());
    std::iota(order.begin(), order.end(), 0);
    if (pick(2)) std::ranges::shuffle(order, random_);
    v.strides.resize(v.sizes.size());
    int64_t step = 1;
    for (const size_t d : order) {
      v.strides[d] = v.sizes[d] == 1 ? pick(100) : step;
      step *= v.sizes[d] * (pick(4) ? 1 : 2);
      if (pick(6) == 0) v.strides[d] = 0;
    }
    return v;
  }

  // Every tensor's leading elements, in step with the others, before and after.
  static void expect_same(const std::vector<View>& views, const std::vector<tk_tensor>& got) {
    const uint32_t n = views[0].layout().n_leading;
    std::vector<Dims> before, after;
    for (size_t i = 0; i < views.size(); i++) {
      before.push_back(first(views[i].strides.data(), n));
      after.push_back(first(got[i].strides, 3));
      for (uint32_t d = 0; d < views[i].rank; d++) {
        EXPECT_EQ(got[i].sizes[3 + d], views[i].sizes[n + d]);
        EXPECT_EQ(got[i].strides[3 + d], views[i].sizes[n + d] == 1 ? 0 : views[i].strides[n + d]);
      }
      for (int d = 0; d < 3; d++)
        if (got[i].sizes[d] == 1) {
          EXPECT_EQ(got[i].strides[d], 0);
        }
    }
    EXPECT_EQ(offsets(first(views[0].sizes.data(), n), before), offsets(first(got[0].sizes, 3), after));
  }

  std::mt19937 random_{7};
};

TEST_F(RandomViews, AreSeenAsTheyAre) {
  int fitting = 0, copied = 0;
  for (int round = 0; round < 4000; round++) {
    Dims leading;
    for (int64_t n = pick(6); n > 0; n--) leading.push_back(1 + pick(3));
    std::vector<View> views;
    for (int64_t n = 1 + pick(3); n > 0; n--) views.push_back(view(leading, static_cast<uint32_t>(pick(3))));
    Leading joined;
    auto got = described(views, joined);
    if (!joined.fits()) {
      copied++;
      const auto all = layouts(views);
      std::vector<View> dense = views;
      for (size_t i = 0; i < views.size(); i++)
        if (!runs_together(all[i], all)) joined_strides(all[i], all, dense[i].strides.data());
      for (const View& v : dense) ASSERT_EQ(v.sizes, views[&v - dense.data()].sizes);
      got = described(dense, joined);
      ASSERT_LE(joined.count, 1u);
      expect_same(dense, got);
    } else {
      fitting++;
      expect_same(views, got);
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(fitting, 1000);
  EXPECT_GT(copied, 100);
}

}  // namespace
}  // namespace tk::ops
