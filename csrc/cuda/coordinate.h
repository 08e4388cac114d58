// Layer 1. What one CUDA thread does for its coordinates, as host and device code, so that it is
// tested on machines without a GPU: keys in registers, a network, a rule; every index static.
//
// kWires registers hold the rows between as many -inf below as put the middle in its place: the
// lower middle rank is always wire (kWires - 1) / 2. Rows are even in number when kWires is the row
// count, or padded with the same parity; `kIsOdd` says which, because the sum's first pair differs.
#pragma once

#include <type_traits>

#include "coordinate_rules.h"
#include "keys.h"

#if defined(__CUDACC__)
#define LOFT_UNROLL _Pragma("unroll")
#else
#define LOFT_UNROLL
#endif

namespace loft {
namespace device {

template <typename E>
LOFT_INLINE void exchange(E& a, E& b) {
  const E low = a < b ? a : b;
  b = a < b ? b : a;
  a = low;
}
template <typename E>
LOFT_INLINE void keep_min(E& a, E& b) {
  a = a < b ? a : b;
}
template <typename E>
LOFT_INLINE void keep_max(E& a, E& b) {
  b = a < b ? b : a;
}

#include "networks.h"

template <DType kDType>
using Bits = typename Stored<kDType>::Bits;
// 16-bit keys are compared as 32-bit integers: one register each, one instruction a minimum.
template <DType kDType>
using Key = std::conditional_t<kDType == DType::kFloat64, int64_t, int32_t>;

template <DType kDType>
constexpr Key<kDType> kLast =
    static_cast<Key<kDType>>(kDType == DType::kFloat64 ? INT64_MAX : INT32_MAX);
template <DType kDType>
constexpr Key<kDType> kFirst =
    static_cast<Key<kDType>>(kDType == DType::kFloat64 ? INT64_MIN : INT32_MIN);

template <DType kDType>
LOFT_INLINE typename Stored<kDType>::Value value_at(Key<kDType> key) {
  return value_of<kDType>(flip_bits(static_cast<Bits<kDType>>(key)));
}

// Wires below the rows when `rows` rows lie on kWires wires.
template <int kWires>
LOFT_HOST_DEVICE constexpr int padding_below(int rows) {
  return (kWires - 1) / 2 - (rows - 1) / 2;
}

// -0 becomes +0 and every NaN the canonical one.
template <DType kDType>
LOFT_INLINE Bits<kDType> result_bits(typename Stored<kDType>::Value result) {
  return result == result ? bits_of<kDType>(result) : Stored<kDType>::kNaN;
}

// What is stored for one coordinate, and the smallest and largest value that were kept for it.
template <DType kDType>
struct Outcome {
  Bits<kDType> result;
  typename Stored<kDType>::Value low, high;
};

template <DType kDType, int kWires, bool kIsOdd>
LOFT_INLINE Outcome<kDType> median_of(Key<kDType> (&keys)[kWires], MedianKind kind) {
  MedianNetwork<kWires>::apply(keys);
  const auto lower = value_at<kDType>(keys[(kWires - 1) / 2]);
  if constexpr (kIsOdd) return {result_bits<kDType>(lower), lower, lower};
  const auto upper = value_at<kDType>(keys[kWires / 2]);
  return {result_bits<kDType>(pick_median(lower, upper, kind)), lower, upper};
}

// The mean of ranked values by `value(i)`; `distance`-th pair from the middle by static indices.
// num_pairs: leaves of the tree that count; the others are zero, which changes nothing.
template <DType kDType, int kWires, bool kIsOdd>
LOFT_INLINE Outcome<kDType> trimmed_mean_of(Key<kDType> (&keys)[kWires], int rows, int f) {
  using V = typename Stored<kDType>::Value;
  SortNetwork<kWires>::apply(keys);
  constexpr int kMiddle = (kWires - 1) / 2;  // wire of the lower middle
  constexpr int kLeaves = kMiddle + 1;
  const int num_leaves = (rows - 2 * f + 1) / 2;
  const auto at = [&](int wire) -> V { return value_at<kDType>(keys[wire]); };
  const auto leaf = [&](int k) -> V {
    if (k >= num_leaves) return V{0};
    if constexpr (kIsOdd) {
      if (k == 0) return at(kMiddle);
      return kMiddle + k < kWires ? at(kMiddle - k) + at(kMiddle + k) : V{0};
    } else {
      return kMiddle + 1 + k < kWires ? at(kMiddle - k) + at(kMiddle + 1 + k) : V{0};
    }
  };
  const V sum = Tree<kLeaves>::sum(leaf, 0);
  V low{}, high{};
  LOFT_UNROLL
  for (int k = 0; k < kLeaves; ++k) {
    constexpr int kShift = kIsOdd ? 0 : 1;
    if (k == num_leaves - 1) {
      low = at(kMiddle - k);
      high = kMiddle + kShift + k < kWires ? at(kMiddle + kShift + k) : low;
    }
  }
  const int count = rows - 2 * f;
  V mean = sum / static_cast<V>(count);
  if (!(sum - sum == 0) && low - low == 0 && high - high == 0) {  // finite values, infinite sum
    const auto scaled_leaf = [&](int k) -> double {
      constexpr double kScale = 1.0 / 18446744073709551616.0;
      if (k >= num_leaves) return 0.0;
      if constexpr (kIsOdd) {
        if (k == 0) return at(kMiddle) * kScale;
        return kMiddle + k < kWires ? at(kMiddle - k) * kScale + at(kMiddle + k) * kScale : 0.0;
      } else {
        return kMiddle + 1 + k < kWires ? at(kMiddle - k) * kScale + at(kMiddle + 1 + k) * kScale
                                        : 0.0;
      }
    };
    mean = static_cast<V>(Tree<kLeaves>::sum(scaled_leaf, 0) / count * 18446744073709551616.0);
  }
  return {result_bits<kDType>(clamp_mean(mean, low, high)), low, high};
}

// Whether step (p, k) of Batcher's odd-even merge sort compares wire `low` with wire low + k. The
// steps run over p = 1, 2, 4 ... < rows and within each over k = p, p / 2 ... 1; any rows.
LOFT_INLINE bool is_batcher_low(int low, int rows, int p, int k) {
  const int high = low + k, skip = k % p;
  return high < rows && low >= skip && (low - skip) % (2 * k) < k &&
         low / (2 * p) == high / (2 * p);
}

// Ranked entries of one coordinate in slow memory (shared on the device): `key(i)` and `weight(i)`
// give references, `weight` only with weights. One definition for any shape.
template <DType kDType, bool kIsWeighted, typename KeyAt, typename WeightAt>
struct RankedEntries {
  using V = typename Stored<kDType>::Value;
  int rows;
  const KeyAt& key;
  const WeightAt& weight;

