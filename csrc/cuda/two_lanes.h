// Layer 1. One coordinate with 65 to 128 rows on two neighbouring CUDA lanes, as host and device
// code: what a lane does between the shuffles, so that a machine without a GPU tests it.
//
// The even lane (side 0) holds the first 64 of 128 wires, the odd lane (side 1) the others; wires
// without a row are padded as in cuda/coordinate.h. After `keep_half` the even lane has the 64
// smallest, so the lower middle is its largest, and the odd lane's smallest is the upper middle.
#pragma once

#include "cuda/coordinate.h"

namespace loft {
namespace device {

constexpr int kHalf = 64;

// `other`: the other lane's sorted keys in descending order.
template <typename K>
LOFT_INLINE void keep_half(K (&keys)[kHalf], const K (&other)[kHalf], int side) {
  LOFT_UNROLL
  for (int wire = 0; wire < kHalf; ++wire) {  // the even lane keeps minima, the odd lane maxima
    const bool takes_other = (other[wire] < keys[wire]) == (side == 0);
    keys[wire] = takes_other ? other[wire] : keys[wire];
  }
}

// The even lane's largest key, the odd lane's smallest.
template <typename K>
LOFT_INLINE K edge_of(const K (&keys)[kHalf], int side) {
  K edge = keys[0];
  LOFT_UNROLL
  for (int wire = 1; wire < kHalf; ++wire) {
    edge = (keys[wire] > edge) == (side == 0) ? keys[wire] : edge;
  }
  return edge;
}

// On the even lane: `lower` is its own edge, `upper` the odd lane's.
template <DType kDType>
LOFT_INLINE Outcome<kDType> median_of_edges(Key<kDType> lower, Key<kDType> upper, int rows,
                                            MedianKind kind) {
  const auto low = value_at<kDType>(lower), high = rows % 2 ? low : value_at<kDType>(upper);
  return {result_bits<kDType>(rows % 2 ? low : pick_median(low, high, kind)), low, high};
}

// Sorts what `keep_half` left, which is bitonic.
template <typename K>
LOFT_INLINE void sort_half(K (&keys)[kHalf]) {
  LOFT_UNROLL
  for (int distance = kHalf / 2; distance > 0; distance /= 2) {
    LOFT_UNROLL
    for (int wire = 0; wire < kHalf; ++wire) {
      if (!(wire & distance)) exchange(keys[wire], keys[wire + distance]);
    }
  }
}

// On the even lane: `keys` and `above`, the odd lane's values, both ascending.
template <DType kDType>
LOFT_INLINE Outcome<kDType> trimmed_mean_of_halves(
    const Key<kDType> (&keys)[kHalf], const typename Stored<kDType>::Value (&above)[kHalf],
    int rows, int f) {
  using V = typename Stored<kDType>::Value;
  const bool is_odd = rows % 2;
  const int num_leaves = (rows - 2 * f + 1) / 2;
  const auto pair = [&](int k, auto scale) {
    using S = decltype(scale);
    const S from = static_cast<S>(value_at<kDType>(keys[kHalf - 1 - k])) * scale;
    if (!is_odd) return from + static_cast<S>(above[k]) * scale;
    return k == 0 ? from : from + static_cast<S>(above[k > 0 ? k - 1 : 0]) * scale;
  };
  const auto leaf = [&](int k) -> V { return k < num_leaves ? pair(k, V{1}) : V{0}; };
  const V sum = Tree<kHalf>::sum(leaf, 0);
  V low{}, high{};
  LOFT_UNROLL
  for (int k = 0; k < kHalf; ++k) {
    if (k == num_leaves - 1) {
      low = value_at<kDType>(keys[kHalf - 1 - k]);
      high = !is_odd ? above[k] : k == 0 ? low : above[k > 0 ? k - 1 : 0];
    }
  }
  const int count = rows - 2 * f;
  V mean = sum / static_cast<V>(count);
  if (!(sum - sum == 0) && low - low == 0 && high - high == 0) {  // finite values, infinite sum
    constexpr double kScale = 1.0 / 18446744073709551616.0;
    const auto scaled = [&](int k) -> double { return k < num_leaves ? pair(k, kScale) : 0.0; };
    mean = static_cast<V>(Tree<kHalf>::sum(scaled, 0) / count / kScale);
  }
  return {result_bits<kDType>(clamp_mean(mean, low, high)), low, high};
}

}  // namespace device
}  // namespace loft
