// Layer 1. What one CUDA thread does for its coordinates, as host and device code, so that it is
// tested on machines without a GPU: values in registers, a network, a rule. Where a comment does
// not say otherwise every index is known when it is compiled: registers have no addresses, so an
// array with an index that is known only at run time lies in local memory, which is the GPU's DRAM.
//
// kWires registers hold the rows between as many wire_below as put the middle in its place: the
// lower middle rank is always wire (kWires - 1) / 2. Rows are even in number when kWires is the row
// count, or padded with the same parity; `kIsOdd` says which, because the sum's first pair differs.
// Of 5 rows on 8 wires, kIsOdd (the middle is rank 2):
//   wire   0     1   2   3   4   5   6     7
//   holds  -inf  r0  r1  r2  r3  r4  NaN   NaN
#pragma once

#include <type_traits>

#include "coordinate_rules.h"
#include "keys.h"

#if defined(__CUDACC__)
#define LOFT_UNROLL _Pragma("unroll")
#define LOFT_NO_UNROLL _Pragma("unroll 1")
#else
#define LOFT_UNROLL
#define LOFT_NO_UNROLL
#endif

namespace loft::device {

// The smaller and the larger of two wires. Of floats a NaN is larger than any number and -0 smaller
// than +0, as their keys are: what PTX's min and max.NaN do, so no key need be made.
template <typename E>
LOFT_INLINE E smaller(E a, E b) {
  return a < b ? a : b;
}
template <typename E>
LOFT_INLINE E larger(E a, E b) {
  return a < b ? b : a;
}
LOFT_INLINE float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  float least;
  asm("min.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
#else
  constexpr DType kOf = DType::kFloat32;
  return key_of<kOf>(bit_cast<int32_t>(b)) < key_of<kOf>(bit_cast<int32_t>(a)) ? b : a;
#endif
}
LOFT_INLINE float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
#elif defined(__CUDA_ARCH__)
  float most;
  asm("max.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return a == a && b == b ? most : bit_cast<float>(Stored<DType::kFloat32>::kNaN);
#else
  constexpr DType kOf = DType::kFloat32;
  return key_of<kOf>(bit_cast<int32_t>(b)) < key_of<kOf>(bit_cast<int32_t>(a)) ? a : b;
#endif
}

template <typename E>
LOFT_INLINE void exchange(E& a, E& b) {
  const E low = smaller(a, b);
  b = larger(a, b);
  a = low;
}
template <typename E>
LOFT_INLINE void keep_min(E& a, E& b) {
  a = smaller(a, b);
}
template <typename E>
LOFT_INLINE void keep_max(E& a, E& b) {
  b = larger(a, b);
}

#include "networks.h"

template <DType kDType>
using Bits = typename Stored<kDType>::Bits;
// What a wire of a network holds: a value as sums have it, of float64 its key, as devices have no
// minimum of doubles in one instruction.
template <DType kDType>
using Wire = std::conditional_t<kDType == DType::kFloat64, int64_t, float>;
// What Batcher's network sorts in shared memory.
template <DType kDType>
using Key = std::conditional_t<kDType == DType::kFloat64, int64_t, int32_t>;

// On wires without a row: not before, and not behind, any row's value.
template <DType kDType>
LOFT_INLINE Wire<kDType> wire_below() {
  if constexpr (kDType == DType::kFloat64) {
    return INT64_MIN;
  } else {
    return -bit_cast<float>(Stored<DType::kFloat32>::kInfinity);
  }
}
template <DType kDType>
LOFT_INLINE Wire<kDType> wire_above() {
  if constexpr (kDType == DType::kFloat64) {
    return INT64_MAX;
  } else {
    return bit_cast<float>(Stored<DType::kFloat32>::kNaN);
  }
}

template <DType kDType>
LOFT_INLINE Wire<kDType> wire_of(Bits<kDType> bits) {
  if constexpr (kDType == DType::kFloat64) {
    return key_of<kDType>(bits);
  } else {
    return value_of<kDType>(bits);
  }
}

// Of a wire or a key.
template <DType kDType, typename K>
LOFT_INLINE typename Stored<kDType>::Value value_at(K key) {
  if constexpr (std::is_same_v<K, float>) {
    return key;
  } else {
    return value_of<kDType>(flip_bits(static_cast<Bits<kDType>>(key)));
  }
}

// Wires below the rows when `rows` rows lie on kWires wires.
template <int kWires>
LOFT_HOST_DEVICE constexpr int padding_below(int rows) {
  return (kWires - 1) / 2 - (rows - 1) / 2;
}

// What is stored for one coordinate, and the smallest and largest value that were kept for it.
template <DType kDType>
struct Outcome {
  Bits<kDType> result;
  typename Stored<kDType>::Value low, high;
};

// From the middle two ranks, which are one for an odd number of rows.
template <DType kDType, typename V>
LOFT_INLINE Outcome<kDType> median_of_middle(V lower, V upper, bool is_one, MedianKind kind) {
  if (is_one) return {result_bits<kDType>(lower), lower, lower};
  return {result_bits<kDType>(pick_median(lower, upper, kind)), lower, upper};
}

// The mean of ranks from their sum; `rescue()` gives it where the sum overflows although the
// outermost ranks, low and high, are finite.
template <typename V, typename Rescue>
LOFT_HOST_DEVICE inline V mean_of_sum(V sum, V count, V low, V high, const Rescue& rescue) {
  V mean = sum / count;
  if (!(sum - sum == 0) && low - low == 0 && high - high == 0) mean = static_cast<V>(rescue());
  return clamp_mean(mean, low, high);
}

// Calls run(std::integral_constant<int, n>) for kFrom <= n <= kTo: all threads branch alike. On a
// host run(n), which does the same with less to compile.
template <int kFrom, int kTo, typename Run>
LOFT_INLINE void with_constant(int n, const Run& run) {
#if defined(__CUDA_ARCH__)
  if constexpr (kFrom == kTo) {
    run(std::integral_constant<int, kFrom>{});
  } else {
    constexpr int kMiddle = (kFrom + kTo) / 2;
    n <= kMiddle ? with_constant<kFrom, kMiddle>(n, run) : with_constant<kMiddle + 1, kTo>(n, run);
  }
#else
  run(n);
#endif
}

// The trimmed mean with static indices: lower(k) and upper(k) are the values that lie k from the
// middle; with is_one, an odd count, lower(0) is the middle alone. Pairs from (rows - 2 f + 1) / 2
// on count as zero, which leaves the bits of the sum as they are. Of more than 4 pairs each number
// of kept ones has unrolled code of its own: by masks 32 rows took 1.20 passes of an H200, this way
// 1.07. Of fewer the outermost kept pair is picked by masks: a comparison with k makes one index of
// the loop, and local memory of the keys (measured by ptxas for sm_90: a stack of 128 bytes a
// thread for 8 rows by 4 coordinates, none by masks).
template <DType kDType, int kPairs, typename LowerAt, typename UpperAt>
LOFT_INLINE Outcome<kDType> mean_of_pairs(const LowerAt& lower, const UpperAt& upper, bool is_one,
                                          int rows, int f) {
  using V = typename Stored<kDType>::Value;
  using I = std::conditional_t<sizeof(V) == 8, int64_t, int32_t>;
  const int count = rows - 2 * f, pairs = (count + 1) / 2;
  const auto pair = [&](int k, int kept, auto scale) {
    using S = decltype(scale);
    if (k >= kept) return S{0};
    const S low = static_cast<S>(lower(k)) * scale;
    return is_one && k == 0 ? low : low + static_cast<S>(upper(k)) * scale;
  };
  V sum{}, low{}, high{};
  if constexpr (kPairs > 4) {
    with_constant<1, kPairs>(pairs, [&](auto kept) {
      sum = Tree<kPairs>::sum([&](int k) { return pair(k, kept, V{1}); }, 0);
      low = lower(kept - 1);
      high = upper(kept - 1);
    });
  } else {
    I low_bits = 0, high_bits = 0;
    LOFT_UNROLL
    for (int k = 0; k < kPairs; ++k) {
      const I mask = -static_cast<I>(k == pairs - 1);  // all bits or none
      low_bits |= bit_cast<I>(lower(k)) & mask;
      high_bits |= bit_cast<I>(upper(k)) & mask;
    }
    sum = Tree<kPairs>::sum([&](int k) { return pair(k, pairs, V{1}); }, 0);
    low = bit_cast<V>(low_bits);
    high = bit_cast<V>(high_bits);
  }
  const auto rescue = [&] {
    const auto scaled = [&](int k) { return pair(k, pairs, kRescueScale); };
    return Tree<kPairs>::sum(scaled, 0) / count / kRescueScale;
  };
  const V mean = mean_of_sum(sum, static_cast<V>(count), low, high, rescue);
  return {result_bits<kDType>(mean), low, high};
}

// On kWires wires, of which wire (kWires - 1) / 2 has the lower middle.
template <DType kDType, int kWires, bool kIsOdd>
LOFT_INLINE Outcome<kDType> median_of(Wire<kDType> (&keys)[kWires], MedianKind kind) {
  MedianNetwork<kWires>::apply(keys);
  const auto lower = value_at<kDType>(keys[(kWires - 1) / 2]);
  const auto upper = kIsOdd ? lower : value_at<kDType>(keys[kWires / 2]);
  return median_of_middle<kDType>(lower, upper, kIsOdd, kind);
}

template <DType kDType, int kWires, bool kIsOdd>
LOFT_INLINE Outcome<kDType> trimmed_mean_of(Wire<kDType> (&keys)[kWires], int rows, int f) {
  using V = typename Stored<kDType>::Value;
  SortNetwork<kWires>::apply(keys);
  constexpr int kLower = (kWires - 1) / 2, kUpper = kLower + !kIsOdd;
  const auto lower = [&](int k) -> V { return value_at<kDType>(keys[kLower - k]); };
  const auto upper = [&](int k) -> V {  // behind the last wire there is no row, which no f keeps
    return value_at<kDType>(keys[kUpper + k < kWires ? kUpper + k : kWires - 1]);
  };
  return mean_of_pairs<kDType, kLower + 1>(lower, upper, kIsOdd, rows, f);
}

// --- 65 to 128 rows on two neighbouring lanes: what a lane does between the shuffles
//
// The even lane (side 0) holds the first 64 of 128 wires, the odd lane (side 1) the others; wires
// without a row are padded as above. After `keep_half` the even lane has the 64 smallest, so the
// lower middle is its largest, and the odd lane's smallest is the upper middle.

constexpr int kHalf = 64;  // wires a lane

// `other`: the other lane's sorted keys in descending order.
template <typename K>
LOFT_INLINE void keep_half(K (&keys)[kHalf], const K (&other)[kHalf], int side) {
  LOFT_UNROLL
  for (int wire = 0; wire < kHalf; ++wire) {  // the even lane keeps minima, the odd lane maxima
    keys[wire] = side == 0 ? smaller(keys[wire], other[wire]) : larger(keys[wire], other[wire]);
  }
}

// The even lane's largest key, the odd lane's smallest.
template <typename K>
LOFT_INLINE K edge_of(const K (&keys)[kHalf], int side) {
  K edge = keys[0];  // keys are bitonic here, so all are looked at
  LOFT_UNROLL
  for (int wire = 1; wire < kHalf; ++wire) {
    edge = side == 0 ? larger(edge, keys[wire]) : smaller(edge, keys[wire]);
  }
  return edge;
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
    const Wire<kDType> (&keys)[kHalf], const typename Stored<kDType>::Value (&above)[kHalf],
    int rows, int f) {
  using V = typename Stored<kDType>::Value;
  const bool is_odd = rows % 2;
  const auto lower = [&](int k) -> V { return value_at<kDType>(keys[kHalf - 1 - k]); };
  const auto upper = [&](int k) -> V {
    return !is_odd ? above[k] : k == 0 ? lower(0) : above[k - 1];
  };
  return mean_of_pairs<kDType, kHalf>(lower, upper, is_odd, rows, f);
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
    int64_t total = count;  // of the weights, or of the ranks
    if (counts) {
      total = 0;
      for (int i = first; i < first + count; ++i) total += weight(i);
    }
    const auto product = [&](int i) -> V {
      return counts ? at(i) * static_cast<V>(weight(i)) : at(i);
    };
    const auto rescue = [&] {
      const auto value = [&](int i) { return static_cast<double>(at(i)); };
      const auto share = [&](int i) { return counts ? static_cast<double>(weight(i)) : 1.0; };
      return scaled_mean(value, share, first, count, static_cast<double>(total));
    };
    const V sum = fold_sum<V>(product, first, count);
    return mean_of_sum(sum, static_cast<V>(total), low, high, rescue);
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
    return median_of_middle<kDType>(lower, upper, is_one, kind);
  }

