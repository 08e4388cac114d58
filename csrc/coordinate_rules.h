// Layer 1. One coordinate's ranked values in, one value out. Host and device; the value type V is a
// float, a double, or a vector of them on the CPU, so every machine runs this one definition.
//
// `at(i)` gives the value of rank i. Sums add pairs from the middle outwards and the pairs by a
// binary tree over the pairs' distance from the middle: the order depends on ranks alone. A tree
// padded with zeros (device: all indices known at compile time) gives the same bits as one cut to
// size (host), because adding zero is exact and the sign of a zero sum is normalised at the end.
#pragma once

#include "rules.h"

namespace loft {

// Largest power of two below kCount.
constexpr int split_of(int count) {
  int half = 1;
  while (2 * half < count) half *= 2;
  return half;
}

template <int kLeaves>
struct Tree {
  template <typename Leaf>
  static LOFT_INLINE auto sum(const Leaf& leaf, int first) {
    if constexpr (kLeaves == 1) {
      return leaf(first);
    } else {
      constexpr int kLeft = split_of(kLeaves);
      return Tree<kLeft>::sum(leaf, first) + Tree<kLeaves - kLeft>::sum(leaf, first + kLeft);
    }
  }
};

// Sum of `count` leaves, count >= 1, by groups of eight and a binary counter over the groups.
template <typename V, typename Leaf>
LOFT_INLINE V tree_sum(const Leaf& leaf, int count) {
  constexpr int kMaxLevels = 8;  // 512 leaves are 64 groups
  V partial[kMaxLevels];         // of 1, 2, 4, ... groups, as the bits of their count say
  const int groups = count / 8;
  for (int group = 0; group < groups; ++group) {
    V sum = Tree<8>::sum(leaf, 8 * group);
    int level = 0;
    for (; (group >> level) & 1; ++level) sum = partial[level] + sum;
    partial[level] = sum;
  }
  V tail;
  bool has_tail = true;
  switch (const int first = 8 * groups; count % 8) {
    case 1: tail = Tree<1>::sum(leaf, first); break;
    case 2: tail = Tree<2>::sum(leaf, first); break;
    case 3: tail = Tree<3>::sum(leaf, first); break;
    case 4: tail = Tree<4>::sum(leaf, first); break;
    case 5: tail = Tree<5>::sum(leaf, first); break;
    case 6: tail = Tree<6>::sum(leaf, first); break;
    case 7: tail = Tree<7>::sum(leaf, first); break;
    default:
      tail = V{};
      has_tail = false;
      break;
  }
  for (int level = 0; groups >> level; ++level) {
    if (!((groups >> level) & 1)) continue;
    tail = has_tail ? partial[level] + tail : partial[level];
    has_tail = true;
  }
  return tail;
}

// Sum of at(first) .. at(first + count - 1) in the order described above; count >= 1.
template <typename V, typename At>
LOFT_INLINE V fold_sum(const At& at, int first, int count) {
  const int middle = first + count / 2;  // the upper one for an even count
  if (count % 2) {
    const auto leaf = [&](int k) -> V {
      return k == 0 ? at(middle) : at(middle - k) + at(middle + k);
    };
    return tree_sum<V>(leaf, count / 2 + 1);
  }
  const auto leaf = [&](int k) -> V { return at(middle - 1 - k) + at(middle + k); };
  return tree_sum<V>(leaf, count / 2);
}

// The same bits, the number of ranks known when it is compiled.
template <int kCount, typename V, typename At>
LOFT_INLINE V fold_sum_fixed(const At& at, int first) {
  const int middle = first + kCount / 2;
  const auto leaf = [&](int k) -> V {
    if constexpr (kCount % 2) {
      return k == 0 ? at(middle) : at(middle - k) + at(middle + k);
    } else {
      return at(middle - 1 - k) + at(middle + k);
    }
  };
  return Tree<(kCount + 1) / 2>::sum(leaf, 0);
}

// 0.5 a + 0.5 b: no overflow. Equal values give themselves, which halving the smallest subnormal
// would not. NaN and inf - inf give NaN.
template <typename V>
LOFT_INLINE V midpoint(V lower, V upper) {
  return lower == upper ? lower : lower * 0.5f + upper * 0.5f;
}

template <typename V>
LOFT_INLINE V pick_median(V lower, V upper, MedianKind kind) {
  return kind == MedianKind::kLower   ? lower
         : kind == MedianKind::kUpper ? upper
                                      : midpoint(lower, upper);
}

// A mean never leaves its values' range, and the mean of equal values is that value.
template <typename V>
LOFT_INLINE V clamp_mean(V mean, V low, V high) {
  mean = mean < low ? low : mean;    // false for NaN
  return mean > high ? high : mean;  // a NaN stays: no comparison with it holds
}

// Whether a window around a centre slides up: `entering` is nearer than `leaving`. Of two equally
// near the lower one stays, but -inf gives way to any finite value, though both distances overflow.
template <typename V>
LOFT_INLINE auto slides(V centre, V leaving, V entering) {
  const V below = centre - leaving, above = entering - centre;
  return (below > above) |
         ((below == above) & (leaving - leaving != 0) & (entering - entering == 0));
}

// A sum that overflows is repeated with every value scaled by this, in double. Bound from the most
// rows and weights, 2^30 together: sums grow by less than 2^64. A power of two keeps the bits.
constexpr double kRescueScale = 1.0 / 18446744073709551616.0;  // 2^-64

// The mean of finite values whose sum overflows.
// `at(i)` gives values as double, `weight(i)` counts as double; total is the sum of the counts.
template <typename At, typename Weight>
LOFT_HOST_DEVICE inline double scaled_mean(const At& at, const Weight& weight, int first, int count,
                                           double total) {
  const auto product = [&](int i) { return at(i) * kRescueScale * weight(i); };
  return fold_sum<double>(product, first, count) / total / kRescueScale;
}

}  // namespace loft