  LOFT_HOST_DEVICE V at(int i) const { return value_at<kDType>(key(i)); }

  // Of ranks first .. first + count - 1, which lie between low and high.
  LOFT_HOST_DEVICE V mean(int first, int count, V low, V high, bool by_weight) const {
    const bool counts = kIsWeighted && by_weight;
    int64_t total = count;
    if (counts) {
      total = 0;
      for (int i = first; i < first + count; ++i) total += weight(i);
    }
    const auto product = [&](int i) -> V {
      return counts ? at(i) * static_cast<V>(weight(i)) : at(i);
    };
    const V sum = fold_sum<V>(product, first, count);
    V result = sum / static_cast<V>(total);
    if (!(sum - sum == 0) && low - low == 0 && high - high == 0) {  // finite values, infinite sum
      const auto value = [&](int i) { return static_cast<double>(at(i)); };
      const auto share = [&](int i) { return counts ? static_cast<double>(weight(i)) : 1.0; };
      result = static_cast<V>(scaled_mean(value, share, first, count, static_cast<double>(total)));
    }
    return clamp_mean(result, low, high);
  }

  LOFT_HOST_DEVICE Outcome<kDType> median(int64_t total_weight, MedianKind kind) const {
    V lower = at((rows - 1) / 2), upper = at(rows / 2);
    if (kIsWeighted) {
      int64_t below = 0;  // twice the weight of the ranks before
      for (int i = 0; i < rows && below <= total_weight; ++i) {
        if (below < total_weight) lower = at(i);
        upper = at(i);
        below += 2 * static_cast<int64_t>(weight(i));
      }
    }
    const bool is_one = kIsWeighted ? lower == upper : rows % 2 == 1;
    return {result_bits<kDType>(is_one ? lower : pick_median(lower, upper, kind)), lower, upper};
  }