  // The mean of the rows - f nearest to a centre; overwrites entries.
  LOFT_HOST_DEVICE Outcome<kDType> mean_around(V centre, int f) const {
    const int keep = rows - f;
    V low = at(0), high = at(keep - 1);
    for (int i = 0, slot = 0; i < f; ++i, slot = slot + 1 == keep ? 0 : slot + 1) {
      const V leaving = at(i), entering = at(i + keep);  // entries from `keep` on never change
      const V next = at(i + 1);                          // before the slot is overwritten
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
  V centre = ranked.at((rows - 1) / 2);  // the lower middle
  if (params.rule == Rule::kPhocas) {
    centre = ranked.mean(f, rows - 2 * f, low, high, false);
  } else if (rows % 2 == 0) {
    centre = pick_median(centre, ranked.at(rows / 2), MedianKind::kMidpoint);
  }
  return ranked.mean_around(centre, f);
}

// Sorts up to kWires rows of one coordinate in registers, in row order; `keys` beyond the rows are
// wire_above. Weights travel below 32-bit keys, so that ties order by weight.
template <DType kDType, int kWires, bool kIsWeighted>
LOFT_INLINE void sort_rows(Wire<kDType> (&keys)[kWires], int32_t (&weights)[kWires], int rows) {
  if constexpr (kIsWeighted) {
    static_assert(kDType != DType::kFloat64, "a key and its weight share 64 bits");
    constexpr DType kOf = DType::kFloat32;
    int64_t entries[kWires];
    LOFT_UNROLL
    for (int i = 0; i < kWires; ++i) {
      const int64_t key = i < rows ? key_of<kOf>(bit_cast<int32_t>(keys[i])) : INT32_MAX;
      entries[i] = key * (int64_t{1} << 32) + weights[i];
    }
    SortNetwork<kWires>::apply(entries);
    LOFT_UNROLL
    for (int i = 0; i < kWires; ++i) {
      keys[i] = value_at<kOf>(static_cast<int32_t>(entries[i] >> 32));  // weights are >= 0
      weights[i] = static_cast<int32_t>(entries[i] & 0x7fffffff);
    }
  } else {
    SortNetwork<kWires>::apply(keys);
  }
}

// Any rule on them. `rule_of` indexes the ranked values, which therefore lie in local memory.
template <DType kDType, int kWires, bool kIsWeighted>
LOFT_INLINE Outcome<kDType> any_rule_of(Wire<kDType> (&keys)[kWires], int32_t (&weights)[kWires],
                                        int rows, int64_t total_weight, const RuleParams& params) {
  sort_rows<kDType, kWires, kIsWeighted>(keys, weights, rows);
  const auto key = [&](int i) -> Wire<kDType>& { return keys[i]; };
  const auto weight = [&](int i) -> int32_t& { return weights[i]; };
  return rule_of<kDType, kIsWeighted>(params, rows, total_weight, key, weight);
}

// --- diagnostics: where a coordinate's window lies, and what one value of a row adds

// Of every so many blocks the first one is looked at.
LOFT_HOST_DEVICE constexpr int64_t blocks_looked_at(int64_t numel, int every) {
  return ((numel + kBlock - 1) / kBlock + every - 1) / every;
}

// The kept windows of the blocks that are looked at, in order; `low` is null where nobody asks.
template <DType kDType>
struct Windows {
  using V = typename Stored<kDType>::Value;
  V* low;
  V* high;
  int every;

  // Where coordinate i has its window, the rest of its block behind it; negative: not looked at.
  LOFT_HOST_DEVICE int64_t place(int64_t i) const {
    if (!low) return -1;
    const uint32_t block = static_cast<uint32_t>(i / kBlock);
    const uint32_t in_turn = static_cast<uint32_t>(every);
    if (block % in_turn) return -1;  // a block that is not looked at
    return static_cast<int64_t>(block / in_turn) * kBlock + i % kBlock;
  }
  LOFT_HOST_DEVICE void put(int64_t place, const Outcome<kDType>& outcome) const {
    if (place < 0) return;
    low[place] = outcome.low;  // 64-bit floats for float64, else 32-bit
    high[place] = outcome.high;
  }
};

// What some values of one row did, see Diagnostics in aggregate.h; starts as RowSums{}.
struct RowSums {
  double outside, non_finite, squared;  // counts below 2^53

  template <typename V>
  LOFT_HOST_DEVICE void add(V value, V result, V low, V high) {
    const bool is_nan = value != value;  // orders above +inf
    const bool is_below = value < low || (low != low && !is_nan);
    const bool is_above = value > high || (is_nan && high == high);
    const double distance = static_cast<double>(value) - static_cast<double>(result);
    outside += is_below || is_above;
    non_finite += !(value - value == 0);
    if (distance - distance == 0) squared += distance * distance;  // finite ones only
  }
  LOFT_HOST_DEVICE void add(const RowSums& other) {
    outside += other.outside;
    non_finite += other.non_finite;
    squared += other.squared;
  }
};

}  // namespace loft::device