  // The mean of the rows - f nearest to a centre; overwrites entries.
  LOFT_HOST_DEVICE Outcome<kDType> mean_around(V centre, int f) const {
    const int keep = rows - f;
    V low = at(0), high = at(keep - 1);
    for (int i = 0, slot = 0; i < f; ++i, slot = slot + 1 == keep ? 0 : slot + 1) {
      const V leaving = at(i), entering = at(i + keep);  // entries from `keep` on never change
      const V next = at(i + 1);
      if (slides(centre, leaving, entering)) {
        low = next;
        high = entering;
        key(slot) = key(i + keep);
        if (kIsWeighted) weight(slot) = weight(i + keep);
      }
    }
    const V result = mean(0, keep, low, high, true);
    return {result_bits<kDType>(centre == centre ? result : centre), low, high};
  }
};

// Any rule on ranked entries, which it overwrites.
template <DType kDType, bool kIsWeighted, typename KeyAt, typename WeightAt>
LOFT_HOST_DEVICE Outcome<kDType> rule_of(const RuleParams& params, int rows, int64_t total_weight,
                                         const KeyAt& key, const WeightAt& weight) {
  using V = typename Stored<kDType>::Value;
  const RankedEntries<kDType, kIsWeighted, KeyAt, WeightAt> ranked{rows, key, weight};
  if (params.rule == Rule::kMedian) return ranked.median(total_weight, params.kind);
  const int f = params.f;
  const V low = ranked.at(f), high = ranked.at(rows - 1 - f);
  if (params.rule == Rule::kTrimmedMean) {
    return {result_bits<kDType>(ranked.mean(f, rows - 2 * f, low, high, true)), low, high};
  }
  V centre = ranked.at((rows - 1) / 2);
  if (params.rule == Rule::kPhocas) {
    centre = ranked.mean(f, rows - 2 * f, low, high, false);
  } else if (rows % 2 == 0) {
    centre = pick_median(centre, ranked.at(rows / 2), MedianKind::kMidpoint);
  }
  return ranked.mean_around(centre, f);
}

// Any rule on up to kWires rows of one coordinate in registers, in row order; `keys` beyond the
// rows are kLast. Weights travel below their 32-bit keys, so that ties order by weight. After
// sorting, `rule_of` indexes the ranked values, so the compiler moves them to the thread's local
// memory.
template <DType kDType, int kWires, bool kIsWeighted>
LOFT_INLINE Outcome<kDType> any_rule_of(Key<kDType> (&keys)[kWires], int32_t (&weights)[kWires],
                                        int rows, int64_t total_weight, const RuleParams& params) {
  static_assert(!kIsWeighted || sizeof(Key<kDType>) == 4, "a key and its weight share 64 bits");
  if constexpr (kIsWeighted) {
    int64_t entries[kWires];
    LOFT_UNROLL
    for (int i = 0; i < kWires; ++i) {
      entries[i] = static_cast<int64_t>(keys[i]) * (int64_t{1} << 32) + weights[i];
    }
    SortNetwork<kWires>::apply(entries);
    LOFT_UNROLL
    for (int i = 0; i < kWires; ++i) {
      keys[i] = static_cast<Key<kDType>>(entries[i] >> 32);  // weights are >= 0
      weights[i] = static_cast<int32_t>(entries[i] & 0x7fffffff);
    }
  } else {
    SortNetwork<kWires>::apply(keys);
  }
  const auto key = [&](int i) -> Key<kDType>& { return keys[i]; };
  const auto weight = [&](int i) -> int32_t& { return weights[i]; };
  return rule_of<kDType, kIsWeighted>(params, rows, total_weight, key, weight);
}

}  // namespace device
}  // namespace loft
